"""tools/generate.py: which variants, what is written, what fails; and tools/sass.py's counting."""

import dataclasses
import importlib.util
import json
import math
import re
import shlex
import struct
import subprocess
import sys
import zipfile
from importlib import metadata
from types import SimpleNamespace

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from fake_gpu import view
from typer.testing import CliRunner

import rtflash
from rtflash import (
    ahead,
    artifacts,
    build,
    bundle,
    cache,
    device,
    layouts,
    listed,
    nvrtc,
    record,
    select,
)
from rtflash.__main__ import import_tool
from rtflash.describe import kvcache
from rtflash.nvrtc import Resources
from rtflash.other_specs import AppendSpec
from rtflash.problem import Tensors
from rtflash.spec import Spec

cli, generate, sass = (import_tool(name) for name in ("cli", "generate", "sass"))
generated, served = (import_tool(name) for name in ("generated", "served"))

PLAIN = [frozenset()]
CLEAN = Resources(
    registers=128, static_shared_bytes=0, local_bytes=0, spill_stores=0, spill_loads=0, seconds=0.5
)


def run(*arguments):
    return CliRunner().invoke(cli.app, ["generate", *(str(argument) for argument in arguments)])


def words(result):
    """What a command said, without the frame that typer breaks its errors in."""
    return " ".join(result.output.replace("│", " ").split())


def fake_compile(log="", **resources):
    """A compiler that needs no NVRTC and gives every variant the same resources."""

    def compile(spec, arch, lines=True):
        used = dataclasses.replace(CLEAN, **resources)
        return artifacts.Artifact(
            spec, arch, b"\x7fELF", "// source", log, (), used, "0" * 12, None
        )

    return compile


@pytest.fixture
def fake(monkeypatch):
    """Install a fake compiler."""

    def install(**options):
        monkeypatch.setattr(artifacts, "compile", fake_compile(**options))
        monkeypatch.setattr(generate.nvrtc, "version", lambda: (13, 0))
        monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))

    return install


def test_variants_are_distinct_and_as_asked():
    calls = served.problems(
        ["fp16", "bf16"],
        [(64, 64), (192, 128)],
        ["full", "causal", "window"],
        PLAIN,
        [(8192, 8192)],
    )
    chosen, refused = served.variants(["sm_80", "sm_90a"], calls)
    assert not refused
    assert len(set(chosen)) == len(chosen) == 2 * 2 * 3 * 2
    specs = [variant.spec for variant in chosen]
    assert {spec.mask for spec in specs} == {"full", "causal", "window"}
    assert {(spec.head_dim, spec.head_dim_v) for spec in specs} == {(64, 64), (192, 128)}


def test_four_variants_by_length():
    calls = list(served.problems(["fp16"], [(64, 64)], ["full"], PLAIN, served.LENGTHS["all"]))
    chosen, _ = served.variants(["sm_80"], calls)
    assert {(v.spec.even_m, v.spec.even_n) for v in chosen} == {
        (m, n) for m in (False, True) for n in (False, True)
    }


def test_table_is_listed_for_each_architecture():
    chosen = served.table_variants(["sm_75", "sm_90a"])
    assert len(set(chosen)) == len(chosen)
    assert {variant.arch for variant in chosen} == {"sm_75", "sm_90a"}
    assert all(variant.spec.isa == 75 for variant in chosen if variant.arch == "sm_75")


INFERENCE = [
    {"varlen": True},
    {"decode": True},
    {"varlen": True, "decode": True, "paged": True},
    {"decode": True, "append": True, "rotary": "halves"},
    {"decode": True, "paged": True, "strided": True},
]


