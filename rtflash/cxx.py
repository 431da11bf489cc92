"""Spec -> library of the host: the kernel's templates compiled by the machine's C++ compiler.

The runtime (templates/host/runtime.cpp), which no Spec changes, is compiled once; a variant is
compiled alone and linked with it. Both are kept in the cache of the cubins.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from . import artifacts, cache, render, settings
from .spec import ISAS, AnySpec

TARGET = "host"
RUNTIME = "rtflash_host_runtime"
RUNTIME_SOURCE = "host/runtime.cpp"
COMPILERS = ("g++", "clang++", "c++")
INSTALL = "install g++ or clang++, or name one in RTFLASH_CXX"

# Kernels are compiled for a debugger, too; the runtime, where the time goes, for speed. Sums and
# products stay apart, so that results do not depend on the host's instruction set.
COMMON = ("-std=c++17", "-g", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-pthread")
RUNTIME_OPTIONS = (*COMMON, "-O3")
KERNEL_OPTIONS = (*COMMON, "-O2", "-Wno-unknown-pragmas")
POISON = "-ftrivial-auto-var-init=pattern"  # what a kernel forgets to set is not 0 by chance

compile_count = 0  # compilations of variants by this process

_libraries: dict[tuple[AnySpec, Path | None], ctypes.CDLL] = {}
_runtimes: dict[str, bytes] = {}  # by cache key


class Compiler(NamedTuple):
    """A C++ compiler.

    Attributes
    ----------
    path : of the program.
    options : what RTFLASH_CXX adds ("g++ -O0"), and POISON where the compiler knows it.
    version : the first line that it says of its version.
    """

    path: str
    options: tuple[str, ...]
    version: str


def why_not() -> str | None:
    """None where kernels can be compiled for the host, else the reason as one sentence."""
    try:
        find()
    except RuntimeError as error:
        return f"{error}."
    return None


def find() -> Compiler:
    """RTFLASH_CXX, else the first of COMPILERS in the path.

    Raises
    ------
    RuntimeError
        There is none, it does not run, or the system is not one that the runtime knows.
    """
    if sys.platform == "win32":
        raise RuntimeError("emulated kernels need Linux or macOS; this is Windows (WSL is a Linux)")
    wanted = settings.get().cxx
    for name, *added in commands(wanted):
        path = shutil.which(name)
        if path is not None:
            return describe(path, tuple(added))
    missing = f"RTFLASH_CXX is {wanted!r}, which is no program" if wanted else "no C++ compiler"
    raise RuntimeError(f"{missing}: {INSTALL}")


def commands(wanted: str) -> list[list[str]]:
    """What RTFLASH_CXX may mean: a program, in whose path are spaces; one and its options, quoted as for a shell."""
    if not wanted:
        return [[name] for name in COMPILERS]
    with contextlib.suppress(ValueError):  # a quote that nothing closes
        return [[wanted], shlex.split(wanted)]
    return [[wanted]]


@functools.cache
def describe(path: str, options: tuple[str, ...]) -> Compiler:
    """The compiler at a path, which is asked for its version."""
    try:
        said = subprocess.run([path, "--version"], check=True, capture_output=True)
        trial = [path, POISON, "-x", "c++", "-E", os.devnull]
        poisons = subprocess.run(trial, capture_output=True).returncode == 0
    except (OSError, subprocess.CalledProcessError) as error:
        raise RuntimeError(f"{path} does not run ({error}): {INSTALL}") from error
    added = (POISON, *options) if poisons else options
    return Compiler(path, added, said.stdout.decode(errors="replace").split("\n", 1)[0])


def library(spec: AnySpec, folder: Path | None = None) -> ctypes.CDLL:
    """The variant's library, with `rtflash_launch`: from memory, the disk cache, or compiled.

    Parameters
    ----------
    folder : templates folder; None = the installed one.

    Raises
    ------
    CompileError
        The compiler refuses the source.
    RuntimeError
        There is no compiler.
    """
    found = _libraries.get((spec, folder))
    if found is not None:
        return found
    with artifacts.lock_of(TARGET, spec, folder):
        if (spec, folder) not in _libraries:
            _libraries[spec, folder] = load(*obtain(find(), spec, folder))
    return _libraries[spec, folder]


def obtain(
    compiler: Compiler, spec: AnySpec, folder: Path | None = None
) -> tuple[Path, cache.Entry, bool]:
    """(place, entry, whether it is on disk) of a variant's library."""
    key = cache_key(compiler, spec.variables(), render.digest(folder, TARGET))
    place = cache.folder(f"{spec.name}_{TARGET}", key)
    if not settings.get().cache:
        return place, make_kernel(compiler, spec, folder, key), False
    return place, *cache.obtain(place, lambda: make_kernel(compiler, spec, folder, key))


