"""A GPU that is newer than NVRTC: cache, record, bundle, dump, override and their errors meet in one name, its PTX."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex

import pytest

import rtflash
from rtflash import artifacts, build, bundle, cache, device, dump, nvrtc, record
from rtflash.__main__ import import_tool
from rtflash.device import Device
from rtflash.spec import Spec

pytest.importorskip("cupy", reason="NVRTC is called through CuPy")

SMALL = Spec("fp16", 16, 16, 32, 16, 2, 1, isa=75)
OTHER = dataclasses.replace(SMALL, mask="causal")
NEWER = Device(0, "Newer", 99, 9, 100, 101376, 1 << 22)
EDIT = 'extern "C" __global__ void rtflash_edited() {}\n'


@pytest.fixture(autouse=True)
def process(monkeypatch, tmp_path):
    """Begins a process that has loaded nothing and never asks a driver, with these variables; returns how to load."""
    monkeypatch.setattr(
        build, "load", lambda made, gpu: build.Kernel(made.spec, made, 1, made.resources)
    )

    def begin(**variables):
        for name in ("BUNDLE", "NO_COMPILE", "DUMP", "OVERRIDE", "RECORD"):
            monkeypatch.delenv(f"RTFLASH_{name}", raising=False)
        monkeypatch.setenv("RTFLASH_CACHE_DIR", str(tmp_path / "cache"))
        for name, value in variables.items():
            monkeypatch.setenv(f"RTFLASH_{name}", str(value))
        bundle.read.cache_clear()
        for module, name in ((build, "_kernels"), (artifacts, "_unkept")):
            monkeypatch.setattr(module, name, {})
        for module, name in ((cache, "_warned"), (record, "_noted"), (dump, "_told")):
            monkeypatch.setattr(module, name, set())
        return lambda spec=SMALL, gpu=NEWER: build.kernel(spec, gpu).raw

    begin()
    return begin


@pytest.fixture(scope="module")
def ptx():
    """What NEWER's kernels are compiled for here."""
    return f"compute_{nvrtc.supported_archs()[-1].removeprefix('sm_').removesuffix('a')}"


def generate(*arguments):
    pytest.importorskip("rich")
    testing = pytest.importorskip("typer.testing")
    app = import_tool("cli").app
    return testing.CliRunner().invoke(app, ["generate", *map(str, arguments)])


def test_it_has_one_name(ptx, monkeypatch):
    assert nvrtc.arch_on(NEWER) == nvrtc.target_arch(NEWER) == ptx
    known = device.for_arch("sm_90a")
    assert nvrtc.arch_on(known) == nvrtc.target_arch(known) == "sm_90a"
    monkeypatch.setattr(nvrtc, "supported_archs", lambda: ("sm_80", "sm_90a"))
    older = dataclasses.replace(NEWER, major=7, minor=5)
    assert (nvrtc.arch_on(older), nvrtc.arch_on(known)) == ("sm_75", "sm_90a")

    def missing():
        raise RuntimeError("no libnvrtc")

    monkeypatch.setattr(nvrtc, "supported_archs", missing)
    assert nvrtc.arch_on(NEWER) == "sm_999"


def test_what_is_recorded_can_be_generated_and_runs_without_a_compiler(process, ptx, tmp_path):
    file, kernels = tmp_path / "r.jsonl", tmp_path / "kernels.zip"
    made = process(RECORD=file)()
    assert made.arch == ptx
    assert record.read(file) == [(SMALL, ptx)]
    result = generate("--record", file, "--bundle", kernels, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / ptx / SMALL.name / "kernel.ptx").read_bytes()
    assert bundle.read(kernels).archs == (ptx,)
    cache.clear()
    loaded = process(BUNDLE=kernels, NO_COMPILE=1)()
    assert (loaded.arch, loaded.cubin[:2]) == (ptx, b"//")
    assert "kernels.zip" in loaded.origin


def test_no_compile_takes_the_caches_kernel(process):
    made = process()()
    count = artifacts.compile_count
    assert process(NO_COMPILE=1)() == made
    assert artifacts.compile_count == count


