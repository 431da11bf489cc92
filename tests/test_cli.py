"""The command line, on a machine with or without a GPU."""

import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from rich.console import Console
from typer.testing import CliRunner

import rtflash
from rtflash import bundle, cache, device, settings
from rtflash.__main__ import import_tool

bench, chart, cli, demo = (import_tool(name) for name in ("bench", "chart", "cli", "demo"))
roofline, screen = (import_tool(name) for name in ("roofline", "screen"))

ROOT = Path(__file__).resolve().parents[1]
ROWS = [
    {"mode": "machine", "gpu": "Some GPU"},
    {"mode": "fwd", "dtype": "bfloat16", "d": 64, "causal": False, "s": 1024, "b": 16, "h": 32}
    | {"rtflash": 330, "torch-FA2": 300, "cuDNN": None},
    {"mode": "fwd", "dtype": "bfloat16", "d": 64, "causal": True, "s": 1024, "b": 16, "h": 32}
    | {"rtflash": 240, "torch-FA2": 240, "cuDNN": 300},
    {"mode": "host us/call", "rtflash": 14.5, "torch-SDPA": 18.0},
]
ONE_QUERY = {"dtype": "bfloat16", "d": 128, "causal": False, "s": 8192, "b": 16, "h": 32}
INFERENCE_ROWS = [
    {"copy GB/s": 4256},
    {"mode": "decode", **ONE_QUERY, "rtflash": 1.03, "cuDNN": 1.02},
    {"mode": "decode us", **ONE_QUERY, "rtflash": 126.1, "cuDNN": 127.2},
    {"mode": "cache", **ONE_QUERY, "pages of 16": 1.04, "append, rotary": 1.05},
    {"mode": "varlen", "dtype": "bfloat16", "d": 64, "causal": True, "s": 4081, "b": 64, "h": 32}
    | {"rtflash": 300, "dense": 297, "torch-FA2": 240},
]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("RTFLASH_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(device, "why_no_gpu", lambda: "There is no GPU.")


def run(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def test_help_and_version():
    assert "Usage" in run().output
    assert run("--version").output.strip() == rtflash.__version__
    for command in ("info", "demo", "cache", "generate", "bench", "tune"):
        assert command in run("--help").output


def test_info_shows_settings_and_the_reason_without_gpu(without_gpu):
    result = run("info")
    assert result.exit_code == 0
    assert "There is no GPU." in result.output
    for row in settings.describe():
        assert row.variable in result.output


@pytest.mark.parametrize(("backend", "words"), [("", "NumPy"), ("emulate", "emulated kernels")])
def test_what_host_arrays_run_on_is_told(without_gpu, monkeypatch, backend, words):
    monkeypatch.setenv("RTFLASH_BACKEND", backend)
    assert f"Host arrays run on {words}." in " ".join(run("info").output.split())
    assert import_tool("demo").choose().name == f"{words} on the CPU"


def test_info_tells_of_bundles_and_tuned_tiles(monkeypatch, tmp_path):
    assert "tuned tiles  none" in run("info").output
    file = tmp_path / "kernels.zip"
    bundle.write(file, bundle.pack([]))
    monkeypatch.setenv("RTFLASH_BUNDLE", str(file))
    assert "kernels.zip: 0 for" in "".join(run("info").output.split("\n"))
    monkeypatch.setenv("RTFLASH_BUNDLE", os.pathsep.join([str(tmp_path / "none"), str(file)]))
    result = run("info")
    assert result.exit_code == 0
    assert "kernels.zip: 0 for" in "".join(result.output.split("\n"))
    assert result.output.count("unusable") == 1


@pytest.mark.parametrize("place", ["dumped", "typo", "dumped/sm_80"])
def test_info_tells_of_edited_kernels(monkeypatch, tmp_path, place):
    """Without a GPU as well, where no call would find out; and such calls go on."""
    assert "edited kernels  " not in run("info").output
    file = tmp_path / "dumped" / "sm_80" / "rtflash_one" / "kernel.cu"
    file.parent.mkdir(parents=True)
    file.write_text("void rtflash_one();", encoding="utf-8")
    monkeypatch.setenv("RTFLASH_OVERRIDE", str(tmp_path / place))
    result = run("info")
    assert result.exit_code == 0
    said = "1 in " if place == "dumped" else "unusable. RTFLASH_OVERRIDE is"
    assert f"edited kernels  {said}" in result.output
    (tmp_path / "dumped" / "sm_80" / "odd").mkdir()
    (tmp_path / "dumped" / "sm_80" / "odd" / "kernel.cu").touch()
    result = run("info")
    assert f"edited kernels  {said}" in result.output
    assert ("has no kernel odd" in " ".join(result.output.split())) == (place == "dumped")
    q = np.ones((1, 2, 1, 8), np.float16)
    assert (rtflash.flash_attn_func(q, q, q) == 1).all()


def test_info_without_cupy_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "cupy"] or ["cupy"]:
        monkeypatch.setitem(sys.modules, name, None)
    result = run("info")
    assert result.exit_code == 0
    assert "rtflash[cuda13]" in result.output


def test_info_lists_what_generate_takes(monkeypatch):
    known = ("sm_75", "sm_80", "sm_88", "sm_90a", "sm_121")
    monkeypatch.setattr(cli.nvrtc, "version", lambda: (13, 0))
    monkeypatch.setattr(cli.nvrtc, "supported_archs", lambda: known)
    said = "13.0 for sm_75 sm_80 sm_90a"
    assert cli.compiler() == f"{said}; where such a GPU is, also for sm_88 sm_121"
    monkeypatch.setattr(cli.nvrtc, "supported_archs", lambda: known[:2])
    assert cli.compiler() == "13.0 for sm_75 sm_80"


@pytest.mark.gpu
def test_info_names_the_gpu():
    assert device.get(0).name in run("info").output


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"RTFLASH_LOG": "loud"}, "RTFLASH_LOG is 'loud'; it must be one of 0, 1, 2, 3"),
        ({"RTFLASH_CACHE": "no", "RTFLASH_TUNED": "x"}, "RTFLASH_CACHE is 'no'; it must be"),
        ({"RTFLASH_NO_COMPILE": "1", "RTFLASH_OVERRIDE": "."}, "unset one of them"),
    ],
    ids=["one", "two", "together"],
)
def test_info_marks_refused_settings_and_tells_the_rest(monkeypatch, without_gpu, values, reason):
    """Other commands refuse them."""
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    result = run("info")
    assert result.exit_code == 0, result.output
    shown = " ".join(result.output.split())
    assert "There is no GPU." in shown
    assert "cache 0 kernels" in shown
    wrong = [row for row in settings.describe() if row.refused]
    assert len(wrong) == shown.count("refused.") == (2 if "RTFLASH_TUNED" in values else 1)
    assert reason in shown
    for row in settings.describe():
        assert f"{row.variable} " in shown
    result = run("cache", "size")
    assert result.exit_code == 2
    assert next(iter(values)) in result.output
    assert {*values.items()} <= os.environ.items()


