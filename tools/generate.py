"""Compile kernel variants for any architectures on any machine: no GPU, no driver, no nvcc.

Which variant serves a call is select.py's choice, so variants are asked for as calls: dtype,
head_dim, mask, features, lengths that divide the tile or not.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rtflash import build, device, nvrtc, select
from rtflash.problem import Problem
from rtflash.spec import DTYPES, MAX_HEAD_DIM, Spec

from .screen import check_file, check_folder, console, frameless, given, items

# Query and key lengths that every tile divides, and that none does.
LENGTHS: dict[str, list[tuple[int, int]]] = {
    "even": [(8192, 8192)],
    "odd": [(8191, 8191)],
    "all": [(sq, sk) for sq in (8192, 8191) for sk in (8192, 8191)],
}
FEATURES = ("softcap", "alibi")
WINDOWS = {"full": (-1, -1), "causal": (-1, 0), "window": (1024, 0)}
# Options that say which calls to serve; --table has its own.
CALL_OPTIONS = ("dtype", "head_dim", "mask", "feature", "length")


class Variant(NamedTuple):
    """A kernel for an architecture."""

    spec: Spec
    arch: str


class Outcome(NamedTuple):
    """What came of a variant: its artifact, or the compiler's words."""

    variant: Variant
    artifact: build.Artifact | None
    error: str

    @property
    def faults(self) -> list[str]:
        """What a shipped kernel must not have: local memory, spills, the compiler's warnings."""
        if self.artifact is None:
            return [self.error]
        used = self.artifact.resources
        counted = {
            "bytes of local memory": used.local_bytes,
            "bytes of spill stores": used.spill_stores,
            "bytes of spill loads": used.spill_loads,
        }
        faults = [f"{count} {what}" for what, count in counted.items() if count]
        return faults + list(self.artifact.warnings)


def problems(
    dtypes: Sequence[str],
    head_dims: Sequence[tuple[int, int]],
    masks: Sequence[str],
    features: Sequence[frozenset[str]],
    lengths: Sequence[tuple[int, int]],
) -> Iterator[Problem]:
    """One representative call per combination.

    Parameters
    ----------
    dtypes : "fp16", "bf16".
    head_dims : (head_dim, head_dim_v).
    masks : keys of WINDOWS.
    features : sets out of "softcap", "alibi".
    lengths : (seqlen_q, seqlen_k).
    """
    for dtype, (d, dv), mask, extra, (sq, sk) in itertools.product(
        dtypes, head_dims, masks, features, lengths
    ):
        left, right = WINDOWS[mask]
        yield Problem(
            batch=4,
            seqlen_q=sq,
            seqlen_k=sk,
            heads=32,
            heads_k=8,
            head_dim=d,
            head_dim_v=dv,
            dtype=dtype,
            softmax_scale=d**-0.5,
            window_left=left,
            window_right=right,
            softcap=30.0 if "softcap" in extra else 0.0,
            alibi="alibi" in extra,
            align=16,
        )


def variants(archs: Iterable[str], calls: Iterable[Problem]) -> tuple[list[Variant], list[str]]:
    """The distinct kernels that serve the calls, and why some calls have none.

    Raises
    ------
    ValueError
        An architecture is unknown.
    """
    devices = {arch: device.for_arch(arch) for arch in archs}
    found: dict[Variant, None] = {}
    refused: dict[str, None] = {}
    for arch, call in itertools.product(devices, list(calls)):
        try:
            spec, _ = select.forward(call, devices[arch])
            found[Variant(spec, arch)] = None
        except (ValueError, TypeError, NotImplementedError) as error:
            refused[f"{arch}: {error}"] = None
    return list(found), list(refused)


def table_variants(archs: Iterable[str]) -> list[Variant]:
    """Every kernel that the shipped tile table makes on the architectures."""
    return [Variant(s, arch) for arch in archs for s in select.table_specs(device.for_arch(arch))]


def compile_all(chosen: Sequence[Variant], jobs: int) -> Iterator[Outcome]:
    """Compile in `jobs` threads; outcomes come as they finish.

    NVRTC runs outside the interpreter's lock: two threads take half the time of one (measured).
    """

    def work(variant: Variant) -> Outcome:
        try:
            return Outcome(variant, build.compile(*variant), "")
        except build.CompileError as error:
            return Outcome(variant, None, str(error))

    with ThreadPoolExecutor(jobs) as pool:
        pending = [pool.submit(work, variant) for variant in chosen]
        try:
            for future in as_completed(pending):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def write(outcome: Outcome, folder: Path) -> None:
    """Put a variant's files under `folder`/<arch>/<name>/, as the cache has them."""
    if outcome.artifact is None:
        return
    place = folder / outcome.variant.arch / outcome.variant.spec.name
    place.mkdir(parents=True, exist_ok=True)
    entry = build.to_entry(outcome.artifact)
    for name, data in entry.files.items():
        (place / name).write_bytes(data)
    record = json.dumps(dict(entry.record), indent=1)
    (place / "spec.json").write_text(record + "\n", encoding="utf-8")


def report(outcome: Outcome) -> dict[str, Any]:
    """A variant's row of the JSON report."""
    variant, artifact = outcome.variant, outcome.artifact
    row: dict[str, Any] = {"name": variant.spec.name, "arch": variant.arch}
    if artifact is not None:
        used = artifact.resources
        row |= {
            "registers": used.registers,
            "threads": variant.spec.threads,
            "shared_bytes": used.shared_bytes + variant.spec.shared_bytes,
            "local_bytes": used.local_bytes,
            "spill_bytes": used.spill_stores + used.spill_loads,
            "cubin_bytes": len(artifact.cubin),
            "seconds": round(used.seconds, 3),
        }
    return row | {"faults": outcome.faults}


