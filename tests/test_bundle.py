"""bundle.py, record.py: bundles are used without NVRTC or refused with the reason; records hold a variant once."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
import zipfile
from types import SimpleNamespace

import pytest

import rtflash
from rtflash import artifacts, build, bundle, cache, device, listed, nvrtc, record, render
from rtflash.other_specs import AppendSpec, CombineSpec
from rtflash.spec import Spec

SMALL = Spec("fp16", 16, 16, 32, 16, 2, 1, isa=75)
OTHER = dataclasses.replace(SMALL, mask="causal")
CUBIN = b"\x7fELF" + bytes(range(200))
USED = {
    "registers": 40, "static_shared_bytes": 0, "local_bytes": 0, "spill_stores": 0, "spill_loads": 0, "seconds": 0.1,
}  # fmt: skip
A100, H100 = device.for_arch("sm_80"), dataclasses.replace(device.for_arch("sm_90a"), index=1)


def packed(spec=SMALL, arch="sm_80", cubin=CUBIN):
    return bundle.Packed(spec, arch, cubin, (f"-arch={arch}",), (13, 0), USED)


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    """A process that has met no bundle, compiles nothing, and has no cache."""
    for name in ("RTFLASH_BUNDLE", "RTFLASH_NO_COMPILE", "RTFLASH_RECORD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RTFLASH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_warned", set())
    monkeypatch.setattr(build, "_kernels", {})
    monkeypatch.setattr(artifacts, "_unkept", {})
    monkeypatch.setattr(record, "_noted", set())
    monkeypatch.setattr(
        build, "load", lambda made, gpu: build.Kernel(made.spec, made, 1, made.resources)
    )


@pytest.fixture
def without_nvrtc(monkeypatch):
    """NVRTC is not there: whatever asks for it fails."""

    def missing(*_):
        raise RuntimeError("NVRTC cannot be loaded")

    for name in ("version", "import_nvrtc", "run", "supported_archs"):
        monkeypatch.setattr(nvrtc, name, missing)


def put(folder, *kernels, name="kernels é.zip"):
    file = folder / name
    bundle.write(file, bundle.pack(kernels or [packed()]))
    return file


def use(monkeypatch, *files):
    monkeypatch.setenv("RTFLASH_BUNDLE", os.pathsep.join(map(str, files)))


def repack(file, edit=lambda index: None, code=None):
    """Rewrite a bundle with another index, whose checksum is right, or other code."""
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    index = json.loads(entries[bundle.INDEX])
    del index["checksum"]
    edit(index)
    index["checksum"] = cache.checksum(index)
    entries[bundle.INDEX] = json.dumps(index).encode()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, data if code is None or name == bundle.INDEX else code)


def test_a_kernel_of_a_bundle_needs_no_nvrtc(monkeypatch, without_nvrtc, tmp_path):
    use(monkeypatch, put(tmp_path, packed(), packed(OTHER, cubin=b"other")))
    for spec, code in ((SMALL, CUBIN), (OTHER, b"other")):
        made = build.kernel(spec, A100).raw
        assert (made.cubin, made.arch, made.resources.registers) == (code, "sm_80", 40)
        assert made.compiler == (13, 0)
        assert str(tmp_path) in made.origin
    assert build.is_loaded(SMALL, A100)


def test_several_bundles_are_searched_in_their_order(monkeypatch, without_nvrtc, tmp_path):
    first = put(tmp_path, packed(arch="sm_90a"), name="a.zip")
    second = put(tmp_path, packed(cubin=b"2"), name="b.zip")
    third = put(tmp_path, packed(cubin=b"3"), packed(OTHER), name="c.zip")
    use(monkeypatch, first, second, third)
    assert build.kernel(SMALL, A100).raw.cubin == b"2"
    assert build.kernel(OTHER, A100).raw.cubin == CUBIN
    assert build.kernel(SMALL, H100).raw.cubin == CUBIN


def test_what_no_bundle_has_is_compiled(monkeypatch, tmp_path):
    use(monkeypatch, put(tmp_path))
    asked = []
    monkeypatch.setattr(nvrtc, "target_arch", lambda gpu: gpu.arch)
    monkeypatch.setattr(artifacts, "artifact", lambda *what: asked.append(what) or SimpleNamespace(
            spec=what[0], arch=what[1], origin="", folder=None, resources=None
        )
    )  # fmt: skip
    build.kernel(OTHER, A100)
    assert asked == [(OTHER, "sm_80")]


def test_a_miss_names_the_variant_and_the_command(monkeypatch, without_nvrtc, tmp_path):
    file = put(tmp_path)
    use(monkeypatch, file)
    monkeypatch.setenv("RTFLASH_NO_COMPILE", "1")
    assert build.kernel(SMALL, A100)
    with pytest.raises(rtflash.MissingKernelError) as caught:
        build.kernel(OTHER, A100)
    message = str(caught.value)
    assert OTHER.name in message
    assert "RTFLASH_NO_COMPILE is 1" in message
    assert f"{file}: 1 for sm_80" in message
    assert f"--arch sm_80 --spec {record.text(OTHER)}" in message
    assert f'--bundle "{file}" --add' in message


def test_without_any_bundle_nothing_is_compiled_either(monkeypatch, without_nvrtc):
    monkeypatch.setenv("RTFLASH_NO_COMPILE", "1")
    with pytest.raises(rtflash.MissingKernelError, match=r"in no bundle .* and not in the cache"):
        build.kernel(SMALL, A100)


def test_no_compile_takes_the_cache_where_there_is_nvrtc(monkeypatch):
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    made = artifacts.Artifact(
        SMALL, "sm_80", CUBIN, "//", "", nvrtc.options("sm_80"), nvrtc.Resources(**USED),
        artifacts.cache_key(SMALL, "sm_80"), None, (13, 0),
    )  # fmt: skip
    monkeypatch.setenv("RTFLASH_NO_COMPILE", "1")
    with pytest.raises(rtflash.MissingKernelError):
        build.kernel(SMALL, A100)
    cache.store(cache.folder(SMALL.name, made.key), artifacts.to_entry(made))
    assert build.kernel(SMALL, A100).raw.cubin == CUBIN
    monkeypatch.setenv("RTFLASH_CACHE", "0")
    with pytest.raises(rtflash.MissingKernelError):
        build.kernel(OTHER, A100)


def test_another_architecture_is_refused_with_the_reason(monkeypatch, tmp_path):
    file = put(tmp_path)
    use(monkeypatch, file)
    with pytest.raises(bundle.BundleError) as caught:
        build.kernel(SMALL, H100)
    assert "no kernels for sm_90a" in str(caught.value)
    assert f"{file} is for sm_80" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("rtflash", f"was made by rtflash x, this is rtflash {rtflash.__version__}"),
        ("templates", "was made from other templates"),
        ("schema", "has format x, this rtflash reads 1"),
    ],
)
def test_another_version_is_refused_with_the_reason(monkeypatch, tmp_path, name, reason):
    file = put(tmp_path)
    repack(file, lambda index: index.update({name: "x"}))
    use(monkeypatch, file)
    for _ in range(2):
        with pytest.raises(bundle.BundleError, match=reason):
            build.kernel(SMALL, A100)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: data[:60] + bytes([data[60] ^ 255]) + data[61:],
        lambda data: b"PK\x05\x06" + bytes(18),
        lambda data: b"not a zip file",
    ],
)
def test_a_damaged_bundle_is_refused(monkeypatch, tmp_path, damage):
    file = put(tmp_path)
    file.write_bytes(damage(file.read_bytes()))
    use(monkeypatch, file)
    with pytest.raises(bundle.BundleError, match="damaged") as caught:
        build.kernel(SMALL, A100)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    "edit",
    [
        lambda index: index.pop("kernels"),
        lambda index: index["kernels"]["sm_80/" + SMALL.name + ".cubin"].pop("sha256"),
        lambda index: index["kernels"]["sm_80/" + SMALL.name + ".cubin"].update(sha256="0" * 64),
        lambda index: index["kernels"]["sm_80/" + SMALL.name + ".cubin"].update(spec={}),
        lambda index: index["kernels"]["sm_80/" + SMALL.name + ".cubin"].update(arch="sm_90a"),
        lambda index: index["kernels"]["sm_80/" + SMALL.name + ".cubin"].update(nvrtc=None),
        lambda index: index["kernels"]["sm_80/" + SMALL.name + ".cubin"]["spec"].update(
            mask="causal"
        ),
        lambda index: index["kernels"].update({"compute_x/y.ptx": {}}),
        lambda index: index["kernels"].update({"sm_80/../y.cubin": {}}),
    ],
)
def test_an_index_that_lies_is_refused(monkeypatch, tmp_path, edit):
    file = put(tmp_path)
    repack(file, edit)
    use(monkeypatch, file)
    with pytest.raises(bundle.BundleError, match="damaged"):
        build.kernel(SMALL, A100)


def leaves(index, path=()):
    """The places of all values of a JSON object, whole objects and lists included."""
    inner = index.items() if isinstance(index, dict) else enumerate(index)
    for key, value in inner:
        yield (*path, key)
        if isinstance(value, (dict, list)):
            yield from leaves(value, (*path, key))


@pytest.mark.parametrize("odd", [None, True, -1, 1.5, "x", [], ["x", {}], {}, {"x": 1}, "gone"])
def test_an_index_of_odd_values_gives_no_other_error(monkeypatch, tmp_path, odd):
    """Whatever stands in its place, with the right checksum: one value after another."""
    file = put(tmp_path)
    found = {path for path in leaves(bundle_index(file)) if path[0] != "checksum"}
    whole = file.read_bytes()
    for path in found:
        file.write_bytes(whole)

        def edit(index, path=path):
            *above, last = path
            for key in above:
                index = index[key]
            if odd == "gone":
                del index[last]
            else:
                index[last] = odd

        repack(file, edit)
        bundle.read.cache_clear()
        use(monkeypatch, file)
        monkeypatch.setattr(build, "_kernels", {})
        monkeypatch.setenv("RTFLASH_NO_COMPILE", "1")
        # What another type would break: loading it, telling of it, adding to it.
        with contextlib.suppress(bundle.BundleError, rtflash.MissingKernelError):
            kernel = build.kernel(SMALL, A100)
            assert isinstance(kernel.resources.registers, (int, float)), path
        with contextlib.suppress(bundle.BundleError):
            bundle.said()
        with contextlib.suppress(bundle.BundleError):
            held = bundle.read(file)
            bundle.pack([bundle.unpack(held, where) for where in held.kernels])


def bundle_index(file):
    with zipfile.ZipFile(file) as archive:
        return json.loads(archive.read(bundle.INDEX))


def test_code_of_another_hash_is_refused(monkeypatch, tmp_path):
    file = put(tmp_path)
    repack(file, code=b"\x7fELF, another one")
    use(monkeypatch, file)
    with pytest.raises(bundle.BundleError, match="another SHA-256"):
        build.kernel(SMALL, A100)


def test_an_index_of_another_checksum_is_refused(monkeypatch, tmp_path):
    file = put(tmp_path)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(
            bundle.INDEX, json.dumps({**bundle.maker(), "kernels": {}, "checksum": "0"})
        )
    use(monkeypatch, file)
    with pytest.raises(bundle.BundleError, match="another checksum"):
        build.kernel(SMALL, A100)


def test_a_missing_bundle_is_named(monkeypatch, tmp_path):
    use(monkeypatch, tmp_path / "none.zip")
    with pytest.raises(bundle.BundleError, match=r"none\.zip cannot be read"):
        build.kernel(SMALL, A100)
    use(monkeypatch, tmp_path)
    with pytest.raises(bundle.BundleError, match="cannot be read"):
        build.kernel(SMALL, A100)


def test_the_same_kernels_make_the_same_bytes():
    kernels = [packed(), packed(OTHER), packed(arch="sm_90a")]
    assert bundle.pack(kernels) == bundle.pack(reversed(kernels))


def test_writing_is_whole_or_not_at_all(tmp_path):
    file = put(tmp_path)
    before = file.read_bytes()
    with pytest.raises(TypeError):
        bundle.write(file, None)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")
def test_writing_leaves_links_and_pipes_what_they_are(tmp_path):
    file, link, pipe = (tmp_path / name for name in ("file", "link", "pipe"))
    link.symlink_to(file)
    bundle.write(link, b"1")
    assert link.is_symlink()
    assert file.read_bytes() == b"1"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE)
    bundle.write(pipe, b"2")
    assert reader.communicate(timeout=10)[0] == b"2"
    assert pipe.is_fifo()


def installed_in(folder, monkeypatch, file):
    """A package with the bundle, in a folder of sys.path."""
    package = folder / "rtflash_bundle_é"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n", encoding="utf-8")
    shutil.copy(file, package / bundle.PACKAGED)
    monkeypatch.syspath_prepend(str(folder))
    return package / bundle.PACKAGED


def test_an_installed_bundle_is_found_and_not_imported(monkeypatch, without_nvrtc, tmp_path):
    file = installed_in(tmp_path / "site", monkeypatch, put(tmp_path))
    assert build.kernel(SMALL, A100).raw.cubin == CUBIN
    assert f"{file}: 1 for sm_80" in bundle.said()
    monkeypatch.setenv("RTFLASH_NO_COMPILE", "1")
    with pytest.raises(rtflash.MissingKernelError):
        build.kernel(SMALL, H100)  # of another architecture: no reason to refuse the others


def test_an_installed_bundle_of_another_version_is_passed_over(
    monkeypatch, without_nvrtc, tmp_path
):
    file = installed_in(tmp_path / "site", monkeypatch, put(tmp_path))
    repack(file, lambda index: index.update(rtflash="0.0.0"))
    monkeypatch.setenv("RTFLASH_NO_COMPILE", "1")
    with (
        pytest.warns(RuntimeWarning, match="made by rtflash 0.0.0") as caught,
        pytest.raises(rtflash.MissingKernelError),
    ):
        build.kernel(SMALL, A100)
    assert len(caught) == 1


def test_a_gpu_with_a_bundle_is_used_without_nvrtc(monkeypatch, tmp_path):
    cupy = pytest.importorskip("cupy")

    def missing():
        raise RuntimeError("no libnvrtc")

    monkeypatch.setattr(cupy.cuda.nvrtc, "getVersion", missing)
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", lambda: 1)
    monkeypatch.setattr(device, "get", lambda index: A100)
    assert "NVRTC" in device.why_no_gpu()
    use(monkeypatch, put(tmp_path))
    assert device.why_no_gpu() is None
    use(monkeypatch, tmp_path / "none.zip")
    assert "none.zip cannot be read" in device.why_no_gpu()


ALONE = """
import sys
from rtflash import build, device
from rtflash.spec import Spec
import cupy
build.load = lambda made, gpu: build.Kernel(made.spec, made, 1, made.resources)
spec = Spec("fp16", 16, 16, 32, 16, 2, 1, isa=75)
print(len(build.kernel(spec, device.for_arch("sm_80")).raw.cubin), b"libnvrtc" in open("/proc/self/maps", "rb").read())
print("jinja2" in sys.modules)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs /proc")
def test_the_library_of_nvrtc_is_not_loaded(tmp_path):
    pytest.importorskip("cupy")
    from processes import environment

    env = environment(RTFLASH_BUNDLE=str(put(tmp_path)), RTFLASH_NO_COMPILE="1", LC_ALL="C")
    done = subprocess.run([sys.executable, "-c", ALONE], env=env, capture_output=True, text=True)
    assert done.stdout.split() == [str(len(CUBIN)), "False", "False"], done.stderr


