"""Renames that Windows may refuse for a moment."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_S = 2.0


def patiently(rename: Callable[[Path, Path], None], old: Path, new: Path) -> None:
    """Rename by os.rename or os.replace; on Windows again and again for a while.

    There it is refused as long as anybody has the files open: a reader, or a virus scanner that looks at what is new.
    """
    end = time.monotonic() + (PATIENCE_S if sys.platform == "win32" else 0.0)
    while True:
        try:
            return rename(old, new)
        except PermissionError:
            if time.monotonic() >= end:
                raise
        time.sleep(0.01)
