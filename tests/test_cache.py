"""cache.py: whole folders or none, damage, locks among processes, and folders that cannot be written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import processes
import pytest

import rtflash
from rtflash import cache

NAME = "rtflash_test"
KEY = "0123456789ab"
ENTRY = cache.Entry(
    {"kernel.cubin": b"\x7fELF" + bytes(1000), "build.log": b"fine\n"}, {"arch": "sm_80"}
)
BASE = {
    "variables": {"dtype": "fp16", "head_dim": "64"},
    "arch": "sm_80",
    "options": ("-std=c++17",),
    "templates": "aa",
    "nvrtc": (13, 0),
    "version": "0.1.0",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache folder, and no warning given yet."""
    monkeypatch.setenv("RTFLASH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("RTFLASH_CACHE", raising=False)
    monkeypatch.setattr(cache, "_warned", set())
    return tmp_path / "cache"


@pytest.fixture
def place(folder):
    return cache.folder(NAME, KEY)


def counted():
    """A `make` for obtain, and the list that grows with its calls."""
    calls: list[int] = []

    def make() -> cache.Entry:
        calls.append(1)
        return ENTRY

    return make, calls


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if cache.TEMPORARY.fullmatch(path.name)]


@pytest.mark.parametrize(
    "change",
    [
        {"variables": {"dtype": "fp16", "head_dim": "65"}},
        {"arch": "sm_86"},
        {"options": ("-std=c++17", "-lineinfo")},
        {"templates": "ab"},
        {"nvrtc": (13, 1)},
        {"version": "0.1.1"},
    ],
)
def test_key_changes_with_everything(change):
    key = cache.key(**BASE)
    assert len(key) == 12
    assert int(key, 16) >= 0
    assert cache.key(**BASE) == key
    assert cache.key(**{**BASE, **change}) != key


def test_round_trip(place):
    make, calls = counted()
    assert cache.load(place) is None
    assert cache.obtain(place, make) == (ENTRY, True)
    assert cache.obtain(place, make) == (ENTRY, True)
    assert cache.load(place) == ENTRY
    assert len(calls) == 1
    assert sorted(path.name for path in place.iterdir()) == [
        "build.log",
        "kernel.cubin",
        "spec.json",
    ]
    assert leftovers(place.parent) == []


DAMAGE = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "random": lambda data: os.urandom(len(data)),
    "one bit": lambda data: data[:-4] + bytes([data[-4] ^ 1]) + data[-3:],
}


@pytest.mark.parametrize("file", ["kernel.cubin", "build.log", "spec.json"])
@pytest.mark.parametrize("damage", list(DAMAGE))
def test_damaged_file_is_repaired_with_one_warning(place, file, damage):
    make, calls = counted()
    cache.obtain(place, make)
    path = place / file
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    with pytest.warns(RuntimeWarning, match="damaged cache folder") as caught:
        assert cache.obtain(place, make) == (ENTRY, True)
    assert len(caught) == 1
    assert cache.load(place) == ENTRY
    assert len(calls) == 2
    assert leftovers(place.parent) == []


@pytest.mark.parametrize(
    "how", ["file missing", "folder empty", "folder is a file", "record is a list"]
)
def test_odd_folder_is_repaired(place, how):
    make, calls = counted()
    cache.obtain(place, make)
    if how == "file missing":
        (place / "kernel.cubin").unlink()
    elif how == "record is a list":
        (place / "spec.json").write_text("[1]", encoding="utf-8")
    else:
        cache.remove(place)
        if how == "folder empty":
            place.mkdir()
        else:
            place.write_text("?", encoding="utf-8")
    with pytest.warns(RuntimeWarning, match="damaged"):
        assert cache.obtain(place, make) == (ENTRY, True)
    assert cache.load(place) == ENTRY
    assert len(calls) == 2


