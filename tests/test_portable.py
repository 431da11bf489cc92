"""What keeps rtflash from no system: no module of one system, files and names that Windows takes, any encoding.

mypy with --platform win32 (.ci/run) finds what Windows' standard library lacks; here is what it does not see.
"""

from __future__ import annotations

import ast
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import processes
import pytest

import rtflash
from rtflash import (
    artifacts,
    build,
    bundle,
    cache,
    cxx,
    device,
    dump,
    listed,
    nvrtc,
    record,
    renames,
    settings,
)
from rtflash.__main__ import import_tool
from rtflash.other_specs import AppendSpec, CombineSpec
from rtflash.spec import ROTARIES, AnySpec, Spec

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(rtflash.__file__).parent
SHIPPED = [*sorted(PACKAGE.rglob("*.py")), *sorted((ROOT / "tools").glob("*.py"))]
SOURCES = [*SHIPPED, *sorted((ROOT / "tests").glob("*.py"))]

# Modules that some systems lack, and multiprocessing, which starts processes in another way on each.
FORBIDDEN = {
    "fcntl", "grp", "msvcrt", "multiprocessing", "posix", "pty", "pwd", "resource", "signal", "syslog", "termios",
    "tty", "winreg", "_winapi",
}  # fmt: skip
# What Windows allows in no name of a file, and the names that are devices there.
REFUSED = re.compile(r'[<>:"/\\|?*\x00-\x1f]|[. ]$')
DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)
# Of 260 characters with the last, a NUL; a folder leaves room for a name of 12. (Windows without long paths.)
LONGEST_FILE, LONGEST_FOLDER = 259, 247
# As platformdirs has it, for a user whose name is as long as one can be.
WINDOWS_CACHE = rf"C:\Users\{'u' * 20}\AppData\Local\rtflash\Cache"

# No longer name can be made: every flag, and sizes of the most digits.
LONGEST = Spec(
    "bf16", 255, 254, 128, 128, 4, 1, isa=80, q_in_regs=True, blocks_per_sm=2, key_warps=4, mask="window",
    softcap=True, alibi=True, prescale=True, align=2, pack_gqa=True, split=True, ragged=True, paged=True,
    rotary="interleaved",
)  # fmt: skip
SMALL = Spec("fp16", 16, 16, 32, 16, 2, 1, isa=75)
KEY = "0123456789ab"


def calls(path: Path) -> list[tuple[ast.Call, str]]:
    """The calls of a module, and what is called, as it is written there."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [(call, ast.unparse(call.func)) for call in found]


def said(call: ast.Call) -> set[str]:
    """The keywords of a call."""
    return {str(keyword.arg) for keyword in call.keywords}


def is_text(call: ast.Call, name: str) -> bool:
    """Whether a call opens, reads or writes a file as text."""
    if name.rpartition(".")[2] in ("read_text", "write_text"):
        return True
    given = [x.value for x in call.args if isinstance(x, ast.Constant)]
    modes = [x for x in given if isinstance(x, str) and re.fullmatch(r"[rwxab+]{2,3}", x)]
    return re.fullmatch(r"(.*\.)?open", name) is not None and name != "os.open" and not modes


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_no_module_of_one_system_and_no_shell(path):
    imported = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            imported.add(str(node.module).partition(".")[0])
    assert not imported & FORBIDDEN
    found = calls(path)
    assert not [call.lineno for call, _ in found if "shell" in said(call)]
    # What a program says is in its own encoding, if in any.
    assert not [x.lineno for x, _ in found if said(x) & {"text", "universal_newlines"}]
    assert not {name for _, name in found} & {"os.system", "os.popen", "os.fork"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_texts_name_their_encoding(path):
    """The system's is another one on each: cp1252 on Windows."""
    found = [
        call.lineno
        for call, name in calls(path)
        if is_text(call, name) and "encoding" not in said(call)
    ]
    assert found == []


def test_names_of_this_repository():
    folders = [ROOT / name for name in ("docs", "rtflash", "templates", "tests", "tools")]
    paths = [path.relative_to(ROOT).as_posix() for x in folders for path in x.rglob("*")]
    assert [path for path in paths if not is_legal(path)] == []
    assert len({path.lower() for path in paths}) == len(paths)


