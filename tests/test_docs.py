"""docs/: links and named files exist, the site has every page and builds, functions are described, screens are those
of the commands; docs/emulation.md tells of every file of the host and examples run;
docs/variants.md knows every option of `rtflash generate`, docs/settings.md every setting, and their commands run."""

from __future__ import annotations

import inspect
import itertools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import rtflash
from rtflash import artifacts, cache, device, listed, nvrtc, record, settings
from rtflash.__main__ import import_tool

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
# On the site these are pages, too.
ABOVE = {"README.md": "start.md", "CHANGELOG.md": "changes.md", "LICENSE": "license.md"}
VARIANTS = ROOT / "docs" / "variants.md"
SETTINGS = ROOT / "docs" / "settings.md"
EMULATION = ROOT / "docs" / "emulation.md"
FUNCTIONS = ROOT / "docs" / "functions.md"
SCREENS = ROOT / "docs" / "screens"
SITE = ROOT / ".mkdocs.yml"

if not EMULATION.exists():
    pytest.skip("not run from a checkout", allow_module_level=True)


def relative(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """What GitHub, and mkdocs likewise, make of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=relative)
def test_links_and_files_exist(page: Path) -> None:
    text = without_code(page)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link
        # Other files above docs/ are not on the site.
        assert (ROOT / "docs") in target.parents or relative(target) in ABOVE, link
    folders = "rtflash|templates|tests|tools|docs"
    for name in re.findall(rf"(?:`|python )((?:{folders})/[\w./]*)", text):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=relative)
def test_links_are_named_by_what_they_lead_to(page: Path) -> None:
    """A path is no name on the site."""
    assert not re.findall(r"\[[^\]]*\.md\]\(", without_code(page))


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=relative)
def test_lists_are_lists_on_the_site(page: Path) -> None:
    """GitHub is content with less: an empty line before a list or a table, four spaces before an inner list."""
    lines = ["", *without_code(page).splitlines()]
    for before, line in itertools.pairwise(lines):
        begins = re.match(r"(- |\d+\. |\|)", line)
        goes_on = re.match(r"(- |\d+\. |\||  |#|$)", before)
        assert not begins or goes_on, line
        assert not re.match(r" {1,3}(- |\d+\. )", line), line


def test_the_site_has_every_page() -> None:
    """As text: mkdocs and a YAML parser need not be installed."""
    nav = re.search(r"^nav:\n(.*?)^\S", SITE.read_text(encoding="utf-8"), re.M | re.S)
    assert nav
    named = re.findall(r": (\S+\.md)\b", nav[1])
    made = set(ABOVE.values()) - {"license.md"}
    assert sorted(named) == sorted(made | {relative(page)[len("docs/") :] for page in PAGES})
    hook = (ROOT / ".ci" / "site.py").read_text(encoding="utf-8")
    for name, page in ABOVE.items():
        assert f'"{name}": "{page}"' in hook


def test_the_site_builds(tmp_path: Path) -> None:
    """Strictly: a link that leads nowhere, or a page that nothing names, fails."""
    for package in ("material", "mkdocstrings"):
        pytest.importorskip(package, reason="the extra docs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", SITE, "-d", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    html = (tmp_path / "functions" / "index.html").read_text(encoding="utf-8")
    for name in described():
        assert f'id="{name}"' in html, name


def described() -> list[str]:
    """The names that docs/functions.md describes."""
    return re.findall(r"^<!-- ::: ([\w.]+) -->$", FUNCTIONS.read_text(encoding="utf-8"), re.M)


def test_every_public_name_is_described() -> None:
    public = {f"rtflash.{name}" for name in rtflash.__all__ if name != "__version__"}
    assert public <= {*described()}
    table = re.findall(r"^\| `(\w+)` \|", FUNCTIONS.read_text(encoding="utf-8"), re.M)
    functions = {name for name in rtflash.__all__ if inspect.isfunction(getattr(rtflash, name))}
    assert set(table) == functions


@pytest.mark.parametrize("name", [name for name in rtflash.__all__ if name[0].islower()])
def test_docstrings_tell_of_arguments_results_and_errors(name: str) -> None:
    function = getattr(rtflash, name)
    said = inspect.getdoc(function) or ""
    parts = re.split(r"^(\w+)\n-+\n", said, flags=re.M)[1:]
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    assert [*sections] == ["Parameters", "Returns", "Raises"]
    items = re.findall(r"^(\w[\w, ]*) : ", sections["Parameters"], re.M)
    told = {word for item in items for word in item.split(", ")}
    assert told == {*inspect.signature(function).parameters}
    if name != "warmup":
        assert re.search(r"\b(batch|total)\w*, ", sections["Parameters"])
        assert "heads, head_dim" in sections["Parameters"]


def test_every_page_with_examples_is_tested() -> None:
    tested = {"emulation.md", "jax.md", "migrate.md", "pytorch.md", "serving.md", "transformers.md"}
    assert {page.name for page in PAGES if examples(page)} == tested


@pytest.mark.parametrize("name", ["info", "bench", "generate"])
def test_screens_are_of_the_commands(name: str) -> None:
    """The pictures are there, are XML, and the README shows them with the command that made them."""
    screens = import_tool("screens")
    picture = ElementTree.parse(SCREENS / f"{name}.svg").getroot()
    shown = "".join(picture.itertext()).replace("\xa0", " ")
    commands = [screens.COMMANDS[name], *([screens.ON_CPU] if name == "bench" else [])]
    assert any(f"$ rtflash {command}" in shown for command in commands)
    assert f"](docs/screens/{name}.svg)" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "@font-face" not in (SCREENS / f"{name}.svg").read_text(encoding="utf-8")


def test_a_screen_is_made_again(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("typer")
    monkeypatch.setenv("RTFLASH_CACHE_DIR", str(tmp_path / "cache"))
    code = "import sys; from tools import screens; screens.main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "info", "--out", str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    shown = "".join(ElementTree.parse(tmp_path / "info.svg").getroot().itertext())
    for row in settings.describe():
        assert row.variable in shown


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


def commands_of(page: Path) -> list[str]:
    """The commands of `rtflash` that stand in a page's text, with options or without."""
    return re.findall(r"`(rtflash (?:cache )?\w+(?: -[^`\n]*)?)`", without_code(page))


@pytest.mark.parametrize(
    "line", sorted({line for page in PAGES for line in commands_of(page) if "..." not in line})
)
def test_commands_in_the_text_parse(line: str) -> None:
    name, *words = shlex.split(line)[1:]
    if words == ["--arch"]:
        return  # the option is what the text is about
    command = typer_command(name)
    if name == "cache":
        command = command.commands[words.pop(0)]
    command.make_context(command.name, words, resilient_parsing=False)


def test_pictures_of_measurements_are_made_again(tmp_path: Path, monkeypatch: Any) -> None:
    """By the commands that docs/benchmarks tells; every picture there has one."""
    testing = pytest.importorskip("typer.testing")
    pytest.importorskip("matplotlib")
    folder = ROOT / "docs" / "benchmarks"
    monkeypatch.chdir(ROOT)
    made = set()
    for line in commands_of(folder / "README.md"):
        for picture in re.findall(r"docs/benchmarks/(\w+\.png)", line):
            words = line.replace(f"docs/benchmarks/{picture}", (tmp_path / picture).as_posix())
            result = testing.CliRunner().invoke(import_tool("cli").app, shlex.split(words)[1:])
            assert result.exit_code == 0, result.output
            assert (tmp_path / picture).stat().st_size > 10000
            made.add(picture)
    assert made == {path.name for path in folder.glob("*.png")}


def blocks(page: Path) -> str:
    """What a page has in blocks of bash."""
    return "".join(
        re.findall(r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    )


def lines_of(page: Path) -> list[str]:
    """The commands of `rtflash` in them."""
    return re.findall(r"^rtflash .*$", blocks(page), re.M)


def test_every_page_with_commands_is_tested() -> None:
    assert [page for page in PAGES if blocks(page)] == [SETTINGS, VARIANTS]


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


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=relative)
def test_settings_that_are_told_of_exist(page: Path) -> None:
    named = re.findall(r"\bRTFLASH_\w+", page.read_text(encoding="utf-8"))
    assert {*named} <= settings.MEANINGS.keys()


def test_every_setting_is_told_of_with_its_default(monkeypatch: Any) -> None:
    for name in settings.MEANINGS:
        monkeypatch.delenv(name, raising=False)
    values = {row.variable: row.value for row in settings.describe()}
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", SETTINGS.read_text(encoding="utf-8"), re.M)
    assert [name for name, _ in rows] == [*values]
    for name, meaning in rows:
        default = re.search(r"`?(\w+)`? \(default\)", meaning)
        assert not default or default[1] == values[name], name


@pytest.mark.parametrize("line", lines_of(SETTINGS))
def test_commands_of_settings_run(line: str, monkeypatch: Any, tmp_path: Path) -> None:
    """On a cache of one kernel, which is listed or deleted."""
    testing = pytest.importorskip("typer.testing")
    monkeypatch.setenv("RTFLASH_CACHE_DIR", str(tmp_path))
    place = cache.folder("rtflash_forward_test", "0123456789ab")
    cache.store(place, cache.Entry({}, {"arch": "sm_80"}))
    result = testing.CliRunner().invoke(import_tool("cli").app, shlex.split(line)[1:])
    assert result.exit_code == 0, result.output
    assert "1 kernel," in result.output
    assert place.exists() == (line != "rtflash cache clear")


@pytest.mark.parametrize("line", lines_of(VARIANTS))
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
    spec = listed.table_specs(device.for_arch("sm_80"))[0]
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