@pytest.mark.parametrize("mask", ["full", "causal", "window"])
@pytest.mark.parametrize("options", INFERENCE, ids=lambda options: "_".join(options))
def test_inference_variants_are_those_of_warmup(monkeypatch, options, mask):
    """What a wheel of kernels holds is what a serving process would compile at its start."""
    loaded = set()
    monkeypatch.setattr(device, "get", lambda index: device.for_arch("sm_90a"))
    monkeypatch.setattr(
        build, "kernel", lambda spec, gpu: loaded.add(spec) or SimpleNamespace(spec=spec)
    )
    strided = options.get("strided", False)
    calls = served.problems(["bf16"], [(64, 64)], [mask], PLAIN, served.LENGTHS["all"], strided)
    wanted = {name: value for name, value in options.items() if name != "strided"}
    chosen, _ = served.variants(["sm_90a"], calls, served.Inference(**wanted))
    kvcache = {"kvcache": options["decode"]} if "decode" in options else {}
    others = {name: value for name, value in options.items() if name != "decode"}
    features = {"full": {}, "causal": {"causal": True}, "window": {"window": True}}[mask]
    ahead.warmup(64, "bf16", group=4, **features, **kvcache, **others)
    made = {variant.spec for variant in chosen}
    if kvcache:
        assert made == loaded
    else:  # warmup prepares for few queries, too
        assert made <= loaded
        assert {spec for spec in loaded if getattr(spec, "ragged", False)} <= made


def test_what_tma_cannot_read_is_an_option():
    def asked(strided):
        calls = served.problems(["bf16"], [(128, 128)], ["causal"], PLAIN, [(8192, 8192)], strided)
        wanted = served.Inference(varlen=True, paged=True)
        return set(served.variants(["sm_80", "sm_90a"], calls, wanted)[0])

    plain, added = asked(False), asked(True) - asked(False)
    assert not any(getattr(variant.spec, "gather", False) for variant in plain)
    assert all(variant.arch == "sm_90a" and variant.spec.gather for variant in added)
    (row_major,) = served.problems(["bf16"], [(128, 128)], ["causal"], PLAIN, [(8192, 8192)])
    pages = dataclasses.replace(row_major, ragged=True, page_size=16)
    for call in (
        dataclasses.replace(row_major, boxes=False),
        dataclasses.replace(pages, page_size=12),
        dataclasses.replace(pages, leftpad=True),
        dataclasses.replace(pages, leftpad=True, seqlen_q=31, num_splits=2),
    ):
        spec, _ = select.forward(call, device.for_arch("sm_90a"))
        assert served.Variant(spec, "sm_90a") in added


def test_decoding_needs_splits_and_their_merge():
    calls = served.problems(["bf16"], [(128, 128)], ["causal"], PLAIN, [(8192, 8192)])
    wanted = served.Inference(decode=True, append=True, rotary="interleaved")
    specs = [variant.spec for variant in served.variants(["sm_80"], calls, wanted)[0]]
    assert {spec.kernel_file for spec in specs} == {"forward_sm80.cu", "combine.cu", "append.cu"}
    forward = [spec for spec in specs if isinstance(spec, Spec)]
    assert {(spec.split, spec.key_warps > 1) for spec in forward} == {
        (False, False), (True, False), (False, True), (True, True),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--paged",), "--paged"),
        (("--append",), "--append"),
        (("--decode", "--rotary", "halves"), "--rotary"),
        (("--strided",), "--strided adds to the kernel for Hopper alone; --arch is sm_80"),
        (("--decode", "--append", "--rotary", "quarters"), "--rotary"),
    ],
)
def test_inference_options_that_would_do_nothing_are_refused(fake, options, named):
    fake()
    result = run("--arch", "sm_80", *options)
    assert result.exit_code == 2
    assert named in words(result)


def test_strided_is_taken_where_one_architecture_is_hopper(fake):
    fake()
    options = ("--head-dim", "64", "--mask", "full", "--length", "even")
    assert "variants: 3," in run("--arch", "sm_80,sm_90", *options, "--strided").output


def test_inference_is_compiled_with_the_dense_calls(fake):
    fake()
    options = ("--arch", "sm_80", "--head-dim", "64", "--mask", "full", "--length", "even")
    assert "variants: 1," in run(*options).output
    result = run(*options, "--decode", "--append")
    assert result.exit_code == 0, result.output
    assert "append__bf16" in result.output
    assert "combine__fp32_bf16" in result.output


def test_features_reach_the_spec():
    both = frozenset({"softcap", "alibi"})
    calls = served.problems(["fp16"], [(64, 64)], ["full"], [both], [(8192, 8192)])
    (variant,), _ = served.variants(["sm_80"], calls)
    assert variant.spec.softcap
    assert variant.spec.alibi


