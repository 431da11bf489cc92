"""NVRTC through CuPy: source and architecture -> cubin or PTX, log and resources. Needs no GPU."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .device import INSTALL, OLDEST, Device, arch_name

if TYPE_CHECKING:
    from types import ModuleType


@dataclass(frozen=True, slots=True)
class Resources:
    """What a kernel uses, as ptxas reports it; zeros for PTX, which the driver assembles.

    Attributes
    ----------
    registers : per thread.
    static_shared_bytes : of a CTA; what it has besides is Spec.shared_bytes.
    local_bytes : stack frame of a thread, spills included.
    spill_stores, spill_loads : bytes of a thread.
    seconds : time of rendering and compiling.
    """

    registers: int
    static_shared_bytes: int
    local_bytes: int
    spill_stores: int
    spill_loads: int
    seconds: float


def options(arch: str, lines: bool = True) -> tuple[str, ...]:
    """NVRTC's options; `lines`: whether the code tells profilers its lines, which more than doubles its size."""
    flags = [f"-arch={arch}", "-std=c++17", "-default-device", *(["-lineinfo"] if lines else [])]
    if not is_ptx(arch):
        flags.append("--ptxas-options=-v")
    if version() >= (13, 0):
        # NVRTC's own cache would answer a repeated source without ptxas' report.
        flags.append("--no-cache")
    return tuple(flags)


def run(text: str, name: str, arch: str, flags: tuple[str, ...]) -> tuple[bytes | None, str]:
    """(binary, log) of a source; the binary is None if it does not compile."""
    nvrtc = import_nvrtc()
    # A path of bytes that are no text has surrogates, which CuPy cannot encode; the name is only for messages.
    name = name.encode(errors="backslashreplace").decode()
    program = nvrtc.createProgram(text, name, (), ())
    try:
        try:
            nvrtc.compileProgram(program, flags)
        except nvrtc.NVRTCError as error:
            return None, nvrtc.getProgramLog(program).rstrip("\0") or str(error)
        log = nvrtc.getProgramLog(program).rstrip("\0")
        if is_ptx(arch):
            ptx = nvrtc.getPTX(program)  # text in older CuPy
            return ptx.encode() if isinstance(ptx, str) else ptx.rstrip(b"\0"), log
        # CuPy (14.2) takes a cubin for a string and drops its last byte, a zero that disassemblers miss.
        return nvrtc.getCUBIN(program) + b"\0", log
    finally:
        nvrtc.destroyProgram(program)


def is_ptx(arch: str) -> bool:
    """Whether code for an architecture is PTX ("compute_90"), which the driver compiles, and no cubin ("sm_90a")."""
    return arch.startswith("compute_")


def parse_resources(log: str, seconds: float) -> Resources:
    """Read ptxas' report: the most registers and memory of its functions, all their spills."""

    def numbers(pattern: str) -> list[int]:
        return [int(number) for number in re.findall(pattern, log)]

    return Resources(
        registers=max(numbers(r"Used (\d+) registers"), default=0),
        static_shared_bytes=max(numbers(r"(\d+) bytes smem"), default=0),
        local_bytes=max(numbers(r"(\d+) bytes (?:stack frame|cumulative stack size)"), default=0),
        spill_stores=sum(numbers(r"(\d+) bytes spill stores")),
        spill_loads=sum(numbers(r"(\d+) bytes spill loads")),
        seconds=seconds,
    )


def import_nvrtc() -> ModuleType:
    """CuPy's NVRTC module."""
    try:
        from cupy.cuda import nvrtc
    except ImportError as error:
        raise ImportError(
            f"rtflash compiles its kernels with CuPy's NVRTC ({error}): {INSTALL}"
        ) from error
    return nvrtc


@functools.cache
def version() -> tuple[int, int]:
    """Version of the NVRTC library, for example (13, 0).

    Raises
    ------
    RuntimeError
        CuPy is there, the library is not.
    """
    try:
        return import_nvrtc().getVersion()
    except RuntimeError as error:
        raise RuntimeError(f"NVRTC cannot be loaded ({error}): {INSTALL}") from error


def supported_archs() -> tuple[str, ...]:
    """Architectures of cubins that this NVRTC can make and rtflash's kernels take, oldest first."""
    version()
    known = sorted(divmod(number, 10) for number in import_nvrtc().getSupportedArchs())
    return tuple(arch_name(*pair) for pair in known if pair >= OLDEST)


def target_arch(device: Device) -> str:
    """What to compile for: the device's own architecture, or "compute_NN" (PTX) if NVRTC lacks it.

    Raises
    ------
    RuntimeError
        The device is older than sm_75 or than anything that NVRTC compiles for.
    """
    if (device.major, device.minor) < OLDEST:
        raise RuntimeError(f"{device.name} is {device.arch}; rtflash's kernels need sm_75 or newer")
    known = supported_archs()
    if device.arch in known:
        return device.arch
    own = device.major * 10 + device.minor
    numbers = [int(re.sub(r"\D", "", arch)) for arch in known]
    older = [number for number in numbers if number <= own]
    if not older:
        raise RuntimeError(
            f"{device.name} is {device.arch}; NVRTC {'.'.join(map(str, version()))} compiles for "
            f"{known[0]} and newer: install an older CuPy and NVRTC"
        )
    return f"compute_{max(older)}"


def arch_on(device: Device) -> str:
    """The name under which variants on a device are recorded, dumped, overridden and looked for in the cache.

    That is what they are compiled for; where nothing can be, the device's own architecture.
    """
    try:
        return target_arch(device)
    except (ImportError, RuntimeError):
        return device.arch