def test_cache_commands():
    assert "0 kernels" in run("cache", "size").output
    place = cache.folder("rtflash_forward_test", "0123456789ab")
    cache.store(place, cache.Entry({"kernel.cu": b"//" * 2048}, {"arch": "sm_80"}))
    listed = run("cache", "list").output
    assert place.name in listed
    assert "sm_80" in listed
    assert "1 kernel, 4 KB" in run("cache", "size").output
    assert "deleted 1 kernel," in run("cache", "clear").output
    cache.store(place, cache.Entry({}, {"arch": 80, "resources": []}))
    assert "80" in run("cache", "list").output
    assert run("cache", "clear").exit_code == 0
    assert "0 kernels" in run("cache", "list").output


@pytest.mark.parametrize("command", ["list", "size", "clear"])
def test_cache_commands_read_the_cache_once(monkeypatch, command):
    place = cache.folder("rtflash_forward_test", "0123456789ab")
    cache.store(place, cache.Entry({"kernel.cu": b"//"}, {"arch": "sm_80"}))
    load, loaded = cache.load, []
    monkeypatch.setattr(cache, "load", lambda place: loaded.append(place) or load(place))
    assert "1 kernel, " in run("cache", command).output
    assert loaded == [place]


def test_demo_is_right_here():
    result = run("demo")
    assert result.exit_code == 0, result.output
    assert len(re.findall(r"\bok\b", result.output)) == 2


