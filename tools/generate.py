"""Compile kernel variants for any architectures on any machine: no GPU, no driver, no nvcc.

Which variant serves a call is select.py's choice, so variants are asked for as calls: dtype,
head_dim, mask, features, lengths that divide the tile or not, and where sequences lie.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rtflash import artifacts, device, nvrtc, record, select
from rtflash.ahead import Inference
from rtflash.spec import DTYPES, MAX_HEAD_DIM, ROTARIES

from .generated import Outcome, packed, table, write
from .outputs import check_outputs, counted, held_by, save, tell_files
from .screen import PLOTS, check_apart, check_file, console, given, items, one_of
from .served import (
    FEATURES,
    LENGTHS,
    WINDOWS,
    Variant,
    problems,
    table_variants,
    variants,
    why_not_on_its_gpu,
)

# Options that say which calls to serve; not with those that say which variants.
CALL_OPTIONS = (
    "dtype", "head_dim", "mask", "feature", "length", "varlen", "decode", "paged", "append", "rotary",
    "strided",
)  # fmt: skip

# select.py's words, which speak of a tensor and of a GPU that nobody named here.
NO_BF16 = re.compile(r"q is bf16 on .*?; bf16 needs sm_80, use fp16")
# Seconds between two lines of progress in a log.
EVERY = 5


def compile_all(chosen: Sequence[Variant], jobs: int, lines: bool = True) -> Iterator[Outcome]:
    """Compile in `jobs` threads, with line numbers for profilers or without; outcomes come as they finish.

    NVRTC runs outside the interpreter's lock: two threads take half the time of one (measured).
    """

    def work(variant: Variant) -> Outcome:
        try:
            return Outcome(variant, artifacts.compile(*variant, lines=lines), "")
        except artifacts.CompileError as error:
            return Outcome(variant, None, str(error))

    with ThreadPoolExecutor(jobs) as pool:
        pending = [pool.submit(work, variant) for variant in chosen]
        try:
            for future in as_completed(pending):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


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


def targets(text: str) -> list[str]:
    """Architectures of "sm_80,sm_90": those of GPUs as NVRTC names them, and PTX as it is ("compute_90").

    Raises
    ------
    ValueError
        One is unknown.
    """
    named = items(text, "--arch")
    return [item if record.PTX.fullmatch(item) else device.for_arch(item).arch for item in named]


def check_inference(wanted: Inference) -> None:
    """BadParameter if an option would do nothing."""
    one_of(wanted.rotary, "--rotary", ROTARIES)
    if wanted.paged and not (wanted.varlen or wanted.decode):
        raise typer.BadParameter("--paged needs --varlen or --decode")
    if wanted.append and not wanted.decode:
        raise typer.BadParameter("--append needs --decode")
    if wanted.rotary != "none" and not wanted.append:
        raise typer.BadParameter("--rotary needs --append")


def choose(
    context: typer.Context,
    archs: list[str],
    calls: Callable[[], tuple[list[Variant], list[str]]],
    every: bool,
    recorded: Path | None,
    specs: Sequence[str],
) -> tuple[list[Variant], list[str]]:
    """The variants that the options name, each once, and why some calls have none.

    Raises
    ------
    typer.BadParameter
        Some of them do not go together, or the record or a variant cannot be read.
    """
    if ptx := [arch for arch in archs if nvrtc.is_ptx(arch) and not (recorded or specs)]:
        raise typer.BadParameter(
            f"--arch is {', '.join(ptx)}, PTX for a GPU that NVRTC does not know: its variants are chosen by that GPU; "
            "name them by --spec or --record"
        )
    if not (every or recorded or specs):
        if given(context, ["strided"]) and not any(
            select.is_hopper(device.for_arch(arch)) for arch in archs
        ):
            raise typer.BadParameter(
                f"--strided adds to the kernel for Hopper alone; --arch is {', '.join(archs)}, it must have sm_90a"
            )
        return calls()
    ways = {"--table": every, "--record": recorded is not None, "--spec": bool(specs)}
    way = ", ".join(name for name, is_given in ways.items() if is_given)
    if every and (recorded or specs):
        raise typer.BadParameter(f"{way} do not go together")
    if found := given(context, CALL_OPTIONS):
        raise typer.BadParameter(
            f"{way} says which variants, and does not go with {', '.join(found)}"
        )
    if every:
        return table_variants(archs), []
    chosen: dict[Variant, None] = {}
    if recorded is not None:
        try:
            held = [Variant(*pair) for pair in record.read(recorded)]
        except FileNotFoundError:
            raise typer.BadParameter(
                f"--record: there is no {recorded}. Calls on a GPU write what RTFLASH_RECORD names; those on the CPU"
                " record nothing"
            ) from None
        except (OSError, ValueError) as error:
            raise typer.BadParameter(f"--record: {error}") from None
        there = {variant.arch for variant in held}
        only = archs if given(context, ["arch"]) else there
        if not held:
            raise typer.BadParameter(f"--record: {recorded} has no variants")
        if not there.intersection(only):
            raise typer.BadParameter(
                f"--record: {recorded} has variants for {', '.join(sorted(there))}; --arch is {', '.join(only)}"
            )
        chosen.update(dict.fromkeys(variant for variant in held if variant.arch in only))
    for text in specs:
        try:
            spec = record.from_text(text)
        except ValueError as error:
            raise typer.BadParameter(f"--spec: {error}") from None
        chosen.update(dict.fromkeys(Variant(spec, arch) for arch in archs))
    if wrong := next(filter(None, map(why_not_on_its_gpu, chosen)), None):
        raise typer.BadParameter(f"{way}: {wrong}")
    return list(chosen), []


def command(
    context: typer.Context,
    arch: Annotated[str, typer.Option(help="GPU architectures.")] = "sm_80,sm_90a",
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES))] = "bf16",
    head_dim: Annotated[str, typer.Option(help="D, or DxDV where V's differs: 64,192x128")] = "128",
    mask: Annotated[str, typer.Option(help=", ".join(WINDOWS))] = "full,causal",
    feature: Annotated[
        str, typer.Option(help=f"{', '.join(FEATURES)}; of several, kernels with all of them.")
    ] = "",
    length: Annotated[
        str, typer.Option(help="Lengths: even (the tile divides them), odd, all.")
    ] = "all",
    varlen: Annotated[bool, typer.Option("--varlen", help="Packed sequences too.")] = False,
    decode: Annotated[bool, typer.Option("--decode", help="Few queries and caches too.")] = False,
    paged: Annotated[
        bool, typer.Option("--paged", help="--varlen and --decode with a block table too.")
    ] = False,
    append: Annotated[bool, typer.Option("--append", help="--decode with new keys too.")] = False,
    rotary: Annotated[str, typer.Option(help=f"Of --append: {', '.join(ROTARIES)}")] = "none",
    strided: Annotated[
        bool,
        typer.Option("--strided", help="On Hopper tensors and pages that TMA cannot read too."),
    ] = False,
    every: Annotated[
        bool, typer.Option("--table", help="Instead of calls: all variants of the tile tables.")
    ] = False,
    recorded: Annotated[
        Path | None,
        typer.Option(
            "--record", help="Instead of calls: RTFLASH_RECORD's file, what a program used."
        ),
    ] = None,
    spec: Annotated[
        list[str] | None,
        typer.Option(help="Instead of calls: variants by their fields, as errors name them."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write .cu, .cubin, .json here.")] = None,
    pack: Annotated[
        Path | None, typer.Option("--bundle", help="Write all kernels into this file.")
    ] = None,
    add: Annotated[bool, typer.Option("--add", help="Keep what the --bundle has already.")] = False,
    package: Annotated[
        Path | None, typer.Option("--wheel", help="Write them as a wheel into this folder.")
    ] = None,
    name: Annotated[str, typer.Option(help="The wheel's: rtflash_bundle_NAME.")] = "",
    report_file: Annotated[Path | None, typer.Option("--json", help="Write a report here.")] = None,
    drawing: Annotated[
        Path | None,
        typer.Option(
            "--plot", help=f"Draw registers, memory, occupancy here ({', '.join(PLOTS)})."
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Compilations at a time.")] = os.cpu_count() or 1,
    allow: Annotated[bool, typer.Option("--allow-faults", help="Exit 0 despite faults.")] = False,
) -> None:
    """Compile kernel variants for any GPU on a machine without one; as files, one bundle, a wheel.

    Lists take commas. Exits 1 if a variant spills, has a compiler warning or does not compile.
    """
    extra = frozenset(items(feature, "--feature", FEATURES) if feature else ())
    dtypes, masks = items(dtype, "--dtype", DTYPES), items(mask, "--mask", list(WINDOWS))
    calls = problems(dtypes, head_dims(head_dim), masks, [extra], lengths(length), strided)
    wanted = Inference(varlen, decode, paged, append, rotary)
    check_inference(wanted)
    if add and pack is None:
        raise typer.BadParameter("--add needs --bundle")
    check_apart({"--bundle": pack, "--json": report_file, "--plot": drawing})
    check_outputs(out, report_file, drawing, package, name)
    check_file(pack, "--bundle")
    try:
        archs = targets(arch)
        chosen, refused = choose(
            context, archs, lambda: variants(archs, calls, wanted), every, recorded, spec or []
        )
        nvrtc.version()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    except (ImportError, RuntimeError) as error:
        console.print(f"[red]{escape(str(error))}[/]")
        raise typer.Exit(2) from None
    held = held_by(pack, add)
    there = {Variant(kernel.spec, kernel.arch) for kernel in held}
    asked = chosen
    chosen = [variant for variant in chosen if variant not in there]
    for reason in refused:
        reason = NO_BF16.sub("bf16 needs sm_80, use --dtype fp16", reason)
        console.print(f"[yellow]skipped[/] {escape(reason)}")
    if refused and not chosen and not held:
        console.print("Nothing is left to compile.")
        raise typer.Exit(2)
    if asked and not chosen:
        console.print(
            f"nothing to compile: {counted(len(asked), 'variant')} asked for, all there already"
        )
    packing = pack is not None or package is not None
    start = time.perf_counter()
    outcomes = watch(chosen, jobs, out, not packing)
    seconds = time.perf_counter() - start
    if outcomes:
        console.print(table(outcomes), crop=False)
    faulty = [outcome for outcome in outcomes if outcome.faults]
    for outcome in faulty:
        made, arch = outcome.variant
        faults = escape("; ".join(outcome.faults))
        console.print(f"[red]{arch} {made.name}[/]: {faults}", soft_wrap=True)
    already = f", already there: {len(held)}" if held else ""
    console.print(
        f"\nvariants: {len(outcomes)}, with faults: {len(faulty)}, in {seconds:.1f} s{already}"
    )
    tell_files(outcomes, out, report_file, drawing)
    kernels = [*held, *packed(outcomes)]
    if not kernels or (faulty and not allow):
        if packing:
            console.print("[yellow]no bundle is written[/]")
        raise typer.Exit(1)
    if packing:
        save(kernels, pack, package, name)
    elif out is None:
        console.print("nothing is kept: --out, --bundle or --wheel would")


def watch(chosen: Sequence[Variant], jobs: int, out: Path | None, lines: bool) -> list[Outcome]:
    """Compile and write each variant under `out`; all in `chosen`'s order.

    A terminal has a progress bar, a log a line on stderr every EVERY seconds.
    """
    done: dict[Variant, Outcome] = {}
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    if chosen and not console.is_terminal:  # it shows no bar
        console.print(f"compiling {counted(len(chosen), 'variant')}, {jobs} at a time")
    start = told = time.perf_counter()
    with Progress(*columns, console=console, transient=True) as progress:
        for outcome in progress.track(compile_all(chosen, jobs, lines), total=len(chosen)):
            done[outcome.variant] = outcome
            if out is not None:
                write(outcome, out)
            now = time.perf_counter()
            if not console.is_terminal and now - told >= EVERY and len(done) < len(chosen):
                print(
                    f"{len(done)}/{len(chosen)}, {now - start:.0f} s", file=sys.stderr, flush=True
                )
                told = now
    return [done[variant] for variant in chosen]
