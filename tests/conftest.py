"""Fixtures: the backends, a cache folder of this session's own, and the kernels of GPU tests compiled ahead."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

# One thread serves matrices of this size best; more spin and wait for each other where cores are few or busy (measured:
# 17 s for the forward tests instead of 70). Read when NumPy is first imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# JAX would take three quarters of the GPU's memory at its first use.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from backends import Backend
from backends import backend as make_backend

from rtflash import build, device, nvrtc, select
from rtflash.spec import Spec


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the GPU tests, with the reason, where no GPU is usable."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = device.why_no_gpu() if marked else None
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A kernel cache that is empty when the session starts; the user's own is left alone."""
    folder = tmp_path_factory.mktemp("rtflash_cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RTFLASH_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="session")
def compiled_ahead(request: pytest.FixtureRequest, cache_folder: Path) -> int:
    """Compile the kernels of every collected GPU test that has a `call`, in parallel; their number."""
    gpu = device.get(0)
    specs: dict[Spec, None] = {}
    for item in request.session.items:
        callspec = getattr(item, "callspec", None)
        if callspec and item.get_closest_marker("gpu") and "call" in callspec.params:
            specs[select.forward(callspec.params["call"].problem(), gpu)[0]] = None
    compile_all(list(specs), nvrtc.target_arch(gpu))
    return len(specs)


def compile_all(specs: list[Spec], arch: str) -> None:
    """Compile the variants into the cache folder on all cores (NVRTC runs outside Python's lock)."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(lambda spec: build.artifact(spec, arch), specs):
            pass


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Backend:
    """The backend named by the test's parameter."""
    made = make_backend(request.param)
    if made.on_gpu:
        request.getfixturevalue("compiled_ahead")
    return made
