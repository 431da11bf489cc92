"""settings.py: defaults, values, refusals, and that it alone reads the environment."""

from __future__ import annotations

import logging
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import rtflash
from rtflash import settings

VARIABLES = (
    "RTFLASH_BACKEND",
    "RTFLASH_BUNDLE",
    "RTFLASH_CACHE",
    "RTFLASH_CACHE_DIR",
    "RTFLASH_CXX",
    "RTFLASH_DUMP",
    "RTFLASH_LOG",
    "RTFLASH_NO_COMPILE",
    "RTFLASH_OVERRIDE",
    "RTFLASH_RECORD",
    "RTFLASH_TUNED",
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
    bundles = (tmp_path / "a b.zip", Path.cwd() / "é.zip")
    monkeypatch.setenv("RTFLASH_BUNDLE", os.pathsep.join([str(bundles[0]), "", " é.zip"]))
    monkeypatch.setenv("RTFLASH_NO_COMPILE", "1")
    monkeypatch.setenv("RTFLASH_DUMP", str(tmp_path))
    monkeypatch.setenv("RTFLASH_RECORD", str(tmp_path / "r"))
    monkeypatch.setenv("RTFLASH_TUNED", "0")
    wanted = settings.Settings(
        cache=False,
        cache_dir=tmp_path / "kernels",
        log=2,
        backend="emulate",
        cxx="clang++",
        bundles=bundles,
        no_compile=True,
        record=tmp_path / "r",
        dump=tmp_path,
        tuned=False,
    )
    assert settings.get() == wanted
    rows = settings.describe()
    assert [row.variable for row in rows] == list(VARIABLES)
    named = os.pathsep.join(map(str, bundles))
    values = [
        "emulate", named, "0", str(tmp_path / "kernels"), "clang++", str(tmp_path), "2", "1", "", str(tmp_path / "r"),
        "0",
    ]  # fmt: skip
    assert [row.value for row in rows] == values
    assert {row.source for row in rows if row.value} == {"environment"}
    assert all(row.meaning for row in rows)


def test_no_override_where_nothing_is_compiled(monkeypatch, tmp_path):
    monkeypatch.setenv("RTFLASH_OVERRIDE", str(tmp_path))
    assert settings.get().override == tmp_path
    monkeypatch.setenv("RTFLASH_NO_COMPILE", "1")
    with pytest.raises(ValueError, match="RTFLASH_OVERRIDE is set and RTFLASH_NO_COMPILE is 1"):
        settings.get()


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


Q, LSE = np.ones((1, 2, 1, 8), np.float16), np.zeros((1, 1, 2), np.float32)
CALLS = {
    "attention": lambda: rtflash.flash_attn_func(Q, Q, Q),
    "cache": lambda: rtflash.flash_attn_with_kvcache(Q, Q, Q),
    "merge": lambda: rtflash.merge_attention_states(Q, LSE, Q, LSE),
    "combine": lambda: rtflash.flash_attn_combine(Q[None], LSE.swapaxes(1, 2)[None]),
}


@pytest.mark.parametrize("attend", CALLS.values(), ids=CALLS)
def test_a_call_on_the_cpu_is_logged_once_and_checks_the_settings(monkeypatch, caplog, attend):
    log = logging.getLogger("rtflash")
    monkeypatch.setattr(log, "handlers", [caplog.handler])
    monkeypatch.setattr(log, "propagate", False)
    monkeypatch.setattr(log, "level", logging.NOTSET)
    monkeypatch.setenv("RTFLASH_LOG", "2")
    attend()
    assert caplog.text.count("runs on NumPy: its tensors are in host memory") == 1
    monkeypatch.setenv("RTFLASH_NO_COMPILE", "yes")
    with pytest.raises(ValueError, match="RTFLASH_NO_COMPILE is 'yes'"):
        attend()


def test_nothing_else_reads_the_environment():
    package = Path(rtflash.__file__).parent
    readers = [
        path.name
        for path in package.glob("*.py")
        if re.search(r"\bos\.environ\b|\bgetenv\b", path.read_text(encoding="utf-8"))
    ]
    assert readers == ["settings.py"]
