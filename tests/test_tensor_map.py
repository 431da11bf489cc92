"""What TMA is told of a tensor, and which tensors it can copy. The driver's side runs on a GPU: see test_forward.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rtflash import describe, device, select, tensor_map
from rtflash.dlpack import row_major
from rtflash.spec import Spec
from rtflash.tensor import View
from rtflash.tensor_map import TensorMap


def view(*shape: int, strides: tuple[int, ...] | None = None) -> View:
    return View(0, shape, strides or row_major(shape), "bf16", 0)


def test_boxes_are_rows_of_one_head() -> None:
    """Columns come in slabs of 128 bytes, or of 64 where 128 would waste half."""
    made = TensorMap(view(3, 100, 8, 128), 176)
    assert made.dims == (128, 8, 100, 3)
    assert made.strides == (256, 2048, 204800)
    assert (made.box, made.swizzle) == ((64, 1, 176, 1), 128)
    assert TensorMap(view(3, 100, 8, 96), 64).box == (32, 1, 64, 1)
    assert TensorMap(view(3, 100, 8, 80), 64).swizzle == 64


def test_packed_rows_are_one_batch() -> None:
    made = TensorMap(view(100, 8, 64), 64)
    assert (made.dims, made.strides) == ((64, 8, 100, 1), (128, 1024, 16))


def test_an_axis_of_one_element_has_a_legal_stride() -> None:
    made = TensorMap(view(1, 5, 1, 64, strides=(3, 64, 7, 1)), 64)
    assert made.strides == (16, 128, 16)
    assert tensor_map.fits(view(1, 5, 1, 64, strides=(3, 64, 7, 1)))


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((2, 5, 2, 64), (640, 128, 0, 1)),
        ((2, 5, 2, 64), (640, -128, 64, 1)),
        ((2, 5, 2, 60), (600, 120, 60, 1)),
        ((2, 5, 2, 64), (2**40, 128, 64, 1)),
        ((2, 0, 2, 64), (640, 128, 64, 1)),
    ],
)
def test_what_tma_cannot_copy(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Heads that share memory, rows backwards, strides that are no whole 16 bytes, or too far; nothing at all."""
    assert not tensor_map.fits(view(*shape, strides=strides))


def test_addresses_are_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(TensorMap, "encode", lambda self, at: asked.append(at) or b"x")
    made = TensorMap(view(3, 100, 8, 128), 176)
    for at in (16, 32, 16, 32, 16):
        made.at(at)
    assert asked == [16, 32]
    for at in range(tensor_map.MAX_ADDRESSES + 1):
        made.at(at)
    assert len(made._encoded) <= tensor_map.MAX_ADDRESSES


def test_hopper_is_chosen_or_the_reason_said() -> None:
    q = view(4, 1024, 8, 128)
    call = describe.dense(q, q, q)
    hopper, ampere = device.for_arch("sm_90a"), device.for_arch("sm_80")
    spec, grid = select.forward(call, hopper)
    assert (spec.isa, spec.kernel_file, grid.blocks) == (90, "forward_sm90.cu", 132)
    assert select.forward(call, ampere)[0].isa == 80
    assert "no Hopper" in str(select.why_not_hopper(call, ampere))
    short = dataclasses.replace(call, align=2, head_dim=33, head_dim_v=33)
    assert "element by element" in str(select.why_not_hopper(short, hopper))
    assert select.forward(short, hopper)[0].isa == 80
    assert not spec.gather
    for other, reason in (
        ({"align": 8}, "16 bytes"),
        ({"boxes": False}, "16 bytes"),
        ({"page_size": 12, "ragged": True}, "whole 8 slots"),
        ({"page_size": 16, "ragged": True, "leftpad": True}, "first slot"),
    ):
        changed = dataclasses.replace(call, **other)
        assert reason in str(select.why_not_tma(changed))
        spec = select.forward(changed, hopper)[0]
        assert (spec.isa, spec.gather) == (90, True)


@pytest.mark.parametrize(
    ("seqlen_q", "heads", "other", "wanted"),
    [
        (40, 8, {}, {"pack_gqa": True, "split": True, "block_m": 128}),
        (100, 6, {}, {"pack_gqa": False, "split": True}),
        (40, 8, {"num_splits": 1}, {"pack_gqa": True, "split": False}),
        (1024, 8, {"page_size": 16, "ragged": True}, {"pack_gqa": False, "paged": True}),
        (1024, 8, {"rotary": "halves", "ragged": True}, {"rotary": "halves"}),
        (1024, 64, {"batch": 9}, {"split": False, "even_n": False}),
    ],
)
def test_what_hoppers_kernel_serves(
    seqlen_q: int, heads: int, other: dict[str, Any], wanted: dict[str, Any]
) -> None:
    """Groups are packed where one head leaves a tile empty and a tile holds whole positions."""
    q, k = view(2, seqlen_q, heads, 64), view(2, 4096, 2, 64)
    call = dataclasses.replace(describe.dense(q, k, k), **other)
    spec, _ = select.forward(call, device.for_arch("sm_90a"))
    assert spec.isa == 90
    assert {name: getattr(spec, name) for name in wanted} == wanted


@pytest.mark.parametrize(("seqlen_q", "heads"), [(16, 14), (1, 142), (40, 6)])
@pytest.mark.parametrize("paged", [False, True])
def test_groups_that_fill_no_tile_of_hoppers(seqlen_q: int, heads: int, paged: bool) -> None:
    """7, 71 or 3 heads of a group: unpacked they would leave most of a tile empty, and read keys once a head."""
    q, k = view(2, seqlen_q, heads, 64), view(2, 4096, 2, 64)
    call = describe.dense(q, k, k)
    if paged:
        call = dataclasses.replace(call, page_size=16, ragged=True)
    spec, _ = select.forward(call, device.for_arch("sm_90a"))
    assert (spec.isa, spec.pack_gqa) == (80, True)


@pytest.mark.parametrize(("page_size", "rows"), [(8, 8), (16, 16), (24, 8), (48, 16), (256, 128)])
def test_boxes_of_pages_divide_pages_and_tiles(page_size: int, rows: int) -> None:
    spec = Spec("bf16", 64, 64, 128, 128, 8, 2, isa=90, ragged=True, paged=True, pack_gqa=True)
    q, k = view(100, 8, 64), view(9, page_size, 2, 64)
    assert [x.box for x in tensor_map.maps(spec, 4, q, k, k)] == [
        (64, 4, 32, 1),
        *[(64, 1, rows, 1)] * 2,
    ]


def test_ctas_stay_where_there_are_more_tiles_than_sms() -> None:
    q = view(2, 16384, 16, 128)
    spec, grid = select.forward(describe.dense(q, q, q), device.for_arch("sm_90a"))
    assert (spec.isa, grid.blocks) == (90, 132)
