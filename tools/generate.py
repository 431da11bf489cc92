"""Compile kernel variants for any architectures on any machine: no GPU, no driver, no nvcc.

Which variant serves a call is select.py's choice, so variants are asked for as calls: dtype,
head_dim, mask, features, lengths that divide the tile or not, and where sequences lie.
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

from rtflash import build, launch, nvrtc
from rtflash.spec import DTYPES, MAX_HEAD_DIM, ROTARIES, AnySpec, AppendSpec, Spec

from .screen import check_file, check_folder, console, frameless, given, items
from .served import (
    FEATURES,
    LENGTHS,
    WINDOWS,
    Inference,
    Variant,
    problems,
    table_variants,
    variants,
)

# Options that say which calls to serve; --table has its own.
CALL_OPTIONS = (
    "dtype", "head_dim", "mask", "feature", "length", "varlen", "decode", "paged", "append", "rotary",
)  # fmt: skip


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
    how = json.dumps(launch_record(outcome.variant.spec), indent=1)
    (place / "launch.json").write_text(how + "\n", encoding="utf-8")


def launch_record(spec: AnySpec) -> dict[str, Any]:
    """How a kernel is launched, for `launch.json`: grid, block, shared memory, and the fields of its one argument.

    A "tensor map" is a CUtensorMap, as rtflash/tensor_map.py encodes it. The grid is a formula of Params' fields and of
    the batch (packed rows to merge: batch 1).
    """
    if isinstance(spec, Spec):
        rows, heads = (
            ("seqlen_q * group", "heads / group") if spec.pack_gqa else ("seqlen_q", "heads")
        )
        grid = f"ceil({rows} / {spec.block_m}) * batch * {heads} * splits"
        layout = launch.FORWARD
        if spec.isa == 90:  # the CTAs stay, and share the tiles
            grid, layout = f"min({grid}, multiprocessors)", launch.FORWARD_TMA
    elif isinstance(spec, AppendSpec):
        grid, layout = "batch * seqlen_new * heads", launch.APPEND
    else:
        grid, layout = "batch * seqlen * heads", launch.COMBINE
    fields = layout.described()
    return {
        "symbol": spec.name,
        "grid": grid,
        "threads": spec.threads,
        "dynamic_shared_bytes": spec.shared_bytes,
        "params_bytes": layout.size,
        "params": [{"name": name, "type": kind, "offset": at} for name, kind, at in fields],
    }


def report(outcome: Outcome) -> dict[str, Any]:
    """A variant's row of the JSON report."""
    variant, artifact = outcome.variant, outcome.artifact
    row: dict[str, Any] = {"name": variant.spec.name, "arch": variant.arch}
    if artifact is not None:
        used = artifact.resources
        row |= {
            "registers": used.registers,
            "threads": variant.spec.threads,
            "shared_bytes": used.static_shared_bytes + variant.spec.shared_bytes,
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
        name = row["name"].removeprefix("rtflash_").removeprefix("forward_")
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


def check_inference(wanted: Inference) -> None:
    """BadParameter if an option would do nothing."""
    if wanted.rotary not in ROTARIES:
        raise typer.BadParameter(
            f"--rotary is {wanted.rotary!r}; it must be one of {', '.join(ROTARIES)}"
        )
    if wanted.paged and not (wanted.varlen or wanted.decode):
        raise typer.BadParameter("--paged goes with --varlen or --decode")
    if wanted.append and not wanted.decode:
        raise typer.BadParameter("--append goes with --decode")
    if wanted.rotary != "none" and not wanted.append:
        raise typer.BadParameter("--rotary goes with --append")


def command(
    context: typer.Context,
    arch: Annotated[str, typer.Option(help="GPU architectures.")] = "sm_80,sm_90a",
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES))] = "bf16",
    head_dim: Annotated[str, typer.Option(help="D, or DxDV where V's differs: 64,192x128")] = "128",
    mask: Annotated[str, typer.Option(help=", ".join(WINDOWS))] = "full,causal",
    feature: Annotated[str, typer.Option(help=", ".join(FEATURES))] = "",
    length: Annotated[str, typer.Option(help="Divisible by the tile: even, odd, all.")] = "all",
    varlen: Annotated[bool, typer.Option("--varlen", help="Packed sequences too.")] = False,
    decode: Annotated[bool, typer.Option("--decode", help="Few queries and caches too.")] = False,
    paged: Annotated[bool, typer.Option("--paged", help="Those two with a block table.")] = False,
    append: Annotated[bool, typer.Option("--append", help="--decode with new keys.")] = False,
    rotary: Annotated[str, typer.Option(help=f"Of new keys: {', '.join(ROTARIES)}")] = "none",
    every: Annotated[bool, typer.Option("--table", help="All of the tile table.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write .cu, .cubin, .json here.")] = None,
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
    wanted = Inference(varlen, decode, paged, append, rotary)
    check_inference(wanted)
    if every:
        refuse_call_options(context)
    check_folder(out, "--out")
    check_file(report_file, "--json")
    try:
        chosen, refused = (table_variants(archs), []) if every else variants(archs, calls, wanted)
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