def variants_of_every_kind():
    specs = [*listed.table_specs(H100)[::97], *listed.table_specs(device.for_arch("sm_75"))[::97]]
    return [
        *specs,
        CombineSpec("bf16"),
        CombineSpec("fp16", "fp16", 1),
        AppendSpec("bf16", "halves"),
    ]


def test_variants_are_read_back():
    for spec in variants_of_every_kind():
        described = json.loads(json.dumps(record.described(spec, "sm_80")))
        assert record.parse(described) == (spec, "sm_80")
        assert record.from_text(record.text(spec)) == spec


def test_names_are_places():
    """A bundle finds a kernel by its name and architecture."""
    specs = listed.table_specs(H100)
    assert len({bundle.place(spec, "sm_90a") for spec in specs}) == len(specs)


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [],
        {},
        {"arch": "sm_80", "kernel": "backward", "spec": {}},
        {"arch": 80, "kernel": "combine", "spec": {"dtype": "bf16"}},
        {"arch": "../sm_80", "kernel": "combine", "spec": {"dtype": "bf16"}},
        {"arch": "sm_80", "kernel": "combine", "spec": {}},
        {"arch": "sm_80", "kernel": "combine", "spec": []},
        {"arch": "sm_80", "kernel": "combine", "spec": 1},
        {"arch": "sm_80", "kernel": "combine", "spec": {"dtype": 1}},
        {"arch": "sm_80", "kernel": "combine", "spec": {"dtype": "bf16", "vector": True}},
        {"arch": "sm_80", "kernel": "combine", "spec": {"dtype": "bf16", "more": 1}},
        {"arch": "sm_80", "kernel": "combine", "spec": {"dtype": "int8"}},
        {"arch": "sm_80", "kernel": [], "spec": {}},
    ],
)
def test_what_is_no_variant_is_refused(wrong):
    with pytest.raises(ValueError, match=r"no variant|must be"):
        record.parse(wrong)


