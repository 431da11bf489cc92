"""render.py: joining, line numbers that NVRTC reports, Jinja's delimiters and errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rtflash import render
from rtflash.spec import Spec

SPEC = Spec("bf16", 128, 96, 128, 64, 4, 2, mask="causal", softcap=True, prescale=True)
LINE = re.compile(r'#line (\d+) "([^"]+)"')
VALUES = {"head_dim": "64", "softcap": "true", "alibi": "false", "name": "kernel_name"}


def lines_by_place(text: str) -> dict[tuple[str, int], str]:
    """Text of each line by the (file, number) that a compiler would report for it."""
    places: dict[tuple[str, int], str] = {}
    file, number = "", 0
    for line in text.splitlines():
        directive = LINE.fullmatch(line)
        if directive:
            number, file = int(directive[1]), directive[2]
        else:
            places[file, number] = line
            number += 1
    return places


def test_real_templates_keep_their_numbers():
    texts = render.templates()
    places = lines_by_place(render.source(SPEC))
    assert {file for file, _ in places} <= set(texts)
    for (file, number), line in places.items():
        original = texts[file].splitlines()[number - 1]
        if "${" not in original and "#pragma once" not in original:
            assert line == original.rstrip(), f"{file}:{number}"


def test_real_templates_render_every_flag():
    text = render.source(SPEC)
    assert "${" not in text
    assert "#include" not in text
    assert re.search(rf"\b{SPEC.name}\b\W", text)
    assert "kHeadDimV = 96;" in text
    assert "kSoftcap = true;" in text
    assert "kAlibi = false;" in text


def test_includes_are_joined_once_and_resolved_from_their_folder():
    texts = {
        "k.cu": '#include "a.cuh"\n#include "sm80/mma.cuh"\n  #  include "sm80/../a.cuh"\nint k;\n',
        "a.cuh": "#pragma once\nint a;\n",
        "sm80/mma.cuh": '#include "copy.cuh"\n#include "../a.cuh"\n#include "b.cuh"\nint mma;\n',
        "sm80/copy.cuh": '#include "mma.cuh"\nint copy;\n',
        "b.cuh": "int b;\n",
    }
    text = render.join("k.cu", texts, VALUES)
    assert re.findall(r"int (\w+);", text) == ["a", "copy", "b", "mma", "k"]
    assert "pragma" not in text
    places = lines_by_place(text)
    assert places["k.cu", 4] == "int k;"
    assert places["sm80/mma.cuh", 4] == "int mma;"
    assert places["a.cuh", 2] == "int a;"


def test_an_include_in_a_false_branch_is_not_joined():
    texts = {
        "k.cu": '//% if alibi\n#include "a.cuh"\n//% endif\n#include "b.cuh"\nint k;\n',
        "a.cuh": "int a;\n",
        "b.cuh": '#include "a.cuh"\nint b;\n',
    }
    assert re.findall(r"int (\w+);", render.join("k.cu", texts, VALUES)) == ["a", "b", "k"]


def test_angle_includes_and_comments_stay():
    text = render.join("k.cu", {"k.cu": '#include <cuda.h>\n// #include "no.cuh"\n'}, VALUES)
    assert text == '#line 1 "k.cu"\n#include <cuda.h>\n// #include "no.cuh"\n'


@pytest.mark.parametrize("softcap", ["true", "false"])
def test_numbers_after_jinja(softcap):
    lines = [
        "int a1;",
        "//% if softcap",
        "int b3;",
        "",
        "  //% if not alibi",
        "int c6;",
        "  //% endif",
        "//% else",
        "int d9;",
        "//% endif",
        "",
        "/*# a comment",
        "of two lines #*/ int e13;",
        "/*% if softcap %*/ int f14; /*% endif %*/ int g14;",
        "//% if softcap",
        "//% endif",
        "int h17;",
    ]
    text = render.join("k.cu", {"k.cu": "\n".join(lines)}, {**VALUES, "softcap": softcap})
    places = lines_by_place(text)
    names = {"b3", "c6", "f14"} if softcap == "true" else {"d9"}
    found = {
        name: number
        for (_, number), line in places.items()
        for name in re.findall(r"[a-h]\d+", line)
    }
    assert set(found) == names | {"a1", "e13", "g14", "h17"}
    assert all(name[1:] == str(number) for name, number in found.items())


@pytest.mark.parametrize("softcap", ["true", "false"])
def test_no_line_directive_inside_a_macro(softcap):
    lines = [
        "#define F(x) \\",
        "  a; \\",
        "//% if softcap",
        "  b; \\",
        "//% endif",
        "  c",
        "int d7;",
    ]
    text = render.join("k.cu", {"k.cu": "\n".join(lines)}, {**VALUES, "softcap": softcap})
    macro = "#define F(x) \\\n  a; \\\n" + ("  b; \\\n" if softcap == "true" else "") + "  c\n"
    assert text == f'#line 1 "k.cu"\n{macro}#line 7 "k.cu"\nint d7;\n'


def test_cuda_text_passes_unchanged():
    body = 'int x{{0}}; asm("{%0, %1}, {#}" :: "r"(x)); f<{}>(a /* % */, b); // 50%\n'
    assert render.join("k.cu", {"k.cu": body}, VALUES) == f'#line 1 "k.cu"\n{body}'


def test_values_are_spelled_as_cpp():
    body = "bool s = ${softcap}, a = ${alibi}; int d = ${head_dim}; void ${name}();\n"
    text = render.join("k.cu", {"k.cu": body}, VALUES)
    assert "bool s = true, a = false; int d = 64; void kernel_name();" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int a;\nint b = ${hed_dim};\n", r"k\.cu:2: 'hed_dim' is undefined.*head_dim"),
        ("\n\n//% if nope\nint a;\n//% endif\n", r"k\.cu:3: 'nope' is undefined"),
        ("\n//% if\n//% endif\n", r"k\.cu:2: "),
        ("int a = ${a b};\n", r"k\.cu:1: "),
        ('\n\n#include "no.cuh"\n', r'k\.cu:3: no template for #include "no\.cuh"'),
        ("//% include 'no.cuh'\n", r"k\.cu: no template 'no\.cuh'"),
    ],
)
def test_errors_name_file_line_and_variable(text, message):
    with pytest.raises(render.TemplateError, match=message):
        render.join("k.cu", {"k.cu": text}, VALUES)


def test_errors_in_an_included_file_name_it():
    texts = {"k.cu": '#include "sm80/a.cuh"\n', "sm80/a.cuh": "\nint a = ${nope};\n"}
    with pytest.raises(render.TemplateError, match=r"^sm80/a\.cuh:2: 'nope' is undefined"):
        render.join("k.cu", texts, VALUES)


PLANTED = {
    "k.cu": [
        '#include "config.cuh"',
        "//% if softcap",
        '#include "sm80/mma.cuh"',
        "//% endif",
        "#define TWICE(x) \\",
        "  (x) + \\",
        "//% if alibi",
        "  0 + \\",
        "//% endif",
        "  (x)",
        "PLANT",
        'extern "C" __global__ void ${name}(int* p) {',
        "PLANT",
        "  *p = TWICE(kHeadDim) + mma();",
        "}",
        "PLANT",
    ],
    "config.cuh": [
        "#pragma once",
        "//% if alibi",
        "int alibi;",
        "//% endif",
        "PLANT",
        "constexpr int kHeadDim = ${head_dim};",
    ],
    "sm80/mma.cuh": [
        "#pragma once",
        '#include "../config.cuh"',
        "PLANT",
        "__device__ int mma() { return 1; }",
    ],
}
PLACES = [
    (file, n)
    for file, lines in PLANTED.items()
    for n, line in enumerate(lines, 1)
    if line == "PLANT"
]


@pytest.mark.parametrize(("file", "number"), [(None, 0), *PLACES])
def test_nvrtc_reports_the_template_line(file, number):
    pytest.importorskip("cupy")
    from rtflash import nvrtc

    def planted(name, line, place):
        if line != "PLANT":
            return line
        return "  int oops = undeclared_name;" if (name, place) == (file, number) else ""

    texts = {
        name: "\n".join(planted(name, line, place) for place, line in enumerate(lines, 1))
        for name, lines in PLANTED.items()
    }
    text = render.join("k.cu", texts, VALUES)
    binary, log = nvrtc.run(text, "k.cu", "sm_80", nvrtc.options("sm_80"))
    if file is None:
        assert binary, log
    else:
        assert binary is None
        assert f'{file}({number}): error: identifier "undeclared_name" is undefined' in log


def test_templates_of_a_folder(tmp_path):
    (tmp_path / "sm80").mkdir()
    (tmp_path / "k.cu").write_bytes(b"int a;\r\nint b;\r\n")
    (tmp_path / "sm80" / "a.cuh").write_text("int c;\n", encoding="utf-8")
    (tmp_path / "notes.txt").write_text("no template", encoding="utf-8")
    assert render.templates(tmp_path) == {"k.cu": "int a;\nint b;\n", "sm80/a.cuh": "int c;\n"}
    first = render.digest(tmp_path)
    (tmp_path / "k.cu").write_text("int changed;\n", encoding="utf-8")
    assert render.digest(tmp_path) == first, "a process reads the templates once"
    render.templates.cache_clear()
    render.digest.cache_clear()
    assert render.digest(tmp_path) != first


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no templates"):
        render.templates(tmp_path)


def test_default_folder_prefers_the_package(tmp_path, monkeypatch):
    package = tmp_path / "rtflash"
    package.mkdir()
    monkeypatch.setattr(render, "__file__", str(package / "render.py"))
    assert render.default_folder() == Path(tmp_path / "templates").resolve()
    (package / "templates").mkdir()
    assert render.default_folder() == Path(package / "templates").resolve()
