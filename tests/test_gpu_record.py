"""tools/gpu_record.py: what makes a record stale, and which runs it refuses to record."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from rtflash import device, nvrtc
from rtflash.__main__ import import_tool

gpu_record = import_tool("gpu_record")


@pytest.fixture
def checkout(monkeypatch, tmp_path):
    """A small checkout in the place of this one."""
    for name in ("launch.py", "api.py"):
        (tmp_path / "rtflash" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "rtflash" / name).write_text('"""Head."""\nx = 1\n', encoding="utf-8")
    (tmp_path / "templates" / "host").mkdir(parents=True)
    (tmp_path / "templates" / "forward.cu").write_text("int x;\n", encoding="utf-8")
    (tmp_path / "templates" / "host" / "cpu.cuh").write_text("int x;\n", encoding="utf-8")
    monkeypatch.setattr(gpu_record.sys, "path", list(gpu_record.sys.path))  # `record` adds to it
    monkeypatch.setattr(gpu_record, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_record, "RECORD", tmp_path / "gpu_record.json")
    monkeypatch.setattr(gpu_record, "UNRECORDED", tmp_path / "gpu_unrecorded.json")
    return tmp_path


@pytest.fixture
def gpu(monkeypatch):
    """A GPU on which pytest gives the counts that the test puts in the result."""
    counts = {"passed": 3, "failed": 0, "skipped": 1, "seconds": 1.0}
    monkeypatch.setattr(device, "why_no_gpu", lambda: None)
    monkeypatch.setattr(device, "get", lambda index: device.for_arch("sm_90a"))
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    monkeypatch.setattr(gpu_record, "run_tests", lambda jobs: (int(counts["failed"] > 0), counts))
    return counts


def test_every_kernel_module_exists():
    there = {path.stem for path in (gpu_record.ROOT / "rtflash").glob("*.py")}
    assert set(gpu_record.KERNEL_MODULES) <= there


@pytest.mark.parametrize(
    ("file", "text", "status", "words"),
    [
        ("rtflash/launch.py", '"""Other."""\n\n# Why.\nx = 1\n', 0, "covers the sources"),
        ("rtflash/launch.py", '"""Head."""\nx = 2\n', 1, "stale"),
        ("rtflash/api.py", '"""Head."""\nx = 2\n', 0, "other Python code has changed"),
        ("templates/forward.cu", "// What.\nint x;  // Why.\n", 0, "covers the sources"),
        ("templates/forward.cu", "//% if x\nint x;\n", 1, "stale"),
        ("templates/host/cpu.cuh", "int y;\n", 0, "covers the sources"),
    ],
)
def test_check(checkout, gpu, capsys, file, text, status, words):
    assert gpu_record.check() == 1
    assert gpu_record.record(gpu_record.RECORD) == 0
    assert gpu_record.check() == 0
    (checkout / file).write_text(text, encoding="utf-8")
    capsys.readouterr()
    assert gpu_record.check() == status
    assert words in capsys.readouterr().out


def test_kernels_that_no_gpu_could_run(checkout, gpu, capsys):
    """What is said of them holds for these kernels alone, is told at every check, and ends with the next record."""
    kernel = checkout / "templates" / "forward.cu"
    assert gpu_record.record(gpu_record.RECORD) == 0
    kernel.write_text("int y;\n", encoding="utf-8")
    assert gpu_record.check() == 1
    assert gpu_record.say_unrecorded("no GPU was lent") == 0
    capsys.readouterr()
    assert gpu_record.check() == 0
    assert "NOT RECORDED" in (said := capsys.readouterr().out)
    assert "no GPU was lent" in said
    kernel.write_text("int z;\n", encoding="utf-8")
    assert gpu_record.check() == 1
    assert gpu_record.record(gpu_record.RECORD) == 0
    assert not gpu_record.UNRECORDED.exists()
    assert gpu_record.check() == 0


@pytest.mark.parametrize("counts", [{"skipped": 4}, {"failed": 1}, {"passed": 0, "skipped": 0}])
def test_what_is_not_recorded(checkout, gpu, counts):
    gpu.update(counts)
    assert gpu_record.record(gpu_record.RECORD) == 1
    assert not gpu_record.RECORD.exists()


def test_record(checkout, gpu):
    assert gpu_record.record(gpu_record.RECORD) == 0
    written = json.loads(gpu_record.RECORD.read_text(encoding="utf-8"))
    assert (written["gpu"], written["arch"], written["nvrtc"]) == ("H100", "sm_90a", "13.0")
    assert written["passed"] == 3


@pytest.mark.parametrize(("jobs", "option"), [(1, ""), (3, "-n 3")])
def test_jobs_are_processes_of_pytest(monkeypatch, jobs, option):
    asked = []

    def run(command, **_):
        asked.append(" ".join(command))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(gpu_record.subprocess, "run", run)
    assert gpu_record.run_tests(jobs) == (0, {})
    assert ("-n " in asked[0]) == bool(option)
    assert option in asked[0]


def test_jobs_without_xdist_say_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(gpu_record.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(gpu_record.sys, "argv", ["gpu_record.py", "--jobs", "2"])
    with pytest.raises(SystemExit):
        gpu_record.main()
    assert "pip install pytest-xdist" in capsys.readouterr().err


def test_the_record_is_checked_or_said_to_be_stale(monkeypatch, capsys):
    monkeypatch.setattr(gpu_record.sys, "argv", ["gpu_record.py", "--check", "--unrecorded", "x"])
    with pytest.raises(SystemExit):
        gpu_record.main()
    assert "not allowed with" in capsys.readouterr().err
