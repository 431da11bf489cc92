"""The record of the GPU tests: on which GPU, with which versions and for which sources they passed.

usage: python tools/gpu_record.py [--output FILE] [--jobs N]   run `pytest -m gpu` here, write the record if all pass
       python tools/gpu_record.py --check                      say whether it covers the sources as they stand
       python tools/gpu_record.py --unrecorded WHY             say that it does not, where no GPU could be had

A machine without a GPU cannot run these tests, so it checks the record: exit status 1 if the kernels have changed since
(templates and the modules that choose, render, compile and launch them), 0 with a note if only other Python code has.
Comment lines, docstrings, blank lines and line endings do not count.

Kernels that changed when no GPU could be had need `--unrecorded`: it writes tests/gpu_unrecorded.json, which holds for
exactly these kernels; `--check` then says so, and why, with status 0. The next record replaces it.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "gpu_record.json"
UNRECORDED = ROOT / "tests" / "gpu_unrecorded.json"
# What decides the machine code, the call that it is made for, and how it is launched. The other modules are checked on
# any machine, but for the streams and allocators of GPU arrays.
KERNEL_MODULES = (
    "cache_checks",
    "call",
    "checks",
    "describe",
    "device",
    "hopper",
    "jax_callbacks",
    "jax_ops",
    "launch",
    "layouts",
    "merging",
    "nvrtc",
    "other_specs",
    "partials",
    "plan",
    "problem",
    "render",
    "select",
    "spec",
    "tensor_map",
    "tiles",
    "tuned",
)
PACKAGES = ("torch", "cupy", "jax", "numpy")


def main() -> int:
    """Command line; the exit status."""
    parser = argparse.ArgumentParser(description="Record of the GPU tests.")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--check", action="store_true", help="compare the record with the sources")
    instead.add_argument(
        "--unrecorded", metavar="WHY", help="say that the record does not cover these kernels"
    )
    parser.add_argument("--output", type=Path, default=RECORD, help="where to write the record")
    parser.add_argument("--jobs", type=int, default=1, help="processes (needs pytest-xdist)")
    arguments = parser.parse_args()
    if arguments.unrecorded:
        return say_unrecorded(arguments.unrecorded)
    if arguments.jobs > 1 and importlib.util.find_spec("xdist") is None:
        parser.error("--jobs needs pytest-xdist: pip install pytest-xdist")
    return check() if arguments.check else record(arguments.output, arguments.jobs)


def check() -> int:
    """Print what the record covers; 1 if it does not cover the kernels."""
    try:
        kept = json.loads(RECORD.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        print(f"no GPU record: {error}")
        return 1
    run = f"{kept['passed']} GPU tests passed on {kept['gpu']} on {kept['date']}"
    current = digests()
    said = json.loads(UNRECORDED.read_text(encoding="utf-8")) if UNRECORDED.exists() else None
    if kept["digests"]["kernels"] != current["kernels"]:
        print(f"The GPU record is stale: {run}, and the kernels have changed since.")
        if said is not None and said["kernels"] == current["kernels"]:
            print(f"NOT RECORDED, said on {said['date']}: {said['why']}")
            return 0
        print(
            "Run `python tools/gpu_record.py` on a machine with a GPU and commit tests/gpu_record.json."
        )
        return 1
    if kept["digests"] != current:
        print(f"{run}; the kernels are the same since, other Python code has changed.")
    else:
        print(f"{run}; it covers the sources as they stand.")
    return 0


def say_unrecorded(why: str) -> int:
    """Write that, and why, the kernels as they stand have no record."""
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    said = {"date": date, "why": why, "kernels": digests()["kernels"]}
    UNRECORDED.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
    return check()


def record(output: Path, jobs: int = 1) -> int:
    """Run the GPU tests and write the record; pytest's exit status, or 1 if there is nothing to record."""
    sys.path.insert(0, str(ROOT))
    from rtflash import device, nvrtc

    reason = device.why_no_gpu()
    if reason:
        print(f"No record: {reason}")
        return 1
    before = digests()
    status, counts = run_tests(jobs)
    if status != 0 or not counts.get("passed"):
        print("No record: the tests did not pass.")
        return status or 1
    if counts["skipped"] > counts["passed"]:
        print(
            f"No record: {counts['skipped']} GPU tests were skipped and {counts['passed']} ran; install"
            ' ".[cuda13,interop,test]", or cuda12.'
        )
        return 1
    if digests() != before:
        print("No record: the sources changed while the tests ran.")
        return 1
    written = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "gpu": device.get(0).name,
        "arch": device.get(0).arch,
        "driver": driver_version(),
        "nvrtc": ".".join(map(str, nvrtc.version())),
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
        **counts,
        "digests": before,
    }
    output.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    UNRECORDED.unlink(missing_ok=True)
    print(
        f"{output}: {counts['passed']} passed, {counts['skipped']} skipped in {counts['seconds']:.0f} s"
    )
    return 0


