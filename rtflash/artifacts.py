"""Spec and architecture -> Artifact: rendered and compiled by NVRTC, kept on disk; errors name the template's line."""

from __future__ import annotations

import os
import re
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from . import bundle, cache, dump, nvrtc, render, settings
from .nvrtc import Resources, options
from .spec import AnySpec

SOURCE = dump.SOURCE
LOG = "build.log"
WARNING = re.compile(r"\bwarning(?: #|\s*:)|\bC75\d\d\b")

compile_count = 0  # NVRTC compilations of this process

_unkept: dict[tuple[AnySpec, str], Artifact] = {}  # artifacts that the disk cache does not hold
_locks: dict[tuple[object, ...], threading.Lock] = {}
_count_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Artifact:
    """A compiled variant.

    Attributes
    ----------
    spec : the variant.
    arch : "sm_90a" for a cubin, "compute_120" for PTX.
    cubin : the cubin, or PTX text.
    source : the joined CUDA source.
    log : what NVRTC and ptxas said.
    options : NVRTC's options.
    resources : registers, memory, seconds.
    key : cache key.
    folder : its folder on disk; None where it is not on disk.
    compiler : NVRTC's version.
    origin : the bundle or the edited source that it comes from; empty: the templates.
    """

    spec: AnySpec
    arch: str
    cubin: bytes
    source: str
    log: str
    options: tuple[str, ...]
    resources: Resources
    key: str
    folder: Path | None
    compiler: tuple[int, int] = (0, 0)
    origin: str = ""

    @property
    def warnings(self) -> tuple[str, ...]:
        """The log's lines that warn, notes C75xx of ptxas (serialised wgmma) among them."""
        return tuple(line for line in self.log.splitlines() if WARNING.search(line))


class CompileError(RuntimeError):
    """NVRTC refused a variant.

    Attributes
    ----------
    spec, arch, options, log : what was compiled, how, and the compiler's answer in template lines.
    path : where the joined source was kept; None if no folder could be written.
    """

    def __init__(
        self, spec: AnySpec, arch: str, options: tuple[str, ...], log: str, path: Path | None
    ) -> None:
        super().__init__(
            f"{spec.name} does not compile for {arch}\n{log.rstrip()}\n"
            f"source: {path or 'not kept'}\noptions: {' '.join(options)}"
        )
        self.spec, self.arch, self.options, self.log, self.path = spec, arch, options, log, path

    def __reduce__(self) -> tuple[object, ...]:
        """Pickled by its parts: pools of processes hand exceptions back."""
        return CompileError, (self.spec, self.arch, self.options, self.log, self.path)


def artifact(spec: AnySpec, arch: str) -> Artifact:
    """The compiled variant, through the disk cache if RTFLASH_CACHE allows it; no GPU is needed.

    Raises as `compile` does.
    """
    key = cache_key(spec, arch)
    with lock_of("artifact", spec, arch):
        made = _unkept.get((spec, arch))
        if made is not None and made.key == key:
            return made
        if not settings.get().cache:
            made = compile(spec, arch)
        else:
            place = cache.folder(spec.name, key)
            entry, kept = cache.obtain(
                place,
                lambda: to_entry(compile(spec, arch)),
                lambda entry: is_sound(spec, arch, entry),
            )
            made = from_entry(spec, arch, key, entry, place if kept else None)
        if made.folder is None:
            _unkept[spec, arch] = made
    return made


def compile(
    spec: AnySpec, arch: str, *, lines: bool = True, edited: tuple[Path, str] | None = None
) -> Artifact:
    """Render and compile a variant, without any cache and without a GPU.

    Parameters
    ----------
    spec : the variant.
    arch : "sm_NN" or "sm_NNa" for a cubin, "compute_NN" for PTX.
    lines : see nvrtc.options.
    edited : path and text of a source that is compiled instead; errors name its lines.

    Raises
    ------
    CompileError
        NVRTC refuses the source or the architecture.
    ImportError
        CuPy is not installed.
    """
    global compile_count
    key = cache_key(spec, arch)
    start = time.perf_counter()
    flags, logger = options(arch, lines), settings.logger()
    if edited is None:
        text = code = render.source(spec)
        name, origin = spec.kernel_file, ""
    else:
        name, text = str(edited[0]), edited[1]
        code, origin = dump.LINE.sub("", text), f"edited {name}"
    with _count_lock:
        compile_count += 1
    binary, log = nvrtc.run(code, name, arch, flags)
    if binary is None:
        path = edited[0] if edited else cache.keep_failed(spec.name, key, text)
        raise CompileError(spec, arch, flags, log, path)
    resources = nvrtc.parse_resources(log, time.perf_counter() - start)
    made = Artifact(
        spec, arch, binary, text, log, flags, resources, key, None, nvrtc.version(), origin
    )
    logger.log(
        settings.LOG_LEVELS[0 if edited else 1],  # of an edited kernel everybody must know
        "compiled %s for %s from %s: %d registers, %.2f s",
        spec.name,
        arch,
        name,
        resources.registers,
        resources.seconds,
    )
    logger.log(settings.LOG_COMPILER, "%s", log)
    return made


def cache_key(spec: AnySpec, arch: str) -> str:
    """The cache key of a variant: see `cache.key`."""
    from . import __version__

    return cache.key(
        spec.variables(), arch, options(arch), render.digest(), nvrtc.version(), __version__
    )


def binary_file(arch: str) -> str:
    """File name of the compiled code."""
    return f"kernel.{bundle.suffix(arch)}"


def to_entry(made: Artifact) -> cache.Entry:
    """The artifact as the cache and a dump keep it."""
    from . import __version__

    files = {
        SOURCE: (made.source or render.source(made.spec)).encode(),
        binary_file(made.arch): made.cubin,
        LOG: made.log.encode(),
    }
    record = {
        "spec": made.spec.to_dict(),
        "arch": made.arch,
        "options": list(made.options),
        "nvrtc": list(made.compiler),
        "resources": asdict(made.resources),
        "rtflash": __version__,
        "templates": render.digest(),
    }
    return cache.Entry(files, record)


def from_entry(
    spec: AnySpec, arch: str, key: str, entry: cache.Entry, place: Path | None
) -> Artifact:
    """The artifact that `to_entry` described."""
    return Artifact(
        spec=spec,
        arch=arch,
        cubin=entry.files[binary_file(arch)],
        source=entry.files[SOURCE].decode(),
        log=entry.files[LOG].decode(),
        options=options(arch),
        resources=Resources(**entry.record["resources"]),  # type: ignore[arg-type]
        key=key,
        folder=place,
        compiler=tuple(entry.record["nvrtc"]),  # type: ignore[arg-type]
    )


def is_sound(spec: AnySpec, arch: str, entry: cache.Entry) -> bool:
    """Whether an entry of the cache has all that `from_entry` needs, and nothing that it does not know."""
    try:
        from_entry(spec, arch, "", entry, None)
    except (KeyError, TypeError, ValueError):
        return False
    return True


def lock_of(*what: object) -> threading.Lock:
    """The lock among this process' threads for one thing."""
    return _locks.setdefault(what, threading.Lock())


# A process forked while another thread compiled would inherit a lock that nobody releases.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_locks.clear)
