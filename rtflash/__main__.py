"""The `rtflash` command, also as `python -m rtflash`. What it does is in tools/cli.py."""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import sys
from pathlib import Path
from types import ModuleType

import rtflash

INSTALL = 'pip install "rtflash[tools]"'


def import_tool(name: str) -> ModuleType:
    """The module `rtflash.tools.<name>`, wherever tools/ is.

    A wheel has it inside the package; in a checkout, editable install or not, it is the folder beside it.
    """
    package = Path(rtflash.__file__).parent
    if importlib.util.find_spec("rtflash.tools") is None and (package.parent / "tools").is_dir():
        rtflash.__path__.append(str(package.parent))
    return importlib.import_module(f"rtflash.tools.{name}")


def main() -> None:
    """Run the command line; without its extra, say what to install and exit with 2."""
    missing = [name for name in ("rich", "typer") if importlib.util.find_spec(name) is None]
    if missing:
        needs = " and ".join(missing)
        print(f"The rtflash command needs {needs}, not installed here: {INSTALL}", file=sys.stderr)
        sys.exit(2)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="backslashreplace"
            )  # a path may hold what the terminal cannot show
    try:
        import_tool("cli").app(prog_name="rtflash")
    except OSError as error:
        # A full disk, above all. The interpreter would try again to write what stdout still holds.
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"rtflash: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
