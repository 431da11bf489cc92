"""Every RTFLASH_* environment variable. Nothing else in rtflash reads the environment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import logging

LOGGER = "rtflash"
# RTFLASH_LOG -> level of `logging`: warnings, compilations, choices and origins, compiler logs.
LOG_LEVELS = (30, 20, 10, 5)
LOG_COMPILER = LOG_LEVELS[3]

BACKENDS = ("numpy", "emulate")

MEANINGS = {
    "RTFLASH_BACKEND": "host tensors: numpy, or emulate to run the kernel's own source, checked",
    "RTFLASH_BUNDLE": "files of `rtflash generate --bundle` with compiled kernels, separated as in PATH",
    "RTFLASH_CACHE": "1: keep compiled kernels on disk, 0: in memory only",
    "RTFLASH_CACHE_DIR": "folder of the compiled kernels",
    "RTFLASH_CXX": "C++ compiler of emulated kernels, options after it; unset: g++, else clang++",
    "RTFLASH_DUMP": "folder that keeps source, PTX and SASS of every kernel that is loaded",
    "RTFLASH_LOG": "log to stderr: 1 compilations, 2 also choices and origins, 3 also compiler logs",
    "RTFLASH_NO_COMPILE": "1: a kernel that is in no bundle and not in the cache is an error",
    "RTFLASH_OVERRIDE": "folder of edited kernels, as RTFLASH_DUMP writes it, that are run instead",
    "RTFLASH_RECORD": "file that collects the variants that are loaded, for `rtflash generate --record`",
    "RTFLASH_TUNED": "1: tiles that `rtflash tune` found on this GPU come first, 0: they do not",
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
    bundles : files with compiled kernels.
    no_compile : whether a kernel that would have to be compiled is an error.
    record : file that collects variants; None: they are not collected.
    dump : folder that keeps sources and code; None: they are not kept.
    override : folder of edited sources; None: there are none.
    tuned : whether tiles of `rtflash tune` are used.
    """

    cache: bool
    cache_dir: Path
    log: int
    backend: str = BACKENDS[0]
    cxx: str = ""
    bundles: tuple[Path, ...] = ()
    no_compile: bool = False
    record: Path | None = None
    dump: Path | None = None
    override: Path | None = None
    tuned: bool = True


class Row(NamedTuple):
    """One line of `rtflash info`; `refused` is the reason why the value is, empty where it is not."""

    variable: str
    value: str
    source: str
    meaning: str
    refused: str = ""


def get() -> Settings:
    """The settings of this moment: the environment is read anew by each call.

    Raises
    ------
    ValueError
        A variable holds something else than it may; the message names it.
    """
    current = Settings(**{field: read() for field, read in READERS.values()})
    if current.no_compile and current.override:
        raise ValueError(
            "RTFLASH_OVERRIDE is set and RTFLASH_NO_COMPILE is 1; edited kernels must be compiled: unset one of them"
        )
    return current


def backend() -> str:
    """RTFLASH_BACKEND, else the first of BACKENDS."""
    return one_of("RTFLASH_BACKEND", BACKENDS) or BACKENDS[0]


def host_backend() -> str:
    """What host arrays run on, in words."""
    return "emulated kernels" if backend() == "emulate" else "NumPy"


def log_level() -> int:
    """`Settings.log` alone: every new plan asks."""
    return choice("RTFLASH_LOG", len(LOG_LEVELS), default=0)


def tuned() -> bool:
    """`Settings.tuned` alone."""
    return choice("RTFLASH_TUNED", 2, default=1) == 1


def bundles() -> tuple[Path, ...]:
    """The files of RTFLASH_BUNDLE."""
    texts = os.environ.get("RTFLASH_BUNDLE", "").split(os.pathsep)
    return tuple(absolute("RTFLASH_BUNDLE", text.strip()) for text in texts if text.strip())


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
    found = place("RTFLASH_CACHE_DIR")
    if found is None:
        import platformdirs

        return Path(platformdirs.user_cache_path("rtflash", appauthor=False))
    return found


def place(variable: str) -> Path | None:
    """The variable as a path; None where it is unset."""
    text = os.environ.get(variable, "").strip()
    return absolute(variable, text) if text else None


def absolute(variable: str, text: str) -> Path:
    """A variable's path, absolute; where there is no home, one that starts with ~ stays as it is."""
    if "\0" in text:
        raise ValueError(f"{variable} is {text!r}; it must be a path")
    path = os.path.expanduser(text)
    try:
        return Path(path if path.startswith("~") else os.path.abspath(path))
    except FileNotFoundError:
        raise ValueError(
            f"{variable} is {text!r}, relative to a current folder that was deleted; it must be absolute"
        ) from None


# Of each variable the field of Settings and what reads it.
READERS: Mapping[str, tuple[str, Callable[[], Any]]] = {
    "RTFLASH_BACKEND": ("backend", backend),
    "RTFLASH_BUNDLE": ("bundles", bundles),
    "RTFLASH_CACHE": ("cache", lambda: choice("RTFLASH_CACHE", 2, default=1) == 1),
    "RTFLASH_CACHE_DIR": ("cache_dir", cache_dir),
    "RTFLASH_CXX": ("cxx", lambda: os.environ.get("RTFLASH_CXX", "").strip()),
    "RTFLASH_DUMP": ("dump", lambda: place("RTFLASH_DUMP")),
    "RTFLASH_LOG": ("log", log_level),
    "RTFLASH_NO_COMPILE": ("no_compile", lambda: choice("RTFLASH_NO_COMPILE", 2, default=0) == 1),
    "RTFLASH_OVERRIDE": ("override", lambda: place("RTFLASH_OVERRIDE")),
    "RTFLASH_RECORD": ("record", lambda: place("RTFLASH_RECORD")),
    "RTFLASH_TUNED": ("tuned", tuned),
}


def refused() -> dict[str, str]:
    """The variables for which `get` raises, each with the reason."""
    found = {}
    for variable, (_, read) in READERS.items():
        try:
            read()
        except ValueError as error:
            found[variable] = str(error)
    try:
        with leaving_out(found):
            get()
    except ValueError as error:  # each of the two would do alone
        found["RTFLASH_OVERRIDE"] = str(error)
    return found


@contextlib.contextmanager
def leaving_out(variables: Iterable[str]) -> Iterator[None]:
    """The environment is without these variables: for a command that tells of them."""
    kept = {name: os.environ.pop(name) for name in variables}
    try:
        yield
    finally:
        os.environ.update(kept)


def describe() -> list[Row]:
    """Each variable with its value, where the value comes from, what it means and why it is refused, if it is."""
    wrong = refused()
    rows = []
    for name, (_, read) in READERS.items():
        given = os.environ.get(name, "").strip()
        value = given if name in wrong else said(read())
        rows.append(
            Row(
                name,
                value,
                "environment" if given else "default",
                MEANINGS[name],
                wrong.get(name, ""),
            )
        )
    return rows


def said(value: Any) -> str:
    """A field of Settings as its variable would be set."""
    match value:
        case None:
            return ""
        case bool():
            return str(int(value))
        case tuple():
            return os.pathsep.join(map(str, value))
    return str(value)


def logger() -> logging.Logger:
    """The logger "rtflash"; at RTFLASH_LOG=0 it is left as the application configured it.

    Else its level is set and, once, a handler that writes to stderr.
    """
    import logging

    log = logging.getLogger(LOGGER)
    level = log_level()
    if level > 0:
        log.setLevel(LOG_LEVELS[level])
        if not log.handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("rtflash: %(message)s"))
            log.addHandler(handler)
            log.propagate = False
    return log
