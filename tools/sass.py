"""Count the SASS instructions that decide an attention kernel's speed.

usage: python tools/sass.py FILE.cubin...

Needs nvdisasm or cuobjdump: on PATH, or from `pip install nvidia-cuda-nvdisasm`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

# Tensor cores, their loads, asynchronous copies, exponentials, barriers, local memory (none wanted).
COUNTED = ("HMMA", "LDSM", "LDGSTS", "MUFU", "BAR", "LDL", "STL")

FUNCTION = re.compile(r"Function : (\S+)|^\.text\.(\S+):")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[\dT]+\s+)?([A-Z][A-Z0-9_]*)")


def disassemble(cubin: Path) -> str:
    """SASS text of a cubin.

    Raises
    ------
    FileNotFoundError
        Neither disassembler is here.
    """
    nvdisasm, cuobjdump = find("nvdisasm"), find("cuobjdump")
    if nvdisasm:
        command = [nvdisasm, "--print-code", str(cubin)]
    elif cuobjdump:
        command = [cuobjdump, "--dump-sass", str(cubin)]
    else:
        raise FileNotFoundError(
            "neither nvdisasm nor cuobjdump is on PATH: pip install nvidia-cuda-nvdisasm"
        )
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def find(program: str) -> str | None:
    """Path of a CUDA program on PATH or in NVIDIA's wheels, None where there is none."""
    wheels = (f"{place}/nvidia" for place in sys.path if place)
    found = (
        path for place in wheels for path in Path(place).glob(f"*/bin/{program}") if path.is_file()
    )
    return shutil.which(program) or next(map(str, found), None)


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
    print(*(f"{name:>7}" for name in (*COUNTED, "total")), " kernel")
    for file in sys.argv[1:]:
        for kernel, counter in count(disassemble(Path(file))).items():
            print(*(f"{counter[name]:>7}" for name in (*COUNTED, "total")), f" {kernel}")


if __name__ == "__main__":
    try:
        main()
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(str(error))