@pytest.mark.parametrize(
    "text",
    ["", ",", "kernel=no", "dtype=bf16", "kernel=combine,dtype", "kernel=combine,dtype=bf16,vector=x",
     "kernel=forward,dtype=bf16", "kernel=combine,what=1", "kernel=forward,q_in_regs=1"],
)  # fmt: skip
def test_a_text_that_is_no_variant_is_refused(text):
    with pytest.raises(ValueError, match=r"kernel is|no variant|must be"):
        record.from_text(text)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "no variant (no object); one is"),
        ({"arch": "sm_80"}, "no variant without kernel, spec; one is"),
        ({"arch": 80, "kernel": "combine", "spec": {}}, "no variant (arch is 80, "),
        ("sm80", "'sm80' is no NAME=VALUE; a variant must be as kernel=forward,dtype="),
        ("kernel=combine,bf16", "'bf16' is no NAME=VALUE"),
        ("kernel=combine,=bf16", "'=bf16' is no NAME=VALUE"),
        ("dtype=bf16", "kernel is ''; it must be one of forward, combine, append"),
    ],
    ids=str,
)
def test_what_a_variant_lacks_is_said(given, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        record.from_text(given) if isinstance(given, str) else record.parse(given)


def test_the_example_of_a_line_is_one():
    assert record.parse(json.loads(record.EXAMPLE_LINE)) == (CombineSpec("bf16"), "sm_80")


def test_a_name_that_comes_twice_is_refused(tmp_path):
    """One of the values would not count."""
    with pytest.raises(
        ValueError, match="dtype is given as bf16 and as fp16; it must be given once"
    ):
        record.from_text("kernel=combine,dtype=bf16,dtype=fp16")
    file = tmp_path / "record.jsonl"
    line = json.dumps(record.described(SMALL, "sm_80"))
    for twice in ('"arch": "sm_80", ', '"spec": {}, '):
        file.write_text(line.replace("{", "{" + twice, 1), encoding="utf-8")
        with pytest.raises(ValueError, match=r"line 1 of .*; it must be given once"):
            record.read(file)


def test_whole_variants_are_those_of_the_fewest_fields():
    for kernel, text in record.EXAMPLES.items():
        assert record.text(record.from_text(text)) == text
        for needed in text.split(",")[1:]:
            said = ",".join(item for item in text.split(",") if item != needed)
            name = needed.partition("=")[0]
            with pytest.raises(ValueError, match=rf"without {name}; one is {text}"):
                record.from_text(said)
        with pytest.raises(ValueError, match=rf"has what=1; one is kernel={kernel}"):
            record.from_text(f"{text},what=1")


def test_a_record_holds_each_variant_once(monkeypatch, tmp_path):
    file = tmp_path / "é folder" / "record.jsonl"
    monkeypatch.setenv("RTFLASH_RECORD", str(file))
    for spec, arch in ((SMALL, "sm_80"), (OTHER, "sm_80"), (SMALL, "sm_80"), (SMALL, "sm_86")):
        record.note(spec, arch)
    monkeypatch.setattr(record, "_noted", set())
    record.note(OTHER, "sm_80")
    assert record.read(file) == [(SMALL, "sm_80"), (OTHER, "sm_80"), (SMALL, "sm_86")]
    assert file.read_text(encoding="utf-8").count("\n") == 3


def test_a_miss_is_recorded_too(monkeypatch, without_nvrtc, tmp_path):
    file = tmp_path / "record.jsonl"
    monkeypatch.setenv("RTFLASH_RECORD", str(file))
    monkeypatch.setenv("RTFLASH_NO_COMPILE", "1")
    with pytest.raises(rtflash.MissingKernelError):
        build.kernel(SMALL, A100)
    assert record.read(file) == [(SMALL, "sm_80")]


def test_a_torn_line_does_not_swallow_the_next(tmp_path):
    file = tmp_path / "record.jsonl"
    file.write_bytes(b'{"arch": "sm')
    record.add(file, b"{}")
    assert file.read_bytes() == b'{"arch": "sm\n{}\n'
    with pytest.raises(ValueError, match=r"line 1 of .*record\.jsonl"):
        record.read(file)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "latin-1", "cp500"])
