"""Compiled kernels on disk: one folder per variant, whole or not at all.

A folder `<cache>/<name>.<key>/` holds the files of a variant and `spec.json`, which carries a
SHA-256 of each file and of itself: what does not match is rebuilt. A folder is written under a
temporary name beside its place and renamed, under a lock that dies with its process. Whatever the
disk does, `obtain` returns an entry: without a usable folder it builds in memory and warns once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from . import renames, settings

SCHEMA = 1
RECORD = "spec.json"
FAILED = "failed"
KEY_LENGTH = 12
FOLDER = re.compile(rf"rtflash_\w+\.[0-9a-f]{{{KEY_LENGTH}}}")
TEMPORARY = re.compile(rf"\.{FOLDER.pattern}\.(new|old)-[0-9a-f]+")
LOCK = re.compile(rf"\.{FOLDER.pattern}\.lock")

# A stopped process may hold a lock for ever; after this time the variant is compiled without it,
# which is merely wasteful.
LOCK_TIMEOUT_S = 60.0
# A temporary folder lives for milliseconds; one of this age was left by a killed process.
STALE_S = 3600.0

_warned: set[str] = set()


@dataclass(frozen=True, slots=True)
class Entry:
    """The content of a variant's folder.

    Attributes
    ----------
    files : bytes by file name.
    record : the JSON object of spec.json, without the checksums.
    """

    files: Mapping[str, bytes]
    record: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Listed:
    """A folder as `rtflash cache` lists it.

    Attributes
    ----------
    folder : its path.
    size : bytes.
    modified : time of its making, seconds since the epoch.
    record : the JSON object of spec.json; empty where the folder is damaged.
    """

    folder: Path
    size: int
    modified: float
    record: Mapping[str, object]


def key(
    variables: Mapping[str, object],
    arch: str,
    options: Iterable[str],
    templates: str,
    nvrtc: tuple[int, int],
    version: str,
) -> str:
    """12 hexadecimal digits that change with anything that changes the compiled code.

    Parameters
    ----------
    variables : what the templates are rendered with.
    arch, options : the compiler's target and flags.
    templates : digest of the template files. Files and variables determine the joined source;
        hashing them instead spares a cache hit the rendering.
    nvrtc : version of the compiler.
    version : rtflash's own.
    """
    parts = [SCHEMA, version, list(nvrtc), arch, list(options), templates, dict(variables)]
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_LENGTH]


def folder(name: str, key: str) -> Path:
    """The place of a variant, whether it exists or not."""
    return settings.get().cache_dir / f"{name}.{key}"


def obtain(
    place: Path, make: Callable[[], Entry], sound: Callable[[Entry], bool] = lambda entry: True
) -> tuple[Entry, bool]:
    """The entry at `place`, built by `make` if it is missing or damaged.

    One process builds, the others wait for it.

    Parameters
    ----------
    place : a variant's folder.
    make : builds the entry.
    sound : whether the caller can use an entry whose checksums are right.

    Returns
    -------
    entry : Entry
    kept : bool, whether it is on disk.
    """
    found = load(place)
    if found is not None and sound(found):
        return found, True
    problem = unusable(place.parent)
    if problem is None:
        with locked(place):
            found = load(place)
            if found is not None and sound(found):
                return found, True
            if os.path.lexists(place):
                warn_once("damaged", f"rtflash: rebuilding the damaged cache folder {place}")
            made = make()
            if found is not None:
                remove(place)  # `store` would keep it, as its checksums are right
            try:
                store(place, made)
                return made, True
            except OSError as error:
                problem = str(error)
    else:
        made = make()
    warn_once(
        "unusable",
        f"rtflash: kernels are kept in memory only, since the cache folder {place.parent} cannot "
        f"be written ({problem}); set RTFLASH_CACHE_DIR to another folder, or RTFLASH_CACHE=0",
    )
    return made, False


def load(place: Path) -> Entry | None:
    """The entry at `place`, or None if it is missing, torn or altered."""
    try:
        record = json.loads((place / RECORD).read_bytes())
        if record.pop("checksum") != checksum(record):
            return None
        sums = record.pop("sha256")
        files = {name: (place / name).read_bytes() for name in sums}
        if any(hashlib.sha256(data).hexdigest() != sums[name] for name, data in files.items()):
            return None
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return None
    return Entry(files, record)


def store(place: Path, entry: Entry) -> None:
    """Put the entry at `place`, whole; a valid one that another process put there meanwhile stays.

    Raises
    ------
    OSError
        The disk is full, or the folder cannot be written. Nothing is left behind.
    """
    new = temporary(place, "new")
    try:
        new.mkdir(parents=True)
        sums = {name: hashlib.sha256(data).hexdigest() for name, data in entry.files.items()}
        record = {**entry.record, "sha256": sums}
        record["checksum"] = checksum(record)
        for name, data in entry.files.items():
            (new / name).write_bytes(data)
        (new / RECORD).write_bytes(json.dumps(record, indent=1).encode())
        move(new, place)
    finally:
        remove(new)
        remove_stale(place.parent)


def move(new: Path, place: Path) -> None:
    """Rename a folder to its place: a valid one there stays, a damaged one is set aside first."""
    try:
        renames.patiently(os.rename, new, place)
        return
    except OSError:
        if not os.path.lexists(place):
            raise
        if load(place) is not None:
            return
    old = temporary(place, "old")
    renames.patiently(os.rename, place, old)
    try:
        renames.patiently(os.rename, new, place)
    finally:
        remove(old)


def checksum(record: Mapping[str, object]) -> str:
    """SHA-256 of a JSON object, whatever its spacing."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def temporary(place: Path, kind: str) -> Path:
    """A fresh name beside `place`."""
    return place.with_name(f".{place.name}.{kind}-{uuid.uuid4().hex[:8]}")


