"""docs/: links and named files exist, examples run; docs/emulation.md tells of every file of the host."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
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


@pytest.mark.emulated
def test_the_example_of_emulation_runs() -> None:
    code = re.findall(r"^```python\n(.*?)^```", EMULATION.read_text("utf-8"), re.M | re.S)
    scope: dict[str, Any] = {}
    for block in code:
        exec(block, scope)
    assert (scope["report"].out == 1).all()
    assert not scope["report"].findings


@pytest.mark.parametrize("page", ["jax.md", "migrate.md"])
def test_examples_run(page: str) -> None:
    if page == "jax.md":
        pytest.importorskip("jax")
    text = (ROOT / "docs" / page).read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    assert blocks
    for block in blocks:
        exec(block, {})