def cache_key(compiler: Compiler, variables: dict[str, str], digest: str) -> str:
    """The cache key of a variant, or of the runtime, which has no variables."""
    from . import __version__

    identity = (compiler.path, compiler.version, *compiler.options)
    options = (*identity, *RUNTIME_OPTIONS, *KERNEL_OPTIONS)
    arch = f"{TARGET}-{platform.machine()}"
    return cache.key(variables, arch, options, digest, (0, 0), __version__)


def make_kernel(compiler: Compiler, spec: AnySpec, folder: Path | None, key: str) -> cache.Entry:
    """Compile a variant and link it with the runtime."""
    global compile_count
    start = time.perf_counter()
    source = render.source(spec, folder, TARGET)
    isa = getattr(spec, "isa", max(ISAS))  # only the forward knows one
    options = [*KERNEL_OPTIONS, f"-D__CUDA_ARCH__={isa}0", "-shared", *compiler.options]
    command = [compiler.path, *options, "kernel.cpp", "runtime.o", "-o", "kernel.so"]
    inputs = {"kernel.cpp": source.encode(), "runtime.o": runtime_object(compiler, folder)}
    binary, log = run(command, inputs, "kernel.so")
    if binary is None:
        path = cache.keep_failed(f"{spec.name}_{TARGET}", key, source)
        raise artifacts.CompileError(spec, TARGET, tuple(command), log, path)
    compile_count += 1
    logger = settings.logger()
    logger.info("compiled %s for the host: %.2f s", spec.name, time.perf_counter() - start)
    logger.log(settings.LOG_COMPILER, "%s", log)
    files = {"kernel.cpp": inputs["kernel.cpp"], "kernel.so": binary, "build.log": log.encode()}
    return cache.Entry(files, {"spec": spec.to_dict(), "arch": TARGET, "options": command})


def runtime_object(compiler: Compiler, folder: Path | None) -> bytes:
    """The object file of the runtime: from memory, the disk cache, or compiled."""
    text = render.join(RUNTIME_SOURCE, render.templates(folder), {})
    plain = compiler._replace(options=())  # a kernel at -O0 needs no slow runtime
    key = cache_key(plain, {}, hashlib.sha256(text.encode()).hexdigest())

    def make() -> cache.Entry:
        command = [compiler.path, *RUNTIME_OPTIONS, "-c", "runtime.cpp", "-o", "runtime.o"]
        files = {"runtime.cpp": text.encode()}
        binary, log = run(command, files, "runtime.o")
        if binary is None:
            raise RuntimeError(f"{compiler.path} refuses {RUNTIME_SOURCE}:\n{log}")
        files |= {"runtime.o": binary, "build.log": log.encode()}
        return cache.Entry(files, {"arch": TARGET, "options": command})

    with artifacts.lock_of(TARGET, key):
        if key not in _runtimes:
            if settings.get().cache:
                entry, _ = cache.obtain(cache.folder(RUNTIME, key), make)
            else:
                entry = make()
            _runtimes[key] = entry.files["runtime.o"]
    return _runtimes[key]


def run(command: list[str], inputs: Mapping[str, bytes], output: str) -> tuple[bytes | None, str]:
    """(content of the file `output`, log) of a compiler's run; None if it fails."""
    with tempfile.TemporaryDirectory(prefix="rtflash-") as scratch:
        for name, content in inputs.items():
            Path(scratch, name).write_bytes(content)
        done = subprocess.run(command, cwd=scratch, capture_output=True)
        made = Path(scratch, output).read_bytes() if done.returncode == 0 else None
        return made, done.stderr.decode(errors="replace")


def load(place: Path, entry: cache.Entry, kept: bool) -> ctypes.CDLL:
    """Load a library from its file, or from a short-lived one."""
    if kept:
        loaded = ctypes.CDLL(str(place / "kernel.so"))
    else:
        with tempfile.TemporaryDirectory(prefix="rtflash-") as scratch:
            path = Path(scratch, "kernel.so")
            path.write_bytes(entry.files["kernel.so"])
            loaded = ctypes.CDLL(str(path))
    loaded.rtflash_launch.argtypes = [ctypes.c_void_p]
    loaded.rtflash_launch.restype = None
    return loaded
