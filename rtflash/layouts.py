"""The bytes of a kernel's struct Params (templates/params.cuh): its fields, and what a call has in them."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, NamedTuple

from . import tensor_map
from .problem import Combine, Problem, Tensors
from .spec import Spec
from .tensor import View

if TYPE_CHECKING:
    from .select import Grid

AXES = ("batch", "row", "head")
TENSOR_MAP = "tensor map"
KIND_BYTES = {TENSOR_MAP: tensor_map.BYTES, "int32": 4, "uint32": 4, "float32": 4}
SEQUENCES = (
    "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k", "cache_batch_idx", "block_table",
)  # fmt: skip


class Layout(NamedTuple):
    """A kernel's struct Params, field by field in its order; tests compile params.cuh and compare offsets.

    What changes from call to call stands first: tensor maps, pointers, `lengths`.
    """

    pointers: tuple[str, ...]
    lengths: tuple[str, ...]
    longs: tuple[str, ...]
    ints: tuple[str, ...]
    floats: tuple[str, ...] = ()
    maps: tuple[str, ...] = ()

    @property
    def fields(self) -> tuple[str, ...]:
        """All of them."""
        return self.maps + self.pointers + self.lengths + self.longs + self.ints + self.floats

    @property
    def head(self) -> struct.Struct:
        """What changes from call to call."""
        maps = f"{tensor_map.BYTES}s" * len(self.maps)
        return struct.Struct(f"<{maps}{len(self.pointers)}Q{len(self.lengths)}i")

    @property
    def rest(self) -> struct.Struct:
        """What a plan keeps."""
        ints = "".join("1I" if is_unsigned(name) else "1i" for name in self.ints)
        return struct.Struct(f"<{len(self.longs)}q{ints}{len(self.floats)}f")

    @property
    def size(self) -> int:
        """Bytes of the struct."""
        unit = tensor_map.ALIGNMENT if self.maps else 8
        return -(-(self.head.size + self.rest.size) // unit) * unit

    def described(self) -> list[tuple[str, str, int]]:
        """(name, type, offset) of each field; nothing is padded but the end."""
        found, offset = [], 0
        kinds = (
            (TENSOR_MAP, self.maps),
            ("pointer", self.pointers),
            ("int32", self.lengths),
            ("int64", self.longs),
            ("int32", self.ints),
        )
        for kind, names in (*kinds, ("float32", self.floats)):
            for name in names:
                found.append((name, "uint32" if is_unsigned(name) else kind, offset))
                offset += KIND_BYTES.get(kind, 8)
        return found


def is_unsigned(field: str) -> bool:
    """Whether a field is a uint32: a Divisor's multiplier."""
    return field.endswith(".multiplier")


def strides_of(*names: str) -> tuple[str, ...]:
    """The fields of the Strides of these names."""
    return tuple(f"{name}_strides.{axis}" for name in names for axis in AXES)


def divisor_of(name: str) -> tuple[str, ...]:
    """The fields of a Divisor."""
    return tuple(f"{name}.{field}" for field in ("value", "multiplier", "shift"))


PLACES = tuple(f"sequences.{name}" for name in SEQUENCES)
LENGTHS = ("seqlen_q", "seqlen_k")
FORWARD = Layout(
    ("q", "k", "v", "o", "lse", "alibi_slopes", "rotary_cos", "rotary_sin", *PLACES),
    LENGTHS,
    (
        *strides_of("q", "k", "v", "o"), "o_split_stride", "lse_split_stride", "lse_batch_stride", "lse_head_stride",
        "alibi_batch_stride", "alibi_head_stride", "rotary_cos_stride", "rotary_sin_stride", "table_stride",
    ),
    (
        "heads", *divisor_of("group"), "pairs", "section", "splits", "blocks", "window_left", "window_right", "total_q",
        "k_rows", "k_batch", *divisor_of("page_size"), "pages", "box_rows", "seqlen_new", "positions", "rotary_half",
        "rotate_by_row",
    ),
    ("score_scale", "softcap_log2"),
)  # fmt: skip
FORWARD_DRAWN = FORWARD._replace(pointers=("next_tile", *FORWARD.pointers))
FORWARD_TMA = FORWARD_DRAWN._replace(maps=("q_map", "k_map", "v_map"))
COMBINE = Layout(
    ("o_partial", "lse_partial", "o", "lse"),
    (),
    ("o_split_stride", *strides_of("o_partial"), "lse_split_stride", *strides_of("lse_partial", "lse")),
    ("seqlen", "heads", "head_dim", "splits"),
)  # fmt: skip
APPEND = Layout(
    ("k_new", "v_new", "k", "v", "rotary_cos", "rotary_sin", *PLACES),
    LENGTHS,
    (*strides_of("k_new", "v_new", "k", "v"), "rotary_cos_stride", "rotary_sin_stride", "table_stride"),
    (
        "seqlen_new", "heads", "head_dim", "head_dim_v", "slots", "k_batch", *divisor_of("page_size"), "pages",
        "positions", "rotary_half",
    ),
)  # fmt: skip
COMBINE_HEAD, APPEND_HEAD = COMBINE.head, APPEND.head
FORWARD_REST, COMBINE_REST, APPEND_REST = FORWARD.rest, COMBINE.rest, APPEND.rest
# The driver reads whole multiples of the alignment of a tensor map.
PARAMS_BYTES = max(layout.size for layout in (FORWARD_TMA, COMBINE, APPEND))

LOG2_E = math.log2(math.e)


