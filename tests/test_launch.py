"""rtflash/layouts.py mirrors params.cuh: a C++ compiler says where the fields of each kernel's Params are."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from rtflash import cxx, layouts, render
from rtflash.other_specs import AppendSpec, CombineSpec
from rtflash.spec import AnySpec, Spec

TILE = {"head_dim": 64, "head_dim_v": 64, "block_m": 64, "block_n": 64, "warps": 4, "stages": 1}
FORWARD = Spec("fp16", **TILE)
HOPPER = Spec("fp16", 64, 64, 192, 128, 12, 2, isa=90)
ROWS = Spec("fp16", 64, 64, 128, 128, 8, 2, isa=90, gather=True)
SPLIT = Spec("bf16", **TILE, split=True, ragged=True, paged=True, rotary="halves")
KERNELS: dict[str, tuple[AnySpec, layouts.Layout]] = {
    "forward": (FORWARD, layouts.FORWARD),
    "split forward": (SPLIT, layouts.FORWARD),
    "forward by TMA": (HOPPER, layouts.FORWARD_TMA),
    "forward by rows": (ROWS, layouts.FORWARD_DRAWN),
    "combine": (CombineSpec("fp16"), layouts.COMBINE),
    "append": (AppendSpec("fp16"), layouts.APPEND),
}
SIZES = {"M": 128, "Q": 8, "q": 8, "i": 4, "I": 4, "f": 4}
# A declaration such as `const int* lse;` or `Strides q_strides;`.
MEMBER = re.compile(r"^\s*(?:const )?(\w+)\*? (\w+);", re.MULTILINE)


def packed(layout: layouts.Layout) -> list[tuple[str, int]]:
    """(field, offset) of every field as layouts.py packs them."""
    parts = re.findall(r"(\d+)(\w)", layout.head.format + layout.rest.format)
    # A tensor map is packed as so many bytes.
    codes = "".join("M" if code == "s" else code * int(count) for count, code in parts)
    offset, found = 0, []
    for field, code in zip(layout.fields, codes, strict=True):
        found.append((field, offset))
        offset += SIZES[code]
    assert offset == layout.head.size + layout.rest.size
    return found


def members(source: str, struct: str, prefix: str = "") -> list[str]:
    """The fields of a struct of params.cuh in their order, those of structs in it by their path."""
    body = re.search(rf"struct {struct} \{{(.*?)\n\}};", source, re.DOTALL)
    assert body is not None, struct
    found = []
    for kind, name in MEMBER.findall(body[1]):
        inner = kind in ("Strides", "Sequences", "Divisor")
        found += members(source, kind, f"{prefix}{name}.") if inner else [prefix + name]
    return found


def run_cpp(source: str, body: str, scratch: Path, given: str = "") -> list[str]:
    """What a C++ program of params.cuh and `body` prints, line by line."""
    path = scratch / "program.cpp"
    path.write_text(f"#include <cstdio>\n{source}\nint main() {{\n{body}\n}}\n", encoding="utf-8")
    program = str(scratch / "program")
    subprocess.run([cxx.find().path, "-std=c++17", str(path), "-o", program], check=True)
    run = subprocess.run([program], check=True, capture_output=True, text=True, input=given)
    return run.stdout.splitlines()


def params_source(spec: AnySpec) -> str:
    """params.cuh of a variant, for the host's compiler."""
    return render.join("params.cuh", render.templates(), spec.variables(), "host")


def compiled(source: str, fields: list[str], scratch: Path) -> list[tuple[str, int]]:
    """(field, offset) as a C++ compiler lays Params out, and the size of all."""
    reports = "".join(
        f'  std::printf("{field} %zu\\n", __builtin_offsetof(Params, {field}));\n'
        for field in fields
    )
    said = run_cpp(source, f'{reports}  std::printf(" %zu\\n", sizeof(Params));', scratch)
    return [(name, int(offset)) for name, offset in (line.split(" ") for line in said)]


@pytest.mark.emulated
@pytest.mark.parametrize("kernel", KERNELS)
def test_params_are_those_of_params_cuh(kernel: str, tmp_path: Path) -> None:
    """Names, order, offsets and size: no field is missing on either side, and nothing is padded but the end."""
    spec, layout = KERNELS[kernel]
    source = params_source(spec)
    fields = members(source, "Params")
    assert fields == list(layout.fields)
    *offsets, (_, size) = compiled(source, fields, tmp_path)
    assert offsets == packed(layout)
    assert size == layout.size
    assert size <= -(-layouts.PARAMS_BYTES // 8) * 8


@pytest.mark.emulated
def test_divisors_divide(tmp_path: Path) -> None:
    """Every divisor up to 300, and those beside powers of two, at numbers beside their multiples."""
    most = 2**31 - 1
    near = {2**i + j for i in range(1, 32) for j in (-1, 0, 1)}
    divisors = {d for d in near | set(range(1, 301)) if 1 <= d <= most}
    cases = [
        (d, x)
        for d in sorted(divisors)
        for n in (0, 1, 7, most // d // 2, most // d)
        for x in (n * d - 1, n * d, n * d + d - 1, most)
        if 0 <= x <= most
    ]
    body = """
  int x, value, shift;
  uint32 multiplier;
  while (std::scanf("%d %d %u %d", &x, &value, &multiplier, &shift) == 4) {
    std::printf("%d\\n", divide(x, {value, multiplier, shift}));
  }"""
    given = "".join(" ".join(map(str, (x, *layouts.divisor(d)))) + "\n" for d, x in cases)
    function = render.templates()["divide.cuh"].rpartition("#include")[2].partition("\n")[2]
    words = "#define __device__\n#define __forceinline__ inline\n"
    quotients = run_cpp(params_source(FORWARD) + words + function, body, tmp_path, given)
    assert [int(line) for line in quotients] == [x // d for d, x in cases]


LAYOUTS = [layout for _, layout in KERNELS.values()]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fields_are_described_as_they_are_packed(layout: layouts.Layout) -> None:
    described = layout.described()
    assert [(name, offset) for name, _, offset in described] == packed(layout)
    assert {kind for _, kind, _ in described} <= {
        layouts.TENSOR_MAP,
        "pointer",
        "int32",
        "uint32",
        "int64",
        "float32",
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_plan_keeps_follows_the_head(layout: layouts.Layout) -> None:
    """The rest is copied behind the head: its first field must lie there without padding."""
    assert layout.head.size % 8 == 0
    assert layout.head.size + layout.rest.size <= layouts.PARAMS_BYTES
    assert len(set(layout.fields)) == len(layout.fields)
