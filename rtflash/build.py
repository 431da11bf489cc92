"""Spec -> Kernel: from memory, an edited source, a bundle, the disk cache, or compiled; loaded by CuPy's RawModule."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import artifacts, bundle, cache, dump, nvrtc, record, settings
from .artifacts import Artifact
from .device import Device
from .nvrtc import Resources
from .spec import AnySpec

_kernels: dict[tuple[AnySpec, int], Kernel] = {}


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
    with artifacts.lock_of("kernel", spec, device.index):
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
        made = artifacts.compile(spec, nvrtc.target_arch(device), edited=edited)
    else:
        packed = bundle.find(spec, device)
        if packed is not None:
            made = from_bundle(*packed)
        elif current.no_compile:
            made = cached(spec, nvrtc.arch_on(device))
        else:
            made = artifacts.artifact(spec, nvrtc.target_arch(device))
    origin = made.origin or made.folder or "compiled in memory"
    settings.logger().debug("%s for %s: %s", spec.name, made.arch, origin)
    if current.dump is not None:
        entry = artifacts.to_entry(made)
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
        key = artifacts.cache_key(spec, arch)
        place = cache.folder(spec.name, key)
        entry = cache.load(place) if settings.get().cache else None
    except (ImportError, RuntimeError):
        entry = None
    if entry is not None and artifacts.is_sound(spec, arch, entry):
        return artifacts.from_entry(spec, arch, key, entry, place)
    held = bundle.said()
    file = next(map(str, settings.get().bundles), "kernels.zip")
    where = f"in none of the bundles ({held})" if held else "in no bundle (there is none)"
    raise MissingKernelError(
        f"{spec.name} for {arch} is {where} and not in the cache, and RTFLASH_NO_COMPILE is 1. This adds it:\n"
        f'rtflash generate --arch {arch} --spec {record.text(spec)} --bundle "{file}" --add\n'
        "All that a program needs: run it with RTFLASH_RECORD=record.jsonl where it may compile, then"
        f' rtflash generate --record record.jsonl --bundle "{file}" --add'
    )


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
        file = str(made.folder / artifacts.binary_file(made.arch))
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