def test_bf16_on_turing_is_skipped_with_a_reason(fake):
    fake()
    result = run("--arch", "sm_75,sm_80", "--length", "even", "--mask", "full")
    assert result.exit_code == 0, result.output
    assert "skipped sm_75" in result.output
    assert "variants: 1," in result.output


@pytest.mark.parametrize(
    "found",
    [{"spill_stores": 8}, {"local_bytes": 16}, {"log": "ptxas info : (C7510) serialized wgmma"}],
)
def test_a_fault_fails_unless_allowed(fake, found):
    fake(**found)
    assert run("--arch", "sm_80", "--length", "even").exit_code == 1
    assert run("--arch", "sm_80", "--length", "even", "--allow-faults").exit_code == 0


def test_an_error_of_the_compiler_is_shown(fake, monkeypatch, tmp_path):
    def refuse(spec, arch, lines):
        raise artifacts.CompileError(spec, arch, (), "softmax.cuh(3): error: no", tmp_path)

    fake()
    monkeypatch.setattr(artifacts, "compile", refuse)
    result = run("--arch", "sm_80", "--length", "even", "--mask", "full")
    assert result.exit_code == 1
    assert "softmax.cuh(3): error: no" in result.output


def test_files_and_report(fake, tmp_path):
    fake()
    out, report = tmp_path / "out", tmp_path / "report.json"
    result = run("--arch", "sm_80", "--length", "even", "--out", out, "--json", report)
    assert result.exit_code == 0, result.output
    rows = json.loads(report.read_text(encoding="utf-8"))
    assert len(rows) == 2
    for row in rows:
        place = out / row["arch"] / row["name"]
        written = {file.name for file in place.iterdir()}
        assert {"kernel.cu", "kernel.cubin", "spec.json", "launch.json"} <= written
        record = json.loads((place / "spec.json").read_text(encoding="utf-8"))
        assert Spec(**record["spec"]).name == row["name"]
        assert row["registers"] == 128
        assert row["faults"] == []


def blocks(described, **numbers):
    """How many CTAs launch.json says."""
    return eval(described["grid"].replace("ceil", "math.ceil"), {"math": math}, numbers)


