"""Lists of variants: what lengths choose among, what calls of some features can need, what the tables make."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from . import select
from .device import Device
from .other_specs import AppendSpec, CombineSpec
from .problem import Problem
from .spec import Spec
from .tiles import FEW, HOPPER, SOME, TILES


def variants(spec: Spec) -> list[Spec]:
    """The variants of a kernel that lengths choose among: each length even or not, split or not.

    Rows that are packed, or whose lengths lie on the device, and all of isa 90, count as uneven; the other tables with
    unpacked rows are not split.
    """
    either = (True, False)
    uneven = spec.pack_gqa or spec.ragged or spec.isa == 90
    found = [
        dataclasses.replace(spec, even_m=even_m, even_n=even_n, split=False)
        for even_m, even_n in (((False, False),) if uneven else itertools.product(either, either))
    ]
    return [*found, select.as_split(spec)] if spec.pack_gqa or spec.isa == 90 else found


def every_variant(problem: Problem, device: Device) -> list[Spec | CombineSpec | AppendSpec]:
    """All that a call of these features and on such tensors can need, whatever its lengths, batch and heads."""
    specs: dict[Spec | CombineSpec | AppendSpec, None] = {}
    one, many, more = (dataclasses.replace(problem, seqlen_q=n) for n in (1, 2, 1024))
    few = [many, one]
    if problem.mask == "window":  # one that is open to the left hides nothing from a single query
        few.append(dataclasses.replace(one, window_left=-1))
    calls = [(table, call) for table in (FEW, SOME) for call in few]
    if select.why_not_hopper(problem, device) is None:
        calls += [(HOPPER, call) for call in (*few, more)]
    elif not problem.page_size and problem.rotary == "none":
        calls.append((TILES, more))
    for table, call in calls:
        specs.update(dict.fromkeys(variants(select.variant(call, device, table))))
    specs[select.combine(select.splits_combine(problem, 2), True)[0]] = None
    if problem.seqlen_new:
        specs[select.append(problem)[0]] = None
    return list(specs)


TABLE_FEATURES: tuple[tuple[str, dict[str, float]], ...] = (
    ("full", {}),
    ("causal", {}),
    ("window", {}),
    *((mask, feature) for mask in ("full", "causal", "window")
      for feature in ({"softcap": 30.0}, {"alibi": 1.0}, {"softcap": 30.0, "alibi": 1.0}, {"scale": -1.0})),
)  # fmt: skip


def table_specs(device: Device) -> list[Spec]:
    """What the tables make on a device: every tile with each mask, dtype and evenness, and with each feature."""
    specs: dict[Spec, None] = {}
    tables = (TILES, FEW, SOME, *((HOPPER,) if select.is_hopper(device) else ()))
    for table in tables:
        widest = {(row.max_head_dim, row.max_head_dim_v) for rows in table.values() for row in rows}
        for head_dim, head_dim_v in sorted((d, min(d, dv)) for d, dv in widest):
            for dtype in ("fp16", "bf16") if device.major >= 8 else ("fp16",):
                for mask, features in TABLE_FEATURES:
                    call = table_problem(head_dim, head_dim_v, dtype, mask, features)
                    for places in PLACES[: 2 if table is TILES else None if table is HOPPER else 4]:
                        found = select.variant(dataclasses.replace(call, **places), device, table)
                        specs.update(dict.fromkeys([found] if features else variants(found)))
    return list(specs)


# Where sequences may lie, beside a dense call.
PACKED: dict[str, Any] = {"ragged": True}
STRIDED: dict[str, Any] = {"boxes": False}
SMALL_PAGES: dict[str, Any] = {"ragged": True, "page_size": 1}
PAGED: dict[str, Any] = {"ragged": True, "page_size": 16}
APPENDED: dict[str, Any] = {"ragged": True, "page_size": 16, "rotary": "halves"}
GROUPED: dict[str, Any] = {"heads": 8}
PLACES: tuple[dict[str, Any], ...] = (
    {}, PACKED, PAGED, APPENDED, GROUPED, {**GROUPED, **PAGED}, {**GROUPED, **APPENDED}, STRIDED, SMALL_PAGES,
    {**SMALL_PAGES, "rotary": "halves"}, {**GROUPED, **SMALL_PAGES},
)  # fmt: skip


def table_problem(
    head_dim: int, head_dim_v: int, dtype: str, mask: str, features: dict[str, float]
) -> Problem:
    """A call of one feature."""
    left, right = {"full": (-1, -1), "causal": (-1, 0), "window": (128, 16)}[mask]
    return Problem(
        batch=1,
        seqlen_q=2,
        seqlen_k=1,
        heads=1,
        heads_k=1,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype,
        softmax_scale=features.get("scale", 1.0),
        window_left=left,
        window_right=right,
        softcap=features.get("softcap", 0.0),
        alibi="alibi" in features,
        align=16,
        boxes=True,
    )
