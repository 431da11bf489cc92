"""build.py, artifacts.py, nvrtc.py: cubins without a GPU, resources, errors, one compilation however many ask."""

from __future__ import annotations

import functools
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import rtflash
from rtflash import artifacts, build, cache, device, hopper, nvrtc, render
from rtflash.device import Device
from rtflash.spec import Spec

pytest.importorskip("cupy", reason="NVRTC is called through CuPy")

# The smallest kernels: a quarter of a second to compile.
SMALL = Spec("fp16", 16, 16, 32, 16, 2, 1, isa=75)
OTHER = Spec("fp16", 32, 32, 32, 16, 2, 1, isa=75)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty cache folder and a process that has compiled nothing."""
    monkeypatch.setenv("RTFLASH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("RTFLASH_CACHE", raising=False)
    monkeypatch.setattr(cache, "_warned", set())
    monkeypatch.setattr(build, "_kernels", {})
    monkeypatch.setattr(artifacts, "_unkept", {})
    monkeypatch.setattr(artifacts, "compile_count", 0)
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def compiled():
    """A compiled variant, for tests that are about its folder."""
    return artifacts.compile(SMALL, "sm_80")


def fake_device(major: int, minor: int) -> Device:
    return Device(0, "Fake", major, minor, 100, 101376, 1 << 22)


@pytest.mark.parametrize("arch", nvrtc.supported_archs())
def test_nvrtc_takes_every_supported_architecture(arch):
    binary, log = nvrtc.run('extern "C" __global__ void k() {}', "k.cu", arch, nvrtc.options(arch))
    assert binary is not None, log
    assert binary.startswith(b"\x7fELF")
    assert nvrtc.parse_resources(log, 0.0).registers > 0


@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
def test_compiles_without_a_gpu(arch):
    made = artifacts.compile(SMALL, arch)
    assert made.cubin.startswith(b"\x7fELF")
    assert SMALL.name.encode() in made.cubin
    assert 16 < made.resources.registers <= 255
    assert (
        made.resources.spill_stores == made.resources.spill_loads == made.resources.local_bytes == 0
    )
    assert made.resources.seconds > 0
    assert made.warnings == ()
    assert f"-arch={arch}" in made.options
    assert made.folder is None
    assert artifacts.compile_count == 1


def test_resources_are_read_from_the_log():
    source = """extern "C" __global__ void __launch_bounds__(1024, 2) k(float* p, int n) {
      __shared__ float tile[64]; float a[96];
      for (int i = 0; i < 96; ++i) a[i] = p[i * n];
      tile[threadIdx.x & 63] = p[n]; __syncthreads();
      for (int j = 0; j < n; ++j)
        for (int i = 0; i < 96; ++i) a[i] = a[i] * a[(i + 1) % 96] + tile[j & 63];
      for (int i = 0; i < 96; ++i) p[i * n] = a[i];
      p[a[n & 63] > 0 ? 1 : 0] = a[int(p[3]) % 96];
    }"""
    binary, log = nvrtc.run(source, "k.cu", "sm_80", nvrtc.options("sm_80"))
    assert binary
    found = nvrtc.parse_resources(log, 0.5)
    assert found.registers == 32
    assert found.static_shared_bytes == 256
    assert found.local_bytes >= 96 * 4
    assert found.spill_stores >= 0
    assert found.seconds == 0.5
    log = "ptxas  .  8 bytes stack frame, 20 bytes spill stores, 44 bytes spill loads\\nUsed 255 registers"
    assert nvrtc.parse_resources(log, 0.0) == nvrtc.Resources(255, 0, 8, 20, 44, 0.0)


def test_warnings_are_kept(monkeypatch):
    log = "a.cuh(3): warning #177-D: unused\n int x;\nRemark: suppress <warning-number>\n"
    log += (
        "ptxas info : (C7510) Potential Performance Loss: wgmma serialized\nptxas warning : slow\n"
    )
    monkeypatch.setattr(nvrtc, "run", lambda *_: (b"code", log))
    assert [line[:8] for line in artifacts.compile(SMALL, "sm_80").warnings] == [
        "a.cuh(3)",
        "ptxas in",
        "ptxas wa",
    ]


def test_error_names_template_line_source_and_options(monkeypatch, folder):
    texts = dict(render.templates())
    texts["softmax.cuh"] += "int oops = undeclared_name;\n"
    line = texts["softmax.cuh"].count("\n")
    monkeypatch.setattr(render, "templates", lambda folder=None: texts)
    with pytest.raises(artifacts.CompileError) as caught:
        artifacts.artifact(SMALL, "sm_80")
    error, message = caught.value, str(caught.value)
    assert SMALL.name in message
    assert f'softmax.cuh({line}): error: identifier "undeclared_name" is undefined' in message
    assert str(error.path) in message
    assert "-std=c++17" in message
    assert str(pickle.loads(pickle.dumps(error))) == message
    assert error.path.parent == folder / "failed"
    assert "undeclared_name" in error.path.read_text(encoding="utf-8")
    assert cache.entries() == []
    assert not artifacts._locks["artifact", SMALL, "sm_80"].locked()


def test_unknown_architecture_is_a_compile_error():
    with pytest.raises(artifacts.CompileError, match="arch"):
        artifacts.compile(SMALL, "sm_61")


def test_case_b54_devices_older_and_newer_than_nvrtc():
    with pytest.raises(RuntimeError, match="Fake is sm_10; rtflash's kernels need sm_75 or newer"):
        nvrtc.target_arch(fake_device(1, 0))
    newest = nvrtc.supported_archs()[-1].removeprefix("sm_").removesuffix("a")
    assert nvrtc.target_arch(fake_device(99, 9)) == f"compute_{newest}"
    for arch in nvrtc.supported_archs():
        number = int(arch.removeprefix("sm_").removesuffix("a"))
        assert nvrtc.target_arch(fake_device(*divmod(number, 10))) == arch


def test_case_b54_gaps_and_future_nvrtc(monkeypatch):
    monkeypatch.setattr(nvrtc, "supported_archs", lambda: ("sm_80", "sm_90a", "sm_120"))
    assert nvrtc.target_arch(fake_device(8, 9)) == "compute_80"
    assert nvrtc.target_arch(fake_device(10, 0)) == "compute_90"
    with pytest.raises(RuntimeError, match="compiles for sm_80 and newer"):
        nvrtc.target_arch(fake_device(7, 5))


def test_case_b54_ptx_for_a_newer_device():
    made = artifacts.artifact(SMALL, nvrtc.target_arch(fake_device(99, 9)))
    assert b".version" in made.cubin[:400]
    assert made.cubin.rstrip().endswith(b"}")
    assert (made.folder / "kernel.ptx").read_bytes() == made.cubin
    assert artifacts.artifact(SMALL, made.arch) == made
    assert artifacts.compile_count == 1


def test_no_cupy_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(ImportError, match=r"pip install 'rtflash\[cuda13\]'"):
        nvrtc.import_nvrtc()


def test_cache_folder_holds_the_variant(folder):
    made = artifacts.artifact(SMALL, "sm_80")
    assert made.folder == folder / f"{SMALL.name}.{made.key}"
    assert (made.folder / "kernel.cubin").read_bytes() == made.cubin
    assert (
        (made.folder / "kernel.cu").read_text(encoding="utf-8")
        == made.source
        == render.source(SMALL)
    )
    assert (made.folder / "build.log").read_text(encoding="utf-8") == made.log
    record = json.loads((made.folder / "spec.json").read_text(encoding="utf-8"))
    assert Spec(**record["spec"]) == SMALL
    assert record["arch"] == "sm_80"
    assert record["resources"]["registers"] == made.resources.registers
    assert artifacts.artifact(SMALL, "sm_80") == made
    assert artifacts.artifact(SMALL, "sm_86").key != made.key
    assert artifacts.compile_count == 2


def test_a_hit_neither_renders_nor_locks(monkeypatch):
    artifacts.artifact(SMALL, "sm_80")
    monkeypatch.setattr(render, "source", None)
    monkeypatch.setattr(cache, "locked", None)
    artifacts.artifact(SMALL, "sm_80")
    assert artifacts.compile_count == 1


@pytest.mark.parametrize("file", ["kernel.cu", "kernel.cubin", "spec.json", "build.log"])
@pytest.mark.parametrize(
    "damage",
    [lambda data: b"", lambda data: data[: len(data) // 2], lambda data: os.urandom(len(data))],
    ids=["empty", "half", "random"],
)
def test_case_b16_damaged_files_are_rebuilt(monkeypatch, compiled, file, damage):
    monkeypatch.setattr(nvrtc, "run", lambda *_: (compiled.cubin, compiled.log))
    made = artifacts.artifact(SMALL, "sm_80")
    path = made.folder / file
    path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(RuntimeWarning) as caught:
        repaired = artifacts.artifact(SMALL, "sm_80")
    assert len(caught) == 1
    assert repaired.cubin == made.cubin
    assert artifacts.compile_count == 2
    assert artifacts.artifact(SMALL, "sm_80") == repaired
    assert artifacts.compile_count == 2


@pytest.mark.parametrize(
    "change",
    [
        {"resources": {"bogus": 1}},
        {"resources": None},
        {"sha256": {}},
        {"sha256": ["kernel.cubin"]},
    ],
    ids=str,
)
def test_a_record_of_other_fields_is_rebuilt_though_its_checksum_is_right(
    monkeypatch, compiled, change
):
    monkeypatch.setattr(nvrtc, "run", lambda *_: (compiled.cubin, compiled.log))
    made = artifacts.artifact(SMALL, "sm_80")
    file = made.folder / "spec.json"
    record = json.loads(file.read_text(encoding="utf-8")) | change
    del record["checksum"]
    file.write_text(json.dumps(record | {"checksum": cache.checksum(record)}), encoding="utf-8")
    with pytest.warns(RuntimeWarning, match="damaged cache folder"):
        repaired = artifacts.artifact(SMALL, "sm_80")
    assert repaired.folder == made.folder
    assert artifacts.artifact(SMALL, "sm_80") == repaired
    assert artifacts.compile_count == 2


def test_without_disk_cache_a_process_compiles_once(monkeypatch, folder):
    monkeypatch.setenv("RTFLASH_CACHE", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = artifacts.artifact(SMALL, "sm_80")
        assert artifacts.artifact(SMALL, "sm_80") is made
    assert made.folder is None
    assert artifacts.compile_count == 1
    assert not folder.exists()


def test_unusable_cache_folder_warns_once_and_compiles_once(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    monkeypatch.setenv("RTFLASH_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(RuntimeWarning, match="in memory only") as caught:
        made = [artifacts.artifact(spec, "sm_80") for spec in (SMALL, SMALL, OTHER)]
    assert len(caught) == 1
    assert made[0] is made[1]
    assert artifacts.compile_count == 2


def test_case_b35_sixteen_threads_compile_each_kernel_once(monkeypatch):
    loads: list[Spec] = []

    def load(made, gpu):
        loads.append(made.spec)
        time.sleep(0.05)
        return build.Kernel(made.spec, object(), 1, made.resources)

    monkeypatch.setattr(build, "load", load)
    gpu, barrier = device.for_arch("sm_80"), threading.Barrier(16)

    def call(n: int) -> build.Kernel:
        barrier.wait()
        return build.kernel(SMALL if n % 2 else OTHER, gpu)

    with ThreadPoolExecutor(16) as pool:
        kernels = list(pool.map(call, range(16)))
    assert artifacts.compile_count == 2
    assert sorted(spec.head_dim for spec in loads) == [16, 32]
    assert len({id(kernel) for kernel in kernels}) == 2
    assert all(kernel.spec == (SMALL if n % 2 else OTHER) for n, kernel in enumerate(kernels))
    assert build.is_loaded(SMALL, gpu)
    assert not build.is_loaded(Spec("fp16", 8, 8, 32, 16, 2, 1, isa=75), gpu)


class FakeModule:
    """cupy.RawModule and its kernel without a driver: `kernel` is what the file holds when it is first asked for."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def get_function(self, name: str) -> FakeModule:
        return self

    @functools.cached_property
    def kernel(self) -> bytes:
        data = self.path.read_bytes()
        if not data:
            raise OSError("the driver refuses the file")
        return data