def test_launch_json_says_how_to_launch():
    """The grid is select's, what Params are is launch's."""
    gpu = device.for_arch("sm_80")
    new, cache = view(2, 4, 2, 64), view(2, 640, 2, 64)
    tensors = Tensors(q=view(2, 5, 6, 64), k=cache, v=cache, k_new=new, v_new=new)
    odd = kvcache(tensors._replace(seqused_k=view(2, dtype="int32")), num_splits=3)
    few, grid = select.forward(odd, gpu)
    assert few.pack_gqa
    assert grid.splits == 3
    numbers = {"seqlen_q": 5, "group": 3, "heads": 6, "batch": 2, "splits": 3}
    assert blocks(generated.launch_record(few), **numbers) == grid.blocks
    many = dataclasses.replace(few, pack_gqa=False)
    assert blocks(generated.launch_record(many), **numbers) == select.grid(many, odd, gpu, 3).blocks
    append, grid = select.append(odd)
    numbers = {"batch": 2, "seqlen_new": 4, "heads": 2}
    assert blocks(generated.launch_record(append), **numbers) == grid.blocks
    merge, grid = select.combine(select.splits_combine(odd, 3), True)
    assert blocks(generated.launch_record(merge), batch=2, seqlen=5, heads=6) == grid.blocks

    described = generated.launch_record(few)
    assert described["symbol"] == few.name
    assert (described["threads"], described["dynamic_shared_bytes"]) == (
        few.threads,
        few.shared_bytes,
    )
    fields = described["params"]
    assert [field["name"] for field in fields] == list(layouts.FORWARD.fields)
    assert fields[1] == {"name": "k", "type": "pointer", "offset": 8}
    assert fields[-1]["type"] == "float32"
    assert described["params_bytes"] == -(-(fields[-1]["offset"] + 4) // 8) * 8


def test_a_real_compilation(tmp_path):
    pytest.importorskip("cupy")
    options = ("--head-dim", "64", "--length", "even", "--mask", "causal", "--out", tmp_path)
    result = run("--arch", "sm_80", *options)
    assert result.exit_code == 0, result.output
    (file,) = tmp_path.rglob("kernel.cubin")
    cubin = file.read_bytes()
    assert cubin.startswith(b"\x7fELF")
    # The program headers stand last: NVIDIA's disassemblers refuse a file that lacks a byte of them.
    (start,), (entry, count) = (
        struct.unpack_from("<Q", cubin, 32),
        struct.unpack_from("<HH", cubin, 54),
    )
    assert start + entry * count <= len(cubin)


def test_without_nvrtc_it_says_what_to_install(monkeypatch):
    def missing():
        raise ImportError("install rtflash[cuda13]")

    monkeypatch.setattr(generate.nvrtc, "version", missing)
    result = run("--arch", "sm_80")
    assert result.exit_code == 2
    assert "rtflash[cuda13]" in result.output


@pytest.mark.parametrize(
    "wrong",
    [
        ("--arch", "sm_1"),
        ("--head-dim", "wide"),
        ("--head-dim", "0"),
        ("--head-dim", "257"),
        ("--head-dim", "8x300"),
        ("--mask", "none"),
        ("--dtype", "fp32"),
    ],
)
def test_bad_options_are_refused(wrong):
    result = run(*wrong)
    assert result.exit_code == 2
    assert wrong[1] in result.output


def test_places_that_cannot_be_written_are_refused_before_the_work(fake, monkeypatch, tmp_path):
    fake()
    monkeypatch.setattr(artifacts, "compile", None)
    file = tmp_path / "file"
    file.write_text("kept", encoding="utf-8")
    for option, place in [
        ("--out", file),
        ("--out", file / "x"),
        ("--json", tmp_path),
        ("--json", tmp_path / "missing" / "x"),
    ]:
        result = run("--arch", "sm_80", option, place)
        assert result.exit_code == 2, result.output
        assert option in result.output
    assert file.read_text(encoding="utf-8") == "kept"
    assert list(tmp_path.iterdir()) == [file]


def test_lengths_are_a_list(fake):
    fake()
    options = ("--arch", "sm_80", "--head-dim", "64", "--mask", "full")
    assert "variants: 1," in run(*options, "--length", "even").output
    assert "variants: 2," in run(*options, "--length", "even,odd").output
    assert "variants: 4," in run(*options, "--length", "odd,all").output


@pytest.mark.parametrize(
    "given",
    [
        ("--dtype", "fp16"),
        ("--head-dim", "64"),
        ("--mask", "full"),
        ("--length", "even"),
        ("--decode",),
    ],
)
def test_table_goes_with_no_choice_of_calls(fake, given):
    fake()
    result = run("--table", "--arch", "sm_75", *given)
    assert result.exit_code == 2
    assert given[0] in result.output


def test_table_compiles_the_table(fake):
    fake()
    result = run("--table", "--arch", "sm_75")
    assert result.exit_code == 0, result.output
    assert f"variants: {len(served.table_variants(['sm_75']))}," in result.output


def test_sass_counts_instructions():
    text = """
.text.kernel_one:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDSM.16.M88.4 R4, [R2] ;
        /*0020*/                   HMMA.16816.F32 R8, R4, R6, R8 ;
        /*0030*/                   HMMA.16816.F32 R8, R4, R6, R8 ;
                Function : kernel_two
        /*0000*/              @UP1 STL [R1], R2 ;
"""
    one, two = sass.count(text).values()
    assert (one["HMMA"], one["LDSM"], one["total"]) == (2, 1, 4)
    assert (two["STL"], two["total"]) == (1, 1)


def test_hopper_gets_a_kernel_of_its_own():
    """By TMA for rows of whole 16 bytes, else row by row, but for short rows of single elements."""
    for dim, isa, gather in ((64, 90, False), (60, 90, True), (33, 80, False)):
        calls = served.problems(["bf16"], [(dim, dim)], ["full"], PLAIN, [(1024, 1024)])
        chosen, refused = served.variants(["sm_90a"], calls)
        assert [(variant.spec.isa, variant.spec.gather) for variant in chosen] == [(isa, gather)]
        assert not refused


ONE = ("--arch", "sm_80", "--head-dim", "64", "--mask", "full", "--length", "even")


@pytest.fixture
def loads(monkeypatch, tmp_path):
    """A process that loads without a driver and cannot compile."""
    monkeypatch.setenv("RTFLASH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_kernels", {})
    monkeypatch.setattr(
        build, "load", lambda made, gpu: build.Kernel(made.spec, made, 1, made.resources)
    )
    monkeypatch.setenv("RTFLASH_NO_COMPILE", "1")


def test_bundle_is_what_a_gpu_loads(fake, loads, monkeypatch, tmp_path):
    fake()
    file = tmp_path / "a b" / "kernels é.zip"
    file.parent.mkdir()
    result = run(*ONE, "--decode", "--bundle", file)
    assert result.exit_code == 0, result.output
    monkeypatch.setenv("RTFLASH_BUNDLE", str(file))
    gpu = device.for_arch("sm_80")
    calls = served.problems(["bf16"], [(64, 64)], ["full"], PLAIN, [(8192, 8192)])
    chosen, _ = served.variants(["sm_80"], calls, served.Inference(decode=True))
    for variant in chosen:
        assert build.kernel(variant.spec, gpu).raw.cubin == b"\x7fELF"
    assert f"{len(chosen)} kernels for sm_80" in result.output
    assert run(*ONE, "--decode", "--bundle", tmp_path / "same.zip").exit_code == 0
    assert (tmp_path / "same.zip").read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    ("arch", "spec"),
    [
        ("sm_80", Spec("bf16", 96, 96, 64, 64, 4, 1, mask="window", prescale=True, alibi=True, align=8)),
        ("sm_90", Spec("bf16", 96, 96, 128, 64, 8, 2, isa=90, ragged=True, paged=True, gather=True)),
    ],
    ids=["sm_80", "gather"],
)  # fmt: skip
def test_the_command_of_a_miss_adds_the_variant(fake, loads, monkeypatch, tmp_path, arch, spec):
    fake()
    file = tmp_path / "kernels.zip"
    assert run("--arch", arch, *ONE[2:], "--bundle", file).exit_code == 0
    monkeypatch.setenv("RTFLASH_BUNDLE", str(file))
    gpu, held = device.for_arch(arch), bundle.read(file).kernels
    with pytest.raises(build.MissingKernelError) as caught:
        build.kernel(spec, gpu)
    (line,) = [x for x in str(caught.value).splitlines() if x.startswith("rtflash generate")]
    result = run(*shlex.split(line)[2:])
    assert result.exit_code == 0, result.output
    assert "already there: 1" in result.output
    bundle.read.cache_clear()  # as in another process
    assert build.kernel(spec, gpu).raw.spec == spec
    assert len(bundle.read(file).kernels) == len(held) + 1
    again = run(*shlex.split(line)[2:])
    assert "variants: 0" in again.output
    assert again.exit_code == 0


