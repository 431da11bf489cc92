"""The GPU at hand: architecture, SM count, memory limits; and the reason where there is none."""

from __future__ import annotations

import functools
from dataclasses import dataclass

OLDEST = (7, 5)
INSTALL = "pip install 'rtflash[cuda13]' (or 'rtflash[cuda12]' for a driver of CUDA 12)"
VISIBLE = "see what nvidia-smi shows, and whether CUDA_VISIBLE_DEVICES hides it"

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True, slots=True)
class Device:
    """A CUDA device.

    Attributes
    ----------
    index : CUDA device index.
    name : the product.
    major, minor : compute capability.
    sm_count : streaming multiprocessors.
    shared_bytes_per_block : most shared memory that a CTA can opt in to.
    l2_bytes : size of the L2 cache.
    """

    index: int
    name: str
    major: int
    minor: int
    sm_count: int
    shared_bytes_per_block: int
    l2_bytes: int

    @property
    def arch(self) -> str:
        """Architecture of a cubin for exactly this device, for example "sm_86" or "sm_90a"."""
        return arch_name(self.major, self.minor)


def arch_name(major: int, minor: int) -> str:
    """NVRTC's name of a compute capability; "a" admits instructions of this architecture alone."""
    specific = (major, minor) == (9, 0) or major == 10
    return f"sm_{major}{minor}{'a' if specific else ''}"


# A typical product of each architecture: SM count, shared memory of a CTA, L2. From the CUDA C++
# Programming Guide ("Technical Specifications per Compute Capability") and data sheets.
TYPICAL = {
    "sm_75": ("Tesla T4", 40, 64 * KIB, 4 * MIB),
    "sm_80": ("A100", 108, 163 * KIB, 40 * MIB),
    "sm_86": ("GeForce RTX 3090", 82, 99 * KIB, 6 * MIB),
    "sm_87": ("Jetson AGX Orin", 16, 163 * KIB, 4 * MIB),
    "sm_89": ("GeForce RTX 4090", 128, 99 * KIB, 72 * MIB),
    "sm_90a": ("H100", 132, 227 * KIB, 50 * MIB),
    "sm_100a": ("B200", 148, 227 * KIB, 126 * MIB),
    "sm_103a": ("B300", 148, 227 * KIB, 126 * MIB),
    "sm_120": ("GeForce RTX 5090", 170, 99 * KIB, 96 * MIB),
}


@functools.cache
def get(index: int) -> Device:
    """Device `index`, read from CUDA once per process.

    Raises
    ------
    ImportError
        CuPy is not installed, or cannot be imported; the message says what to install.
    RuntimeError
        There is no such device, or CUDA cannot be used.
    """
    try:
        from cupy.cuda import runtime

        properties = runtime.getDeviceProperties(index)
    except ImportError as error:
        raise ImportError(why_no_cuda(), name="cupy") from error
    except RuntimeError as error:
        reason = why_no_cuda() or f"CUDA cannot use GPU {index} ({first_line(error)})."
        raise RuntimeError(reason) from error
    return Device(
        index=index,
        name=properties["name"].decode(),
        major=properties["major"],
        minor=properties["minor"],
        sm_count=properties["multiProcessorCount"],
        shared_bytes_per_block=properties["sharedMemPerBlockOptin"],
        l2_bytes=properties["l2CacheSize"],
    )


def for_arch(arch: str) -> Device:
    """A typical device of `arch` ("sm_86"; "sm_90" and "sm_90a" are the same), without a GPU.

    Raises
    ------
    ValueError
        The architecture is not in the table.
    """
    name = next(
        (name for name in TYPICAL if name.removesuffix("a") == arch.removesuffix("a")), None
    )
    if name is None:
        raise ValueError(f"arch is {arch!r}; it must be one of {', '.join(TYPICAL)}")
    product, sm_count, shared_bytes, l2_bytes = TYPICAL[name]
    number = int(name.removeprefix("sm_").removesuffix("a"))
    return Device(0, product, number // 10, number % 10, sm_count, shared_bytes, l2_bytes)


def why_no_cuda() -> str | None:
    """None where CUDA counts at least one GPU, else the reason as one sentence."""
    try:
        import cupy  # noqa: F401  so that the error names it
        from cupy.cuda import nvrtc, runtime  # noqa: F401
    except ImportError as error:
        if error.name == "cupy":
            return f"CuPy is not installed: {INSTALL}."
        return f"CuPy cannot be imported ({first_line(error)}): {INSTALL}."
    try:
        count = runtime.getDeviceCount()
    except RuntimeError as error:
        return why_no_driver() or f"CUDA finds no GPU ({first_line(error)}): {VISIBLE}."
    return None if count else f"CUDA finds no GPU: {VISIBLE}."


def why_no_driver() -> str | None:
    """None where there is a driver and CuPy's CUDA can use it, else the reason as one sentence."""
    from cupy.cuda import runtime

    driver, wanted = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    if driver == 0:
        return (
            "There is no NVIDIA driver here: install one (https://www.nvidia.com/drivers), or start the container with "
            "GPUs (docker run --gpus all)."
        )
    # Drivers run what is built for any minor version of their CUDA.
    if driver // 1000 < wanted // 1000:
        other = (
            ", or uninstall this CuPy and pip install 'rtflash[cuda12]'" if driver >= 12000 else ""
        )
        return (
            f"The NVIDIA driver is for CUDA {cuda_version(driver)}, this CuPy for CUDA {cuda_version(wanted)}: "
            f"update the driver{other}."
        )
    return None


def cuda_version(number: int) -> str:
    """CUDA's 13020 as "13.2"."""
    return f"{number // 1000}.{number % 1000 // 10}"


def why_no_gpu() -> str | None:
    """None where a GPU can be used, else the reason as one sentence."""
    reason = why_no_cuda()
    if reason is not None:
        return reason
    from cupy.cuda import nvrtc, runtime

    try:
        devices = [get(index) for index in range(runtime.getDeviceCount())]
    except RuntimeError as error:
        return first_line(error)
    if all((device.major, device.minor) < OLDEST for device in devices):
        names = ", ".join(f"{device.name} ({device.arch})" for device in devices)
        return f"{names} is older than sm_75, the least that rtflash's kernels run on."
    try:
        nvrtc.getVersion()
    except RuntimeError as error:
        from . import bundle  # its own imports need this module

        try:
            if bundle.said():
                return None
        except RuntimeError as refused:
            return f"{refused}."
        return (
            f"NVRTC, which compiles the kernels, cannot be loaded ({first_line(error)}): {INSTALL}."
        )
    return None


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
