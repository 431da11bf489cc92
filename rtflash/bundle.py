"""Bundles: one file of compiled kernels, which a machine without NVRTC loads.

A zip file of `<arch>/<name>.cubin` (or .ptx) and of `bundle.json`, which says for each kernel its variant, SHA-256 and
resources, and for all of them which rtflash and which templates they were made from. Both must be those of this
process: they decide the code and the layout of its argument. The NVRTC that compiled them may be any; the options that
it had differ from those of the cache in line numbers alone.
"""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import json
import os
import re
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from . import cache, nvrtc, record, renames, render, settings
from .device import Device
from .spec import AnySpec

SCHEMA = 1
INDEX = "bundle.json"
# An installed package of this name holds a bundle under this name.
PACKAGE = "rtflash_bundle_"
PACKAGED = "kernels.zip"
MAKE = "make it again with `rtflash generate --bundle`"
# Of every entry: what a bundle holds must decide its bytes.
TIMESTAMP = (1980, 1, 1, 0, 0, 0)
PLACE = re.compile(rf"({record.ARCH.pattern})/\w+\.(cubin|ptx)")


class BundleError(RuntimeError):
    """A bundle cannot be used; the message says which and why."""


class Packed(NamedTuple):
    """A kernel of a bundle.

    Attributes
    ----------
    spec, arch : the variant, and the architecture of its code, as in artifacts.Artifact.
    cubin : its code.
    options : what NVRTC was given.
    nvrtc : its version.
    resources : fields of nvrtc.Resources.
    """

    spec: AnySpec
    arch: str
    cubin: bytes
    options: tuple[str, ...]
    nvrtc: tuple[int, int]
    resources: Mapping[str, Any]


@dataclass(frozen=True, eq=False, slots=True)
class Bundle:
    """A bundle that fits this rtflash.

    Attributes
    ----------
    file : its path.
    kernels : the index' object of each kernel by its place in the zip file.
    """

    file: Path
    kernels: Mapping[str, Mapping[str, Any]]

    @property
    def archs(self) -> tuple[str, ...]:
        """The architectures that it has kernels for."""
        return tuple(sorted({place.partition("/")[0] for place in self.kernels}))


def maker() -> dict[str, object]:
    """What must be equal where a bundle is made and where it is used."""
    from . import __version__

    return {"schema": SCHEMA, "rtflash": __version__, "templates": render.digest()}


def place(spec: AnySpec, arch: str) -> str:
    """Where a kernel is in the zip file."""
    return f"{arch}/{spec.name}.{suffix(arch)}"


def suffix(arch: str) -> str:
    """How the name of a file of code for an architecture ends."""
    return "ptx" if nvrtc.is_ptx(arch) else "cubin"


def pack(kernels: Iterable[Packed]) -> bytes:
    """A bundle's bytes; the same ones for the same kernels, in whatever order."""
    rows: dict[str, dict[str, Any]] = {}
    codes: dict[str, bytes] = {}
    for kernel in kernels:
        where = place(kernel.spec, kernel.arch)
        codes[where] = kernel.cubin
        rows[where] = record.described(kernel.spec, kernel.arch) | {
            "sha256": hashlib.sha256(kernel.cubin).hexdigest(),
            "options": list(kernel.options),
            "nvrtc": list(kernel.nvrtc),
            "resources": dict(kernel.resources),
        }
    index = {**maker(), "kernels": dict(sorted(rows.items()))}
    index["checksum"] = cache.checksum(index)
    import zipfile

    made = io.BytesIO()
    # Level 9 would take 7 times as long, for 1.5 % fewer bytes.
    with zipfile.ZipFile(made, "w") as archive:
        for name, data in [(INDEX, json.dumps(index).encode()), *sorted(codes.items())]:
            entry = zipfile.ZipInfo(name, TIMESTAMP)
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED, compresslevel=6)
    return made.getvalue()


def write(file: Path, data: bytes) -> None:
    """Put bytes at a path, whole or not at all; into what is no plain file, a pipe, they are written.

    Raises
    ------
    OSError
        It cannot be written.
    """
    file = Path(os.path.realpath(file))
    if file.exists() and not file.is_file():
        file.write_bytes(data)
        return
    new = file.with_name(f".{uuid.uuid4().hex[:8]}.new")
    try:
        new.write_bytes(data)
        renames.patiently(os.replace, new, file)
    finally:
        cache.remove(new)


@functools.lru_cache(64)
def read(file: Path) -> Bundle:
    """The bundle at a path; a process reads it once.

    Raises
    ------
    BundleError
        It is missing, damaged, or made by another rtflash.
    """
    import zipfile

    try:
        with zipfile.ZipFile(file) as archive:
            index = json.loads(archive.read(INDEX))
        sound = index.pop("checksum") == cache.checksum(index)
        made = {name: index.get(name) for name in maker()}
    except OSError as error:
        raise BundleError(f"the bundle {file} cannot be read ({error})") from error
    except Exception as error:  # of many kinds, by what a damaged file makes zipfile and json say
        raise BundleError(f"the bundle {file} is damaged, or no bundle ({error}): {MAKE}") from None
    if not sound:
        raise BundleError(f"the bundle {file} is damaged (its index has another checksum): {MAKE}")
    for name, ours in maker().items():
        if made[name] != ours:
            raise BundleError(f"the bundle {file} {misfit(name, made[name], ours)}: {MAKE}")
    kernels = index.get("kernels")
    if not isinstance(kernels, dict) or not all(map(PLACE.fullmatch, kernels)):
        raise BundleError(
            f"the bundle {file} is damaged (its index has no kernels by place): {MAKE}"
        )
    return Bundle(file, kernels)