def is_legal(path: str) -> bool:
    """Whether Windows takes every part of a relative path."""
    return not any(REFUSED.search(part) or DEVICES.fullmatch(part) for part in path.split("/"))


def every_variant() -> list[AnySpec]:
    """A variant of each kind of name: all of the tile tables, and what appends and merges."""
    specs: dict[AnySpec, None] = {LONGEST: None}
    for arch in device.TYPICAL:
        specs.update(dict.fromkeys(listed.table_specs(device.for_arch(arch))))
    specs.update(
        dict.fromkeys(AppendSpec(*x) for x in itertools.product(("fp16", "bf16"), ROTARIES))
    )
    specs[CombineSpec("bf16", "fp32", 4)] = None
    return list(specs)


def test_names_of_variants_differ_whatever_their_case():
    specs = every_variant()
    assert len({spec.name.lower() for spec in specs}) == len(specs)
    assert max(len(spec.name) for spec in specs) == len(LONGEST.name)


def test_paths_of_the_cache_are_legal_on_windows_and_short_enough(monkeypatch):
    root = WINDOWS_CACHE.replace("\\", "/")
    assert all(is_legal(spec.name) for spec in every_variant())
    for spec in (LONGEST, SMALL, AppendSpec("bf16", "interleaved"), CombineSpec("bf16", "fp32", 4)):
        place = Path("root") / f"{spec.name}.{KEY}"
        folders = [place, cache.temporary(place, "new"), cache.temporary(place, "old")]
        names = ("kernel.cubin", "kernel.ptx", "kernel.cu", "build.log", cache.RECORD)
        files = [folder / name for folder in folders for name in names]
        files += [
            place.with_name(f".{place.name}.lock"),
            Path("root", cache.FAILED, f"{place.name}.cu"),
        ]
        for path, longest in [
            *((x, LONGEST_FOLDER) for x in folders),
            *((x, LONGEST_FILE) for x in files),
        ]:
            inside = path.relative_to("root").as_posix()
            assert is_legal(inside)
            assert len(f"{root}/{inside}") <= longest, inside


def test_the_cache_makes_these_names(tmp_path, monkeypatch):
    """The names above are those of `cache`."""
    monkeypatch.setenv("RTFLASH_CACHE_DIR", str(tmp_path))
    place, made = cache.folder(LONGEST.name, KEY), []
    make, rename = Path.mkdir, os.rename
    monkeypatch.setattr(
        Path, "mkdir", lambda self, *a, **k: made.append(self.name) or make(self, *a, **k)
    )
    monkeypatch.setattr(
        os, "rename", lambda old, new: made.append(Path(new).name) or rename(old, new)
    )
    cache.obtain(place, lambda: cache.Entry({"kernel.cubin": b"1"}, {}))
    (place / cache.RECORD).write_bytes(b"?")
    with pytest.warns(RuntimeWarning, match="damaged"):
        cache.obtain(place, lambda: cache.Entry({"kernel.cubin": b"2"}, {}))
    named = [name for name in made if LONGEST.name in name]
    assert place.name in named
    assert {len(name) for name in named} == {
        len(place.name),
        len(cache.temporary(place, "new").name),
    }
    failed = cache.keep_failed(LONGEST.name, KEY, "int é;\n")
    assert failed == tmp_path / cache.FAILED / f"{place.name}.cu"
    assert failed.read_bytes() == "int é;\n".encode()  # and no other line ends, on any system


@pytest.mark.parametrize("arch", [*device.TYPICAL, "compute_120"])
def test_members_of_bundles_and_folders_of_dumps_are_legal(arch):
    assert is_legal(bundle.place(LONGEST, arch))
    assert is_legal(dump.folder(Path(), LONGEST, arch).as_posix())
    assert len(bundle.place(LONGEST, arch)) < 200
    assert record.ARCH.fullmatch(arch)


