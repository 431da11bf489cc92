"""Starts worker.py: one attention call in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rtflash

WORKER = Path(__file__).with_name("worker.py")


def environment(**more: str) -> dict[str, str]:
    """This process' environment, in which `import rtflash` finds the same package."""
    root = str(Path(rtflash.__file__).resolve().parents[1])
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**os.environ, "PYTHONPATH": path, **more}


def link(path: Path, target: Path) -> None:
    """A symbolic link; on Windows not everybody may make one."""
    try:
        path.symlink_to(target)
    except OSError as error:
        pytest.skip(f"no symbolic links here: {error}")


def start(head_dim: int, cache: Path) -> subprocess.Popen[str]:
    """A worker with its own cache folder."""
    return subprocess.Popen(
        [sys.executable, str(WORKER), str(head_dim)],
        env=environment(RTFLASH_CACHE_DIR=str(cache)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(worker: subprocess.Popen[str], timeout_s: float = 120) -> dict[str, Any]:
    """What the worker reports."""
    out, errors = worker.communicate(timeout=timeout_s)
    assert worker.returncode == 0, errors
    return json.loads(out.splitlines()[-1])


def run(head_dim: int, cache: Path) -> dict[str, Any]:
    """Start a worker and wait for its report."""
    return finish(start(head_dim, cache))
