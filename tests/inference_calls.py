"""Described calls on packed sequences and on caches: inputs, expected results, and their run on any backend.

Whatever a call must not read is NaN: rows between and behind sequences, unused slots and pages, rows of the rotary
tables past the last position. Entries of a block table past a sequence's length are no pages.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
from backends import ALL_BACKENDS, Backend, params
from calls import draw_slopes
from compare import check, check_lse
from layouts import OFFSETS, decode, encode, strides_of
from numpy.typing import NDArray
from reference import kvcache, varlen

import rtflash
from rtflash import describe, inference, problem
from rtflash.tensor import View

on_all = pytest.mark.parametrize("backend", ALL_BACKENDS, indirect=True)
# For many calls: one library on the host and one on a GPU, which run the same code as the others there.
on_two = pytest.mark.parametrize("backend", params("numpy", "torch-cuda"), indirect=True)

# Results of fewer elements have an error that may be 0 by chance, which makes no yardstick: they are held to one bound.
FEW = 64
# Entries that are no page, wherever nothing needs one.
NO_PAGES = (-1, 2**31 - 1, -(2**31), 10**6)
# rtflash turns in fp32, the oracle in float64: now and then q or k differ by a last place, and scores by this much.
ROTARY_LSE_ATOL = 1e-3


@dataclass(frozen=True)
class Options:
    """What every call has. `alibi` is "", "heads" or "batch"."""

    heads: int = 4
    heads_k: int = 2
    head_dim: int = 64
    head_dim_v: int = 0
    dtype: str = "fp16"
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: str = ""
    scale: float | None = None
    num_splits: int = 0

    @property
    def id(self) -> str:
        """Its differences from the default call, as a pytest id."""
        parts = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                text = "-".join(map(str, value)) if isinstance(value, tuple) else value
                parts.append(field.name if value is True else f"{field.name}{text}")
        return "_".join(parts) or "default"

    @property
    def dim_v(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def keywords(self) -> dict[str, Any]:
        """Keyword arguments that every public function has, but for num_splits and the slopes."""
        return {
            "softmax_scale": self.scale,
            "causal": self.causal,
            "window_size": self.window,
            "softcap": self.softcap,
        }

    def random(self) -> np.random.Generator:
        """What the call's description decides."""
        return np.random.default_rng(zlib.crc32(f"{type(self).__name__} {self.id}".encode()))

    def draw(self, random: np.random.Generator, *shape: int) -> NDArray:
        """Normal values that the dtype holds exactly."""
        return self.exact(random.standard_normal(shape, np.float32))

    def exact(self, values: NDArray) -> NDArray:
        return decode(encode(values, self.dtype), self.dtype)

    def slopes(self, random: np.random.Generator, batch: int) -> NDArray | None:
        return draw_slopes(random, self.alibi, batch, self.heads)


@dataclass(frozen=True)
class VarlenCall(Options):
    """Packed sequences.

    Attributes
    ----------
    lengths_q, lengths_k : rows that each sequence has.
    used_q, used_k : how many of them count; (): all.
    tail : rows of q, k and v behind the last sequence.
    page_size : of k and v; 0: packed.
    counted : with pages, whether cu_seqlens_k is given; else the keys are those of used_k.
    slack : what max_seqlen_q and max_seqlen_k exceed the longest sequence by.
    layout : of q, k and v.
    """

    lengths_q: tuple[int, ...] = (97, 1, 130)
    lengths_k: tuple[int, ...] = (129, 40, 97)
    used_q: tuple[int, ...] = ()
    used_k: tuple[int, ...] = ()
    tail: int = 0
    page_size: int = 0
    counted: bool = True
    slack: int = 0
    layout: str = "bshd"

    @property
    def batch(self) -> int:
        return len(self.lengths_q)

    @property
    def longest(self) -> tuple[int, int]:
        """max_seqlen_q and max_seqlen_k."""
        return tuple(max((0, *x)) + self.slack for x in (self.lengths_q, self.lengths_k))

    def problem(self) -> problem.Problem:
        """What rtflash will see, for compiling ahead."""
        views = views_of(self)
        tensors = inference.VARLEN.arrange(*(views.get(x) for x in inference.VARLEN.inputs))
        return describe.varlen(
            tensors, *self.longest, num_splits=self.num_splits, **self.keywords
        )  # fmt: skip


