"""The README's pictures of `rtflash info`, `bench` and `generate`: the commands run here, what they print kept as SVG.

    python tools/screens.py [info] [bench] [generate] [--cpu]

From a checkout. It needs rich and typer; bench also a GPU and PyTorch, or --cpu. On a machine where nothing can be
installed, a folder on PYTHONPATH will do, which `pip install --target FOLDER rich "typer==0.20.*"` made elsewhere:
that typer is pure Python.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "screens"
COMMANDS = {
    "info": "info",
    "bench": "bench --head-dim 128",
    "generate": "generate --arch sm_80,sm_90a --head-dim 64,128 --mask full,causal --length even",
}
# What `bench` is with --cpu.
ON_CPU = "bench --cpu --head-dim 64"
COLUMNS = 134  # so that kernels' names stand beside their rows


def draw(name: str, words: str, folder: Path) -> Path:
    """Run a command of `rtflash` and write what it prints as `folder`/`name`.svg.

    Raises
    ------
    SystemExit
        The command fails; what it printed is on the screen.
    """
    from rtflash.__main__ import import_tool

    console = import_tool("screen").console
    console.record, console.width = True, COLUMNS
    print_line = console.print
    # A picture has an edge: lines that a terminal would wrap by itself are wrapped here.
    console.print = lambda *shown, soft_wrap=False, **options: print_line(*shown, **options)
    try:
        status = import_tool("cli").app(words.split(), standalone_mode=False)
    finally:
        console.print = print_line
    if status:
        sys.exit(f"rtflash {words}: exit status {status}")
    file = folder / f"{name}.svg"
    file.parent.mkdir(parents=True, exist_ok=True)
    # A fixed id: the same text makes the same file.
    picture = console.export_svg(title=f"$ rtflash {words}", unique_id=f"rtflash-{name}")
    # Nothing is loaded from elsewhere: where Fira Code is not installed, the reader's own font serves.
    picture = re.sub(r"@font-face \{.*?\}\n", "", picture, flags=re.DOTALL)
    lines = [line.rstrip() for line in picture.splitlines()]
    file.write_text("\n".join(line for line in lines if line) + "\n", encoding="utf-8")
    return file


def main(arguments: Sequence[str]) -> None:
    """Make the pictures that the command line asks for, all by default."""
    parser = argparse.ArgumentParser(description="Make docs/screens/*.svg.")
    parser.add_argument("names", nargs="*", help=f"any of {', '.join(COMMANDS)}; all by default")
    parser.add_argument("--cpu", action="store_true", help="bench times the NumPy backend")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the pictures")
    given = parser.parse_args(arguments)
    for name in given.names or COMMANDS:
        if name not in COMMANDS:
            parser.error(f"names has {name!r}; it must be one of {', '.join(COMMANDS)}")
        words = ON_CPU if given.cpu and name == "bench" else COMMANDS[name]
        print(draw(name, words, given.out))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main(sys.argv[1:])