def test_a_record_is_compiled(fake, monkeypatch, tmp_path):
    fake()
    file = tmp_path / "record.jsonl"
    monkeypatch.setenv("RTFLASH_RECORD", str(file))
    monkeypatch.setattr(record, "_noted", set())
    gpu = device.for_arch("sm_90a")
    specs = listed.table_specs(gpu)[:3]
    for spec in specs:
        record.note(spec, "sm_90a")
    record.note(AppendSpec("bf16"), "sm_80")
    report = tmp_path / "report.json"
    assert run("--record", file, "--json", report).exit_code == 0
    rows = json.loads(report.read_text(encoding="utf-8"))
    assert [row["name"] for row in rows] == [*(x.name for x in specs), AppendSpec("bf16").name]
    assert "variants: 1," in run("--record", file, "--arch", "sm_80").output
    result = run("--record", file, "--arch", "sm_75")
    assert result.exit_code == 2
    assert "has variants for sm_80, sm_90a; --arch is sm_75" in words(result)
    (tmp_path / "empty.jsonl").touch()
    assert "has no variants" in words(run("--record", tmp_path / "empty.jsonl"))


HOPPER = record.text(Spec("bf16", 64, 64, 64, 64, 4, 2, isa=90))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (
            ("--record", "missing.jsonl"),
            "--record: there is no missing.jsonl. Calls on a GPU write",
        ),
        (("--record", __file__), "no variant (no JSON); one is"),
        (("--spec", "kernel=none"), "--spec"),
        (
            ("--spec", f"{record.EXAMPLES['forward']},head_dim=64"),
            "head_dim is given as 128 and as 64",
        ),
        (
            ("--arch", "sm_80", "--spec", HOPPER),
            "isa is 90",
        ),
        (
            ("--arch", "sm_75", "--spec", record.EXAMPLES["forward"]),
            "isa is 80; for sm_75 it must be 75",
        ),
        (
            ("--arch", "compute_90", "--spec", HOPPER),
            "isa is 90; for compute_90 it must be 75 or 80: wgmma and setmaxnreg are sm_90a's alone",
        ),
        (("--arch", "sm_90a,compute_120", "--spec", HOPPER), "isa is 90; for compute_120 it must"),
        (
            ("--arch", "compute_75", "--spec", record.EXAMPLES["forward"]),
            "isa is 80; for compute_75 it must be 75",
        ),
        (
            ("--arch", "compute_50", "--spec", record.EXAMPLES["forward"]),
            "arch is compute_50; it must be compute_75 or newer",
        ),
        (("--spec", "kernel=combine,dtype=bf16", "--table"), "--spec"),
        (("--spec", "kernel=combine,dtype=bf16", "--decode"), "--decode"),
        (("--add",), "--add"),
        (("--bundle", __file__, "--add"), "--add"),
        (("--name", "x"), "--name"),
        (("--json", "x.png", "--plot", "./x.png"), "--json and --plot are both x.png"),
        (("--wheel", ".", "--name", "A-b"), "--name"),
        (("--plot", "x.txt"), "--plot"),
        (("--bundle", "missing/kernels.zip"), "--bundle: there is no folder missing"),
        (("--spec", "sm80"), "--spec: 'sm80' is no NAME=VALUE"),
        (("--wheel", __file__), "--wheel"),
    ],
)
def test_options_that_cannot_be_obeyed_are_refused_before_the_work(
    fake, monkeypatch, tmp_path, options, named
):
    fake()
    monkeypatch.setattr(artifacts, "compile", None)
    monkeypatch.chdir(tmp_path)
    result = run(*options)
    assert result.exit_code == 2, result.output
    assert named in words(result)