def test_demo_compiles_for_other_gpus(without_gpu):
    pytest.importorskip("cupy")
    result = run("demo")
    assert result.exit_code == 0, result.output
    assert "sm_80" in result.output
    assert "sm_90a" in result.output


def test_demo_without_cupy_says_what_to_install(without_gpu, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "cupy"] or ["cupy"]:
        monkeypatch.setitem(sys.modules, name, None)
    result = run("demo")
    assert result.exit_code == 0, result.output
    assert "not done" in result.output
    assert "rtflash[cuda13]" in result.output


@pytest.mark.parametrize("wrong", [lambda x: x + 0.01, lambda x: x * float("nan")])
def test_demo_fails_on_a_wrong_answer(without_gpu, monkeypatch, wrong):
    right = rtflash.flash_attn_func
    monkeypatch.setattr(rtflash, "flash_attn_func", lambda *a, **k: wrong(right(*a, **k)))
    monkeypatch.setattr(demo, "compile_elsewhere", lambda: None)
    result = run("demo")
    assert result.exit_code == 1
    assert "WRONG" in result.output


def test_bench_without_gpu_says_why(without_gpu):
    result = run("bench")
    assert result.exit_code == 2
    assert "There is no GPU." in result.output
    assert "--cpu" in result.output


def test_bench_on_the_cpu(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "ROUNDS", 1)
    file = tmp_path / "rows.json"
    options = ("--head-dim", "32", "--seqlen", "64", "--json", file)
    result = run("bench", "--cpu", *options)
    assert result.exit_code == 0
    assert result.stdout.count("float16") == 2  # a row is printed once
    assert "causal  " not in result.stdout.splitlines()[1]
    assert "mask  " in result.stdout.splitlines()[1]
    shape = "mode cpu ms/call, dtype float16, d 32, mask {}, s 64, b 1, h 8"
    assert result.stderr.splitlines() == [shape.format(mask) for mask in ("full", "causal")]
    rows = json.loads(file.read_text(encoding="utf-8"))
    assert [row["causal"] for row in rows] == [False, True]
    assert all(row["mode"] == "cpu ms/call" and row["rtflash"] > 0 for row in rows)