class MemoryModule:
    """cupy.cuda.function.Module without a driver: a function of it is the code."""

    def load(self, code: bytes) -> None:
        self.code = code

    def get_function(self, name: str) -> bytes:
        return self.code


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"")])
def test_checked_bytes_are_loaded_where_their_file_has_changed(monkeypatch, damage):
    """As by `rtflash cache clear` of another process between the check and the driver's reading."""
    import cupy
    from cupy.cuda import function

    made = artifacts.artifact(SMALL, "sm_80")

    def module(path: str) -> FakeModule:
        if Path(path).parent == made.folder:
            damage(Path(path))
        return FakeModule(path)

    monkeypatch.setattr(cupy, "RawModule", module)
    monkeypatch.setattr(function, "Module", MemoryModule)
    assert build.raw_kernel(made).kernel == made.cubin


@pytest.mark.gpu
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"\x7fELF")])
def test_a_changed_file_does_not_matter_on_the_device(damage):
    gpu = device.get(0)
    made = artifacts.artifact(SMALL, nvrtc.target_arch(gpu))
    damage(made.folder / artifacts.binary_file(made.arch))
    assert build.load(made, gpu).function != 0


def test_a_failed_compilation_leaves_no_lock(monkeypatch):
    run = nvrtc.run
    monkeypatch.setattr(nvrtc, "run", lambda *_: (None, "error"))
    with pytest.raises(artifacts.CompileError):
        artifacts.artifact(SMALL, "sm_80")
    monkeypatch.setattr(nvrtc, "run", run)
    assert artifacts.artifact(SMALL, "sm_80").cubin
    assert artifacts.compile_count == 2


