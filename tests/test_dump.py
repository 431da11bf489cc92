"""dump.py: what RTFLASH_DUMP keeps, and dump -> edit -> RTFLASH_OVERRIDE."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import warnings

import pytest
from fake_gpu import FakeGpu, view

import rtflash
from rtflash import artifacts, build, bundle, cache, call, device, dump, nvrtc, record, render
from rtflash.other_specs import AppendSpec
from rtflash.spec import Spec

pytest.importorskip("cupy", reason="NVRTC is called through CuPy")

SMALL = Spec("fp16", 16, 16, 32, 16, 2, 1, isa=75)
EDIT = 'extern "C" __global__ void rtflash_edited() {}'
A100 = device.for_arch("sm_80")


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    """A process that has loaded nothing and never asks a driver."""
    for name in (
        "RTFLASH_BUNDLE",
        "RTFLASH_NO_COMPILE",
        "RTFLASH_DUMP",
        "RTFLASH_OVERRIDE",
        "RTFLASH_LOG",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RTFLASH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_warned", set())
    monkeypatch.setattr(artifacts, "_unkept", {})
    monkeypatch.setattr(record, "_noted", set())
    monkeypatch.setattr(dump, "_told", set())
    monkeypatch.setattr(
        build, "load", lambda made, gpu: build.Kernel(made.spec, made, 1, made.resources)
    )


@pytest.fixture
def root(monkeypatch, tmp_path):
    """The folder of dumps."""
    folder = tmp_path / "é dumps"
    monkeypatch.setenv("RTFLASH_DUMP", str(folder))
    return folder


@pytest.fixture
def said(monkeypatch):
    """What is logged, as text."""
    lines = []
    log = logging.getLogger("rtflash")
    handler = logging.Handler()
    handler.emit = lambda entry: lines.append(entry.getMessage())
    monkeypatch.setattr(log, "handlers", [handler])
    monkeypatch.setattr(log, "level", logging.NOTSET)
    yield lines
    log.setLevel(logging.NOTSET)


def load(monkeypatch):
    """The artifact that a process which has loaded nothing would load."""
    monkeypatch.setattr(build, "_kernels", {})
    return build.kernel(SMALL, A100).raw


def edit(file, old, new):
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new, 1), encoding="utf-8")


def test_dump_edit_override(monkeypatch, root, said):
    made = load(monkeypatch)
    place = root / "sm_80" / SMALL.name
    assert (place / "kernel.cu").read_text(encoding="utf-8") == render.source(SMALL)
    assert (place / "kernel.cubin").read_bytes() == made.cubin
    assert (place / "kernel.ptx").read_text(encoding="utf-8").count(".entry") == 1
    assert json.loads((place / "spec.json").read_text(encoding="utf-8"))["spec"] == SMALL.to_dict()
    assert (place / "build.log").exists()

    edit(place / "kernel.cu", "#line", EDIT + "\n#line")
    monkeypatch.delenv("RTFLASH_DUMP")
    monkeypatch.setenv("RTFLASH_OVERRIDE", str(root))
    said.clear()
    edited = load(monkeypatch)
    assert b"rtflash_edited" in edited.cubin
    assert str(place / "kernel.cu") in edited.origin
    assert any(f"from {place / 'kernel.cu'}" in line for line in said)
    assert (
        b"rtflash_edited" not in artifacts.artifact(SMALL, "sm_80").cubin
    )  # the cache is as it was

    (place / "kernel.cu").write_text(
        "\ufeff"
        + (place / "kernel.cu").read_text(encoding="utf-8").replace("\n", "\r\n")
        + "int x = no_such_name;",
        encoding="utf-8",
        newline="",
    )  # as an editor of Windows might
    with pytest.raises(artifacts.CompileError) as caught:
        load(monkeypatch)
    lines = (place / "kernel.cu").read_text(encoding="utf-8").count("\n") + 1
    assert f'kernel.cu({lines}): error: identifier "no_such_name"' in str(caught.value)
    assert caught.value.path == place / "kernel.cu"


def test_an_edited_source_stays_and_is_told_of(monkeypatch, root, said):
    load(monkeypatch)
    file = root / "sm_80" / SMALL.name / "kernel.cu"
    before = file.stat().st_mtime_ns, (file.parent / "kernel.ptx").read_bytes()
    load(monkeypatch)
    assert not any("is kept" in line for line in said)
    edit(file, "#line", "// edited\n#line")
    text = file.read_bytes()
    load(monkeypatch)
    assert file.read_bytes() == text
    assert any(f"{file} is not what {SMALL.name} runs" in line for line in said)
    assert (file.parent / "kernel.ptx").read_bytes() == before[1]
    # With both set to the same folder, what the edited source makes is kept beside it.
    edit(file, "// edited", EDIT)
    monkeypatch.setenv("RTFLASH_OVERRIDE", str(root))
    text = file.read_bytes()
    load(monkeypatch)
    assert file.read_bytes() == text
    assert b"rtflash_edited" in (file.parent / "kernel.cubin").read_bytes()
    assert b"rtflash_edited" in (file.parent / "kernel.ptx").read_bytes()


def test_kernels_of_the_cache_and_of_bundles_are_dumped_too(monkeypatch, root, tmp_path):
    made = artifacts.artifact(SMALL, "sm_80")
    load(monkeypatch)
    place = root / "sm_80" / SMALL.name
    assert (place / "kernel.cubin").read_bytes() == made.cubin
    used = {name: getattr(made.resources, name) for name in made.resources.__slots__}
    file = tmp_path / "kernels.zip"
    packed = bundle.Packed(SMALL, "sm_80", b"\x7fELF of a bundle", (), (13, 0), used)
    bundle.write(file, bundle.pack([packed]))
    monkeypatch.setenv("RTFLASH_BUNDLE", str(file))
    load(monkeypatch)
    assert (place / "kernel.cubin").read_bytes() == b"\x7fELF of a bundle"
    assert (place / "kernel.cu").read_text(encoding="utf-8") == render.source(SMALL)
    assert json.loads((place / "spec.json").read_text(encoding="utf-8"))["nvrtc"] == [13, 0]


def test_without_nvrtc_a_bundles_kernel_is_dumped_without_ptx(monkeypatch, root, said, tmp_path):
    file = tmp_path / "kernels.zip"
    used = dict.fromkeys(nvrtc.Resources.__slots__, 0)
    bundle.write(file, bundle.pack([bundle.Packed(SMALL, "sm_80", b"\x7fELF", (), (13, 0), used)]))
    monkeypatch.setenv("RTFLASH_BUNDLE", str(file))

    def missing():
        raise RuntimeError("no libnvrtc")

    monkeypatch.setattr(nvrtc, "version", missing)
    load(monkeypatch)
    place = root / "sm_80" / SMALL.name
    assert (place / "kernel.cu").exists()
    assert not (place / "kernel.ptx").exists()
    assert any("no kernel.ptx" in line and "no libnvrtc" in line for line in said)


def test_sass_is_kept_where_a_disassembler_is(monkeypatch, root, said, tmp_path):
    monkeypatch.setattr(dump, "find", lambda program: None)
    load(monkeypatch)
    place = root / "sm_80" / SMALL.name
    assert not (place / "kernel.sass").exists()
    assert any("no kernel.sass" in x and "nvidia-cuda-nvdisasm" in x for x in said)
    said.clear()
    load(monkeypatch)
    assert said == []  # once is enough
    script = tmp_path / "disassemble.py"
    script.write_text(
        "import sys; print('SASS of', sys.argv[-1]); sys.exit('--fail' in sys.argv)",
        encoding="utf-8",
    )
    run = subprocess.run
    monkeypatch.setattr(dump, "find", lambda program: program if program == "nvdisasm" else None)
    monkeypatch.setattr(
        subprocess, "run", lambda command, **kw: run([sys.executable, script, *command[1:]], **kw)
    )
    load(monkeypatch)
    assert (place / "kernel.sass").read_text(encoding="utf-8").startswith("SASS of")
    monkeypatch.setattr(
        subprocess, "run", lambda command, **kw: run([sys.executable, script, "--fail"], **kw)
    )
    said.clear()
    load(monkeypatch)
    assert any("no kernel.sass" in line and "nvdisasm fails" in line for line in said)


def test_a_dump_that_cannot_be_written_is_a_warning(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    monkeypatch.setenv("RTFLASH_DUMP", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match="RTFLASH_DUMP cannot be written"):
        load(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(monkeypatch)


def put(root, arch, name, text="// {}"):
    """A source in a folder of edited ones."""
    file = root / arch / name / "kernel.cu"
    file.parent.mkdir(parents=True)
    file.write_text(text.format(name), encoding="utf-8")
    return file


def test_variants_that_the_folder_lacks_run_as_ever(monkeypatch, tmp_path):
    put(tmp_path / "edited", "sm_80", "another")
    monkeypatch.setenv("RTFLASH_OVERRIDE", str(tmp_path / "edited"))
    made = load(monkeypatch)
    assert made.origin == ""
    assert made.folder is not None
    assert dump.survey() == (f"1 in {tmp_path / 'edited'}", [])


@pytest.mark.parametrize("place", ["typo", "file", "empty", "edited/sm_80"])
def test_a_folder_without_sources_is_refused(monkeypatch, tmp_path, place):
    """An architecture's folder, too: nothing would come of it."""
    put(tmp_path / "edited", "sm_80", SMALL.name)
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("RTFLASH_OVERRIDE", str(tmp_path / place))
    with pytest.raises(
        ValueError, match=r"RTFLASH_OVERRIDE is '.*'; it must be a folder"
    ) as caught:
        load(monkeypatch)
    assert dump.survey() == ("", [str(caught.value)])