@pytest.mark.gpu
def test_bench_on_the_gpu(tmp_path):
    pytest.importorskip("torch")
    if bench.why_not():
        pytest.skip(bench.why_not())
    file = tmp_path / "rows.json"
    options = ("--head-dim", "64", "--seqlen", "1024", "--peer", "rtflash,fa2", "--json", file)
    result = run("bench", *options)
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text(encoding="utf-8"))
    assert all(row["rtflash"] > 0 and row["torch-FA2"] > 0 for row in rows if row.get("d"))
    assert rows[-1]["mode"] == "host us/call"


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_bench_shows_saved_rows(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    saved, image = tmp_path / "rows.json", tmp_path / f"plot.{suffix}"
    chart.save(ROWS, saved)
    assert chart.load(saved) == ROWS
    result = run("bench", "--from", saved, "--plot", image)
    assert result.exit_code == 0, result.output
    assert "median 1.05, least 1.00" in result.output
    assert "14.5" in result.output
    assert result.output.count("Some GPU") == 1
    assert image.stat().st_size > 1000


def test_bench_shows_rows_of_any_name(tmp_path):
    pytest.importorskip("matplotlib")
    saved, image = tmp_path / "rows.json", tmp_path / "plot.png"
    chart.save([ROWS[1] | {"": 5, "_x": 6, "[/]": 7, "dtype": "[red]"}], saved)
    result = run("bench", "--from", saved, "--plot", image)
    assert result.exit_code == 0, result.output
    assert "[/]" in result.output
    assert "[red]" in result.output


@pytest.mark.parametrize("rows", [INFERENCE_ROWS, [*ROWS, *INFERENCE_ROWS]], ids=["some", "all"])
def test_bench_shows_saved_rows_of_inference(tmp_path, rows):
    pytest.importorskip("matplotlib")
    saved, image = tmp_path / "rows.json", tmp_path / "plot.png"
    chart.save(rows, saved)
    result = run("bench", "--from", saved, "--plot", image)
    assert result.exit_code == 0, result.output
    for text in ("pages of 16", "126.1", "1.03", "median 1.25", "least 1.25"):
        assert text in result.output
    assert image.stat().st_size > 1000
    assert len(chart.panels(rows)) == 2 + (2 if len(rows) > len(INFERENCE_ROWS) else 0)


@pytest.mark.parametrize("files", [[ROWS], [ROWS, INFERENCE_ROWS]], ids=len)
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_bench_draws_a_roofline_of_saved_rows(tmp_path, files, suffix):
    pytest.importorskip("matplotlib")
    options, image = [], tmp_path / f"roofline.{suffix}"
    for number, rows in enumerate(files):
        chart.save(rows, tmp_path / f"{number}.json")
        options += ["--from", tmp_path / f"{number}.json"]
    result = run("bench", *options, "--roofline", image)
    assert result.exit_code == 0, result.output
    assert image.stat().st_size > 1000
    assert "330" in result.output
    assert ("126.1" in result.output) == (INFERENCE_ROWS in files)


def test_places_on_the_roofline():
    """Of every byte of q, k, v and o; a fraction of the copy is that of bytes of K and V."""
    full, causal, one = roofline.points([*ROWS, *INFERENCE_ROWS])
    b, s, h, d = 16, 1024, 32, 64
    flops, traffic = 4 * b * h * s * s * d, 2 * 4 * b * s * h * d
    assert (full.intensity, full.tflops, full.others) == (flops / traffic, 330, 300)
    assert (causal.intensity, causal.tflops, causal.others) == (flops / traffic / 2, 240, 300)
    b, s, h, h_k, d = 16, 8192, 32, 8, 128
    flops, cache = 4 * b * h * s * d, 2 * 2 * b * s * h_k * d
    assert one.intensity == pytest.approx(flops / (cache + 2 * 2 * b * h * d))
    assert one.tflops == pytest.approx(flops / (cache / (1.03 * 4256e9)) / 1e12)
    assert one.others == pytest.approx(one.tflops / 1.03 * 1.02)


def test_roofs_are_those_of_the_gpu_and_of_the_run():
    named = [{"mode": "machine", "gpu": "NVIDIA H200"}, {"gemm bf16 TFLOP/s": 778}]
    assert roofline.datasheet(named) == (989, 4800)
    assert roofline.measured([*named, {"copy GB/s": 4224}]) == (778, 4224)
    assert roofline.datasheet(ROWS) == roofline.measured(ROWS) == (None, None)
    # The copy places the rows of decoding.
    assert not list(roofline.points(INFERENCE_ROWS[1:]))
    with pytest.raises(ValueError, match="no rows of mode fwd to plot"):
        roofline.plot(INFERENCE_ROWS, Path("x.png"))


def test_bench_plots_no_mode_that_is_not_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "why_not", lambda: "There is no GPU.")
    image = tmp_path / "plot.png"
    assert "--plot" in run("bench", "--mode", "host", "--plot", image).output
    for mode in ("varlen", "decode"):  # one query alone is no picture
        assert "--roofline needs" in run("bench", "--mode", mode, "--roofline", image).output
    if importlib.util.find_spec("matplotlib"):
        result = run("bench", "--mode", "decode", "--plot", image)
        assert "There is no GPU." in result.output