def unusable(directory: Path) -> str | None:
    """Why nothing can be written in the cache folder, or None. It is made if it is missing."""
    if not directory.is_absolute():
        return "there is no home folder"
    probe = directory / f".{uuid.uuid4().hex[:8]}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Access rights tell nothing of read-only mounts or of Windows; making a folder does.
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        return str(error)
    return None


@contextlib.contextmanager
def locked(place: Path) -> Iterator[None]:
    """Hold a folder's or file's lock, or none if the file system has no locks or the holder is stuck."""
    import filelock

    lock = filelock.FileLock(place.with_name(f".{place.name}.lock"), timeout=LOCK_TIMEOUT_S)
    held = False
    try:
        lock.acquire()
        held = True
    except (OSError, NotImplementedError, filelock.Timeout) as error:
        settings.logger().info("%s is made without a lock: %s", place.name, error)
    try:
        yield
    finally:
        if held:
            with contextlib.suppress(OSError):
                lock.release()


def remove(path: Path) -> None:
    """Delete a file or a folder if it is there and may be deleted."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def remove_stale(directory: Path) -> None:
    """Delete temporary folders that a killed process left."""
    for path in children(directory, TEMPORARY):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE_S:
                remove(path)


def children(directory: Path, pattern: re.Pattern[str]) -> list[Path]:
    """What lies in a folder under names of a pattern; nothing if the folder cannot be read."""
    try:
        return sorted(path for path in directory.iterdir() if pattern.fullmatch(path.name))
    except OSError:
        return []


def keep_failed(name: str, key: str, text: str) -> Path | None:
    """Write a source that did not compile: in the cache's `failed/`, else the temporary folder.

    Returns
    -------
    Its path, or None if neither can be written.
    """
    current = settings.get()
    if current.cache and current.cache_dir.is_absolute():
        path = current.cache_dir / FAILED / f"{name}.{key}.cu"
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
            return path
    with contextlib.suppress(OSError):
        # A fresh name: others write in this folder too, and could have put a link at one that they can guess.
        descriptor, unique = tempfile.mkstemp(".cu", f"{name}.{key}.")
        with open(descriptor, "wb") as file:
            file.write(text.encode())
        return Path(unique)
    return None


def entries() -> list[Listed]:
    """Every variant in the cache, damaged ones included."""
    listed = []
    for path in children(settings.get().cache_dir, FOLDER):
        with contextlib.suppress(OSError):
            found = load(path)
            record = {} if found is None else found.record
            listed.append(Listed(path, bytes_in(path), path.stat().st_mtime, record))
    return listed


def bytes_in(path: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def clear() -> int:
    """Delete every variant, temporary folder, lock and failed source; other files stay.

    Returns
    -------
    Number of variants deleted.
    """
    directory = settings.get().cache_dir
    variants = children(directory, FOLDER)
    failed = children(directory / FAILED, re.compile(rf"{FOLDER.pattern}\.cu"))
    for path in [*variants, *children(directory, TEMPORARY), *children(directory, LOCK), *failed]:
        remove(path)
    with contextlib.suppress(OSError):
        (directory / FAILED).rmdir()
    return sum(not os.path.lexists(path) for path in variants)


def warn_once(kind: str, message: str) -> None:
    """Warn about a kind of trouble once per process."""
    if kind not in _warned:
        _warned.add(kind)
        warnings.warn(message, RuntimeWarning, stacklevel=3)