def test_a_file_that_is_no_record_is_named(tmp_path, encoding):
    file = tmp_path / "record.jsonl"
    file.write_text("été\n[", encoding=encoding)
    said = f"line 1 of {file}: no variant (no JSON); one is {record.EXAMPLE_LINE}"
    with pytest.raises(ValueError, match=re.escape(said)):
        record.read(file)


def test_a_comma_too_many_is_no_field():
    assert record.from_text(",kernel=combine,,dtype=bf16,") == CombineSpec("bf16")


def test_a_record_that_cannot_be_written_is_one_warning(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    monkeypatch.setenv("RTFLASH_RECORD", str(tmp_path / "file" / "record"))
    with pytest.warns(RuntimeWarning, match="RTFLASH_RECORD cannot be written"):
        record.note(SMALL, "sm_80")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        record.note(OTHER, "sm_80")


WRITER = """
import sys
from rtflash import device, listed, record
specs = listed.table_specs(device.for_arch("sm_80"))[:60]
print("ready", flush=True)
sys.stdin.readline()
for spec in specs if sys.argv[1] == "0" else reversed(specs):
    record.note(spec, "sm_80")
"""


def test_processes_record_side_by_side(tmp_path):
    from processes import environment

    file = tmp_path / "record.jsonl"
    env = environment(RTFLASH_RECORD=str(file))
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(n % 2)], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for n in range(3)
    ]  # fmt: skip
    for worker in workers:
        assert worker.stdout.readline()
    for worker in workers:
        worker.stdin.close()
    assert [worker.wait(60) for worker in workers] == [0] * 3
    for worker in workers:
        worker.stdout.close()
    lines = file.read_bytes().splitlines()
    assert len(lines) == len(set(lines)) == 60
    assert len(record.read(file)) == 60