@pytest.mark.gpu
def test_bench_of_inference_on_the_gpu(monkeypatch, tmp_path):
    pytest.importorskip("torch")
    if bench.why_not():
        pytest.skip(bench.why_not())
    inference = import_tool("bench_inference")
    monkeypatch.setattr(inference, "DECODE_SHAPES", ((1, 1024), (4, 2048)))
    monkeypatch.setattr(inference, "CACHE_SHAPES", ((4, 2048),))
    monkeypatch.setattr(inference, "SEQUENCES", 4)
    file = tmp_path / "rows.json"
    result = run("bench", "--mode", "decode,varlen", "--peer", "rtflash,fa2", "--json", file)
    assert result.exit_code == 0, result.output
    rows = [row for row in json.loads(file.read_text(encoding="utf-8")) if "b" in row]
    assert [row["mode"] for row in rows] == [
        "decode", "decode us", "decode", "decode us", "cache", *["varlen"] * 4,
    ]  # fmt: skip
    assert all(row.get("rtflash", row.get("pages of 16")) > 0 for row in rows)


def test_bench_refuses_nonsense(tmp_path):
    assert run("bench", "--peer", "nobody").exit_code == 2
    assert run("bench", "--seqlen", "many").exit_code == 2
    assert run("bench", "--from", tmp_path / "missing.json").exit_code == 2
    for data in (b"{}", b"", b"[", b"\xff\xfe"):
        (tmp_path / "other.json").write_bytes(data)
        assert run("bench", "--from", tmp_path / "other.json").exit_code == 2
        with pytest.raises(ValueError, match=r"other\.json holds no list of benchmark rows"):
            chart.load(tmp_path / "other.json")


def test_bench_refuses_what_it_cannot_measure(monkeypatch, tmp_path):
    """Before any work: exit code 2 and a message that names the option."""
    monkeypatch.setattr(bench, "cpu", None)
    for option, value in [
        ("--head-dim", 300),
        ("--seqlen", 99999999999999),
        ("--mode", "host"),
        ("--dtype", "fp16"),
        ("--plot", tmp_path / "x.png"),
        ("--roofline", tmp_path / "x.png"),
        ("--json", tmp_path),
        ("--json", tmp_path / "missing" / "x.json"),
    ]:
        result = run("bench", "--cpu", option, value)
        assert result.exit_code == 2, (option, result.output)
        assert option in result.output
    for options in (("decode,varlen", "--head-dim", 64), ("host", "--dtype", "fp16")):
        result = run("bench", "--mode", *options)
        assert result.exit_code == 2
        assert f"{options[1]} is of mode fwd" in result.output
    saved = tmp_path / "rows.json"
    chart.save(ROWS, saved)
    for options in (
        ("--cpu",),
        ("--mode", "fwd"),
        ("--peer", "fa2"),
        ("--head-dim", 64),
        ("--seqlen", 64),
        ("--dtype", "bf16"),
    ):
        result = run("bench", "--from", saved, *options)
        assert result.exit_code == 2
        assert f"does not go with {options[0]}" in " ".join(result.output.replace("│", " ").split())
    image = tmp_path / "x.png"
    result = run("bench", "--from", saved, "--plot", image, "--roofline", image)
    assert "--plot and --roofline are both" in result.output
    for plot in (tmp_path / "x.txt", tmp_path / "missing" / "x.png"):
        for option in ("--plot", "--roofline"):
            assert option in run("bench", "--from", saved, option, plot).output


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"a": 1}],
        [{"mode": "fwd"}],
        [{"mode": ["fwd"], "rtflash": 1}],
        [{"mode": "host us/call", "rtflash": "fast"}],
        [{"mode": "fwd", "rtflash": 300}],
        [{"mode": "decode", "rtflash": 1.0}],
    ],
    ids=str,
)
def test_bench_refuses_rows_that_it_cannot_show(tmp_path, rows):
    saved = tmp_path / "rows.json"
    chart.save(rows, saved)
    result = run("bench", "--from", saved)
    assert result.exit_code == 2
    assert "holds no rows" in result.output


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
@pytest.mark.skipif(shutil.which("sh") is None, reason="there is no sh here")
@pytest.mark.parametrize(("place", "code"), [("/dev/full", 2), ("&-", 0)])
@pytest.mark.parametrize("options", ["--version", "cache size"])
def test_stdout_that_takes_nothing_gives_no_traceback(place, code, options):
    command = f'"{sys.executable}" -m rtflash {options} >{place}'
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code
    assert done.stderr.count("\n") == (1 if code else 0), done.stderr