def test_a_source_of_another_kernel_is_refused(monkeypatch, root):
    """The other sources count as ever."""
    place = root / "sm_80" / SMALL.name
    place.mkdir(parents=True)
    (place / "kernel.cu").write_bytes(b"// \xff\xfe another one")
    put(root, "sm_80", "another")
    put(root, "sm_90a", "another")
    monkeypatch.setenv("RTFLASH_OVERRIDE", str(root))
    with pytest.raises(ValueError, match=f"has no kernel {SMALL.name}") as caught:
        load(monkeypatch)
    assert dump.survey() == (f"2 in {root}", [str(caught.value)])


def test_a_dump_of_other_templates_is_refused(monkeypatch, root):
    load(monkeypatch)
    file = root / "sm_80" / SMALL.name / "spec.json"
    described = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(described | {"templates": "0" * 64}), encoding="utf-8")
    monkeypatch.setenv("RTFLASH_OVERRIDE", str(root))
    with pytest.raises(ValueError, match="dumped from other templates"):
        load(monkeypatch)
    file.write_text("[]", encoding="utf-8")  # a source alone is taken as it is
    assert load(monkeypatch).origin


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="needs a user who is not root")
def test_a_read_only_folder_is_a_warning(monkeypatch, tmp_path):
    tmp_path.chmod(0o500)
    monkeypatch.setenv("RTFLASH_DUMP", str(tmp_path))
    try:
        with pytest.warns(RuntimeWarning, match="RTFLASH_DUMP cannot be written"):
            load(monkeypatch)
    finally:
        tmp_path.chmod(0o700)