def test_the_command_of_a_missing_kernel_adds_it(process, tmp_path):
    kernels = tmp_path / "kernels.zip"
    load = process(NO_COMPILE=1, CACHE_DIR=tmp_path / "none")
    with pytest.raises(rtflash.MissingKernelError) as caught:
        load()
    command = re.search(r"^rtflash generate (.*)$", str(caught.value), re.MULTILINE)[1]
    command = command.replace("kernels.zip", str(kernels))
    process()
    assert generate(*shlex.split(command)).exit_code == 0
    assert process(NO_COMPILE=1, BUNDLE=kernels, CACHE_DIR=tmp_path / "none")().cubin


@pytest.mark.parametrize("cached", [True, False])
def test_what_is_dumped_can_be_edited(process, ptx, tmp_path, cached):
    if cached:
        process()()
    process(DUMP=tmp_path / "dumped")()
    place = tmp_path / "dumped" / ptx / SMALL.name
    assert {path.name for path in place.iterdir()} >= {"kernel.cu", "kernel.ptx", "spec.json"}
    source = (place / "kernel.cu").read_text(encoding="utf-8")
    (place / "kernel.cu").write_text(EDIT + source, encoding="utf-8")
    edited = process(OVERRIDE=tmp_path / "dumped")()
    assert edited.arch == ptx
    assert b"rtflash_edited" in edited.cubin


def test_what_a_bundle_of_a_newer_nvrtc_has_is_dumped_where_overrides_are_looked_for(
    process, ptx, tmp_path
):
    used = dataclasses.asdict(nvrtc.Resources(0, 0, 0, 0, 0, 0.0))
    kernels = tmp_path / "kernels.zip"
    packed = bundle.Packed(SMALL, NEWER.arch, b"\x7fELF", (), (99, 0), used)
    bundle.write(kernels, bundle.pack([packed]))
    process(BUNDLE=kernels, DUMP=tmp_path / "dumped")()
    place = tmp_path / "dumped" / ptx / SMALL.name
    assert (place / "kernel.cubin").read_bytes() == b"\x7fELF"
    assert (place / "kernel.ptx").exists()
    assert str(place) in process(BUNDLE=kernels, OVERRIDE=tmp_path / "dumped")().origin


def test_bundles_are_searched_for_cubins_then_for_the_newest_ptx(process, tmp_path):
    used = dataclasses.asdict(nvrtc.Resources(0, 0, 0, 0, 0, 0.0))
    files = []
    for arch in ("compute_80", "compute_90", "sm_100a", "compute_120"):
        files.append(tmp_path / f"{arch}.zip")
        packed = [bundle.Packed(SMALL, arch, arch.encode(), (), (13, 0), used)]
        if arch == "compute_80":
            packed.append(packed[0]._replace(spec=OTHER))
        bundle.write(files[-1], bundle.pack(packed))
    load = process(BUNDLE=os.pathsep.join(map(str, files)))
    assert load(gpu=device.for_arch("sm_100a")).cubin == b"sm_100a"
    for gpu, wanted in (("sm_90a", b"compute_90"), ("sm_89", b"compute_80")):
        assert process()
        load = process(BUNDLE=os.pathsep.join(map(str, files)))
        assert load(gpu=device.for_arch(gpu)).cubin == wanted
        assert load(OTHER, device.for_arch(gpu)).cubin == b"compute_80"
    load = process(BUNDLE=os.pathsep.join(map(str, files)))
    with pytest.raises(bundle.BundleError, match="no kernels for sm_75, which this GPU is"):
        load(gpu=device.for_arch("sm_75"))


def test_calls_do_not_say_variants_of_ptx(tmp_path):
    result = generate("--arch", "sm_80,compute_90", "--out", tmp_path)
    assert result.exit_code == 2
    assert "compute_90, PTX for a GPU" in re.sub(r"[\s│|]+", " ", result.output)
    assert generate("--arch", "compute_90", "--table").exit_code == 2
    assert generate("--arch", "compute_9x").exit_code == 2