def test_many_damaged_folders_give_one_warning(folder):
    places = [cache.folder(NAME, f"{n:012x}") for n in range(5)]
    make, calls = counted()
    for place in places:
        cache.obtain(place, make)
        (place / "kernel.cubin").write_bytes(b"")
    with pytest.warns(RuntimeWarning) as caught:
        entries = [cache.obtain(place, make) for place in places]
    assert len(caught) == 1
    assert entries == [(ENTRY, True)] * 5
    assert len(calls) == 10


def test_a_valid_folder_of_another_process_stays(place):
    other = cache.Entry(ENTRY.files, {"arch": "sm_80", "by": "another process"})
    cache.store(place, other)
    cache.store(place, ENTRY)
    assert cache.load(place) == other
    assert leftovers(place.parent) == []


@pytest.mark.parametrize("under", ["file", "file/deeper", "dangling"])
def test_unusable_folder_means_memory_and_one_warning(tmp_path, monkeypatch, folder, under):
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    if under == "dangling":
        processes.link(tmp_path / "dangling", tmp_path / "file" / "nowhere")
    monkeypatch.setenv("RTFLASH_CACHE_DIR", str(tmp_path / under))
    place = cache.folder(NAME, KEY)
    make, calls = counted()
    with pytest.warns(RuntimeWarning, match="RTFLASH_CACHE_DIR") as caught:
        assert [cache.obtain(place, make) for _ in range(2)] == [(ENTRY, False)] * 2
    assert len(caught) == 1
    assert len(calls) == 2


def test_missing_home_means_memory(monkeypatch, tmp_path, folder):
    monkeypatch.chdir(tmp_path)
    make, _ = counted()
    with pytest.warns(RuntimeWarning, match="no home folder"):
        assert cache.obtain(Path("~/.cache/rtflash") / f"{NAME}.{KEY}", make) == (ENTRY, False)
    assert list(tmp_path.iterdir()) == []


def test_full_disk_means_memory_and_leaves_nothing(monkeypatch, place):
    def full(self, data):
        raise OSError(28, "No space left on device")

    make, _ = counted()
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        assert cache.obtain(place, make) == (ENTRY, False)
    assert not place.exists()
    assert leftovers(place.parent) == []


def test_file_system_without_locks(monkeypatch, place):
    import filelock

    class NoLock(filelock.FileLock):
        def acquire(self, *args, **kwargs):
            raise NotImplementedError("no flock here")

    monkeypatch.setattr(filelock, "FileLock", NoLock)
    make, _ = counted()
    assert cache.obtain(place, make) == (ENTRY, True)


def test_a_lock_that_is_never_released_delays_but_does_not_hang(monkeypatch, place):
    import filelock

    place.parent.mkdir()
    monkeypatch.setattr(cache, "LOCK_TIMEOUT_S", 0.2)
    make, _ = counted()
    with filelock.FileLock(place.with_name(f".{place.name}.lock")):
        start = time.monotonic()
        assert run_in_thread(lambda: cache.obtain(place, make)) == (ENTRY, True)
        assert 0.2 <= time.monotonic() - start < 5


def run_in_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join(30)
    return results[0]


def test_old_temporary_folders_go_and_new_ones_stay(place):
    place.parent.mkdir()
    old, new = cache.temporary(place, "new"), cache.temporary(place, "old")
    for path in (old, new):
        path.mkdir()
        (path / "kernel.cubin").write_bytes(b"half")
    past = time.time() - 2 * cache.STALE_S
    os.utime(old, (past, past))
    make, _ = counted()
    cache.obtain(place, make)
    assert leftovers(place.parent) == [new.name]


