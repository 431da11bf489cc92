"""What an emulated launch reports: findings, bank conflicts, traffic, instructions.

The ctypes structs mirror templates/host/report.cuh: same order, same sizes.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from numpy.typing import NDArray

from .spec import AnySpec


class CBuffer(ctypes.Structure):
    """struct Buffer."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("begin", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
        ("states", ctypes.c_void_p),
        ("access", ctypes.c_uint64),
        ("bytes_read", ctypes.c_uint64),
        ("bytes_written", ctypes.c_uint64),
    )


class CCount(ctypes.Structure):
    """struct Count."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("instruction", ctypes.c_char_p),
        ("line", ctypes.c_uint64),
        ("threads", ctypes.c_uint64),
        ("warps", ctypes.c_uint64),
        ("conflicts", ctypes.c_uint64),
    )


class CFinding(ctypes.Structure):
    """struct Finding."""

    _fields_ = (
        ("what", ctypes.c_char_p),
        ("file", ctypes.c_char_p),
        ("instruction", ctypes.c_char_p),
        ("other_file", ctypes.c_char_p),
        ("other_instruction", ctypes.c_char_p),
        ("address", ctypes.c_uint64),
        ("times", ctypes.c_uint64),
        *((name, ctypes.c_int) for name in ("line", "other_line", "block", "thread")),
        *((name, ctypes.c_int) for name in ("other_thread", "race")),
    )


class CLaunch(ctypes.Structure):
    """struct Launch."""

    _fields_ = (
        ("params", ctypes.c_void_p),
        ("buffers", ctypes.POINTER(CBuffer)),
        ("counts", ctypes.POINTER(CCount)),
        ("findings", ctypes.POINTER(CFinding)),
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_int) for name in ("blocks", "threads", "shared_bytes", "workers")),
        *((name, ctypes.c_int) for name in ("buffer_count", "count_capacity", "count_count")),
        *((name, ctypes.c_int) for name in ("finding_capacity", "finding_count")),
    )


class EmulationError(RuntimeError):
    """An emulated kernel did what it must not do.

    Attributes
    ----------
    report : the launch's Report.
    """

    def __init__(self, report: Report) -> None:
        lines = [f"{report.spec.name}:", *map(str, report.findings)]
        super().__init__("\n  ".join(lines))
        self.report = report


@dataclass(frozen=True, slots=True)
class Place:
    """An instruction at a line of a template; `line` 0: an instruction of nowhere."""

    file: str
    line: int
    instruction: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.instruction})" if self.line else self.instruction


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a kernel must not do.

    Attributes
    ----------
    what : what it is.
    place : the line that did it.
    other : the line that it collides with, or None.
    race : whether two threads touched one location of shared memory, one of them writing, with no
        barrier between.
    times : how often, over all blocks.
    block, thread : the first time.
    other_thread : -1: none, or several.
    address : in shared memory's window, or global.
    """

    what: str
    place: Place
    other: Place | None = None
    race: bool = False
    times: int = 1
    block: int = 0
    thread: int = -1
    other_thread: int = -1
    address: int = 0

    def __str__(self) -> str:
        between = f" and {self.other}" if self.other else ""
        threads = f", thread {self.thread}" if self.thread >= 0 else ""
        threads += f" and thread {self.other_thread}" if self.other_thread >= 0 else ""
        address = f", address {self.address:#x}" if self.address else ""
        times = f"; {self.times} times" if self.times > 1 else ""
        return f"{self.what}: {self.place}{between}, block {self.block}{threads}{address}{times}"


