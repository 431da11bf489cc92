"""`rtflash tune` and tuned.py: what is tried, what wins, what is kept and used; times are made up."""

from __future__ import annotations

import dataclasses
import json

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

import rtflash
from rtflash import artifacts, bundle, cache, device, listed, render, select, tuned
from rtflash.__main__ import import_tool
from rtflash.nvrtc import Resources
from rtflash.tiles import Tile

autotune, cli, trial = (import_tool(name) for name in ("autotune", "cli", "trial"))
shapes, tile_times = import_tool("shapes"), import_tool("tile_times")

H100 = device.for_arch("sm_90a")
A100 = device.for_arch("sm_80")
PROMPT = shapes.Shape("bf16", 128, 128, "causal", 4, 4096, 4096, 32, 8)
DECODING = PROMPT._replace(seqlen_q=1, batch=16)
FEW_HEADS = PROMPT._replace(seqlen_q=10, mask="full")
KEY = tuned.Key(A100.name, "sm_80", "many", "bf16", 128, 128, "causal")
TILE = Tile(64, 64, 4, 1, blocks_per_sm=2)


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """A cache folder without tiles, and a process that has not warned."""
    monkeypatch.setenv("RTFLASH_CACHE_DIR", str(tmp_path / "é cache"))
    monkeypatch.delenv("RTFLASH_TUNED", raising=False)
    monkeypatch.setattr(cache, "_warned", set())
    tuned.used.cache_clear()
    yield tmp_path / "é cache"
    tuned.used.cache_clear()


def run(*arguments):
    return CliRunner().invoke(cli.app, ["tune", *(str(argument) for argument in arguments)])


def chosen(shape=PROMPT, gpu=A100, **changes):
    problem = dataclasses.replace(shape.problem(), **changes)
    return shapes.tile_of(select.forward(problem, gpu)[0])


def change(path, edit):
    """Edit the first row of the kept tiles."""
    held = json.loads(path.read_text(encoding="utf-8"))
    edit(held["rows"][0])
    path.write_text(json.dumps(held), encoding="utf-8")
    tuned.used.cache_clear()


@pytest.mark.parametrize(
    ("shape", "gpu", "table"),
    [
        (PROMPT, A100, "many"),
        (PROMPT, H100, "hopper"),
        (DECODING, H100, "few"),
        (FEW_HEADS, A100, "some"),
    ],
)
def test_candidates_are_tiles_that_the_shape_would_run_on(shape, gpu, table):
    now = shapes.serving(shape, gpu)
    assert now.table == table
    tiles = shapes.candidates(shape, now, gpu, [])
    assert tiles[0] == now.tile == chosen(shape, gpu)
    assert 3 < len(set(tiles)) == len(tiles) < 150
    for tile in tiles:
        (spec, *_) = shapes.launched(shape, table, tile, gpu)
        assert shapes.tile_of(spec) == tile
        assert spec.isa == (90 if table == "hopper" else 80)
        assert spec.shared_bytes <= gpu.shared_bytes_per_block
        assert trial.parse_tile(trial.label(tile)) == tile
    assert chosen(shape, gpu) == now.tile  # nothing stays forced


def test_single_queries_are_kept_by_the_mask_of_their_kernel():
    assert shapes.serving(DECODING, H100).mask == "full"
    assert shapes.serving(PROMPT, H100).mask == "causal"


def test_siblings_are_all_that_would_get_the_tile():
    specs = shapes.siblings(DECODING, "few", Tile(16, 64, 4, 2, True, 1, 4), A100)
    assert {(x.split, x.ragged, x.paged, x.rotary != "none") for x in specs} == {
        (split, *places)
        for split in (False, True)
        for places in ((False,) * 3, (True, False, False), (True, True, False), (True,) * 3)
    }
    specs = shapes.siblings(PROMPT, "many", TILE, A100)
    assert len(specs) == 5
    assert {x.block_m for x in specs} == {64}


def test_packed_rows_of_hoppers_kernel_are_not_tuned():
    """Their tile is fixed; a shape that runs them must not replace what was found for others."""
    with pytest.raises(ValueError, match="share Hopper's tiles"):
        shapes.serving(PROMPT._replace(seqlen_q=64), H100)
    assert shapes.serving(PROMPT, H100).table == "hopper"
    pages = {spec.paged for spec in shapes.siblings(PROMPT, "hopper", chosen(gpu=H100), H100)}
    assert pages == {False, True}