def test_log_levels_tell_choices_and_origins(monkeypatch, said):
    monkeypatch.setenv("RTFLASH_LOG", "1")
    load(monkeypatch)
    assert any(line.startswith(f"compiled {SMALL.name}") for line in said)
    said.clear()
    load(monkeypatch)
    assert said == []
    monkeypatch.setenv("RTFLASH_LOG", "2")
    load(monkeypatch)
    assert any(SMALL.name in line and "cache" in line for line in said)


def test_choices_are_told(monkeypatch, said):
    gpu = FakeGpu(monkeypatch)
    monkeypatch.setenv("RTFLASH_LOG", "2")
    q = view(2, 70, 4, 64)
    rtflash.flash_attn_func(q, q, q, causal=True)
    name = gpu.launched[0].spec.name
    (line,) = [line for line in said if "Problem(batch=2, seqlen_q=70" in line]
    assert name in line
    assert f"blocks={gpu.launched[0].shape[0]}" in line


def test_the_first_level_tells_why_hopper_has_another_kernel(monkeypatch, said):
    """Or why its own does not copy by TMA."""
    FakeGpu(monkeypatch)
    monkeypatch.setenv("RTFLASH_LOG", "1")
    q = view(2, 700, 4, 64)
    rtflash.flash_attn_func(q, q, q)
    assert said == []
    one = q._replace(strides=(0, *q.strides[1:]))
    rtflash.flash_attn_func(q, one, one)
    assert [line for line in said if line.startswith("copied row by row, not by TMA: ")]
    said.clear()
    pages = view(200, 7, 4, 63)
    table = view(2, 100, dtype="int32")
    lengths = view(2, dtype="int32")
    rtflash.flash_attn_with_kvcache(
        view(2, 700, 4, 63), pages, pages, cache_seqlens=lengths, block_table=table
    )
    assert [line for line in said if line.startswith("not the kernel for Hopper: ")]


@pytest.mark.gpu
def test_an_edited_kernel_runs(monkeypatch, tmp_path):
    """The append's kernel, which is edited to append nothing."""
    import cupy

    monkeypatch.undo()
    root = tmp_path / "dumped"
    monkeypatch.setenv("RTFLASH_CACHE_DIR", str(tmp_path / "cache"))

    def appended():
        monkeypatch.setattr(build, "_kernels", {})
        monkeypatch.setattr(call, "_plans", {})
        k_cache, v_cache = cupy.zeros((2, 1, 64, 1, 64), "float16")
        q, k, v = cupy.ones((3, 1, 1, 1, 64), "float16")
        lengths = cupy.zeros(1, "int32")
        rtflash.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths)
        return float(k_cache.sum())

    monkeypatch.setenv("RTFLASH_DUMP", str(root))
    assert appended() == 64
    file = root / device.get(0).arch / AppendSpec("fp16").name / "kernel.cu"
    edit(
        file,
        "const __grid_constant__ Params params) {",
        "const __grid_constant__ Params params) { return;",
    )
    monkeypatch.delenv("RTFLASH_DUMP")
    monkeypatch.setenv("RTFLASH_OVERRIDE", str(root))
    assert appended() == 0
