"""Spec -> Kernel: memory dict, edited source, bundles, disk cache, NVRTC, and errors that name the template's line.

NVRTC compiles to a cubin for exactly the running architecture, with or without a GPU; CuPy's
RawModule loads it.
"""

from __future__ import annotations

import os
import re
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import bundle, cache, dump, nvrtc, record, render, settings
from .device import Device
from .nvrtc import Resources, options
from .spec import AnySpec

SOURCE = dump.SOURCE
LOG = "build.log"
WARNING = re.compile(r"\bwarning(?: #|\s*:)|\bC75\d\d\b")

compile_count = 0  # NVRTC compilations of this process

_kernels: dict[tuple[AnySpec, int], Kernel] = {}
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


@dataclass(frozen=True, slots=True)
class Kernel:
    """A variant loaded on a device.

    Attributes
    ----------
    spec : the variant.
    raw : cupy.RawKernel or MemoryKernel; keeps the module alive.
    function : CUfunction handle.
    resources : see Resources.
    """

    spec: AnySpec
    raw: Any
    function: int
    resources: Resources


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


class MissingKernelError(RuntimeError):
    """RTFLASH_NO_COMPILE is 1, and a variant is in no bundle and not in the cache; the message says how to add it."""


def kernel(spec: AnySpec, device: Device) -> Kernel:
    """The variant on a device: from memory, else as `obtain` finds or makes it.

    Threads that ask for the same variant wait for one compilation. The current device stays.

    Raises
    ------
    CompileError
        The source does not compile.
    ImportError
        CuPy is not installed.
    RuntimeError
        The device is older than sm_75, or the driver cannot load the kernel. BundleError: a bundle cannot be used.
        MissingKernelError: the kernel would have to be compiled, and must not.
    ValueError
        RTFLASH_OVERRIDE holds something else than the variant.
    """
    found = _kernels.get((spec, device.index))
    if found is not None:
        return found
    with lock_of("kernel", spec, device.index):
        found = _kernels.get((spec, device.index))
        if found is None:
            found = load(obtain(spec, device), device)
            _kernels[spec, device.index] = found
    return found


def is_loaded(spec: AnySpec, device: Device) -> bool:
    """Whether `kernel` answers from memory (a graph capture must not load modules)."""
    return (spec, device.index) in _kernels


def obtain(spec: AnySpec, device: Device) -> Artifact:
    """The variant's code for a device: of an edited source, else of a bundle, else of the cache, else compiled.

    Raises as `kernel` does.
    """
    current, edited = settings.get(), None
    # (Which architecture that is, NVRTC says, which a machine with bundles may lack, or need not load.)
    if current.record is not None:
        record.note(spec, nvrtc.arch_on(device))
    if current.override is not None:
        edited = dump.edited(spec, nvrtc.arch_on(device))
    if edited is not None:
        made = compile(spec, nvrtc.target_arch(device), edited=edited)
    else:
        packed = bundle.find(spec, device)
        if packed is not None:
            made = from_bundle(*packed)
        elif current.no_compile:
            made = cached(spec, nvrtc.arch_on(device))
        else:
            made = artifact(spec, nvrtc.target_arch(device))
    origin = made.origin or made.folder or "compiled in memory"
    settings.logger().debug("%s for %s: %s", spec.name, made.arch, origin)
    if current.dump is not None:
        entry = to_entry(made)
        dump.keep(spec, nvrtc.arch_on(device), entry.files, entry.record)
    return made


def from_bundle(packed: bundle.Packed, file: Path) -> Artifact:
    """A bundle's kernel; its source is what the templates make, since they are the same."""
    spec, arch, cubin, flags, compiler, used = packed
    origin = f"bundle {file}"
    return Artifact(spec, arch, cubin, "", "", flags, Resources(**used), "", None, compiler, origin)


def cached(spec: AnySpec, arch: str) -> Artifact:
    """The variant from the disk cache, where nothing may be compiled.

    Raises
    ------
    MissingKernelError
        It is not there, or there is no NVRTC, whose version is part of the cache's keys.
    """
    try:
        key = cache_key(spec, arch)
        place = cache.folder(spec.name, key)
        entry = cache.load(place) if settings.get().cache else None
    except (ImportError, RuntimeError):
        entry = None
    if entry is not None and is_sound(spec, arch, entry):
        return from_entry(spec, arch, key, entry, place)
    held = bundle.said()
    file = next(map(str, settings.get().bundles), "kernels.zip")
    where = f"in none of the bundles ({held})" if held else "in no bundle (there is none)"
    raise MissingKernelError(
        f"{spec.name} for {arch} is {where} and not in the cache, and RTFLASH_NO_COMPILE is 1. This adds it:\n"
        f'rtflash generate --arch {arch} --spec {record.text(spec)} --bundle "{file}" --add\n'
        "All that a program needs: run it with RTFLASH_RECORD=record.jsonl where it may compile, then"
        f' rtflash generate --record record.jsonl --bundle "{file}" --add'
    )


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


def load(made: Artifact, device: Device) -> Kernel:
    """Load a cubin on a device and allow it its dynamic shared memory.

    Raises
    ------
    RuntimeError
        The driver cannot load it.
    """
    import cupy

    with cupy.cuda.Device(device.index):
        try:
            raw = raw_kernel(made)
            raw.max_dynamic_shared_size_bytes = made.spec.shared_bytes
            return Kernel(made.spec, raw, raw.kernel.ptr, made.resources)
        except cupy.cuda.driver.CUDADriverError as error:
            known, driver = made.compiler, cupy.cuda.runtime.driverGetVersion()
            raise RuntimeError(
                f"{device.name} cannot load {made.spec.name} for {made.arch}: {error}. "
                f"The NVRTC that made it is {known[0]}.{known[1]}, the driver supports CUDA {driver // 1000}."
                f"{driver % 1000 // 10}: update the driver, or install rtflash[cuda12]"
            ) from error


def raw_kernel(made: Artifact) -> Any:
    """cupy.RawKernel of the artifact's file in the cache, else a MemoryKernel of the same bytes."""
    import cupy

    if made.folder is not None:
        file = str(made.folder / binary_file(made.arch))
        try:
            raw = cupy.RawModule(path=file).get_function(made.spec.name)
            raw.kernel  # noqa: B018  RawKernel reads its file when it is first asked for its handle.
            return raw
        except (OSError, ValueError, cupy.cuda.driver.CUDADriverError) as error:
            # Cleared, torn or replaced since its bytes were checked, or at a path that CuPy cannot encode or the
            # driver cannot read (in UTF-8); a genuine refusal comes again below.
            settings.logger().info("%s is loaded from memory: %s", made.spec.name, error)
    return MemoryKernel(made.cubin, made.spec.name)


class MemoryKernel:
    """What is used here of a cupy.RawKernel, for code in no file: CuPy makes a RawModule of a file alone."""

    def __init__(self, code: bytes, name: str) -> None:
        from cupy.cuda import function

        module = function.Module()
        module.load(code)
        self.kernel = module.get_function(name)  # which keeps the module alive

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        """Dynamic shared memory that a launch may ask for."""
        from cupy_backends.cuda.api import driver

        which = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        return driver.funcGetAttribute(which, self.kernel.ptr)

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, count: int) -> None:
        from cupy_backends.cuda.api import driver

        which = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver.funcSetAttribute(self.kernel.ptr, which, count)


def lock_of(*what: object) -> threading.Lock:
    """The lock among this process' threads for one thing."""
    return _locks.setdefault(what, threading.Lock())


# A process forked while another thread compiled would inherit a lock that nobody releases.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_locks.clear)