class Refusing:
    """A rename that is refused so many times, as Windows does while somebody has a file open."""

    def __init__(self, times: int) -> None:
        self.left = times

    def __call__(self, old: Path, new: Path) -> None:
        self.left -= 1
        if self.left >= 0:
            raise PermissionError(13, "used by another process")
        os.replace(old, new)


def test_windows_renames_what_somebody_reads(tmp_path, monkeypatch):
    (tmp_path / "new").write_bytes(b"new")
    with pytest.raises(PermissionError):
        renames.patiently(
            Refusing(1), tmp_path / "new", tmp_path / "old"
        )  # elsewhere it means what it says
    monkeypatch.setattr(sys, "platform", "win32")
    renames.patiently(Refusing(3), tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old").read_bytes() == b"new"
    monkeypatch.setattr(renames, "PATIENCE_S", 0.05)
    with pytest.raises(PermissionError):
        renames.patiently(Refusing(1000), tmp_path / "old", tmp_path / "new")


def test_bundles_and_cache_rename_patiently(tmp_path, monkeypatch):
    renamed = []

    def patiently(rename, old, new):
        renamed.append(Path(new).name)
        rename(old, new)

    monkeypatch.setattr(renames, "patiently", patiently)
    bundle.write(tmp_path / "kernels.zip", b"1")
    cache.store(tmp_path / "variant", cache.Entry({}, {}))
    assert renamed == ["kernels.zip", "variant"]


def test_emulation_on_windows_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    assert (
        cxx.why_not() == "emulated kernels need Linux or macOS; this is Windows (WSL is a Linux)."
    )


def test_programs_of_nvidias_wheels_on_windows(tmp_path, monkeypatch):
    for name in ("nvdisasm", "nvdisasm.exe"):
        (tmp_path / "nvidia" / "cu13" / "bin").mkdir(parents=True, exist_ok=True)
        (tmp_path / "nvidia" / "cu13" / "bin" / name).touch()
    monkeypatch.setattr(dump.shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path)])
    assert Path(str(dump.find("nvdisasm"))).name == "nvdisasm"
    monkeypatch.setattr(sys, "platform", "win32")
    assert Path(str(dump.find("nvdisasm"))).name == "nvdisasm.exe"


@pytest.mark.skipif(sys.platform == "win32", reason="kernels are not emulated there")
def test_a_compiler_in_a_folder_with_spaces(tmp_path, monkeypatch):
    if cxx.why_not():
        pytest.skip(cxx.why_not())
    program = tmp_path / "my tölz" / "g++"
    program.parent.mkdir()
    processes.link(program, Path(cxx.find().path))
    monkeypatch.setenv("RTFLASH_CXX", str(program))
    assert cxx.find().path == str(program)
    monkeypatch.setenv("RTFLASH_CXX", f'"{program}" -O0 -DX="a b"')
    assert (cxx.find().path, cxx.find().options[-2:]) == (str(program), ("-O0", "-DX=a b"))
    monkeypatch.setenv("RTFLASH_CXX", "no ' program")
    assert 'RTFLASH_CXX is "no \' program", which is no program' in str(cxx.why_not())


def test_a_kernel_at_a_path_that_cannot_be_read_is_loaded_from_memory(tmp_path, monkeypatch):
    """As Windows' driver may refuse UTF-8, and CuPy cannot encode what no encoding of the system has."""
    cupy = pytest.importorskip("cupy")
    from cupy.cuda import function

    class Module:
        def load(self, code):
            self.code = code

        def get_function(self, name):
            return name, self.code

    def refuse(path):
        raise UnicodeEncodeError("utf-8", path, 0, 1, "surrogates not allowed")

    monkeypatch.setattr(cupy, "RawModule", refuse)
    monkeypatch.setattr(function, "Module", Module)
    used = nvrtc.Resources(0, 0, 0, 0, 0, 0.0)
    made = artifacts.Artifact(SMALL, "sm_80", b"code", "", "", (), used, KEY, tmp_path / "\udcc3")
    assert build.raw_kernel(made).kernel == (SMALL.name, b"code")