def run_tests(jobs: int) -> tuple[int, dict[str, Any]]:
    """pytest's exit status for the GPU tests, and what `counted` makes of its report."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        spread = ["-n", str(jobs)] if jobs > 1 else []
        options = ["-m", "gpu", "-ra", f"--junitxml={report}", *spread, "tests"]
        command = [sys.executable, "-m", "pytest", *options]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        return status, counted(report) if report.exists() else {}


def counted(report: Path) -> dict[str, Any]:
    """Counts and seconds of pytest's XML report."""
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    total, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    return {
        "passed": total - skipped - failed,
        "failed": failed,
        "skipped": skipped,
        "seconds": round(float(suite.attrib["time"]), 1),
    }


def driver_version() -> str:
    """The driver's own version; "unknown" where nvidia-smi is missing."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, check=True)
        return done.stdout.decode(errors="replace").split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def version(package: str) -> str | None:
    """The installed version of a package, None where it is missing."""
    names = [package] if package != "cupy" else ["cupy", "cupy-cuda13x", "cupy-cuda12x"]
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def digests() -> dict[str, str]:
    """SHA-256 of the code of the kernels and of the package's other modules."""
    modules = sorted((ROOT / "rtflash").glob("*.py"))
    kernels = [path for path in modules if path.stem in KERNEL_MODULES]
    folder = ROOT / "templates"
    # templates/host compiles the kernels for the CPU; a GPU never sees it.
    templates = [
        path
        for path in folder.rglob("*")
        if path.suffix in (".cu", ".cuh") and path.relative_to(folder).parts[0] != "host"
    ]
    return {
        "kernels": digest([*sorted(templates), *kernels]),
        "python": digest(path for path in modules if path not in kernels),
    }


def digest(paths: Iterable[Path]) -> str:
    """SHA-256 of the files' names and code."""
    total = hashlib.sha256()
    for path in paths:
        text = path.read_text(encoding="utf-8")
        code = python_code(text) if path.suffix == ".py" else cuda_code(text)
        total.update(f"{path.relative_to(ROOT).as_posix()}\n{code}\n".encode())
    return total.hexdigest()


def python_code(text: str) -> str:
    """A module without docstrings, comment lines and blank lines.

    Its own text, since what ast.unparse makes of it differs between versions of Python.
    """
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            for number in range(docstring.lineno - 1, docstring.end_lineno or docstring.lineno):
                lines[number] = ""
    return "\n".join(
        line.rstrip() for line in lines if line.strip() and not line.lstrip().startswith("#")
    )


def cuda_code(text: str) -> str:
    """A template without comments and blank lines; Jinja's `//%` lines are code."""
    lines = (re.sub(r"\s*//(?!%).*$", "", line).rstrip() for line in text.splitlines())
    return "\n".join(line for line in lines if line.strip())


if __name__ == "__main__":
    sys.exit(main())