WORKER = """
import hashlib, sys
from rtflash import artifacts
from rtflash.spec import Spec
spec = Spec("fp16", 16, 16, 32, 16, 2, 1, isa=75)
print("ready", flush=True)
made = artifacts.artifact(spec, "sm_80")
print(hashlib.sha256(made.cubin).hexdigest(), artifacts.compile_count, "jinja2" in sys.modules, flush=True)
"""


def start_worker(folder: Path) -> subprocess.Popen[str]:
    root = str(Path(rtflash.__file__).resolve().parents[1])
    return subprocess.Popen(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", WORKER],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
            "RTFLASH_CACHE_DIR": str(folder),
        },
        stdout=subprocess.PIPE,
        text=True,
    )


def answer(worker: subprocess.Popen[str]) -> list[str]:
    out, _ = worker.communicate(timeout=120)
    assert worker.returncode == 0
    return out.split()[1:]


def test_case_b34_eight_processes_compile_once(folder):
    answers = [answer(worker) for worker in [start_worker(folder) for _ in range(8)]]
    assert len({digest for digest, _, _ in answers}) == 1
    assert sorted(count for _, count, _ in answers) == ["0"] * 7 + ["1"]
    assert len(cache.entries()) == 1


def test_case_b34_killed_in_mid_compile(folder):
    victim = start_worker(folder)
    assert victim.stdout.readline() == "ready\n"
    end = time.monotonic() + 60
    while not list(folder.glob("*.lock")):
        assert time.monotonic() < end
    time.sleep(0.1)
    victim.send_signal(getattr(signal, "SIGKILL", signal.SIGTERM))
    victim.communicate(timeout=10)
    assert cache.entries() == []
    start = time.monotonic()
    digest, count, _ = answer(start_worker(folder))
    assert count == "1"
    assert time.monotonic() - start < cache.LOCK_TIMEOUT_S / 2
    assert answer(start_worker(folder)) == [digest, "0", "False"]


