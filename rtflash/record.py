"""Variants as data: what RTFLASH_RECORD collects, what an error names, and what `rtflash generate` reads again.

A record is a file of JSON lines, one for each variant and architecture that a program loaded:
{"arch": "sm_90a", "kernel": "forward", "spec": {"dtype": "bf16", ...}}
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from . import cache, settings
from .other_specs import AppendSpec, CombineSpec
from .spec import AnySpec, Spec

KERNELS: dict[str, Any] = {"forward": Spec, "combine": CombineSpec, "append": AppendSpec}
# A variant of each, by the fields that have no defaults.
EXAMPLES = {
    "forward": "kernel=forward,dtype=bf16,head_dim=128,head_dim_v=128,block_m=128,block_n=64,warps=4,stages=2",
    "combine": "kernel=combine,dtype=bf16",
    "append": "kernel=append,dtype=bf16",
}
# A line of a record.
EXAMPLE_LINE = '{"arch": "sm_80", "kernel": "combine", "spec": {"dtype": "bf16"}}'
# They are also names of folders. PTX is for a GPU that NVRTC does not know.
PTX = re.compile(r"compute_\d{2,3}")
ARCH = re.compile(rf"sm_\d+[af]?|{PTX.pattern}")

_noted: set[tuple[Path, str]] = set()


def described(spec: AnySpec, arch: str) -> dict[str, object]:
    """A variant for an architecture, as in artifacts.Artifact, as a JSON object; `parse` reads it."""
    kernel = next(name for name, kind in KERNELS.items() if type(spec) is kind)
    return {"arch": arch, "kernel": kernel, "spec": spec.to_dict()}


def parse(described: Any) -> tuple[AnySpec, str]:
    """What `described` made an object of.

    Raises
    ------
    ValueError
        It is another object, or says a variant that is none.
    """
    if not isinstance(described, dict):
        raise ValueError(f"no variant (no object); one is {EXAMPLE_LINE}")
    parts = {"arch": str, "kernel": str, "spec": dict}
    if missing := [name for name in parts if name not in described]:
        raise ValueError(f"no variant without {', '.join(missing)}; one is {EXAMPLE_LINE}")
    arch, kernel, fields = values = [described[name] for name in parts]
    sound = all(map(isinstance, values, parts.values()))
    if not (sound and ARCH.fullmatch(arch) and kernel in KERNELS):
        raise ValueError(
            f"no variant (arch is {arch!r}, kernel is {kernel!r}, spec is {fields!r}); one is {EXAMPLE_LINE}"
        )
    return make(kernel, fields), arch


def make(kernel: str, fields: dict[str, object]) -> AnySpec:
    """A variant by its fields; ValueError or TypeError where there is no such one."""
    kind, given = KERNELS[kernel], dict(fields)
    known = {field.name: field for field in dataclasses.fields(kind)}
    types = {name: field.type for name, field in known.items()}
    wrong = [name for name, x in given.items() if type(x).__name__ != types.get(name)]
    if wrong:
        raise ValueError(f"no variant ({', '.join(wrong)}: unknown, or of another type)")
    needed = [name for name, field in known.items() if field.default is dataclasses.MISSING]
    if missing := [name for name in needed if name not in given]:
        raise ValueError(f"no variant without {', '.join(missing)}; one is {EXAMPLES[kernel]}")
    return kind(**fields)


def text(spec: AnySpec) -> str:
    """A variant as `--spec` takes it: its kernel, and the fields that are not as by default."""
    kind = described(spec, "")["kernel"]
    fields = {field.name: field.default for field in dataclasses.fields(KERNELS[str(kind)])}
    said = {name: x for name, x in spec.to_dict().items() if x != fields[name]}
    return ",".join([f"kernel={kind}", *(f"{name}={x}" for name, x in said.items())])


def from_text(said: str) -> AnySpec:
    """What `text` wrote.

    Raises
    ------
    ValueError
        It says no variant.
    """
    items = [item for item in said.split(",") if item]
    if wrong := [item for item in items if item.find("=") < 1]:
        raise ValueError(
            f"{wrong[0]!r} is no NAME=VALUE; a variant must be as {EXAMPLES['forward']}"
        )
    pairs = once(item.partition("=")[::2] for item in items)
    kernel = pairs.pop("kernel", "")
    if kernel not in KERNELS:
        names = ", ".join(KERNELS)
        raise ValueError(
            f"kernel is {kernel!r}; it must be one of {names}, as in {EXAMPLES['forward']}"
        )
    types: dict[str, Any] = {x.name: x.type for x in dataclasses.fields(KERNELS[kernel])}
    readers: dict[str, Callable[[str], object]] = {
        "int": int,
        "bool": {"True": True, "False": False}.__getitem__,
        "str": str,
    }
    fields: dict[str, object] = {}
    for name, value in pairs.items():
        try:
            fields[name] = readers[types[name]](value)
        except (KeyError, ValueError):
            raise ValueError(f"no variant has {name}={value}; one is {EXAMPLES[kernel]}") from None
    return make(kernel, fields)


def once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs as a dict; ValueError where a name comes again, since one of its values would not count."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(
                f"{name} is given as {found[name]} and as {value}; it must be given once"
            )
        found[name] = value
    return found


def note(spec: AnySpec, arch: str) -> None:
    """Add a variant to RTFLASH_RECORD's file, if there is one and it lacks it; a call never fails for it."""
    file = settings.get().record
    if file is None:
        return
    line = json.dumps(described(spec, arch), sort_keys=True)
    if (file, line) in _noted:
        return
    _noted.add((file, line))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with cache.locked(file):
            add(file, line.encode())
    except OSError as error:
        cache.warn_once("record", f"rtflash: RTFLASH_RECORD cannot be written ({error})")


def add(file: Path, line: bytes) -> None:
    """Append a line that is not there yet, behind the end of what a killed process may have left."""
    with file.open("a+b") as opened:
        opened.seek(0)
        held = opened.read()
        if line not in held.splitlines():
            torn = held and not held.endswith(b"\n")
            opened.write((b"\n" if torn else b"") + line + b"\n")


def load(line: bytes) -> Any:
    """A line's JSON; ValueError where it is none."""
    try:
        return json.loads(line, object_pairs_hook=once)
    except (UnicodeError, json.JSONDecodeError, RecursionError):
        raise ValueError(f"no variant (no JSON); one is {EXAMPLE_LINE}") from None


def read(file: Path) -> list[tuple[AnySpec, str]]:
    """The variants of a record, each once.

    Raises
    ------
    OSError, ValueError
        The file cannot be read, or a line of it is no variant.
    """
    found: dict[tuple[AnySpec, str], None] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        if line.strip():
            try:
                found[parse(load(line))] = None
            except ValueError as error:
                raise ValueError(f"line {number} of {file}: {error}") from None
    return list(found)