def misfit(name: str, theirs: object, ours: object) -> str:
    """How a bundle differs from this rtflash, in words."""
    if name == "templates":
        return "was made from other templates than this rtflash has"
    if name == "schema":
        return f"has format {theirs}, this rtflash reads {ours}"
    return f"was made by rtflash {theirs}, this is rtflash {ours}"


def code(bundle: Bundle, spec: AnySpec, arch: str) -> Packed | None:
    """A bundle's kernel, its code checked; None where it has none.

    Raises
    ------
    BundleError
        The bundle is damaged.
    """
    where = place(spec, arch)
    return unpack(bundle, where) if where in bundle.kernels else None


def are(values: Any, *kinds: type) -> bool:
    """Whether these are values of JSON that are all of such types."""
    return all(type(value) in kinds for value in values)


# What a row of the index must have beside its variant.
SOUND: Mapping[str, Callable[[Any], bool]] = {
    "sha256": lambda x: are([x], str),
    "options": lambda x: are([x], list) and are(x, str),
    "nvrtc": lambda x: are([x], list) and len(x) == 2 and are(x, int),
    "resources": lambda x: (
        are([x], dict)
        and x.keys() == set(nvrtc.Resources.__slots__)
        and are(x.values(), int, float)
    ),
}


def unpack(bundle: Bundle, where: str) -> Packed:
    """The kernel at a place of a bundle, its row of the index and its code checked.

    Raises
    ------
    BundleError
        The bundle is damaged.
    """
    import zipfile

    row = bundle.kernels[where]
    try:
        spec, arch = record.parse(row)
        if place(spec, arch) != where:
            raise ValueError("its index tells of another variant")
        if wrong := [name for name, sound in SOUND.items() if not sound(row.get(name))]:
            raise ValueError(f"its index lacks {', '.join(wrong)}, or has another type there")
        with zipfile.ZipFile(bundle.file) as archive:
            cubin = archive.read(where)
        if hashlib.sha256(cubin).hexdigest() != row["sha256"]:
            raise ValueError("its code has another SHA-256")
        major, minor = row["nvrtc"]
        return Packed(spec, arch, cubin, tuple(row["options"]), (major, minor), row["resources"])
    except Exception as error:  # as in `read`
        raise BundleError(
            f"{where} of the bundle {bundle.file} is damaged ({error}): {MAKE}"
        ) from None


def serving(archs: Iterable[str], device: Device) -> list[str]:
    """The architectures out of `archs` whose code runs on a device: its own, then PTX, the newest first."""
    own = device.major * 10 + device.minor
    numbers = {int(x.removeprefix("compute_")) for x in archs if nvrtc.is_ptx(x)}
    ptx = [f"compute_{number}" for number in sorted(numbers, reverse=True) if number <= own]
    return [device.arch, *ptx] if device.arch in archs else ptx


def find(spec: AnySpec, device: Device) -> tuple[Packed, Path] | None:
    """A kernel of RTFLASH_BUNDLE's files, else of the installed bundles, and its bundle; None where none has it.

    Cubins for this very GPU come first, whichever bundle has them.

    Raises
    ------
    BundleError
        A file of RTFLASH_BUNDLE cannot be used, or none of them is for this architecture.
    """
    named = [read(file) for file in settings.get().bundles]
    if named and not any(serving(bundle.archs, device) for bundle in named):
        held = "; ".join(f"{x.file} is for {', '.join(x.archs) or 'none'}" for x in named)
        raise BundleError(
            f"RTFLASH_BUNDLE has no kernels for {device.arch}, which this GPU is ({held})"
        )
    bundles = (*named, *installed())
    held_archs = {arch for bundle in bundles for arch in bundle.archs}
    for arch, bundle in itertools.product(serving(held_archs, device), bundles):
        found = code(bundle, spec, arch)
        if found is not None:
            return found, bundle.file
    return None


def installed() -> list[Bundle]:
    """The bundles of installed packages; there is one warning about those that cannot be used."""
    usable = []
    for file in packaged(tuple(sys.path)):
        try:
            usable.append(read(file))
        except BundleError as error:
            cache.warn_once(str(file), f"rtflash: not used: {error}")
    return usable


@functools.lru_cache(4)
def packaged(folders: tuple[str, ...]) -> tuple[Path, ...]:
    """Files of bundles in packages, which are found by their names: nothing is imported."""
    found: dict[Path, None] = {}
    for folder in folders:
        root = Path(folder or os.curdir).absolute()
        try:
            found.update(dict.fromkeys(sorted(root.glob(f"{PACKAGE}*/{PACKAGED}"))))
        except OSError:
            continue  # a folder that cannot be read holds nothing to import, either
    return tuple(found)


def said() -> str:
    """The bundles in use, in words.

    Raises
    ------
    BundleError
        A file of RTFLASH_BUNDLE cannot be used.
    """
    text, errors = survey()
    if errors:
        raise BundleError(errors[0])
    return text


def survey() -> tuple[str, list[str]]:
    """The bundles in use, in words; and why files of RTFLASH_BUNDLE cannot be used."""
    usable, errors = [], []
    for file in settings.get().bundles:
        try:
            usable.append(read(file))
        except BundleError as error:
            errors.append(str(error))
    parts = [
        f"{x.file}: {len(x.kernels)} for {', '.join(x.archs)}" for x in (*usable, *installed())
    ]
    return "; ".join(parts), errors