def table(outcomes: Iterable[Outcome]) -> Table:
    """The report for the terminal."""
    right = ("registers", "shared KB", "spilled B", "cubin KB", "seconds")
    grid = frameless("arch", "kernel", *right, right=right)
    for row in map(report, outcomes):
        name = row["name"].removeprefix("rtflash_forward_")
        if "registers" not in row:
            grid.add_row(row["arch"], name, *["[red]failed[/]"] * len(right))
            continue
        spilled = row["spill_bytes"] + row["local_bytes"]
        cells = (
            f"{row['registers']}",
            f"{row['shared_bytes'] / 1024:.0f}",
            f"[red]{spilled}[/]" if spilled else "0",
            f"{row['cubin_bytes'] / 1024:.0f}",
            f"{row['seconds']:.2f}",
        )
        grid.add_row(row["arch"], name, *cells)
    return grid


def head_dims(text: str) -> list[tuple[int, int]]:
    """(head_dim, head_dim_v) of "64,192x128"."""
    pairs = []
    for item in items(text, "--head-dim"):
        match = re.fullmatch(r"(\d{1,3})(?:x(\d{1,3}))?", item)
        pair = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not all(1 <= size <= MAX_HEAD_DIM for size in pair):
            raise typer.BadParameter(
                f"--head-dim has {item!r}; it must be D, or DxDV as 192x128, in 1..{MAX_HEAD_DIM}"
            )
        pairs.append(pair)
    return pairs


def lengths(text: str) -> list[tuple[int, int]]:
    """(seqlen_q, seqlen_k) of "even,odd", each once."""
    chosen = [LENGTHS[item] for item in items(text, "--length", list(LENGTHS))]
    return list(dict.fromkeys(itertools.chain.from_iterable(chosen)))


def refuse_call_options(context: typer.Context) -> None:
    """BadParameter if an option was given that --table would ignore."""
    found = given(context, CALL_OPTIONS)
    if found:
        raise typer.BadParameter(
            f"--table is all that the tile table has for --arch; it does not go with {', '.join(found)}"
        )


def command(
    context: typer.Context,
    arch: Annotated[str, typer.Option(help="GPU architectures.")] = "sm_80,sm_90a",
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES))] = "bf16",
    head_dim: Annotated[str, typer.Option(help="D, or DxDV where V's differs: 64,192x128")] = "128",
    mask: Annotated[str, typer.Option(help=", ".join(WINDOWS))] = "full,causal",
    feature: Annotated[str, typer.Option(help=", ".join(FEATURES))] = "",
    length: Annotated[str, typer.Option(help="Divisible by the tile: even, odd, all.")] = "all",
    every: Annotated[bool, typer.Option("--table", help="All of the tile table.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write .cu, .cubin, spec.json here.")] = None,
    report_file: Annotated[Path | None, typer.Option("--json", help="Write a report here.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Compilations at a time.")] = os.cpu_count() or 1,
    allow: Annotated[bool, typer.Option("--allow-faults", help="Exit 0 despite faults.")] = False,
) -> None:
    """Compile kernel variants for any GPU on a machine without one.

    Lists take commas. Exits 1 if a variant spills, uses local memory, has a compiler warning or
    does not compile.
    """
    archs = items(arch, "--arch")
    extra = frozenset(items(feature, "--feature", FEATURES) if feature else ())
    dtypes, masks = items(dtype, "--dtype", DTYPES), items(mask, "--mask", list(WINDOWS))
    calls = problems(dtypes, head_dims(head_dim), masks, [extra], lengths(length))
    if every:
        refuse_call_options(context)
    check_folder(out, "--out")
    check_file(report_file, "--json")
    try:
        chosen, refused = (table_variants(archs), []) if every else variants(archs, calls)
        nvrtc.version()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    except (ImportError, RuntimeError) as error:
        console.print(f"[red]{escape(str(error))}[/]")
        raise typer.Exit(2) from None
    for reason in refused:
        console.print(f"[yellow]skipped[/] {escape(reason)}")
    start = time.perf_counter()
    outcomes = watch(chosen, jobs, out)
    seconds = time.perf_counter() - start
    console.print(table(outcomes))
    faulty = [outcome for outcome in outcomes if outcome.faults]
    for outcome in faulty:
        spec, arch = outcome.variant
        console.print(f"[red]{arch} {spec.name}[/]: {escape('; '.join(outcome.faults))}")
    console.print(f"\nvariants: {len(outcomes)}, with faults: {len(faulty)}, in {seconds:.1f} s")
    if report_file is not None:
        rows = [report(outcome) for outcome in outcomes]
        report_file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if not outcomes or (faulty and not allow):
        raise typer.Exit(1)


def watch(chosen: Sequence[Variant], jobs: int, out: Path | None) -> list[Outcome]:
    """Compile with a progress bar and write each variant under `out`; all in `chosen`'s order."""
    done: dict[Variant, Outcome] = {}
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        for outcome in progress.track(compile_all(chosen, jobs), total=len(chosen)):
            done[outcome.variant] = outcome
            if out is not None:
                write(outcome, out)
    return [done[variant] for variant in chosen]
