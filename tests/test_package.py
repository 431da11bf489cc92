"""Wheel, editable install and plain checkout: each holds all it needs, and the command line finds its parts."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import rtflash
from rtflash import __main__ as entry

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "rtflash", "templates", "tools")

if not (ROOT / "pyproject.toml").exists():
    pytest.skip("not run from a checkout", allow_module_level=True)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the sources, so that building leaves nothing behind in them; in a folder rtflash, as a clone's is."""
    folder = tmp_path_factory.mktemp("checkout") / "rtflash"
    folder.mkdir()
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=ignore)
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def build(checkout, folder, kind):
    """The wheel that setuptools makes, without a network and without pip."""
    # (Not imported here: setuptools replaces distutils, and cannot once another library has loaded that.)
    try:
        found = metadata.version("setuptools")
    except metadata.PackageNotFoundError:
        found = "0"
    if int(found.partition(".")[0]) < 77:
        pytest.skip(f"needs setuptools 77, not {found}")
    code = f"import setuptools.build_meta as b, sys; b.{kind}(sys.argv[1])"
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory):
    return build(checkout, tmp_path_factory.mktemp("wheel"), "build_wheel")


@pytest.fixture(scope="module")
def editable(checkout, tmp_path_factory):
    return build(checkout, tmp_path_factory.mktemp("editable"), "build_editable")


def environment(folder, archive=None):
    """Python of a new virtual environment that has `archive` and sees the packages of this one.

    A path in a .pth file is not searched for further .pth files, so an editable rtflash here is out of sight there.
    """
    if (Path(sysconfig.get_paths()["purelib"]) / "rtflash").is_dir():
        pytest.skip("another rtflash is installed in this environment")
    venv.create(folder, with_pip=False)
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    ask = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    site = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True)
    packages = Path(site.stdout.strip())
    here = {sysconfig.get_paths()[key] for key in ("purelib", "platlib")}
    (packages / "outer.pth").write_text("\n".join(here) + "\n", encoding="utf-8")
    if archive is not None:
        zipfile.ZipFile(archive).extractall(packages)
    return python


def run(python, *arguments, folder, **variables):
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [python, *arguments],
        cwd=folder,
        env=kept | variables | {"RTFLASH_CACHE_DIR": str(folder / "cache")},
        capture_output=True,
        text=True,
    )


USE = """
import sys
import numpy as np
import rtflash
from rtflash import render
from rtflash.__main__ import import_tool
from rtflash.spec import Spec

spec = Spec("fp16", 64, 64, 64, 64, 4, 1)
assert spec.name in render.source(spec)
q = np.ones((1, 3, 2, 8), np.float16)
assert (rtflash.flash_attn_func(q, q, q) == 1).all()
assert import_tool("generate").__name__ == "rtflash.tools.generate"
print(rtflash.__file__, import_tool("cli").__file__)
"""


@pytest.mark.parametrize("kind", ["wheel", "editable", "checkout"])
def test_each_kind_of_install_works(kind, checkout, tmp_path, request):
    archive = None if kind == "checkout" else request.getfixturevalue(kind)
    python = environment(tmp_path / "venv", archive)
    variables = {"PYTHONPATH": str(checkout)} if kind == "checkout" else {}
    # Beside the clone, Python finds a folder rtflash before the package.
    place = checkout.parent if kind == "editable" else tmp_path
    used = run(python, "-c", USE, folder=place, **variables)
    assert used.returncode == 0, used.stderr
    home = tmp_path / "venv" if kind == "wheel" else checkout
    assert all(Path(path).is_relative_to(home) for path in used.stdout.split()), used.stdout

    pytest.importorskip("typer")
    info = run(python, "-m", "rtflash", "info", folder=place, **variables)
    assert info.returncode == 0, info.stderr
    assert rtflash.__version__ in info.stdout


def test_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        scripts = next(name for name in names if name.endswith("entry_points.txt"))
        assert "rtflash = rtflash.__main__:main" in archive.read(scripts).decode()
    templates = {
        f"rtflash/templates/{path.relative_to(ROOT / 'templates').as_posix()}"
        for path in (ROOT / "templates").rglob("*")
        if path.is_file()
    }
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "rtflash").rglob("*.py")}
    tools = {f"rtflash/tools/{path.name}" for path in (ROOT / "tools").glob("*.py")}
    data = {"rtflash/data/minilm_demo.npz", "rtflash/py.typed"}
    expected = templates | modules | tools | data
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert any(name.endswith("LICENSE") for name in names)


def test_wheel_is_pure_and_small(wheel):
    assert wheel.name == f"rtflash-{rtflash.__version__}-py3-none-any.whl"
    assert wheel.stat().st_size < 500_000


def test_command_line_without_its_extra_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit) as stopped:
        entry.main()
    assert stopped.value.code == 2
    assert 'typer, not installed here: pip install "rtflash[tools]"' in capsys.readouterr().err
