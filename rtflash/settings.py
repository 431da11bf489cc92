"""Every RTFLASH_* environment variable. Nothing else in rtflash reads the environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import logging

LOGGER = "rtflash"
# RTFLASH_LOG -> level of `logging`: warnings, compilations, cache hits, compiler logs.
LOG_LEVELS = (30, 20, 10, 5)
LOG_COMPILER = LOG_LEVELS[3]

BACKENDS = ("numpy", "emulate")

MEANINGS = {
    "RTFLASH_BACKEND": "host tensors: numpy, or emulate to run the kernel's own source, checked",
    "RTFLASH_CACHE": "1: keep compiled kernels on disk, 0: in memory only",
    "RTFLASH_CACHE_DIR": "folder of the compiled kernels",
    "RTFLASH_CXX": "C++ compiler of emulated kernels, options after it; unset: g++, else clang++",
    "RTFLASH_LOG": "log to stderr: 1 compilations, 2 also cache hits, 3 also compiler logs",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment asks for.

    Attributes
    ----------
    cache : whether compiled kernels are kept on disk.
    cache_dir : their folder. It need not exist.
    log : 0..3, see `MEANINGS`.
    backend : one of BACKENDS, for host tensors.
    cxx : a C++ compiler, with options or without; empty: whichever is found.
    """

    cache: bool
    cache_dir: Path
    log: int
    backend: str = BACKENDS[0]
    cxx: str = ""


class Row(NamedTuple):
    """One line of `rtflash info`."""

    variable: str
    value: str
    source: str
    meaning: str


def get() -> Settings:
    """The settings of this moment: the environment is read anew by each call.

    Raises
    ------
    ValueError
        A variable holds something else than it may; the message names it.
    """
    return Settings(
        cache=choice("RTFLASH_CACHE", 2, default=1) == 1,
        cache_dir=cache_dir(),
        log=choice("RTFLASH_LOG", len(LOG_LEVELS), default=0),
        backend=backend(),
        cxx=os.environ.get("RTFLASH_CXX", "").strip(),
    )


def backend() -> str:
    """`Settings.backend` alone: every call on host tensors asks."""
    return one_of("RTFLASH_BACKEND", BACKENDS) or BACKENDS[0]


def choice(variable: str, count: int, default: int) -> int:
    """The variable as a whole number below `count`; unset or empty = `default`."""
    text = one_of(variable, [str(value) for value in range(count)])
    return int(text) if text else default


def one_of(variable: str, allowed: Sequence[str]) -> str:
    """The variable, which must be one of `allowed`; empty where it is unset."""
    text = os.environ.get(variable, "").strip()
    if text and text not in allowed:
        raise ValueError(f"{variable} is {text!r}; it must be one of {', '.join(allowed)}")
    return text


def cache_dir() -> Path:
    """RTFLASH_CACHE_DIR, else the platform's place for caches; relative if there is no home."""
    text = os.environ.get("RTFLASH_CACHE_DIR", "").strip()
    if not text:
        import platformdirs

        return Path(platformdirs.user_cache_path("rtflash", appauthor=False))
    if "\0" in text:
        raise ValueError(f"RTFLASH_CACHE_DIR is {text!r}; it must be a path")
    path = os.path.expanduser(text)
    try:
        return Path(path if path.startswith("~") else os.path.abspath(path))
    except FileNotFoundError:
        raise ValueError(
            f"RTFLASH_CACHE_DIR is {text!r}, relative to a current folder that was deleted; it must be absolute"
        ) from None


def describe() -> list[Row]:
    """Each variable with its value, where the value comes from and what it means."""
    current = get()
    values = {
        "RTFLASH_BACKEND": current.backend,
        "RTFLASH_CACHE": str(int(current.cache)),
        "RTFLASH_CACHE_DIR": str(current.cache_dir),
        "RTFLASH_CXX": current.cxx,
        "RTFLASH_LOG": str(current.log),
    }
    return [
        Row(
            name,
            value,
            "environment" if os.environ.get(name, "").strip() else "default",
            MEANINGS[name],
        )
        for name, value in values.items()
    ]


def logger() -> logging.Logger:
    """The logger "rtflash"; at RTFLASH_LOG=0 it is left as the application configured it.

    Else its level is set and, once, a handler that writes to stderr.
    """
    import logging

    log = logging.getLogger(LOGGER)
    level = get().log
    if level > 0:
        log.setLevel(LOG_LEVELS[level])
        if not log.handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("rtflash: %(message)s"))
            log.addHandler(handler)
            log.propagate = False
    return log
