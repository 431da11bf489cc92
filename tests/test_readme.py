"""README.md: its commands exist, its code runs, its links lead somewhere; the code of docs/serving.md runs as well."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from rtflash import device
from rtflash.__main__ import import_tool

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"

if not README.exists():
    pytest.skip("not run from a checkout", allow_module_level=True)

TEXT = README.read_text(encoding="utf-8")
DOCS = ROOT / "docs"


def blocks(text):
    return re.findall(r"^```(\w+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


BLOCKS = blocks(TEXT)
CODE = [text for language, text in BLOCKS if language == "python"]
SERVING = [text for _, text in blocks((DOCS / "serving.md").read_text(encoding="utf-8"))]
COMMANDS = [line for kind, text in BLOCKS if kind == "bash" for line in text.splitlines()]


def framework(code):
    return re.match(r"import (\w+)", code)[1]


@pytest.mark.parametrize("code", [*CODE, *SERVING], ids=framework)
def test_quick_start_runs(code):
    name = framework(code)
    pytest.importorskip(name)
    if name == "cupy" and device.why_no_gpu():
        pytest.skip(device.why_no_gpu())
    scope = {}
    exec(code, scope)
    assert scope["out"].shape == scope["q"].shape
    assert scope["out"].dtype == scope["q"].dtype
    assert type(scope["out"]) is type(scope["q"])


def test_each_framework_has_its_quick_start():
    assert [framework(code) for code in CODE] == ["torch", "jax", "cupy", "numpy"]


def test_serving_has_its_quick_starts():
    """Packed sequences, an append to a cache, pages, the two merges."""
    wanted = ("varlen", "cos, sin", "block_table", "merge_attention_states", "combine")
    for code, words in zip(SERVING, wanted, strict=True):
        assert words in code


def test_two_install_commands_and_extras_that_exist():
    installs = [line for line in COMMANDS if line.startswith("pip install")]
    assert len(installs) == 2
    assert installs[0].endswith("&& rtflash demo")
    assert installs[1].endswith("&& python -m pytest")
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for extra in re.findall(r"\[([a-z0-9,]+)\]\"", "\n".join(COMMANDS)):
        for name in extra.split(","):
            assert re.search(rf"^{name} = \[", pyproject, re.MULTILINE), name


@pytest.mark.parametrize("line", [line for line in COMMANDS if "rtflash " in line])
def test_commands_parse(line):
    typer = pytest.importorskip("typer")
    words = shlex.split(line[line.index("rtflash ") :])
    command = typer.main.get_command(import_tool("cli").app)
    context = None
    for word in words[1:]:
        if not hasattr(command, "commands"):
            break
        context = command.make_context(word, [word], parent=context, resilient_parsing=True)
        command = command.commands[word]
    command.make_context(command.name, words[words.index(command.name) + 1 :], parent=context)


def test_links_and_files_exist():
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert links
    files = re.findall(r"`((?:rtflash|templates|tools)/[\w./]*)`|python (tools/\w+\.py)", TEXT)
    for name in [*links, *filter(None, sum(files, ()))]:
        assert name.startswith("http") or (ROOT / name).exists(), name


def test_public_names_exist():
    rtflash = importlib.import_module("rtflash")
    for name in set(re.findall(r"`?(?:rtflash\.)?(flash_attn_\w+|warmup|merge_\w+)\b", TEXT)):
        assert hasattr(rtflash, name), name
