"""docs/: links and named files exist; docs/emulation.md tells of every file of the host and examples run;
docs/variants.md knows every option of `rtflash generate`, and its commands run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from rtflash import artifacts, device, nvrtc, record, select, settings
from rtflash.__main__ import import_tool

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
VARIANTS = ROOT / "docs" / "variants.md"
EMULATION = ROOT / "docs" / "emulation.md"

if not EMULATION.exists():
    pytest.skip("not run from a checkout", allow_module_level=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#\s]+)\)", text):
        assert link.startswith("http") or (page.parent / link).exists(), link
    folders = "rtflash|templates|tests|tools|docs"
    for name in re.findall(rf"(?:`|python )((?:{folders})/[\w./]*)", text):
        assert (ROOT / name).exists(), name


def test_every_file_of_the_host_is_told_of() -> None:
    text = EMULATION.read_text(encoding="utf-8")
    host = ROOT / "templates" / "host"
    for path in host.rglob("*.c*"):
        assert f"`{path.relative_to(host).as_posix()}`" in text, path


def examples(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_examples_of_frameworks_run(name: str) -> None:
    pytest.importorskip(name)
    pages = {"torch": "pytorch.md", "transformers": "transformers.md"}
    for block in examples(ROOT / "docs" / pages[name]):
        exec(block, {})


@pytest.mark.emulated
def test_the_example_of_emulation_runs() -> None:
    scope: dict[str, Any] = {}
    for block in examples(EMULATION):
        exec(block, scope)
    assert (scope["report"].out == 1).all()
    assert not scope["report"].findings


@pytest.mark.parametrize("page", ["jax.md", "migrate.md"])
def test_examples_run(page: str) -> None:
    if page == "jax.md":
        pytest.importorskip("jax")
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    assert blocks
    for block in blocks:
        exec(block, {})


BLOCKS = re.findall(r"^```bash\n(.*?)^```", VARIANTS.read_text(encoding="utf-8"), re.M | re.S)
COMMANDS = re.findall(r"^rtflash .*$", "".join(BLOCKS), re.M)


def test_every_option_and_setting_of_variants_is_told_of() -> None:
    pytest.importorskip("typer")
    text = VARIANTS.read_text(encoding="utf-8")
    command = typer_command("generate")
    for option in {name for parameter in command.params for name in parameter.opts} - {"--help"}:
        assert option in text, option
    others = {"RTFLASH_CACHE", "RTFLASH_CACHE_DIR", "RTFLASH_BACKEND", "RTFLASH_CXX"}
    for name in {row.variable for row in settings.describe()} - others:
        assert name in text, name


def typer_command(name: str) -> Any:
    """A command of `rtflash`, as click has it."""
    typer = pytest.importorskip("typer")
    return typer.main.get_command(import_tool("cli").app).commands[name]


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_of_variants_run(line: str, monkeypatch: Any, tmp_path: Path) -> None:
    """In an empty folder with a record; nothing is compiled or measured for it."""
    testing = pytest.importorskip("typer.testing")
    used = nvrtc.Resources(128, 0, 0, 0, 0, 0.5)

    def compile(spec: Any, arch: str, lines: bool = True) -> artifacts.Artifact:
        return artifacts.Artifact(spec, arch, b"\x7fELF", "", "", (), used, "", None, (13, 0))

    monkeypatch.setattr(artifacts, "compile", compile)
    monkeypatch.setattr(import_tool("generate").nvrtc, "version", lambda: (13, 0))
    monkeypatch.setattr(import_tool("autotune").bench, "why_not", lambda: "There is no GPU.")
    monkeypatch.chdir(tmp_path)
    spec = select.table_specs(device.for_arch("sm_80"))[0]
    (tmp_path / "record.jsonl").write_text(
        json.dumps(record.described(spec, "sm_80")) + "\n", encoding="utf-8"
    )
    words = shlex.split(line)[1:]
    result = testing.CliRunner().invoke(import_tool("cli").app, words)
    assert result.exit_code == (0 if words[0] == "generate" else 2), result.output
    if words[0] == "generate":
        assert (tmp_path / "kernels.zip").exists() or (tmp_path / "wheels").exists()
    else:
        assert "There is no GPU." in result.output
