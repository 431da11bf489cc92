"""Count the SASS instructions that decide an attention kernel's speed.

usage: python tools/sass.py FILE.cubin...

Needs nvdisasm or cuobjdump: on PATH, or from `pip install nvidia-cuda-nvdisasm`.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections import Counter
from pathlib import Path

if not __package__:  # run as a script: rtflash is beside tools/, installed or not
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rtflash.dump import disassemble

# Tensor cores, their loads, asynchronous copies, exponentials, barriers, local memory (none wanted).
COUNTED = ("HMMA", "LDSM", "LDGSTS", "MUFU", "BAR", "LDL", "STL")

FUNCTION = re.compile(r"Function : (\S+)|^\.text\.(\S+):")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[\dT]+\s+)?([A-Z][A-Z0-9_]*)")


def count(sass: str) -> dict[str, Counter[str]]:
    """Kernel -> instruction -> how often it stands in the code ("total": all of them)."""
    kernels: dict[str, Counter[str]] = {}
    counter: Counter[str] = Counter()
    for line in sass.splitlines():
        if match := FUNCTION.search(line):
            counter = kernels.setdefault(match[1] or match[2], Counter())
        elif match := INSTRUCTION.match(line):
            counter.update((match[1], "total"))
    return kernels


def main() -> None:
    """Print one line per kernel of the files named on the command line."""
    if len(sys.argv) < 2:
        sys.exit("usage: python tools/sass.py FILE.cubin...")
    # All files first: none, or no disassembler, is an error without a header.
    found = [count(disassemble(Path(file))) for file in sys.argv[1:]]
    print(*(f"{name:>7}" for name in (*COUNTED, "total")), " kernel")
    for kernel, counter in itertools.chain.from_iterable(kernels.items() for kernels in found):
        print(*(f"{counter[name]:>7}" for name in (*COUNTED, "total")), f" {kernel}")


if __name__ == "__main__":
    try:
        main()
    except (OSError, RuntimeError) as error:
        sys.exit(str(error))
