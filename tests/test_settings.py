"""settings.py: defaults, values, refusals, and that it alone reads the environment."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

import pytest

import rtflash
from rtflash import settings

VARIABLES = (
    "RTFLASH_BACKEND",
    "RTFLASH_CACHE",
    "RTFLASH_CACHE_DIR",
    "RTFLASH_CXX",
    "RTFLASH_LOG",
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_defaults():
    current = settings.get()
    assert current.cache
    assert current.log == 0
    assert current.cache_dir.name == "rtflash"
    assert {row.source for row in settings.describe()} == {"default"}


def test_values(monkeypatch, tmp_path):
    monkeypatch.setenv("RTFLASH_CACHE", "0")
    monkeypatch.setenv("RTFLASH_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setenv("RTFLASH_LOG", "2")
    monkeypatch.setenv("RTFLASH_BACKEND", "emulate")
    monkeypatch.setenv("RTFLASH_CXX", "clang++")
    wanted = settings.Settings(False, tmp_path / "kernels", 2, "emulate", "clang++")
    assert settings.get() == wanted
    rows = settings.describe()
    assert [row.variable for row in rows] == list(VARIABLES)
    values = ["emulate", "0", str(tmp_path / "kernels"), "clang++", "2"]
    assert [row.value for row in rows] == values
    assert {row.source for row in rows} == {"environment"}
    assert all(row.meaning for row in rows)


def test_empty_means_unset(monkeypatch):
    before = settings.get()
    for name in VARIABLES:
        monkeypatch.setenv(name, " ")
    assert settings.get() == before


@pytest.mark.parametrize(
    ("name", "value"),
    [("RTFLASH_CACHE", "yes"), ("RTFLASH_CACHE", "2"), ("RTFLASH_LOG", "4"), ("RTFLASH_LOG", "-1")],
)
def test_bad_value_names_its_variable(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=rf"{name} is '{value}'; it must be one of 0, 1"):
        settings.get()


def test_folder_is_absolute_and_expands_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv("RTFLASH_CACHE_DIR", "~/k")
    assert settings.get().cache_dir == tmp_path / "k"
    monkeypatch.setenv("RTFLASH_CACHE_DIR", "k")
    assert settings.get().cache_dir == Path.cwd() / "k"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows keeps the folder that a process is in")
def test_relative_folder_in_a_deleted_one_is_named(monkeypatch, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setenv("RTFLASH_CACHE_DIR", "rel")
    with pytest.raises(ValueError, match=r"RTFLASH_CACHE_DIR is 'rel', relative to .* deleted"):
        settings.get()


def test_logger_obeys_the_level(monkeypatch):
    log = logging.getLogger("rtflash")
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "propagate", True)
    monkeypatch.setattr(log, "level", logging.NOTSET)
    assert settings.logger().handlers == []
    monkeypatch.setenv("RTFLASH_LOG", "1")
    assert settings.logger().isEnabledFor(logging.INFO)
    assert not settings.logger().isEnabledFor(logging.DEBUG)
    assert len(log.handlers) == 1
    log.setLevel(logging.NOTSET)


def test_nothing_else_reads_the_environment():
    package = Path(rtflash.__file__).parent
    readers = [
        path.name
        for path in package.glob("*.py")
        if re.search(r"\bos\.environ\b|\bgetenv\b", path.read_text(encoding="utf-8"))
    ]
    assert readers == ["settings.py"]
