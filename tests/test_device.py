"""device.py: architecture names, the table of typical devices, and the reasons for having no GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from rtflash import device
from rtflash.device import Device

NOWHERE = 99  # an index that no test machine has: `get` remembers what it has read


def fake(major: int, minor: int, name: str = "Fake") -> Device:
    return Device(0, name, major, minor, 100, 101376, 1 << 22)


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((7, 5), "sm_75"),
        ((8, 6), "sm_86"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((10, 3), "sm_103a"),
        ((12, 0), "sm_120"),
    ],
)
def test_arch(capability, arch):
    assert fake(*capability).arch == arch


@pytest.mark.parametrize("arch", list(device.TYPICAL))
def test_typical_devices_know_their_arch(arch):
    assert device.for_arch(arch).arch == arch
    assert device.for_arch(arch.removesuffix("a")).arch == arch


def test_shared_memory_of_typical_devices():
    sizes = {arch: device.for_arch(arch).shared_bytes_per_block for arch in device.TYPICAL}
    assert sizes["sm_75"] == 65536
    assert sizes["sm_80"] == sizes["sm_87"] == 166912
    assert sizes["sm_86"] == sizes["sm_89"] == sizes["sm_120"] == 101376
    assert sizes["sm_90a"] == sizes["sm_100a"] == sizes["sm_103a"] == 232448


def test_unknown_arch_is_refused():
    with pytest.raises(ValueError, match="arch is 'sm_61'; it must be one of sm_75"):
        device.for_arch("sm_61")


def fake_cupy(
    monkeypatch, count, nvrtc_version=lambda: (13, 0), properties=None, driver=13000, cuda=13020
):
    """A CuPy for a CUDA whose runtime counts devices by `count()`, and a driver."""
    cuda = SimpleNamespace(
        runtime=SimpleNamespace(
            getDeviceCount=count,
            getDeviceProperties=properties or count,
            driverGetVersion=lambda: driver,
            runtimeGetVersion=lambda built=cuda: built,
        ),
        nvrtc=SimpleNamespace(getVersion=nvrtc_version),
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)


def raises(message):
    def function(*_):
        raise RuntimeError(message)

    return function


def test_no_cupy(monkeypatch):
    for name in ("cupy", "cupy.cuda"):
        monkeypatch.setitem(sys.modules, name, None)
    reason = device.why_no_gpu()
    assert reason.startswith("CuPy is not installed: pip install 'rtflash[cuda13]'")
    with pytest.raises(ImportError, match="CuPy is not installed") as caught:
        device.get(NOWHERE)
    assert str(caught.value) == reason


@pytest.mark.parametrize(
    ("driver", "cuda", "words"),
    [
        (0, 13020, "There is no NVIDIA driver here: install one"),
        (12090, 13020, "is for CUDA 12.9, this CuPy for CUDA 13.2: update the driver, or"),
        (11080, 12090, "is for CUDA 11.8, this CuPy for CUDA 12.9: update the driver."),
        (13000, 13020, "CUDA finds no GPU (cudaErrorNoDevice: none): see what nvidia-smi shows"),
    ],
)
def test_no_driver_or_an_old_one(monkeypatch, driver, cuda, words):
    fake_cupy(monkeypatch, raises("cudaErrorNoDevice: none\nmore"), driver=driver, cuda=cuda)
    reason = device.why_no_gpu()
    assert words in reason
    assert "\n" not in reason
    with pytest.raises(RuntimeError) as caught:
        device.get(NOWHERE)
    assert str(caught.value) == reason


def test_no_device(monkeypatch):
    fake_cupy(monkeypatch, lambda: 0)
    assert device.why_no_gpu().startswith("CUDA finds no GPU: see what nvidia-smi shows")


def test_old_device(monkeypatch):
    fake_cupy(monkeypatch, lambda: 1)
    monkeypatch.setattr(device, "get", lambda index: fake(6, 1, "GTX 1080"))
    assert "GTX 1080 (sm_61) is older than sm_75" in device.why_no_gpu()


def test_one_device_of_two_is_enough(monkeypatch):
    fake_cupy(monkeypatch, lambda: 2)
    monkeypatch.setattr(device, "get", lambda index: fake(6 + 3 * index, 0))
    assert device.why_no_gpu() is None


def test_no_nvrtc(monkeypatch):
    fake_cupy(monkeypatch, lambda: 1, raises("libnvrtc.so is not found"))
    monkeypatch.setattr(device, "get", lambda index: fake(9, 0))
    assert "NVRTC, which compiles the kernels, cannot be loaded" in device.why_no_gpu()


def test_a_device_that_cannot_be_asked_is_a_reason(monkeypatch):
    busy = raises("cudaErrorDevicesUnavailable: busy\nmore")
    fake_cupy(monkeypatch, lambda: 1, properties=busy)
    monkeypatch.setattr(device, "get", device.get.__wrapped__)
    reason = device.why_no_gpu()
    assert reason == "CUDA cannot use GPU 0 (cudaErrorDevicesUnavailable: busy)."


@pytest.mark.gpu
def test_real_device():
    found = device.get(0)
    assert device.get(0) is found
    assert found.sm_count > 0
    assert found.l2_bytes > 0
    known = device.TYPICAL.get(found.arch)
    assert known is None or found.shared_bytes_per_block == known[2]
    assert device.why_no_gpu() is None