@pytest.mark.gpu
@pytest.mark.parametrize("disk", ["1", "0"])
def test_kernel_loads_on_the_device(monkeypatch, disk):
    import cupy
    from cupy_backends.cuda.api import driver

    monkeypatch.setenv("RTFLASH_CACHE", disk)
    gpu = device.get(0)
    kernel = build.kernel(SMALL, gpu)
    assert kernel.function != 0
    assert kernel.raw.max_dynamic_shared_size_bytes == SMALL.shared_bytes
    of, function = driver.funcGetAttribute, kernel.function
    assert of(driver.CU_FUNC_ATTRIBUTE_NUM_REGS, function) == kernel.resources.registers
    assert of(driver.CU_FUNC_ATTRIBUTE_BINARY_VERSION, function) == gpu.major * 10 + gpu.minor
    assert build.kernel(SMALL, gpu) is kernel
    assert artifacts.compile_count == 1
    assert cupy.cuda.runtime.getDevice() == 0


@pytest.mark.gpu
def test_ptx_loads_on_the_device():
    gpu = device.get(0)
    made = artifacts.artifact(SMALL, f"compute_{gpu.major}{gpu.minor}")
    assert build.load(made, gpu).function != 0


@pytest.mark.gpu
def test_a_cubin_for_another_architecture_is_a_clear_error():
    gpu = device.get(0)
    other = "sm_75" if gpu.major >= 8 else "sm_90a"
    with pytest.raises(RuntimeError, match="update the driver"):
        build.load(artifacts.artifact(SMALL, other), gpu)


@pytest.mark.parametrize(("head_dim", "keys", "head_dim_v"), [(16, 48, 16), (192, 80, 128)])
def test_operands_of_wgmma_are_numbered_as_they_are_listed(
    head_dim: int, keys: int, head_dim_v: int
) -> None:
    """Each step of a product has operands of its own, in the order of the lists, and none is left over."""
    texts = hopper.wgmma_variables("bf16", head_dim, keys, head_dim_v)
    for name, columns, steps in (("score", keys, head_dim), ("output", head_dim_v, keys)):
        count = columns // 2
        assert texts[f"{name}_registers"] == ", ".join(f"%{i}" for i in range(count))
        registers = re.findall(r'"\+f"\(d\[0\]\[(\d+)\]\[(\d)\]\)', texts[f"{name}_accumulator"])
        assert [4 * int(j) + int(i) for j, i in registers] == list(range(count))
        listed = re.findall(r'"[lr]"\((.*?)\)', texts[f"{name}_operands"])
        made = re.findall(r"STEP\((.*?)\)", texts[f"{name}_steps"])
        named = [[listed[int(i) - count] for i in re.findall(r"%(\d+)", step)] for step in made]
        a = "a.of_step[{0}]" if name == "score" else "a[{0}][0] a[{0}][1] a[{0}][2] a[{0}][3]"
        assert named == [f"{a} b.of_step[{{0}}]".format(k).split() for k in range(steps // 16)]
        assert sum(map(len, named)) == len(listed)
    adds = re.findall(r'"(\d)"\)', texts["score_steps"])
    assert adds == ["0", *["1"] * (head_dim // 16 - 1)]
