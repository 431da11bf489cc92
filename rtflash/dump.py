"""RTFLASH_DUMP keeps what a kernel was made of; RTFLASH_OVERRIDE runs a source that was edited there.

Both have a folder `<arch>/<name>/` for each variant, as `rtflash generate --out` has.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from . import bundle, cache, nvrtc, render, settings
from .spec import AnySpec

SOURCE = "kernel.cu"
PTX = "kernel.ptx"
SASS = "kernel.sass"
RECORD = "spec.json"
# By these the joined source names the templates' lines; errors of an edited one are to name its own.
LINE = re.compile(r'^#line \d+ ".*"$', re.MULTILINE)

_told: set[tuple[str, str]] = set()


def folder(root: Path, spec: AnySpec, arch: str) -> Path:
    """A variant's folder."""
    return root / arch / spec.name


def write(place: Path, files: Mapping[str, bytes], described: Mapping[str, object]) -> None:
    """Put a variant's files and `spec.json` into its folder.

    Raises
    ------
    OSError
        The folder cannot be written.
    """
    place.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        bundle.write(place / name, data)
    bundle.write(place / RECORD, (json.dumps(dict(described), indent=1) + "\n").encode())


def keep(
    spec: AnySpec, arch: str, files: Mapping[str, bytes], described: Mapping[str, object]
) -> None:
    """Write a loaded variant's files, PTX and SASS among them, to RTFLASH_DUMP, if it is set. No call fails for it.

    `files` and `described` are those of the cache. A source that somebody has edited there stays.
    """
    root = settings.get().dump
    if root is None:
        return
    place, log = folder(root, spec, arch), settings.logger()
    try:
        if is_edited(place / SOURCE, files[SOURCE]):
            log.warning(
                "%s is not what %s runs, and is kept: set RTFLASH_OVERRIDE to run it, or delete it",
                place / SOURCE,
                spec.name,
            )
            return
        there = {SOURCE} if (place / SOURCE).exists() else {}
        write(place, {name: x for name, x in files.items() if name not in there}, described)
        for name, make in ((PTX, ptx), (SASS, sass)):
            try:
                if name not in files:
                    bundle.write(place / name, make(place, spec, arch).encode())
            except (ImportError, RuntimeError, FileNotFoundError) as error:
                if (name, str(error)) not in _told:  # a missing program: once for all kernels
                    _told.add((name, str(error)))
                    log.warning("no %s of %s: %s", name, spec.name, error)
        log.info("kept %s for %s in %s", spec.name, arch, place)
    except OSError as error:
        cache.warn_once("dump", f"rtflash: RTFLASH_DUMP cannot be written ({error})")


def is_edited(file: Path, source: bytes) -> bool:
    """Whether a file is there and holds another source, whatever its line ends."""
    return file.exists() and read(file) != source.decode()


def read(file: Path) -> str:
    """A source, to which an editor may have given a byte order mark, other line ends, another encoding."""
    return file.read_text(encoding="utf-8-sig", errors="backslashreplace")


def ptx(place: Path, spec: AnySpec, arch: str) -> str:
    """PTX of a dumped source.

    Raises
    ------
    ImportError, RuntimeError
        There is no NVRTC, or it refuses the source.
    """
    virtual = arch.replace("sm_", "compute_")
    made, log = nvrtc.run(read(place / SOURCE), spec.kernel_file, virtual, nvrtc.options(virtual))
    if made is None:
        raise RuntimeError(log)
    return made.decode()


def sass(place: Path, spec: AnySpec, arch: str) -> str:
    """SASS of a dumped cubin.

    Raises
    ------
    FileNotFoundError
        No disassembler is here, or the kernel is PTX, which only the driver assembles.
    RuntimeError
        It fails.
    """
    return disassemble(place / "kernel.cubin")


def disassemble(cubin: Path) -> str:
    """SASS text of a cubin.

    Raises
    ------
    FileNotFoundError
        Neither disassembler is here, or the cubin is not.
    RuntimeError
        It fails.
    """
    import subprocess

    nvdisasm, cuobjdump = find("nvdisasm"), find("cuobjdump")
    if not cubin.is_file():
        raise FileNotFoundError(f"there is no {cubin}")
    if nvdisasm:
        command = [nvdisasm, "--print-code", str(cubin)]
    elif cuobjdump:
        command = [cuobjdump, "--dump-sass", str(cubin)]
    else:
        raise FileNotFoundError(
            "neither nvdisasm nor cuobjdump is on PATH: pip install nvidia-cuda-nvdisasm"
        )
    done = subprocess.run(command, capture_output=True)
    if done.returncode:
        raise RuntimeError(f"{command[0]} fails: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout.decode(errors="replace")


def find(program: str) -> str | None:
    """Path of a CUDA program on PATH or in NVIDIA's wheels, None where there is none."""
    name = f"{program}.exe" if sys.platform == "win32" else program
    wheels = (Path(place, "nvidia") for place in sys.path if place)
    found = (path for place in wheels for path in place.glob(f"*/bin/{name}") if path.is_file())
    return shutil.which(program) or next(map(str, found), None)


def edited(spec: AnySpec, arch: str) -> tuple[Path, str] | None:
    """The source that RTFLASH_OVERRIDE has for a variant, and its path; None where it has none.

    Raises
    ------
    ValueError
        The folder has no sources at all, or this one cannot be of this variant.
    """
    root = settings.get().override
    if root is None:
        return None
    file = folder(root, spec, arch) / SOURCE
    if file not in sources(root):
        settings.logger().debug("RTFLASH_OVERRIDE has no %s", file)
        return None
    return file, source(file, spec.name)


def survey() -> tuple[str, list[str]]:
    """How many kernels RTFLASH_OVERRIDE has, in words, empty where it is not set; and why others there are unusable."""
    root, errors = settings.get().override, []
    if root is None:
        return "", []
    try:
        found = sources(root)
    except ValueError as error:
        return "", [str(error)]
    for file in found:
        try:
            source(file, file.parent.name)
        except ValueError as error:
            errors.append(str(error))
    return f"{len(found) - len(errors)} in {root}", errors


def sources(root: Path) -> list[Path]:
    """The sources of an RTFLASH_OVERRIDE, of which there is at least one: else nothing would ever come of it."""
    found = sorted(file for file in root.glob(f"*/*/{SOURCE}") if file.is_file())
    if not found:
        raise ValueError(
            f"RTFLASH_OVERRIDE is {str(root)!r}; it must be a folder as RTFLASH_DUMP writes it, with at least one"
            f" ARCH/VARIANT/{SOURCE}"
        )
    return found


def source(file: Path, name: str) -> str:
    """The text of a source that holds the kernel of a name.

    Raises
    ------
    ValueError
        It cannot be read, has no such kernel, or is of other templates.
    """
    try:
        text = read(file)
    except OSError as error:
        raise ValueError(f"RTFLASH_OVERRIDE: {file} cannot be read ({error})") from error
    if re.search(rf"\b{re.escape(name)}\b", text) is None:
        raise ValueError(f"RTFLASH_OVERRIDE: {file} has no kernel {name}")
    made = templates_of(file.with_name(RECORD))
    if made not in ("", render.digest()):
        raise ValueError(
            f"RTFLASH_OVERRIDE: {file} was dumped from other templates than this rtflash has, and its Params may be"
            " others: dump it again"
        )
    return text


def templates_of(file: Path) -> str:
    """The digest of the templates that a dumped variant was rendered from; empty where nothing says it."""
    try:
        return str(json.loads(file.read_bytes()).get("templates", ""))
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""