@dataclass(frozen=True, slots=True)
class Count:
    """How often an instruction of a line ran.

    Attributes
    ----------
    threads : executions by threads.
    warps : executions by warps; 0 for instructions that neither meet nor touch shared memory.
    conflicts : cycles of shared memory beyond those without bank conflicts.
    """

    place: Place
    threads: int
    warps: int
    conflicts: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of a tensor that moved between global memory and the CTAs."""

    read: int
    written: int


class Outcome(NamedTuple):
    """What a launch reports: see Report."""

    findings: list[Finding]
    counts: list[Count]
    traffic: dict[str, Traffic]


@dataclass(frozen=True, slots=True)
class Report:
    """The emulated launches of a call.

    Attributes
    ----------
    spec : the variant; of several launches the forward's.
    out, lse : the result.
    findings : what the kernels must not do.
    counts : executions and bank conflicts by template line.
    traffic : by tensor: "o", "lse", the fields of Tensors, and "o_partial", "lse_partial".
    """

    spec: AnySpec
    out: NDArray[Any] = field(repr=False)
    lse: NDArray[Any] = field(repr=False)
    findings: tuple[Finding, ...]
    counts: tuple[Count, ...]
    traffic: Mapping[str, Traffic]

    @property
    def races(self) -> tuple[Finding, ...]:
        """The findings that are races."""
        return tuple(finding for finding in self.findings if finding.race)

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that are not races."""
        return tuple(finding for finding in self.findings if not finding.race)

    @property
    def bank_conflicts(self) -> dict[Place, int]:
        """Conflicts of the lines that have any."""
        return {count.place: count.conflicts for count in self.counts if count.conflicts}

    @property
    def instructions(self) -> dict[str, int]:
        """Executions by threads, by instruction."""
        total: Counter[str] = Counter()
        for count in self.counts:
            total[count.place.instruction] += count.threads
        return dict(total)

    def __str__(self) -> str:
        lines = [self.spec.name, *(f"  {finding}" for finding in self.findings)]
        lines += [
            f"  {name}: {t.read} B read, {t.written} B written" for name, t in self.traffic.items()
        ]
        for count in self.counts:
            conflicts = f", {count.conflicts} conflicts" if count.conflicts else ""
            lines.append(
                f"  {count.place}: {count.threads} threads, {count.warps} warps{conflicts}"
            )
        return "\n".join(lines)


def text(value: bytes | None) -> str:
    """A C string."""
    return "" if value is None else value.decode()


def read_findings(launch: CLaunch) -> list[Finding]:
    """The launch's findings, in the order of their blocks."""
    found = [
        Finding(
            what=text(c.what),
            place=Place(text(c.file), c.line, text(c.instruction)),
            other=Place(text(c.other_file), c.other_line, text(c.other_instruction))
            if c.other_instruction
            else None,
            race=bool(c.race),
            times=c.times,
            block=c.block,
            thread=c.thread,
            other_thread=c.other_thread,
            address=c.address,
        )
        for c in launch.findings[: launch.finding_count]
    ]
    return sorted(found, key=lambda finding: (finding.block, str(finding)))


def read_counts(launch: CLaunch) -> list[Count]:
    """The launch's counts, by place."""
    counts = [
        Count(Place(text(c.file), c.line, text(c.instruction)), c.threads, c.warps, c.conflicts)
        for c in launch.counts[: launch.count_count]
    ]
    return sorted(counts, key=order)


def total(
    spec: AnySpec,
    out: NDArray[Any],
    lse: NDArray[Any],
    outcomes: Sequence[Outcome],
    missing: Sequence[Finding],
) -> Report:
    """The Report of several launches; `missing`: findings of no launch."""
    counts: dict[Place, Count] = {}
    traffic: dict[str, Traffic] = {}
    for outcome in outcomes:
        for count in outcome.counts:
            old = counts.get(count.place, Count(count.place, 0, 0, 0))
            sums = (getattr(old, x) + getattr(count, x) for x in ("threads", "warps", "conflicts"))
            counts[count.place] = Count(count.place, *sums)
        for name, moved in outcome.traffic.items():
            past = traffic.get(name, Traffic(0, 0))
            traffic[name] = Traffic(past.read + moved.read, past.written + moved.written)
    return Report(
        spec=spec,
        out=out,
        lse=lse,
        findings=(*(found for outcome in outcomes for found in outcome.findings), *missing),
        counts=tuple(sorted(counts.values(), key=order)),
        traffic=traffic,
    )


def order(count: Count) -> tuple[str, int, str]:
    """By place."""
    return count.place.file, count.place.line, str(count.place)