def test_keeping_leaves_what_another_rtflash_kept(monkeypatch):
    tuned.store([(KEY, TILE, {})])
    with monkeypatch.context() as patch:
        patch.setattr(bundle, "maker", lambda: {"rtflash": "9.9"})
        tuned.store([(KEY, TILE._replace(stages=2), {})])
        tuned.store([(KEY, None, {})])
    assert [row["tile"]["stages"] for row in tuned.rows(tuned.file())] == [TILE.stages]


def test_a_kept_tile_is_used_for_its_calls_alone(monkeypatch):
    before = chosen()
    path = tuned.store([(KEY, TILE, {"us": 1.0})])
    assert before != TILE
    assert chosen() == TILE
    assert chosen(seqlen_q=77, batch=1, heads=8, num_splits=1) == TILE
    other = {
        "another head_dim": chosen(PROMPT._replace(head_dim=96, head_dim_v=96)),
        "another mask": chosen(window_right=-1),
        "another dtype": chosen(PROMPT._replace(dtype="fp16")),
        "prescaled scores": chosen(softcap=30.0),
        "short loads": chosen(align=8),
        "another GPU": chosen(gpu=dataclasses.replace(A100, name="A800")),
        "another table": chosen(DECODING),
    }
    assert TILE not in other.values(), other
    every = listed.every_variant(PROMPT.problem(), A100)
    assert TILE in [shapes.tile_of(x) for x in every if hasattr(x, "block_m")]
    monkeypatch.setenv("RTFLASH_TUNED", "0")
    tuned.used.cache_clear()
    assert chosen() == before
    monkeypatch.delenv("RTFLASH_TUNED")
    tuned.store([(KEY, None, {})])
    assert chosen() == before
    assert tuned.rows(path) == []


def test_keeping_replaces_only_the_same_calls():
    other = KEY._replace(mask="full")
    tuned.store([(KEY, TILE, {}), (other, TILE, {})])
    path = tuned.store([(KEY, TILE._replace(stages=2), {"us": 3.5})])
    assert dict(tuned.tiles(path)) == {other: TILE, KEY: TILE._replace(stages=2)}
    assert tuned.rows(path)[1]["us"] == 3.5


def test_tiles_of_another_rtflash_are_not_used(monkeypatch):
    before = chosen()
    path = tuned.store([(KEY, TILE, {})])
    change(path, lambda row: row.update(templates="other"))
    assert chosen() == before
    assert "1 of another rtflash, not used" in tuned.said()
    change(path, lambda row: row.update(templates=render.digest()))
    assert chosen() == TILE
    assert f"1 tile for {A100.name} in {path}" in tuned.said()
    monkeypatch.setenv("RTFLASH_TUNED", "0")
    assert "ignored" in tuned.said()


@pytest.mark.parametrize(
    "edit",
    [
        lambda row: row["tile"].update(block_m=100),
        lambda row: row["tile"].update(block_m="64"),
        lambda row: row["tile"].update(q_in_regs=1),
        lambda row: row["tile"].update(more=1),
        lambda row: row.pop("tile"),
        lambda row: row.update(tile=[64]),
        lambda row: row.update(table="most"),
        lambda row: row.update(arch="sm"),
        lambda row: row.update(head_dim=None),
        lambda row: row.update(mask=["causal"]),
        lambda row: row.update(gpu={"name": "A100"}),
    ],
)
def test_rows_that_cannot_be_are_passed_over_with_a_warning(edit):
    before = chosen()
    path = tuned.store([(KEY, TILE, {})])
    change(path, edit)
    with pytest.warns(RuntimeWarning, match="holds a tile that cannot be"):
        assert chosen() == before
    assert tuned.said().endswith("; 1 damaged, not used: run `rtflash tune` again")
    assert "another rtflash" not in tuned.said()
    # What was measured since is kept beside it.
    tuned.store([(KEY, TILE, {})])
    assert chosen() == TILE
    assert f"1 tile for {A100.name} in {path}" in tuned.said()


