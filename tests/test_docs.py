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


def examples(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)


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