def test_an_old_gpu_is_refused_bf16_by_the_option(fake):
    fake()
    result = run("--arch", "sm_75,sm_80", "--mask", "full", "--length", "even")
    assert result.exit_code == 0
    assert "skipped sm_75: bf16 needs sm_80, use --dtype fp16\n" in result.output
    assert "variants: 1," in result.output


@pytest.mark.parametrize("option", ["--spec", "--record"])
def test_a_tile_that_no_gpu_has_the_memory_for_is_refused(fake, tmp_path, option):
    """Q and two buffers of K and V, on sm_86; sm_80 has the memory."""
    fake()
    spec = Spec("bf16", 128, 128, 128, 96, 4, 2)
    file = tmp_path / "record.jsonl"
    described = [record.described(spec, arch) for arch in ("sm_80", "sm_88", "sm_86")]
    file.write_text("\n".join(map(json.dumps, described)), encoding="utf-8")
    given = {"--spec": record.text(spec), "--record": file}[option]
    assert run(option, given, "--arch", "sm_80").exit_code == 0
    result = run(option, given, "--arch", "sm_80,sm_86")
    assert result.exit_code == 2
    needed, most = 128 * 256 + 4 * 96 * 256, 99 * 1024
    assert (
        f"{option}: {spec.name} needs {needed} bytes of shared memory; for sm_86 it must be at most {most}"
        in words(result)
    )
    if option == "--record":  # what a typical sm_88 has is not known here
        (tmp_path / "other.jsonl").write_text(json.dumps(described[1]), encoding="utf-8")
        assert run("--record", tmp_path / "other.jsonl").exit_code == 0


def test_an_index_of_odd_values_is_not_added_to(fake, tmp_path):
    fake()
    file = tmp_path / "kernels.zip"
    index = {**bundle.maker(), "kernels": {"sm_80/x.cubin": {"arch": "sm_80"}}}
    index["checksum"] = cache.checksum(index)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(bundle.INDEX, json.dumps(index))
    result = run(*ONE, "--bundle", file, "--add")
    assert result.exit_code == 2
    assert "sm_80/x.cubin of the bundle" in words(result)