def test_list_size_and_clear(folder, place):
    assert cache.entries() == []
    assert cache.clear() == 0
    make, _ = counted()
    cache.obtain(place, make)
    damaged = cache.folder(NAME, "0" * 12)
    cache.obtain(damaged, make)
    (damaged / "build.log").write_bytes(b"")
    cache.temporary(place, "new").mkdir()
    failed = cache.keep_failed(NAME, KEY, "int a")
    assert failed.parent == folder / "failed"
    assert failed.read_text(encoding="utf-8") == "int a"
    (folder / "notes.txt").write_text("the user's own", encoding="utf-8")

    listed = {entry.folder: entry for entry in cache.entries()}
    assert set(listed) == {place, damaged}
    assert listed[place].record == {"arch": "sm_80"}
    assert listed[damaged].record == {}
    assert listed[place].size > 1000
    assert cache.clear() == 2
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_failed_source_goes_to_the_temporary_folder_without_a_cache(monkeypatch, tmp_path, folder):
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "cache").write_text("in the way", encoding="utf-8")
    assert cache.keep_failed(NAME, KEY, "int a").read_text(encoding="utf-8") == "int a"
    monkeypatch.setenv("RTFLASH_CACHE", "0")
    kept = cache.keep_failed(NAME, KEY, "int b")
    assert (kept.parent, kept.suffix, kept.read_text(encoding="utf-8")) == (
        tmp_path,
        ".cu",
        "int b",
    )
    assert kept.name.startswith(f"{NAME}.{KEY}.")
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path / "missing"))
    assert cache.keep_failed(NAME, KEY, "int c") is None


def test_failed_source_follows_no_link_that_others_put(monkeypatch, tmp_path):
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("RTFLASH_CACHE", "0")
    (tmp_path / "precious").write_text("mine", encoding="utf-8")
    processes.link(tmp_path / f"{NAME}.{KEY}.cu", tmp_path / "precious")
    assert cache.keep_failed(NAME, KEY, "int a").read_text(encoding="utf-8") == "int a"
    assert (tmp_path / "precious").read_text(encoding="utf-8") == "mine"


WORKER = """
import pathlib, sys, time
from rtflash import cache
def make():
    with open({calls!r}, "a", encoding="utf-8") as calls:
        calls.write("made\\n")
    time.sleep({seconds})
    return cache.Entry({{"kernel.cubin": b"code" * 1000}}, {{}})
entry, kept = cache.obtain(pathlib.Path({place!r}), make)
print(len(entry.files["kernel.cubin"]), kept)
"""


def start_worker(place: Path, calls: Path, seconds: float) -> subprocess.Popen[str]:
    code = WORKER.format(place=str(place), calls=str(calls), seconds=seconds)
    root = str(Path(rtflash.__file__).resolve().parents[1])
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])},
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for(condition, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.01)


def test_eight_processes_build_once(place, tmp_path):
    calls = tmp_path / "calls"
    workers = [start_worker(place, calls, 0.5) for _ in range(8)]
    assert {worker.communicate(timeout=60)[0] for worker in workers} == {"4000 True\n"}
    assert calls.read_text(encoding="utf-8") == "made\n"
    assert leftovers(place.parent) == []


def test_killed_builder_hands_over_to_a_waiting_process(place, tmp_path):
    calls = tmp_path / "calls"
    victim = start_worker(place, calls, 600)
    wait_for(calls.exists)
    waiting = start_worker(place, calls, 0)
    time.sleep(0.3)
    assert waiting.poll() is None
    victim.send_signal(getattr(signal, "SIGKILL", signal.SIGTERM))
    victim.wait(10)
    assert waiting.communicate(timeout=20)[0] == "4000 True\n"
    assert start_worker(place, calls, 0).communicate(timeout=20)[0] == "4000 True\n"
    assert calls.read_text(encoding="utf-8") == "made\nmade\n"


def test_readers_never_see_half_an_entry(place):
    """One thread keeps replacing damaged folders; what others load is whole or nothing."""
    stop = threading.Event()
    seen: list[object] = []

    def read() -> None:
        while not stop.is_set():
            seen.append(cache.load(place))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(30):
            cache.obtain(place, lambda: ENTRY)
            (place / "spec.json").write_bytes(b"{")
    stop.set()
    for reader in readers:
        reader.join()
    assert all(entry is None or entry == ENTRY for entry in seen)


def test_record_is_readable_json(place):
    cache.store(place, ENTRY)
    record = json.loads((place / "spec.json").read_text(encoding="utf-8"))
    assert record["arch"] == "sm_80"
    assert set(record["sha256"]) == {"kernel.cubin", "build.log"}