def test_what_is_no_row_loses_no_other(folder):
    path = tuned.store([(KEY, TILE, {})])
    text = path.read_text(encoding="utf-8").replace('"rows": [', '"rows": [7,')
    path.write_text(text, encoding="utf-8")
    tuned.used.cache_clear()
    with pytest.warns(RuntimeWarning, match="7 is no row"):
        assert chosen() == TILE
    assert tuned.said().endswith("; 1 damaged, not used: run `rtflash tune` again")
    tuned.store([(KEY, TILE, {})])
    assert tuned.rows(path)[0] == 7


@pytest.mark.parametrize("text", ["", "[]", "{", '{"rows": 1}', "[" * 100000])
def test_a_file_of_something_else_is_passed_over_with_a_warning(folder, text):
    before = chosen()
    folder.mkdir()
    (folder / tuned.FILE).write_text(text, encoding="utf-8")
    tuned.used.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"tuned\.json holds no tiles"):
        assert chosen() == before
    tuned.store([(KEY, TILE, {})])
    assert chosen() == TILE


def test_too_much_shared_memory_for_the_gpu_is_passed_over():
    key = KEY._replace(gpu="GeForce RTX 3090", arch="sm_86")
    gpu = device.for_arch("sm_86")
    before = chosen(gpu=gpu)
    tuned.store([(key, Tile(128, 128, 8, 2), {})])
    assert chosen(gpu=gpu) == before
    tuned.store([(key, TILE, {})])
    assert chosen(gpu=gpu) == TILE


@pytest.fixture
def fake_gpu(monkeypatch):
    """An A100 on which tiles take made-up times: `times[label]`, else 10 us; `spilling` labels spill."""

    class Fake:
        times: dict = {}  # noqa: RUF012
        spilling: set = set()  # noqa: RUF012

    fake = Fake()
    fake.times, fake.spilling = {}, set()

    def artifact(spec, arch):
        spills = getattr(spec, "block_m", 0) and trial.label(shapes.tile_of(spec)) in fake.spilling
        used = Resources(128, 0, 0, 8 if spills else 0, 0, 0.1)
        return artifacts.Artifact(spec, arch, b"", "", "", (), used, "", None)

    def measure(shape, table, tiles):
        return {x: fake.times.get(trial.label(x), 0.010) for x in tiles}

    monkeypatch.setattr(autotune.bench, "why_not", lambda: None)
    monkeypatch.setattr(device, "get", lambda index: A100)
    monkeypatch.setattr(autotune.nvrtc, "target_arch", lambda gpu: gpu.arch)
    monkeypatch.setattr(artifacts, "artifact", artifact)
    monkeypatch.setattr(autotune, "measure", measure)
    return fake


def test_the_winner_is_kept_shown_and_used(fake_gpu, tmp_path):
    fake_gpu.times = {"m64x64_w4s1_b2": 0.008, "m64x32_w4s1": trial.WRONG, "m128x64_w8s1": 0.0079}
    fake_gpu.spilling = {"m128x64_w8s1"}
    report, image = tmp_path / "rows.json", tmp_path / "plot.svg"
    tiles = "m64x64_w4s1_b2,m64x32_w4s1,m128x64_w8s1"
    options = ("--mask", "causal", "--tile", tiles, "--json", report)
    result = run(*options, "--plot", image)
    assert result.exit_code == 1, result.output  # for the wrong one
    assert "the best" in result.output
    assert "1.250" in result.output
    assert "spills" in result.output
    assert chosen() == TILE
    rows = json.loads(report.read_text(encoding="utf-8"))
    assert [row.get("us") for row in rows] == [10.0, 8.0, None, None]
    assert image.stat().st_size > 1000
    assert "1 tile for A100" in " ".join(CliRunner().invoke(cli.app, ["info"]).output.split())
    fake_gpu.times = {}
    assert run("--mask", "causal", "--tile", "m64x64_w4s1_b2").exit_code == 0
    assert chosen() != TILE  # measured again, it gains nothing


def test_a_dry_run_and_a_small_gain_keep_nothing(fake_gpu, folder):
    fake_gpu.times = {"m64x64_w4s1_b2": 0.0099}
    result = run("--mask", "causal", "--tile", "m64x64_w4s1_b2")
    assert "the tables' tile stays" in result.output
    assert tuned.rows(folder / tuned.FILE) == []
    fake_gpu.times = {"m64x64_w4s1_b2": 0.005}
    assert run("--mask", "causal", "--tile", "m64x64_w4s1_b2", "--dry-run").exit_code == 0
    assert tuned.rows(folder / tuned.FILE) == []