def forward(spec: Spec) -> Layout:
    """Params of a forward variant."""
    if spec.isa < 90:
        return FORWARD
    return FORWARD_DRAWN if spec.gather else FORWARD_TMA


def forward_scalars(problem: Problem, grid: Grid, spec: Spec, tensors: Tensors) -> bytes:
    """Everything of the forward's Params but its head; the output, partial or not, is row-major."""
    p, q, k, v = problem, tensors.q, tensors.k, tensors.v
    rows, out_row = math.prod(p.out_shape[:-2]), p.heads * p.head_dim_v
    is_packed = p.total_q >= 0
    unbounded = p.seqlen_q + p.seqlen_k
    left, right = (
        unbounded if bound < 0 else min(bound, unbounded)
        for bound in (p.window_left, p.window_right)
    )
    scale = p.softmax_scale * LOG2_E
    if p.softcap:
        scale *= 2.0 / p.softcap
    slopes = tensors.alibi_slopes
    return FORWARD_REST.pack(
        *(stride for view in (q, k, v) for stride in strides(view)),
        *(0 if is_packed else p.seqlen_q * out_row, out_row, p.head_dim_v),
        rows * out_row,
        rows * p.heads,
        0 if is_packed else p.heads * p.seqlen_q,
        p.total_q if is_packed else p.seqlen_q,
        *((0, 0) if slopes is None else (0, *used_strides(slopes))[-2:]),
        *rotary_strides(tensors),
        table_stride(tensors),
        p.heads,
        *divisor(p.heads // p.heads_k),
        p.batch * (p.heads_k if spec.pack_gqa else p.heads),
        grid.section,
        grid.splits,
        grid.blocks,
        left,
        right,
        max(p.total_q, 0),
        k.shape[-3],
        p.cache_batch,
        *divisor(max(p.page_size, 1)),
        p.pages,
        tensor_map.box_rows(spec, p.page_size),
        p.seqlen_new,
        p.positions,
        p.rotary_dim // 2,
        p.window_left >= 0 or p.window_right >= 0,
        scale,
        p.softcap * LOG2_E,
    )


def divisor(value: int) -> tuple[int, int, int]:
    """A Divisor: the value, its multiplier and its shift."""
    shift = (value - 1).bit_length()
    return value, -(-(1 << 31 + shift) // value), shift


def append_scalars(problem: Problem, tensors: Tensors) -> bytes:
    """Everything of the append kernel's Params but its head."""
    p, t = problem, tensors
    return APPEND_REST.pack(
        *(stride for view in (t.k_new, t.v_new, t.k, t.v) for stride in strides(view)),
        *rotary_strides(t),
        table_stride(t),
        p.seqlen_new,
        p.heads_k,
        p.head_dim,
        p.head_dim_v,
        p.seqlen_k,
        p.cache_batch,
        *divisor(max(p.page_size, 1)),
        p.pages,
        p.positions,
        p.rotary_dim // 2,
    )


def combine_scalars(
    call: Combine, out_partial: View, lse_partial: View, lse_strides: tuple[int, ...]
) -> bytes:
    """Everything of the combine kernel's Params but its head.

    Parameters
    ----------
    out_partial, lse_partial : (splits, *call.rows, heads, head_dim_v) and (splits, *call.rows, heads).
    lse_strides : of the LSE, in the order of (*call.rows, heads).
    """
    (o_split, *o), (lse_split, *lse) = out_partial.strides[:-1], lse_partial.strides
    return COMBINE_REST.pack(
        o_split,
        *(0, *o)[-3:],
        lse_split,
        *(0, *lse)[-3:],
        *(0, *lse_strides)[-3:],
        max(call.rows[-1], 1),
        call.heads,
        call.head_dim_v,
        call.splits,
    )


def forward_head(
    tensors: Tensors, out: int, lse: int, seqlen_q: int, seqlen_k: int
) -> tuple[int, ...]:
    """The head of the forward's Params. out, lse: addresses."""
    t = tensors
    return (
        t.q.ptr,
        t.k.ptr,
        t.v.ptr,
        out,
        lse,
        *addresses(t.alibi_slopes, t.rotary_cos, t.rotary_sin, *t[4:11]),
        seqlen_q,
        seqlen_k,
    )


def append_head(tensors: Tensors, seqlen_q: int, seqlen_k: int) -> tuple[int, ...]:
    """The head of the append kernel's Params."""
    t = tensors
    views = t.k_new, t.v_new, t.k, t.v, t.rotary_cos, t.rotary_sin, *t[4:11]
    return (*addresses(*views), seqlen_q, seqlen_k)


def addresses(*views: View | None) -> list[int]:
    """Their addresses, 0 for None."""
    return [0 if view is None else view.ptr for view in views]


def strides(view: View) -> tuple[int, int, int]:
    """(batch, row, head) strides of (batch, row, head, dim), or of packed (row, head, dim)."""
    batch, row, head = (0, *used_strides(view))[-4:-1]
    return batch, row, head


def rotary_strides(tensors: Tensors) -> tuple[int, int]:
    """Row strides of the two tables."""
    tables = tensors.rotary_cos, tensors.rotary_sin
    cos, sin = (0 if table is None else used_strides(table)[0] for table in tables)
    return cos, sin


def table_stride(tensors: Tensors) -> int:
    """Row stride of the block table."""
    return 0 if tensors.block_table is None else used_strides(tensors.block_table)[0]


def used_strides(view: View) -> tuple[int, ...]:
    """A View's strides, 0 for an axis of one element: what stands there means nothing, and may be misaligned."""
    return tuple(
        stride if size > 1 else 0 for size, stride in zip(view.shape, view.strides, strict=True)
    )