def test_a_terminal_of_few_characters_gives_no_traceback(tmp_path):
    variables = {"PYTHONIOENCODING": "ascii", "RTFLASH_CACHE_DIR": str(tmp_path / "é")}
    command = [sys.executable, "-m", "rtflash", "cache", "size"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert b"\\xe9" in done.stdout.replace(b"\n", b"")


def test_narrow_terminals_leave_setting_names_whole(monkeypatch, without_gpu):
    monkeypatch.setattr(cli.console, "_width", 40)
    lines = run("info").output.splitlines()
    for row in settings.describe():
        assert any(line.startswith(row.variable + " ") for line in lines)


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("width", [40, 80, 120])
def test_names_in_tables_are_never_broken(width, terminal):
    """On a terminal in a line of their own where there is no room, in a log at the rows' ends."""
    console = Console(width=width, force_terminal=terminal, file=io.StringIO())
    table = screen.Named("kernel", "arch", "registers", right=("registers",))
    names = ["short", "x" * 70]
    for name in names:
        table.add_row(name, "sm_80", "[red]255[/]")
    console.print(table, crop=False)
    shown = re.sub(r"\x1b\[[\d;]*m", "", console.file.getvalue()).splitlines()
    if terminal and width < 100:
        assert shown[::2] == ["kernel", *names]
        assert [line.split() for line in shown[1::2]] == [
            ["arch", "registers"],
            *[["sm_80", "255"]] * 2,
        ]
    else:
        assert [line.split()[-1] for line in shown] == ["kernel", *names]


def test_sass_says_what_is_missing_before_it_prints(tmp_path):
    command = [sys.executable, "tools/sass.py", str(tmp_path / "none.cubin")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr
    assert not done.stdout


def test_words_that_are_not_allowed_are_named():
    with pytest.raises(
        screen.typer.BadParameter, match="--dtype has 'fp32'; it must be one of fp16, bf16"
    ):
        screen.items("bf16,fp32", "--dtype", ["fp16", "bf16"])
    with pytest.raises(screen.typer.BadParameter, match="--dtype is 'a,b'; it must be one of a, b"):
        screen.one_of("a,b", "--dtype", ["a", "b"])


@pytest.mark.parametrize("command", ["generate", "bench", "tune"])
def test_help_of_plots_says_what_they_may_be(command):
    shown = " ".join(run(command, "--help").output.replace("│", " ").split())
    assert ", ".join(screen.PLOTS) in shown


def test_units():
    assert [screen.size(count) for count in (0, 4096, 64 * 1024**2)] == ["0 KB", "4 KB", "64 MB"]
    assert [screen.duration(x) for x in (15e-6, 0.0123, 2.5)] == ["15 us", "12.3 ms", "2.50 s"]
    assert [screen.rate(x) for x in (2e9, 4.25e14)] == ["2 GFLOP/s", "425 TFLOP/s"]
