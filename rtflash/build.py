"""Spec -> Kernel: memory dict, disk cache, NVRTC, and errors that name the template's line.

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

from . import cache, nvrtc, render, settings
from .device import Device
from .nvrtc import Resources, options, target_arch
from .spec import AnySpec

SOURCE = "kernel.cu"
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
    raw : cupy.RawKernel; keeps the module alive.
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


def kernel(spec: AnySpec, device: Device) -> Kernel:
    """The variant on a device: from memory, else from the disk cache, else compiled.

    Threads that ask for the same variant wait for one compilation. The current device stays.

    Raises
    ------
    CompileError
        The source does not compile.
    ImportError
        CuPy is not installed.
    RuntimeError
        The device is older than sm_75, or the driver cannot load the kernel.
    """
    found = _kernels.get((spec, device.index))
    if found is not None:
        return found
    with lock_of("kernel", spec, device.index):
        found = _kernels.get((spec, device.index))
        if found is None:
            found = load(artifact(spec, target_arch(device)), device)
            _kernels[spec, device.index] = found
    return found


def is_loaded(spec: AnySpec, device: Device) -> bool:
    """Whether `kernel` answers from memory (a graph capture must not load modules)."""
    return (spec, device.index) in _kernels


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
        else:
            settings.logger().debug("%s for %s is in %s", spec.name, arch, made.folder)
    return made


def compile(spec: AnySpec, arch: str) -> Artifact:
    """Render and compile a variant, without any cache and without a GPU.

    Parameters
    ----------
    spec : the variant.
    arch : "sm_NN" or "sm_NNa" for a cubin, "compute_NN" for PTX.

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
    text = render.source(spec)
    with _count_lock:
        compile_count += 1
    binary, log = nvrtc.run(text, spec.kernel_file, arch, options(arch))
    if binary is None:
        path = cache.keep_failed(spec.name, key, text)
        raise CompileError(spec, arch, options(arch), log, path)
    resources = nvrtc.parse_resources(log, time.perf_counter() - start)
    made = Artifact(spec, arch, binary, text, log, options(arch), resources, key, None)
    logger = settings.logger()
    logger.info(
        "compiled %s for %s: %d registers, %.2f s",
        spec.name,
        arch,
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
    return "kernel.ptx" if arch.startswith("compute_") else "kernel.cubin"


def to_entry(made: Artifact) -> cache.Entry:
    """The artifact as the cache keeps it."""
    files = {
        SOURCE: made.source.encode(),
        binary_file(made.arch): made.cubin,
        LOG: made.log.encode(),
    }
    record = {
        "spec": made.spec.to_dict(),
        "arch": made.arch,
        "options": list(made.options),
        "nvrtc": list(nvrtc.version()),
        "resources": asdict(made.resources),
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
            known, driver = nvrtc.version(), cupy.cuda.runtime.driverGetVersion()
            raise RuntimeError(
                f"{device.name} cannot load {made.spec.name} for {made.arch}: {error}. "
                f"NVRTC is {known[0]}.{known[1]}, the driver supports CUDA {driver // 1000}."
                f"{driver % 1000 // 10}: update the driver, or install rtflash[cuda12]"
            ) from error


def raw_kernel(made: Artifact) -> Any:
    """cupy.RawKernel of the artifact, from its file in the cache or else a short-lived one of the same bytes."""
    import tempfile

    import cupy

    def read(folder: str) -> Any:
        raw = cupy.RawModule(path=os.path.join(folder, binary_file(made.arch))).get_function(
            made.spec.name
        )
        raw.kernel  # noqa: B018  RawKernel reads its file when it is first asked for its handle.
        return raw

    if made.folder is not None:
        try:
            return read(str(made.folder))
        except (OSError, cupy.cuda.driver.CUDADriverError) as error:
            # Cleared, torn or replaced since its bytes were checked; a genuine refusal comes again below.
            settings.logger().info("%s is loaded from memory: %s", made.spec.name, error)
    with tempfile.TemporaryDirectory(prefix="rtflash-") as folder:
        Path(folder, binary_file(made.arch)).write_bytes(made.cubin)
        return read(folder)


def lock_of(*what: object) -> threading.Lock:
    """The lock among this process' threads for one thing."""
    return _locks.setdefault(what, threading.Lock())


# A process forked while another thread compiled would inherit a lock that nobody releases.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_locks.clear)
