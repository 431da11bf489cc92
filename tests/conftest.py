"""Fixtures: the backends, a cache folder of this session's own, and kernels of GPU and host compiled ahead."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

# One thread serves matrices of this size best; more spin and wait for each other where cores are few or busy (measured:
# 17 s for the forward tests instead of 70). Read when NumPy is first imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# JAX would take three quarters of the GPU's memory at its first use.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from backends import EMULATED, Backend
from backends import backend as make_backend

from rtflash import artifacts, cxx, device, emulate, nvrtc, select
from rtflash.problem import Problem
from rtflash.spec import AnySpec


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the GPU tests where no GPU is usable, and the emulated ones where no compiler is, with the reason."""
    for marker, why_not in (("gpu", device.why_no_gpu), ("emulated", emulate.why_not)):
        marked = [item for item in items if item.get_closest_marker(marker)]
        reason = why_not() if marked else None
        if reason:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A kernel cache that is empty when the session starts; the user's own is left alone.

    Processes that share the tests (pytest-xdist) share it too: what one has compiled the others load.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "rtflash_cache"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RTFLASH_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="session")
def compiled_ahead(request: pytest.FixtureRequest, cache_folder: Path) -> int:
    """Compile the kernels of every collected GPU test that has a `call`, in parallel; their number."""
    gpu = device.get(0)
    specs = {
        spec: None
        for params in params_of_calls(request.session.items, "gpu")
        for spec in specs_of(params["call"].problem(), gpu)
    }
    arch = nvrtc.target_arch(gpu)
    with progress(request.config, f"compiling {len(specs)} kernels for the GPU ahead"):
        on_all_cores(lambda spec: artifacts.artifact(spec, arch), list(specs))
    return len(specs)


@pytest.fixture(scope="session")
def emulated_ahead(request: pytest.FixtureRequest, cache_folder: Path) -> int:
    """Compile for the host the kernels of every collected emulated test that has a `call`; their number.

    Before any of these tests runs: some count compilations, or look into the cache. Where several processes share the
    tests (pytest-xdist) nothing is compiled ahead.
    """
    specs: dict[AnySpec, None] = {}
    if "PYTEST_XDIST_WORKER" not in os.environ:
        for params in params_of_calls(request.session.items, "emulated"):
            gpu = device.for_arch(params.get("arch", emulate.ARCH))
            specs.update(dict.fromkeys(specs_of(params["call"].problem(), gpu)))
    with progress(request.config, f"compiling {len(specs)} kernels for the CPU ahead"):
        on_all_cores(cxx.library, list(specs))
    return len(specs)


@contextlib.contextmanager
def progress(config: pytest.Config, what: str) -> Iterator[None]:
    """A line on the terminal, whatever is captured, that says what takes long and, in the end, how long it took."""
    plugins = config.pluginmanager
    terminal, capture = plugins.get_plugin("terminalreporter"), plugins.get_plugin("capturemanager")
    if terminal is None or capture is None:
        yield
        return
    with capture.global_and_fixture_disabled():
        terminal.ensure_newline()
        terminal.write(f"{what}, on {os.cpu_count()} cores ...", flush=True)
    start = time.perf_counter()
    yield
    with capture.global_and_fixture_disabled():
        terminal.write_line(f" {time.perf_counter() - start:.0f} s")


def specs_of(problem: Problem, gpu: device.Device) -> list[AnySpec]:
    """The variants that a call launches."""
    spec, grid = select.forward(problem, gpu)
    specs: list[AnySpec] = [spec] if grid.blocks > 0 else []
    if spec.split and grid.blocks > 0:
        specs.append(select.combine(select.splits_combine(problem, grid.splits), True)[0])
    if problem.seqlen_new and problem.batch:
        specs.append(select.append(problem)[0])
    return specs


def params_of_calls(items: list[pytest.Item], marker: str) -> list[dict[str, Any]]:
    """The parameters of tests that carry the marker and have a `call`."""
    marked = [item for item in items if item.get_closest_marker(marker)]
    parameters = [item.callspec.params for item in marked if hasattr(item, "callspec")]
    return [params for params in parameters if "call" in params]


def on_all_cores(compile_one: Callable[[AnySpec], object], specs: list[AnySpec]) -> None:
    """Compile the variants into the cache folder (compilers run outside Python's lock)."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(compile_one, specs):
            pass


@pytest.fixture
def torch(compiled_ahead: int) -> Any:
    """PyTorch with CUDA."""
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return module


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """The backend named by the test's parameter; host arrays go through the emulated kernels if it is `emulated`."""
    made = make_backend(request.param)
    monkeypatch.setenv("RTFLASH_BACKEND", "emulate" if made.name == EMULATED else "numpy")
    if made.on_gpu:
        request.getfixturevalue("compiled_ahead")
    if made.name == EMULATED:
        request.getfixturevalue("emulated_ahead")
    return made