def test_a_tile_that_spills_in_another_call_is_not_kept(fake_gpu):
    now = shapes.serving(PROMPT, A100)
    times = {now.tile: 1.0, TILE: 0.5, Tile(64, 32, 4, 1): 0.6}
    assert autotune.winner(PROMPT, now, times, A100) == TILE
    fake_gpu.spilling = {trial.label(TILE)}
    assert autotune.winner(PROMPT, now, times, A100) == Tile(64, 32, 4, 1)
    assert autotune.winner(PROMPT, now, {**times, now.tile: "spills"}, A100) is None


def test_kept_where_nothing_can_be_written(fake_gpu, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    monkeypatch.setenv("RTFLASH_CACHE_DIR", str(tmp_path / "file" / "x"))
    fake_gpu.times = {"m64x64_w4s1_b2": 0.005}
    result = run("--mask", "causal", "--tile", "m64x64_w4s1_b2")
    assert result.exit_code == 2
    assert "not kept" in result.output


def test_a_given_tile_without_the_memory_is_refused(fake_gpu):
    result = run("--head-dim", "256", "--mask", "full", "--tile", "m128x256_w8s2")
    assert result.exit_code == 2
    said = " ".join(result.output.replace("│", " ").split())
    assert "m128x256_w8s2 needs 589824 bytes of shared memory" in said
    assert f"it must be at most {A100.shared_bytes_per_block}" in said


@pytest.mark.parametrize(
    "options",
    [
        ("--head-dim", "60"),
        ("--head-dim", "300"),
        ("--mask", "some"),
        ("--dtype", "fp32"),
        ("--dtype", "fp16,bf16"),
        ("--seqlen", 0),
        ("--queries", -1),
        ("--batch", 0),
        ("--heads", 6),
        ("--tile", "m64"),
        ("--plot", "x.txt"),
    ],
)
def test_nonsense_is_refused_by_name(monkeypatch, options):
    monkeypatch.setattr(autotune.bench, "why_not", lambda: "There is no GPU.")
    result = run(*options)
    assert result.exit_code == 2
    assert options[0] in result.output
    assert "There is no GPU." not in result.output


def test_without_a_gpu_it_says_why(monkeypatch):
    monkeypatch.setattr(autotune.bench, "why_not", lambda: "There is no GPU.")
    result = run()
    assert result.exit_code == 2
    assert "There is no GPU." in result.output


def test_what_made_a_tile_is_what_makes_a_bundle():
    tuned.store([(KEY, TILE, {})])
    (row,) = tuned.rows(tuned.file())
    assert bundle.maker().items() <= row.items()


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (9, 0)])
@pytest.mark.parametrize(("rows", "keys"), [(31, 12), (5, 40)])
def test_tiles_are_held_to_attention_itself(rows, keys, window):
    torch = pytest.importorskip("torch")
    qkv = [
        torch.randn(2, n, h, 16, dtype=torch.float16) for n, h in ((rows, 4), (keys, 2), (keys, 2))
    ]
    expected = rtflash.flash_attn_func(*qkv, window_size=window).double()
    assert torch.allclose(tile_times.in_float64(qkv, window), expected, atol=2e-3)


@pytest.mark.gpu
def test_tuning_on_the_gpu(tmp_path):
    pytest.importorskip("torch")
    if autotune.bench.why_not():
        pytest.skip(autotune.bench.why_not())
    gpu = device.get(0)
    prompt = PROMPT._replace(seqlen_q=1024, seqlen_k=1024)
    for options, shape in [
        (("--seqlen", 1024), prompt),
        (("--seqlen", 1024), prompt._replace(mask="full")),
        (("--queries", 1), DECODING._replace(batch=4)),
    ]:
        now = shapes.serving(shape, gpu)
        others = shapes.candidates(shape, now, gpu, [])[1:3]
        file = tmp_path / f"{now.table}.json"
        tiles = ",".join(map(trial.label, others))
        result = run("--mask", shape.mask, *options, "--tile", tiles, "--json", file)
        assert result.exit_code == 0, result.output
        rows = json.loads(file.read_text(encoding="utf-8"))
        assert rows[0]["us"] > 0
        assert all(row.get("us", 1) > 0 for row in rows)
        best = chosen(shape, gpu)
        assert best == now.tile or best in others
