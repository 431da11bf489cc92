"""What `rtflash generate` writes, and what it says of it: files, bundle, wheel, report, plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.markup import escape

import rtflash
from rtflash import bundle

from . import wheel
from .generated import Outcome, edited_file, plot, report
from .screen import check_file, check_folder, check_plot, console, size, try_drawing


def held_by(file: Path | None, add: bool) -> list[bundle.Packed]:
    """What is already in the bundle that is to be added to."""
    if not add or file is None or not file.exists():
        return []
    try:
        found = bundle.read(file)
        return [bundle.unpack(found, where) for where in found.kernels]
    except bundle.BundleError as error:
        raise typer.BadParameter(f"--add: {error}") from None


def check_outputs(
    out: Path | None,
    report_file: Path | None,
    drawing: Path | None,
    package: Path | None,
    name: str,
) -> None:
    """BadParameter if the work could not end in a file that it is asked for."""
    check_folder(out, "--out")
    check_folder(package, "--wheel")
    check_file(report_file, "--json")
    check_plot(drawing)
    if name and package is None:
        raise typer.BadParameter("--name needs --wheel")
    if name and not wheel.NAME.fullmatch(name):
        raise typer.BadParameter(
            f"--name is {name!r}; it must be of a-z, 0-9 and single _ between them"
        )


def tell(text: str) -> None:
    """A line with paths, which a terminal may wrap but nothing else breaks."""
    console.print(escape(text), soft_wrap=True)


def counted(count: int, name: str) -> str:
    """So many of a thing, in words."""
    return f"{count} {name}{'' if count == 1 else 's'}"


def save(kernels: list[bundle.Packed], file: Path | None, package: Path | None, name: str) -> None:
    """Write the bundle and the wheel that are asked for."""
    data = bundle.pack(kernels)
    archs = sorted({kernel.arch for kernel in kernels})
    content = f"{counted(len(kernels), 'kernel')} for {', '.join(archs)}"
    if file is not None:
        bundle.write(file, data)
        tell(f"bundle: {file}, {content}, {size(len(data))}")
        tell(f'use it: RTFLASH_BUNDLE="{file.absolute()}" python program.py')
    if package is not None:
        summary = f"Attention kernels of rtflash {rtflash.__version__}, compiled: {content}."
        made = wheel.write(package, name or "_".join(archs), data, summary)
        tell(f"wheel: {made}, {content}")
        tell(f'install it: pip install --no-index "{made}"')


def tell_files(
    outcomes: Sequence[Outcome], out: Path | None, report_file: Path | None, drawing: Path | None
) -> None:
    """Write report and plot, and say where they and the kernels' files are."""
    made = [outcome for outcome in outcomes if outcome.artifact is not None]
    if out is not None and made:
        kept = list(filter(None, (edited_file(outcome, out) for outcome in made)))
        for file in kept:
            console.print(
                f"[yellow]kept[/] {escape(str(file))}: it was edited, or is of another rtflash; delete it to have it"
                " written",
                soft_wrap=True,
            )
        tell(f"files: {out}, of {counted(len(made) - len(kept), 'kernel')}")
        tell(
            f'use them: edit a kernel.cu, then RTFLASH_OVERRIDE="{out.absolute()}" python program.py'
        )
    if report_file is not None:
        rows = [report(outcome) for outcome in outcomes]
        report_file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        tell(f"report: {report_file}, of {counted(len(rows), 'variant')}")
    if drawing is not None and try_drawing(lambda: plot(outcomes, drawing)):
        tell(f"plot: {drawing}")
