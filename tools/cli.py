"""The commands of `rtflash`: info and cache here, the others in the modules of their names."""

from __future__ import annotations

import platform
import time
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

import rtflash
from rtflash import bundle, cache, device, dump, nvrtc, settings, tuned

from . import autotune, bench, demo, generate
from .screen import Named, console, frameless, size

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
cache_app = typer.Typer(no_args_is_help=True, help="The compiled kernels on disk.")
app.add_typer(cache_app, name="cache")
app.command("demo")(demo.command)
app.command("generate")(generate.command)
app.command("bench")(bench.command)
app.command("tune")(autotune.command)

PACKAGES = ("numpy", "cupy-cuda13x", "cupy-cuda12x", "cupy", "torch", "jax", "ml_dtypes")


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """FlashAttention without a build: CUDA kernels compiled for the call at hand, and cached."""
    if version:
        console.print(rtflash.__version__)
        raise typer.Exit
    if context.invoked_subcommand == "info":
        return  # which tells of settings that are refused
    try:
        settings.get()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@app.command()
def info() -> None:
    """What runs here: GPUs, driver, compiler, cache, settings; and why a GPU is not used."""
    described = settings.describe()
    with settings.leaving_out(row.variable for row in described if row.refused):
        show_machine()
    table = frameless("setting", "value", "from", "meaning", whole=["setting", "from"])
    for *cells, meaning, refused in described:
        shown = f"[red]refused.[/] {escape(refused)}" if refused else escape(meaning)
        table.add_row(*map(escape, cells), shown)
    console.print("", table)


def show_machine() -> None:
    """What `info` says but for the settings."""
    rows = frameless()
    rows.add_column(no_wrap=True)
    rows.add_column(overflow="fold")
    rows.add_row("rtflash", escape(f"{rtflash.__version__} in {Path(rtflash.__file__).parent}"))
    rows.add_row("Python", f"{platform.python_version()} on {platform.platform(terse=True)}")
    rows.add_row("packages", ", ".join(installed()))
    for line in gpus():
        rows.add_row("GPU", line)
    rows.add_row("NVRTC", compiler())
    rows.add_row("cache", stored(cache.entries()))
    rows.add_row("bundles", usable(*bundle.survey()) or "none")
    if overriding := usable(*dump.survey()):
        rows.add_row("edited kernels", overriding)
    rows.add_row("tuned tiles", escape(tuned.said()))
    console.print(rows)


def installed() -> list[str]:
    """Name and version of the packages that rtflash talks to."""
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return found


def gpus() -> list[str]:
    """A line per GPU and one for the driver, or the reason why none is used."""
    reason = device.why_no_gpu()
    if reason is not None:
        return [
            f"[yellow]not used.[/] {escape(reason)} Host arrays run on {settings.host_backend()}."
        ]
    from cupy.cuda import runtime

    found = [device.get(index) for index in range(runtime.getDeviceCount())]
    driver = runtime.driverGetVersion()
    lines = [
        f"{escape(gpu.name)}: {gpu.arch}, {gpu.sm_count} SMs, "
        f"{gpu.shared_bytes_per_block // 1024} KB shared memory a CTA"
        for gpu in found
    ]
    return [*lines, f"driver for CUDA {device.cuda_version(driver)}"]


def compiler() -> str:
    """NVRTC's version and the architectures it compiles for, or what is missing.

    Those that `generate` has no typical GPU of stand apart: it cannot choose their tiles.
    """
    try:
        version, known = ".".join(map(str, nvrtc.version())), nvrtc.supported_archs()
    except (ImportError, RuntimeError) as error:
        return f"[yellow]missing.[/] {escape(str(error))}"
    here = [arch for arch in known if arch not in device.TYPICAL]
    also = f"; where such a GPU is, also for {' '.join(here)}" if here else ""
    return f"{version} for {' '.join(arch for arch in known if arch in device.TYPICAL)}{also}"


def usable(said: str, errors: list[str]) -> str:
    """What a setting brings in, and why the rest of it cannot be used."""
    wrong = [f"[red]unusable.[/] {escape(error)}" for error in errors]
    return "\n".join([*([escape(said)] if said else []), *wrong])


def stored(entries: list[cache.Listed]) -> str:
    """Number, size and place of the kernels on disk."""
    current = settings.get()
    if not current.cache:
        return "off (RTFLASH_CACHE=0): kernels stay in memory"
    return escape(f"{kernels(len(entries))}, {size(total(entries))} in {current.cache_dir}")


def kernels(count: int) -> str:
    """A number of kernels in words."""
    return f"{count} kernel{'' if count == 1 else 's'}"


def total(entries: list[cache.Listed]) -> int:
    """Bytes of the kernels."""
    return sum(entry.size for entry in entries)


@cache_app.command("list")
def cache_list() -> None:
    """The kernels on disk, the newest last."""
    table = Named("kernel", "arch", "registers", "size", "made", right=("registers", "size"))
    entries = cache.entries()
    for entry in sorted(entries, key=lambda entry: entry.modified):
        record: Any = entry.record
        used = record.get("resources")
        table.add_row(
            entry.folder.name,
            escape(str(record["arch"])) if "arch" in record else "[red]damaged[/]",
            str(used.get("registers", "")) if isinstance(used, dict) else "",
            size(entry.size),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.modified)),
        )
    if entries:
        console.print(table, crop=False)
    console.print(stored(entries))


@cache_app.command("size")
def cache_size() -> None:
    """Their number, size and place."""
    console.print(stored(cache.entries()))


@cache_app.command("clear")
def cache_clear() -> None:
    """Delete them; other files in the folder stay."""
    freed = total(cache.entries())
    console.print(f"deleted {kernels(cache.clear())}, {size(freed)}")
