"""The tile sweep, tools/tune.py: candidates, labels, padding and refusals, on a machine with or without a GPU."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

import typer
from typer.testing import CliRunner

from rtflash import build, device, select, tiles
from rtflash.__main__ import import_tool
from rtflash.problem import Problem

trial, tune = import_tool("trial"), import_tool("tune")

ROOT = Path(__file__).resolve().parents[1]
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_90")


def run(*arguments):
    app = typer.Typer()
    app.command()(tune.command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(device, "why_no_gpu", lambda: "There is no GPU.")


@pytest.mark.parametrize("head_dim", [20, 32, 64, 128, 160, 256])
@pytest.mark.parametrize("arch", ARCHS)
def test_candidates_are_variants_that_fit(arch, head_dim):
    chip = device.for_arch(arch)
    found = trial.candidates(head_dim, chip)
    assert 2 <= len(set(found)) == len(found) <= 120
    assert found[0] == select.tile(head_dim, head_dim, chip)
    for tile in found:
        for causal in (False, True):
            spec = trial.make_spec(tile, head_dim, chip, "fp16", causal, 1024)
            assert spec.shared_bytes <= chip.shared_bytes_per_block
            assert trial.residents(spec.shared_bytes, chip) >= spec.blocks_per_sm
            assert spec.even_m
            assert spec.even_n == (1024 % spec.block_n == 0)


def test_hoppers_tiles_are_among_its_candidates():
    (rows,) = tiles.HOPPER.values()
    for row in rows:
        d, dv = row.max_head_dim, min(row.max_head_dim, row.max_head_dim_v)
        found = trial.candidates(d, device.for_arch("sm_90a"), "hopper", dv)
        assert found[0] == row.tile
        assert row.tile in trial.hopper_candidates(d, dv)
        assert row.prescaled is None or row.prescaled in found
    wide = trial.candidates(192, device.for_arch("sm_90a"), "hopper", 128)
    assert {tile.warps for tile in wide[1:]} == {8, 12}


def test_a_kernel_without_shared_memory_has_an_occupancy():
    assert trial.residents(0, device.for_arch("sm_75")) > 1


@pytest.mark.parametrize("arch", ARCHS)
def test_labels_are_read_back(arch):
    for head_dim in (32, 128, 256):
        for tile in trial.candidates(head_dim, device.for_arch(arch)):
            assert trial.parse_tile(trial.label(tile)) == tile


def test_label_is_the_one_in_kernel_names():
    tile = trial.parse_tile("m128x64_w4s2_qreg_b2")
    assert tile == select.Tile(128, 64, 4, 2, q_in_regs=True, blocks_per_sm=2)
    spec = trial.make_spec(tile, 64, device.for_arch("sm_90"), "bf16", True, 100)
    assert spec.name == "rtflash_forward_sm80__bf16_d64_m128x64_w4s2_qreg_b2_causal"


@pytest.mark.parametrize("head_dim", [20, 64, 128, 256])
@pytest.mark.parametrize("arch", ARCHS)
def test_candidates_for_few_rows(arch, head_dim):
    chip = device.for_arch(arch)
    tiles = trial.candidates(head_dim, chip, "few")
    assert 2 <= len(set(tiles)) == len(tiles) <= 150
    assert tiles[0] == select.tile(head_dim, head_dim, chip, select.FEW)
    for tile in tiles:
        assert trial.parse_tile(trial.label(tile)) == tile
        spec = trial.make_spec(tile, head_dim, chip, "fp16", False, 1)
        assert spec.key_warps == spec.warps
        assert spec.shared_bytes <= chip.shared_bytes_per_block


def test_label_for_few_rows_is_the_one_in_kernel_names():
    tile = trial.parse_tile("m16x128_w4ks2_qreg")
    assert tile == select.Tile(16, 128, 4, 2, q_in_regs=True, key_warps=4)
    spec = trial.make_spec(tile, 128, device.for_arch("sm_90"), "bf16", False, 1)
    assert spec.name == "rtflash_forward_sm80__bf16_d128_m16x128_w4ks2_qreg_pack_gqa"


def test_a_tile_for_few_rows_is_what_a_decoding_call_gets():
    """The variants that the sweep compiles are those that its calls launch."""
    problem = Problem(16, 1, 8192, 32, 8, 128, 128, "bf16", 128**-0.5, -1, -1, 0.0, False, 16, True)
    gpu, tile = device.for_arch("sm_90"), trial.parse_tile("m16x64_w4ks3_b2")
    with import_tool("tune_decode").in_table(tile):
        for num_splits in (1, 3):
            wanted = dataclasses.replace(problem, num_splits=num_splits)
            spec, _ = select.forward(wanted, gpu)
            made = trial.make_spec(tile, 128, gpu, "bf16", False, 1)
            assert spec == dataclasses.replace(made, split=num_splits > 1)
    assert select.forward(problem, gpu)[0].blocks_per_sm == 1


@pytest.mark.parametrize(
    "options",
    [("--seqlen", 1024), ("--shared", 99), ("--mask", "full"), ("--tile", "m128x64_w4s2")],
)
def test_few_rows_refuse_what_is_not_theirs(without_gpu, options):
    result = run("--rows", "few", *options)
    assert result.exit_code == 2
    assert options[0] in result.output
    assert "There is no GPU." not in result.output


@pytest.mark.parametrize("text", ["", "m128", "m128x64_w4s2_", "m128x64_w4s2_b", "m128x64_w4s2_b2_qreg"])  # fmt: skip
def test_other_labels_are_refused(text):
    with pytest.raises(ValueError, match="m128x64_w4s2_qreg_b2"):
        trial.parse_tile(text)


def test_residents_of_known_gpus():
    """From the CUDA programming guide: 100 KB an SM on sm_86, of which each CTA costs 1 KB more; 64 KB on sm_75."""
    kilobytes = {"sm_75": {32: 2, 64: 1}, "sm_86": {49: 2, 50: 1, 99: 1}, "sm_90": {113: 2, 114: 1}}
    for arch, counts in kilobytes.items():
        for size, count in counts.items():
            assert trial.residents(size * 1024, device.for_arch(arch)) == count, (arch, size)


def test_padding_gives_the_smaller_gpu_residents():
    large = device.for_arch("sm_90")
    assert trial.padded_bytes(64 * 1024, device.for_arch("sm_86"), large) == 114 * 1024
    for arch in ARCHS:
        small = device.for_arch(arch)
        for size in range(16 * 1024, small.shared_bytes_per_block + 1, 4 * 1024):
            padded = trial.padded_bytes(size, small, large)
            assert size <= padded <= large.shared_bytes_per_block
            assert trial.residents(padded, large) == trial.residents(size, small)


def test_compilation_drops_what_does_not_fit():
    pytest.importorskip("cupy")
    chip = device.for_arch("sm_75")
    specs = [
        trial.make_spec(trial.parse_tile(text), 64, chip, "fp16", False, 1)
        for text in ("m64x32_w4s1", "m128x512_w4s1")
    ]
    made = trial.compile_all([*specs, *specs], chip, "sm_80")
    assert list(made) == specs
    assert made[specs[0]].resources.registers > 0
    assert made[specs[1]] == "too much shared memory"


def test_without_gpu_says_why(without_gpu):
    result = run()
    assert result.exit_code == 2
    assert "There is no GPU." in result.output


def test_without_torch_says_what_to_install(monkeypatch):
    monkeypatch.setattr(device, "why_no_gpu", lambda: None)
    monkeypatch.setitem(sys.modules, "torch", None)
    result = run()
    assert result.exit_code == 2
    assert "pip install torch" in result.output


@pytest.mark.parametrize(
    "options",
    [
        ("--mask", "window"),
        ("--dtype", "fp32"),
        ("--shared", 100),
        ("--head-dim", 257),
        ("--tile", "m64"),
        ("--tile", "m16x64_w4ks2"),
        ("--rows", "no"),
        ("--json", "missing/rows.json"),
    ],
)
def test_nonsense_is_refused_by_name(without_gpu, options):
    result = run(*options)
    assert result.exit_code == 2
    assert options[0] in result.output
    assert "There is no GPU." not in result.output


def test_runs_as_a_script(tmp_path):
    command = [sys.executable, str(ROOT / "tools" / "tune.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--head-dim" in done.stdout


def test_kept_measurements_are_of_tiles():
    kept = json.loads(
        (ROOT / "docs" / "benchmarks" / "tiles_h200.json").read_text(encoding="utf-8")
    )
    chip = device.for_arch("sm_90")
    assert len(kept["rows"]) > 500
    for values in kept["rows"]:
        row = dict(zip(kept["columns"], values, strict=True))
        tile = trial.parse_tile(row["tile"])
        spec = trial.make_spec(tile, row["d"], chip, row["dtype"], row["causal"], row["s"])
        assert spec.shared_bytes <= (row["padded_kb"] or 227) * 1024
        assert row["tflops"] > 0
        assert row["fa2"] > 0


@pytest.mark.gpu
def test_sweep_on_the_gpu(tmp_path):
    pytest.importorskip("torch")
    if tune.bench.why_not():
        pytest.skip(tune.bench.why_not())
    file = tmp_path / "rows.json"
    options = ("--head-dim", 64, "--seqlen", "1024", "--tile", "m64x48_w4s1,m128x1024_w4s1")
    result = run(*options, "--json", file)
    assert result.exit_code == 0, result.output
    machine, *rows = json.loads(file.read_text(encoding="utf-8"))
    assert machine["mode"] == "tiles"
    assert [row["causal"] for row in rows] == [False] * 3 + [True] * 3
    assert [row.get("dropped") for row in rows[:3]] == [None, None, "too much shared memory"]
    assert all(row["tflops"] > 0 and row["registers"] > 0 for row in rows if "dropped" not in row)
    assert "in the table" in result.output


@pytest.mark.gpu
def test_sweep_for_few_rows_on_the_gpu(tmp_path):
    pytest.importorskip("torch")
    if tune.bench.why_not():
        pytest.skip(tune.bench.why_not())
    file = tmp_path / "rows.json"
    result = run("--rows", "few", "--head-dim", 64, "--tile", "m16x64_w4ks2", "--json", file)
    assert result.exit_code == 0, result.output
    _, *rows = json.loads(file.read_text(encoding="utf-8"))
    assert len(rows) == 2 * 2
    assert all(row["of copy"] > 0 and row["us"] > 0 for row in rows)
    assert "in the table" in result.output


@pytest.mark.gpu
def test_a_wrong_kernel_is_noticed():
    pytest.importorskip("torch")
    if tune.bench.why_not():
        pytest.skip(tune.bench.why_not())
    gpu = device.get(0)
    full, causal = (
        trial.make_spec(trial.parse_tile("m64x32_w4s1"), 64, gpu, "fp16", mask, 1)
        for mask in (False, True)
    )
    kernel = build.kernel(full, gpu)
    assert tune.is_right(kernel, full.shared_bytes, gpu)
    assert not tune.is_right(dataclasses.replace(kernel, spec=causal), full.shared_bytes, gpu)
