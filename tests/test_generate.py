"""tools/generate.py: which variants, what is written, what fails; and tools/sass.py's counting."""

import dataclasses
import json
import math
import struct
from types import SimpleNamespace

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from fake_gpu import view
from typer.testing import CliRunner

from rtflash import ahead, build, device, launch, select
from rtflash.__main__ import import_tool
from rtflash.nvrtc import Resources
from rtflash.problem import Tensors, kvcache
from rtflash.spec import Spec

cli, generate, sass = (import_tool(name) for name in ("cli", "generate", "sass"))
generated, served = (import_tool(name) for name in ("generated", "served"))

PLAIN = [frozenset()]
CLEAN = Resources(
    registers=128, static_shared_bytes=0, local_bytes=0, spill_stores=0, spill_loads=0, seconds=0.5
)


def run(*arguments):
    return CliRunner().invoke(cli.app, ["generate", *(str(argument) for argument in arguments)])


def fake_compile(log="", **resources):
    """A compiler that needs no NVRTC and gives every variant the same resources."""

    def compile(spec, arch, lines=True):
        used = dataclasses.replace(CLEAN, **resources)
        return build.Artifact(spec, arch, b"\x7fELF", "// source", log, (), used, "0" * 12, None)

    return compile


@pytest.fixture
def fake(monkeypatch):
    """Install a fake compiler."""

    def install(**options):
        monkeypatch.setattr(build, "compile", fake_compile(**options))
        monkeypatch.setattr(generate.nvrtc, "version", lambda: (13, 0))
        monkeypatch.setattr(build.nvrtc, "version", lambda: (13, 0))

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
    calls = served.problems(["bf16"], [(64, 64)], [mask], PLAIN, served.LENGTHS["all"])
    chosen, _ = served.variants(["sm_90a"], calls, served.Inference(**options))
    kvcache = {"kvcache": options["decode"]} if "decode" in options else {}
    others = {name: value for name, value in options.items() if name != "decode"}
    features = {"full": {}, "causal": {"causal": True}, "window": {"window": True}}[mask]
    ahead.warmup(64, "bf16", **features, **kvcache, **others)
    made = {variant.spec for variant in chosen}
    if kvcache:
        assert made == loaded
    else:  # warmup prepares for few queries, too
        assert made <= loaded
        assert {spec for spec in loaded if getattr(spec, "ragged", False)} <= made


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
        (("--decode", "--append", "--rotary", "quarters"), "--rotary"),
    ],
)
def test_inference_options_that_would_do_nothing_are_refused(fake, options, named):
    fake()
    result = run("--arch", "sm_80", *options)
    assert result.exit_code == 2
    assert named in result.output


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
        raise build.CompileError(spec, arch, (), "softmax.cuh(3): error: no", tmp_path)

    fake()
    monkeypatch.setattr(build, "compile", refuse)
    result = run("--arch", "sm_80", "--length", "even", "--mask", "full")
    assert result.exit_code == 1
    assert "softmax.cuh(3): error: no" in result.output


def test_files_and_report(fake, tmp_path):
    fake()
    out, report = tmp_path / "out", tmp_path / "report.json"
    result = run("--arch", "sm_80", "--length", "even", "--out", out, "--json", report)
    assert result.exit_code == 0, result.output
    rows = json.loads(report.read_text())
    assert len(rows) == 2
    for row in rows:
        place = out / row["arch"] / row["name"]
        written = {file.name for file in place.iterdir()}
        assert {"kernel.cu", "kernel.cubin", "spec.json", "launch.json"} <= written
        record = json.loads((place / "spec.json").read_text())
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
    assert [field["name"] for field in fields] == list(launch.FORWARD.fields)
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
    monkeypatch.setattr(build, "compile", None)
    file = tmp_path / "file"
    file.write_text("kept")
    for option, place in [
        ("--out", file),
        ("--out", file / "x"),
        ("--json", tmp_path),
        ("--json", tmp_path / "missing" / "x"),
    ]:
        result = run("--arch", "sm_80", option, place)
        assert result.exit_code == 2, result.output
        assert option in result.output
    assert file.read_text() == "kept"
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
    """For tensors that TMA can copy: rows of whole 16 bytes."""
    for dim, isa in ((64, 90), (60, 80)):
        calls = served.problems(["bf16"], [(dim, dim)], ["full"], PLAIN, [(1024, 1024)])
        chosen, refused = served.variants(["sm_90a"], calls)
        assert [variant.spec.isa for variant in chosen] == [isa]
        assert not refused