def test_a_bundle_of_another_version_is_not_added_to(fake, monkeypatch, tmp_path):
    fake()
    file = tmp_path / "kernels.zip"
    assert run(*ONE, "--bundle", file).exit_code == 0
    before = file.read_bytes()
    bundle.read.cache_clear()
    monkeypatch.setattr(bundle, "maker", lambda: {"rtflash": "9.9"})
    result = run(*ONE, "--bundle", file, "--add")
    assert result.exit_code == 2
    assert "this is rtflash 9.9" in words(result)
    assert file.read_bytes() == before


def test_faults_leave_no_bundle_unless_allowed(fake, tmp_path):
    fake(spill_stores=8)
    file = tmp_path / "kernels.zip"
    result = run(*ONE, "--bundle", file)
    assert result.exit_code == 1
    assert "no bundle is written" in result.output
    assert not file.exists()
    assert run(*ONE, "--bundle", file, "--allow-faults").exit_code == 0
    assert file.exists()


def test_what_is_written_is_told_with_what_to_do_next(fake, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    fake()
    monkeypatch.chdir(tmp_path)
    outputs = ("--out", "made", "--bundle", "k.zip", "--json", "r.json", "--plot", "p.png")
    result = run(*ONE, *outputs, "--jobs", 2)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    for line in (
        "compiling 1 variant, 2 at a time",
        "files: made, of 1 kernel",
        f'use them: edit a kernel.cu, then RTFLASH_OVERRIDE="{tmp_path / "made"}" python program.py',
        "report: r.json, of 1 variant",
        "plot: p.png",
        f'use it: RTFLASH_BUNDLE="{tmp_path / "k.zip"}" python program.py',
    ):
        assert line in lines
    result = run(*ONE, "--bundle", "k.zip", "--add")
    assert result.exit_code == 0, result.output
    assert "nothing to compile: 1 variant asked for, all there already" in result.output
    assert "compiling" not in result.output
    assert "registers" not in result.output


def test_a_log_has_a_line_of_progress_every_few_seconds(fake, monkeypatch):
    fake()
    result = run(*ONE, "--head-dim", "32,64,96")
    assert result.stderr == ""
    monkeypatch.setattr(generate, "EVERY", 0)
    result = run(*ONE, "--head-dim", "32,64,96")
    assert result.stderr.splitlines() == ["1/3, 0 s", "2/3, 0 s"]


def test_sources_that_were_edited_are_kept(fake, tmp_path):
    """With all that lies beside them, as by a dump; other line ends are no edit."""
    fake(log="a line")
    options = (*ONE[:-1], "all", "--out", tmp_path)
    assert run(*options).exit_code == 0
    first, second, *_ = files = sorted(tmp_path.rglob("kernel.cu"))
    assert len(files) == 4
    first.write_bytes(b"// mine")
    second.write_bytes(second.read_bytes().replace(b"\n", b"\r\n"))
    for file in (first, second):
        (file.parent / "build.log").write_bytes(b"mine")
    result = run(*options)
    assert result.exit_code == 0, result.output
    assert first.read_bytes() == b"// mine"
    assert (first.parent / "build.log").read_bytes() == b"mine"
    assert (second.parent / "build.log").read_bytes() == b"a line"
    (kept,) = [line for line in result.output.splitlines() if line.startswith("kept ")]
    assert str(first) in kept
    assert f"files: {tmp_path}, of 3 kernels" in result.output


def test_a_wheel_is_installed_and_found(fake, loads, monkeypatch, tmp_path):
    fake()
    result = run(*ONE, "--wheel", tmp_path / "wheels", "--name", "my_model")
    assert result.exit_code == 0, result.output
    (file,) = (tmp_path / "wheels").iterdir()
    assert f'pip install --no-index "{file}"' in result.output
    site = tmp_path / "site é"
    if importlib.util.find_spec("pip"):
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
        subprocess.run([*command, "--target", site, file], check=True)
    else:
        zipfile.ZipFile(file).extractall(site)
    (found,) = metadata.distributions(name="rtflash_bundle_my_model", path=[str(site)])
    assert file.name == f"rtflash_bundle_my_model-{found.version}-py3-none-any.whl"
    assert found.version.startswith(f"{rtflash.__version__}+k")
    assert found.requires == [f"rtflash=={rtflash.__version__}"]
    with zipfile.ZipFile(file) as archive:
        for entry in found.files:
            if entry.hash and str(entry) in archive.namelist():
                digest = import_tool("wheel").digest(archive.read(str(entry)))
                assert (digest, "sha256") == (entry.hash.value, entry.hash.mode)
    monkeypatch.syspath_prepend(str(site))
    calls = served.problems(["bf16"], [(64, 64)], ["full"], PLAIN, [(8192, 8192)])
    ((spec, _),), _ = served.variants(["sm_80"], calls)
    assert build.kernel(spec, device.for_arch("sm_80")).raw.cubin == b"\x7fELF"


def test_other_kernels_make_a_wheel_of_another_version():
    """Else pip would leave an installed one where it is; the same kernels are the same wheel."""
    wheel = import_tool("wheel")
    (first, data), again, (other, _) = (
        wheel.build("x", kernels, "") for kernels in (b"1", b"1", b"2")
    )
    assert (first, data) == again
    assert first != other
    assert re.fullmatch(
        rf"rtflash_bundle_x-{rtflash.__version__}\+k[0-9a-f]{{12}}-py3-none-any.whl", first
    )


def test_report_has_occupancy_and_a_plot(fake, tmp_path):
    pytest.importorskip("matplotlib")
    fake()
    report, image = tmp_path / "report.json", tmp_path / "plot.png"
    options = ("--arch", "sm_80,sm_86", "--head-dim", "64", "--mask", "full", "--length", "even")
    assert run(*options, "--json", report, "--plot", image).exit_code == 0
    assert image.stat().st_size > 1000
    for row in json.loads(report.read_text(encoding="utf-8")):
        # 128 registers of 128 threads: 4 CTAs; 48 KB of shared memory and 1 KB kept by the system: 3, or 2.
        assert row["shared_bytes"] == 49152
        assert row["ctas_per_sm"] == {"sm_80": 3, "sm_86": 2}[row["arch"]]
        assert row["occupancy"] == round(
            row["ctas_per_sm"] * 4 / {"sm_80": 64, "sm_86": 48}[row["arch"]], 3
        )


def test_a_plot_of_one_kernel_has_a_bar(fake, tmp_path):
    """Not a panel that is full of it."""
    image = pytest.importorskip("matplotlib.image")
    fake()
    file = tmp_path / "plot.png"
    spec = record.EXAMPLES["combine"]
    assert run("--arch", "sm_80", "--spec", spec, "--plot", file).exit_code == 0
    red, _, blue, _ = image.imread(file).transpose(2, 0, 1)
    assert 0.1 < (blue - red > 0.5).any(axis=1).mean() < 0.4


def test_where_nothing_compiles_there_is_no_plot(fake, tmp_path):
    pytest.importorskip("matplotlib")
    fake()
    file, image = tmp_path / "kernels.zip", tmp_path / "plot.png"
    options = ("--arch", "sm_80", "--spec", record.EXAMPLES["combine"], "--bundle", file, "--add")
    assert run(*options).exit_code == 0
    result = run(*options, "--plot", image)
    assert result.exit_code == 0
    assert "no plot: no kernel compiled" in result.output
    assert not image.exists()


def test_bundles_are_compiled_without_line_numbers(monkeypatch, tmp_path):
    pytest.importorskip("cupy")
    file = tmp_path / "kernels.zip"
    spec = Spec("fp16", 16, 16, 32, 16, 2, 1, isa=75)
    assert run("--arch", "sm_80", "--spec", record.text(spec), "--bundle", file).exit_code == 0
    made = bundle.code(bundle.read(file), spec, "sm_80")
    with_lines = artifacts.compile(spec, "sm_80").cubin
    assert made.cubin.startswith(b"\x7fELF")
    assert spec.name.encode() in made.cubin
    assert b".debug_line" not in made.cubin
    assert len(made.cubin) < len(with_lines)


def test_architectures_are_taken_by_either_name(fake, tmp_path):
    fake()
    file = tmp_path / "kernels.zip"
    assert run(*ONE[2:], "--arch", "sm_90", "--bundle", file).exit_code == 0
    assert bundle.read(file).archs == ("sm_90a",)