@dataclass(frozen=True)
class CacheCall(Options):
    """Queries over a cache.

    Attributes
    ----------
    batch, seqlen_q : of q.
    lengths : cache_seqlens before new keys: one each, an int for all, or None: the cache is full.
    capacity : slots of a sequence; with pages rounded up to whole ones.
    page_size, page_name : 0: no pages; how the table is passed.
    leftpad : slots before each sequence's first key; ().
    rows : of a cache without pages; 0: batch.
    batch_idx : row of each sequence; ().
    seqlen_new : keys to be appended.
    rotary, rotary_dim : "", "interleaved" or "halves".
    layout : of the cache.
    """

    batch: int = 3
    seqlen_q: int = 1
    lengths: tuple[int, ...] | int | None = (129, 40, 1)
    capacity: int = 200
    page_size: int = 0
    page_name: str = "block_table"
    leftpad: tuple[int, ...] = ()
    rows: int = 0
    batch_idx: tuple[int, ...] = ()
    seqlen_new: int = 0
    rotary: str = ""
    rotary_dim: int = 0
    layout: str = "bshd"

    @property
    def columns(self) -> int:
        return -(-self.capacity // self.page_size)

    @property
    def slots(self) -> int:
        """Slots of a sequence."""
        return self.columns * self.page_size if self.page_size else self.capacity

    @property
    def cached(self) -> NDArray:
        """(batch,) slots in use before new keys come."""
        lengths = self.slots if self.lengths is None else self.lengths
        return np.broadcast_to(np.array(lengths, np.int32), self.batch)

    @property
    def pads(self) -> NDArray:
        return np.array(self.leftpad or (0,) * self.batch)

    @property
    def keywords(self) -> dict[str, Any]:
        return {**super().keywords, "rotary_interleaved": self.rotary != "halves"}

    def problem(self) -> problem.Problem:
        """What rtflash will see, for compiling ahead."""
        views = views_of(self)
        tensors = inference.KVCACHE.arrange(*(views.get(x) for x in inference.KVCACHE.inputs))
        counted = isinstance(self.lengths, int)
        return describe.kvcache(
            tensors, num_splits=self.num_splits, counted=counted, **self.keywords
        )  # fmt: skip


# A call's tensors by the names of the public function's arguments: fp32 values that the call's dtype holds exactly,
# and int32.
Inputs = dict[str, NDArray]


class Result(NamedTuple):
    """Of a call, as fp32; the caches only of a call on a cache."""

    out: NDArray
    lse: NDArray
    caches: tuple[NDArray, ...] = ()


class Expected(NamedTuple):
    """The float64 result and what a naive computation in the call's own dtype gives."""

    out: NDArray
    lse: NDArray
    same_dtype: NDArray
    caches: tuple[NDArray, ...] = ()


def calls(*given: VarlenCall | CacheCall) -> Any:
    """Parametrize a test over distinct calls, each under its own id."""
    return pytest.mark.parametrize("call", [pytest.param(c, id=c.id) for c in dict.fromkeys(given)])


def inputs(call: VarlenCall | CacheCall) -> Inputs:
    """Random values from a seed that the call's own description decides."""
    made = varlen_inputs(call) if isinstance(call, VarlenCall) else cache_inputs(call)
    return {name: x for name, x in made.items() if x is not None}


def varlen_inputs(call: VarlenCall) -> dict[str, NDArray | None]:
    random = call.random()
    cu_q, cu_k = (np.cumsum((0, *x), dtype=np.int32) for x in (call.lengths_q, call.lengths_k))
    used_q, used_k = (np.array(x, np.int32) if x else None for x in (call.used_q, call.used_k))
    q = np.full((cu_q[-1] + call.tail, call.heads, call.head_dim), np.nan, np.float32)
    for b, length in enumerate(call.used_q or call.lengths_q):
        q[cu_q[b] : cu_q[b] + length] = call.draw(random, length, *q.shape[1:])
    keys = call.used_k or call.lengths_k
    table = None
    if call.page_size:
        columns = max(1, -(-max((0, *call.lengths_k)) // call.page_size))
        table, pages = block_table(random, columns, call.page_size, np.zeros_like(keys), keys)
        shape: tuple[int, ...] = (pages, call.page_size)
    else:
        shape = (cu_k[-1] + call.tail,)
    k, v = (
        np.full((*shape, call.heads_k, d), np.nan, np.float32) for d in (call.head_dim, call.dim_v)
    )
    for b, length in enumerate(keys):
        slots = np.arange(length)
        at = (cu_k[b] + slots,) if table is None else places(table[b], call.page_size, slots)
        for x in (k, v):
            x[at] = call.draw(random, length, *x.shape[-2:])
    if call.page_size:
        # Only the differences count.
        cu_k = cu_k + np.int32(7) if call.counted else None
    return {
        "q": q,
        "k": k,
        "v": v,
        "cu_seqlens_q": cu_q,
        "cu_seqlens_k": cu_k,
        "seqused_q": used_q,
        "seqused_k": used_k,
        "block_table": table,
        "alibi_slopes": call.slopes(random, call.batch),
    }


def cache_inputs(call: CacheCall) -> dict[str, NDArray | None]:
    random = call.random()
    b, new = call.batch, call.seqlen_new
    rows = np.array(call.batch_idx or range(b), np.int32)
    table = None
    shape = (call.rows or b, call.capacity)
    if call.page_size:
        ends = call.cached + new
        table, pages = block_table(random, call.columns, call.page_size, call.pads, ends)
        shape = (pages, call.page_size)
    k_cache, v_cache = (
        np.full((*shape, call.heads_k, d), np.nan, np.float32) for d in (call.head_dim, call.dim_v)
    )
    for i in range(b):
        slots = np.arange(call.pads[i], call.cached[i])
        at = (rows[i], slots) if table is None else places(table[i], call.page_size, slots)
        for x in (k_cache, v_cache):
            x[at] = call.draw(random, len(slots), *x.shape[-2:])
    cos, sin = tables(call, random) if call.rotary else (None, None)
    return {
        "q": call.draw(random, b, call.seqlen_q, call.heads, call.head_dim),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "k": call.draw(random, b, new, call.heads_k, call.head_dim) if new else None,
        "v": call.draw(random, b, new, call.heads_k, call.dim_v) if new else None,
        "rotary_cos": cos,
        "rotary_sin": sin,
        "cache_seqlens": call.cached.copy() if isinstance(call.lengths, tuple) else None,
        "cache_batch_idx": rows if call.batch_idx else None,
        "cache_leftpad": call.pads.astype(np.int32) if call.leftpad else None,
        call.page_name: table,
        "alibi_slopes": call.slopes(random, b),
    }


def block_table(
    random: np.random.Generator, columns: int, page_size: int, first: Any, last: Any
) -> tuple[NDArray, int]:
    """A table for slots [first[b], last[b]) of each sequence, pages in random order, and how many pages there are."""
    column = np.arange(columns)
    first, last = np.asarray(first)[:, None], np.asarray(last)[:, None]
    needed = (first < last) & (column >= first // page_size) & (column * page_size < last)
    pages = int(needed.sum()) + 2
    table = random.choice(np.array([*NO_PAGES, pages]), needed.shape).astype(np.int32)
    table[needed] = random.permutation(pages)[: needed.sum()]
    return table, pages


def places(table: NDArray, page_size: int, slots: NDArray) -> tuple[NDArray, NDArray]:
    """Pages and rows of a sequence's slots."""
    return table[slots // page_size], slots % page_size


def tables(call: CacheCall, random: np.random.Generator) -> tuple[NDArray, NDArray]:
    """Cosines and sines of random frequencies; NaN from the first position on that nothing has."""
    half = (call.rotary_dim or call.head_dim // 2 * 2) // 2
    positions = call.slots + call.seqlen_q
    angles = np.arange(positions)[:, None] * random.random(half)
    angles[call.cached.max(initial=0) + max(call.seqlen_q, call.seqlen_new) :] = np.nan
    return call.exact(np.cos(angles)), call.exact(np.sin(angles))


@functools.lru_cache(maxsize=4)
def solved(call: VarlenCall | CacheCall) -> tuple[Inputs, Expected]:
    """The call's inputs and its expected result."""
    given = inputs(call)
    if isinstance(call, VarlenCall):
        tensors = {"cu_seqlens_k": None, **given}
        out, lse = varlen(**tensors, **call.keywords)
        plain, _ = varlen(**tensors, **call.keywords, dtype=call.dtype)
        return given, Expected(out, lse, plain)
    tensors = {**given, "cache_seqlens": call.cached, "dtype": call.dtype}
    tensors["block_table"] = tensors.pop(call.page_name, None)
    exact = kvcache(**tensors, **call.keywords)
    plain = kvcache(**tensors, **call.keywords, plain=True).out
    return given, Expected(exact.out, exact.lse, plain, (exact.k_cache, exact.v_cache))


@functools.cache
def views_of(call: VarlenCall | CacheCall) -> dict[str, View]:
    """Views of the inputs as `upload` lays them out, on a GPU."""
    views = {}
    for name, x in inputs(call).items():
        dtype = dtype_of(call, name)
        strides = tuple(math.prod(x.shape[i + 1 :]) for i in range(x.ndim))
        address = 1024
        if name in laid_out(call):
            shape = x.shape if x.ndim == 4 else (1, *x.shape)
            strides = strides_of(call.layout, shape)[-x.ndim :]
            address += 2 * OFFSETS.get(call.layout, 0)
        views[name] = View(address, x.shape, strides, dtype, 0)
    if isinstance(call, CacheCall) and call.page_name in views:
        views["block_table"] = views[call.page_name]
    return views


def laid_out(call: VarlenCall | CacheCall) -> tuple[str, ...]:
    """The inputs that have the call's layout."""
    return ("q", "k", "v") if isinstance(call, VarlenCall) else ("k_cache", "v_cache")


def dtype_of(call: VarlenCall | CacheCall, name: str) -> str:
    if name == "alibi_slopes":
        return "fp32"
    integers = ("seq", "batch_idx", "leftpad", "table")
    return "int32" if any(word in name for word in integers) else call.dtype


def upload(backend: Backend, call: VarlenCall | CacheCall, given: Inputs) -> dict[str, Any]:
    """The inputs on the backend, float ones inside buffers of NaN."""
    made = {}
    for name, x in given.items():
        layout = call.layout if name in laid_out(call) else "bshd"
        if x.ndim == 3:
            made[name] = backend.make(x[None], dtype_of(call, name), layout)[0]
        else:
            made[name] = backend.make(x, dtype_of(call, name), layout)
    return made


def execute(
    backend: Backend, call: VarlenCall | CacheCall, made: dict[str, Any]
) -> tuple[Any, Any]:
    """(out, lse) of the public function on arrays of `upload`, with poisoned memory for the results.

    Caches that the function returns take the place of those in `made`.
    """
    rows = made["q"].shape[0] * (1 if isinstance(call, VarlenCall) else call.seqlen_q) * call.heads
    backend.poison(2 * rows * call.dim_v, 4 * rows)
    options = {**call.keywords, "num_splits": call.num_splits}
    if isinstance(call, VarlenCall):
        q, tensors = made["q"], {"cu_seqlens_k": None, **made}
        longest = dict(zip(("max_seqlen_q", "max_seqlen_k"), call.longest, strict=True))
        out, lse, dmask = rtflash.flash_attn_varlen_func(
            **tensors, **longest, **options, return_attn_probs=True
        )
        assert dmask is None
    else:
        q, tensors = made["q"], dict(made)
        if isinstance(call.lengths, int):
            tensors["cache_seqlens"] = call.lengths
        out, lse, *caches = rtflash.flash_attn_with_kvcache(
            **tensors, **options, return_softmax_lse=True
        )
        made.update(zip(("k_cache", "v_cache"), caches, strict=False))
    assert backend.owns(out, q)
    assert backend.owns(lse, q)
    assert backend.dtype_name(out) == backend.dtype_name(q)
    assert backend.dtype_name(lse) == "float32"
    return out, lse


def result(backend: Backend, call: VarlenCall | CacheCall, made: dict[str, Any]) -> Result:
    """The call's results, read back."""
    out, lse = execute(backend, call, made)
    caches = [made[name] for name in ("k_cache", "v_cache") if name in made]
    return Result(*(backend.to_numpy(x) for x in (out, lse)), tuple(map(backend.to_numpy, caches)))


def run(backend: Backend, call: VarlenCall | CacheCall) -> None:
    """Run the call on the backend and hold its output, LSE and cache to the bound."""
    given, expected = solved(call)
    hold(call, result(backend, call, upload(backend, call, given)), expected)


def alone(call: VarlenCall | CacheCall, given: Inputs, b: int) -> Inputs:
    """The inputs of sequence b as a batch of one, in tensors as long as before.

    Its rows of a packed output are the first.
    """
    own = dict(given)
    for name in ("seqused_q", "seqused_k", "cache_seqlens", "cache_batch_idx", "cache_leftpad"):
        if name in given:
            own[name] = given[name][b : b + 1]
    for name in ("block_table", "page_table"):
        if name in given:
            own[name] = given[name][b : b + 1]
    if call.alibi == "batch":
        own["alibi_slopes"] = given["alibi_slopes"][b : b + 1]
    if isinstance(call, CacheCall):
        names = ("q", "k", "v")
        if not (call.page_size or call.batch_idx):
            names = (*names, "k_cache", "v_cache")
        return own | {name: given[name][b : b + 1] for name in names if name in given}
    for names, offsets in ((("q",), "cu_seqlens_q"), (("k", "v"), "cu_seqlens_k")):
        if offsets not in given:
            continue
        own[offsets] = given[offsets][b : b + 2]
        if names == ("q",) or not call.page_size:
            first, last = own[offsets]
            own[offsets] = own[offsets] - first
            for name in names:
                own[name] = np.full_like(given[name], np.nan)
                own[name][: last - first] = given[name][first:last]
    return own


def hold(call: VarlenCall | CacheCall, got: Result, expected: Expected) -> None:
    """Assert that a result is within the bound, each sequence by its own unless it is small."""
    factor = 3 if call.softcap else 2
    assert got.out.shape == expected.out.shape
    sequences = list(sequences_of(call))
    if min((expected.out[rows].size for rows in sequences), default=0) < FEW:
        sequences = [slice(None)]
    for rows in sequences:
        tensors = (got.out[rows], expected.out[rows], expected.same_dtype[rows])
        check(*tensors, call.dtype, factor)
    rotary = isinstance(call, CacheCall) and call.rotary
    check_lse(got.lse, expected.lse, atol=ROTARY_LSE_ATOL if rotary else 1e-4)
    if isinstance(call, CacheCall):
        hold_caches(call, got.caches, expected.caches)


def sequences_of(call: VarlenCall | CacheCall) -> list[slice]:
    """The rows of each sequence in the output; of packed ones those behind the last, too, as one."""
    if isinstance(call, CacheCall):
        return [slice(b, b + 1) for b in range(call.batch)]
    ends = np.cumsum((0, *call.lengths_q))
    parts = [slice(a, b) for a, b in itertools.pairwise(ends) if a < b]
    return [*parts, slice(ends[-1], None)] if call.tail else parts


def hold_caches(call: CacheCall, got: tuple[NDArray, ...], expected: tuple[NDArray, ...]) -> None:
    """Assert that the cache holds what it must, bit for bit but for the rotated columns' last place."""
    turned = (call.rotary_dim or call.head_dim // 2 * 2) if call.rotary else 0
    np.testing.assert_array_equal(got[1], expected[1], "v_cache")
    np.testing.assert_array_equal(got[0][..., turned:], expected[0][..., turned:], "k_cache")
    last_place = 2.0**-10 if call.dtype == "fp16" else 2.0**-7
    np.testing.assert_allclose(
        got[0][..., :turned], expected[0][..., :turned], last_place, 1e-6, err_msg="k_cache"
    )