def test_the_templates_digest_is_what_the_cache_hashes():
    assert bundle.maker()["templates"] == render.digest()
    assert len(hashlib.sha256(CUBIN).hexdigest()) == len(render.digest())


ON_THE_GPU = """
import sys
import cupy, numpy as np
import rtflash
q = cupy.asarray(np.random.default_rng(0).standard_normal((3, 1, 65, 2, 64)).astype(np.float16))
out = cupy.asnumpy(rtflash.flash_attn_func(*q, causal=True))
from rtflash import artifacts
print(artifacts.compile_count, b"libnvrtc" in open("/proc/self/maps", "rb").read(), hash(out.tobytes()))
"""


@pytest.mark.gpu
def test_a_recorded_program_runs_from_its_bundle(tmp_path):
    """record -> generate -> bundle: the same result, nothing compiled, libnvrtc not loaded."""
    pytest.importorskip("typer")
    from processes import environment

    def run(command, **variables):
        env = environment(
            PYTHONHASHSEED="0", RTFLASH_CACHE_DIR=str(tmp_path / "cache"), **variables
        )
        done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout.split()

    program = [sys.executable, "-c", ON_THE_GPU]
    kept, file = tmp_path / "record.jsonl", tmp_path / "kernels.zip"
    count, _, expected = run(program, RTFLASH_RECORD=str(kept))
    assert int(count) == len(record.read(kept)) > 0
    command = [sys.executable, "-m", "rtflash", "generate", "--record", str(kept)]
    run([*command, "--bundle", str(file)])
    variables = {"RTFLASH_BUNDLE": str(file), "RTFLASH_NO_COMPILE": "1", "RTFLASH_CACHE": "0"}
    assert run(program, **variables) == ["0", "False", expected]