# A folder with a space and two letters of no ASCII; as bytes, since a process may have another encoding.
STRANGE = "a b é ü"
PLAIN = {
    "LC_ALL": "C",
    "LANG": "C",
    "PYTHONUTF8": "0",
    "PYTHONCOERCECLOCALE": "0",
    "PYTHONIOENCODING": "ascii",
}
CP1252 = {"PYTHONIOENCODING": "cp1252"}

USE = """
import sys
from rtflash import artifacts, build, device
from rtflash.spec import Spec
build.load = lambda made, gpu: build.Kernel(made.spec, made, 1, made.resources)
made = build.kernel(Spec("fp16", 16, 16, 32, 16, 2, 1, isa=75), device.for_arch("sm_80")).raw
print(artifacts.compile_count, ascii(str(made.origin or made.folder)))
"""


def run(arguments: list[str], folder: Path, variables: dict[str, str]) -> str:
    """What a Python says in a folder."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=processes.environment(RTFLASH_CACHE_DIR=str(folder / "cache")) | variables,
        capture_output=True,
    )
    errors = done.stderr.decode(errors="replace")
    assert done.returncode == 0, errors
    assert "Traceback" not in errors
    return done.stdout.decode("ascii" if "LANG" in variables else "cp1252")


@pytest.fixture
def strange(tmp_path: Path) -> Path:
    folder = tmp_path / STRANGE
    folder.mkdir()
    return folder


def test_kernels_in_a_folder_that_no_encoding_suits(strange):
    pytest.importorskip("cupy", reason="NVRTC is called through CuPy")
    dumped = str(strange / "dumped é")
    how = PLAIN | {
        "RTFLASH_LOG": "3",
        "RTFLASH_DUMP": dumped,
        "RTFLASH_RECORD": str(strange / "r é.jsonl"),
    }
    assert run(["-c", USE], strange, how).startswith("1 ")
    assert run(["-c", USE], strange, how).startswith("0 ")
    assert run(["-c", USE], strange, PLAIN | {"RTFLASH_OVERRIDE": dumped}).startswith("1 'edited ")
    bundled = str(strange / "b é.zip")
    generate = [
        "-m",
        "rtflash",
        "generate",
        "--record",
        str(strange / "r é.jsonl"),
        "--bundle",
        bundled,
    ]
    run(generate, strange, PLAIN)
    said = run(["-c", USE], strange, PLAIN | {"RTFLASH_BUNDLE": bundled, "RTFLASH_NO_COMPILE": "1"})
    assert said.startswith("0 'bundle ")


COMMANDS = [
    (["info"], PLAIN),
    (["info"], CP1252),
    (["generate", "--help"], PLAIN),
    (["generate", "--help"], CP1252),
    (["cache", "list"], PLAIN),
    (["cache", "clear"], PLAIN),
    (["generate", "--arch", "sm_80", "--head-dim", "16", "--mask", "full", "--length", "even",
      "--out", "out é", "--json", "é.json", "--plot", "é.svg", "--wheel", "wheels é"], PLAIN),
]  # fmt: skip


@pytest.mark.parametrize(
    ("command", "encoding"),
    COMMANDS,
    ids=lambda x: "_".join(x[:2]) if isinstance(x, list) else x["PYTHONIOENCODING"],
)
def test_commands_in_a_folder_that_no_encoding_suits(strange, command, encoding):
    for name in ("typer", "rich", "matplotlib", "cupy"):
        pytest.importorskip(name)
    said = run(["-m", "rtflash", *command], strange, encoding)
    # What it draws is of ASCII; only paths may be shown escaped.
    assert not re.search(r"\\u(?!dc)", said), said


def test_the_spinner_is_of_ascii():
    pytest.importorskip("rich")
    pytest.importorskip("typer")
    frames = import_tool("screen").working("what").renderable.frames
    assert all(frame.isascii() for frame in frames)


def test_paths_of_variables_are_separated_as_in_path(monkeypatch, tmp_path):
    monkeypatch.setenv(
        "RTFLASH_BUNDLE", os.pathsep.join([str(tmp_path / "a"), str(tmp_path / "b")])
    )
    assert settings.bundles() == (tmp_path / "a", tmp_path / "b")
