"""What a call on a GPU launches: Params, order, plans that are made once; on a GPU that is not there."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from fake_gpu import FIRST, LIBRARY, FakeGpu, Library, encoded, view

import rtflash
from rtflash import call, describe, device, layouts, select, tensor
from rtflash.other_specs import AppendSpec, CombineSpec
from rtflash.problem import Tensors
from rtflash.spec import Spec
from rtflash.tensor import View


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return FakeGpu(monkeypatch)


def at(place: int, *shape: int, **options: Any) -> View:
    """A View with an address of its own."""
    return view(*shape, ptr=place << 20, **options)


def ints(place: int, *shape: int) -> View:
    return at(place, *shape, dtype="int32")


def pointers(launched: Any) -> dict[str, int]:
    """The addresses in Params that are not null, in MiB where they are an input's."""
    names = (*layouts.FORWARD.pointers, *layouts.COMBINE.pointers, *layouts.APPEND.pointers)
    return {
        name.removeprefix("sequences."): value / 2**20 if value < FIRST else value
        for name, value in launched.params.items()
        if name in names and value
    }


def test_a_dense_call(gpu: FakeGpu) -> None:
    q, k, v = (at(place, 2, 64, 4, 64) for place in (1, 2, 3))
    alone = rtflash.flash_attn_func(q, k, v, alibi_slopes=at(4, 4, dtype="fp32"))
    out, lse, _ = rtflash.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert (out.shape, lse.shape) == ((2, 64, 4, 64), (2, 4, 64))
    first, second = gpu.launched
    assert gpu.made == [alone, out, lse]
    assert pointers(first) == {"q": 1, "k": 2, "v": 3, "o": alone.ptr, "alibi_slopes": 4}
    assert pointers(second) == {"q": 1, "k": 2, "v": 3, "o": out.ptr, "lse": lse.ptr}
    assert (second.params["seqlen_q"], second.params["seqlen_k"]) == (64, 64)
    described = describe.dense(q, k, v, causal=True)
    spec, grid = select.forward(described, rtflash.device.get(0))
    assert (second.spec, second.shape) == (spec, grid[:3])
    tensors = Tensors(q, k, v)
    head = layouts.forward_head(tensors, out.ptr, lse.ptr, 64, 64)
    rest = layouts.forward_scalars(described, grid, spec, tensors)
    whole = layouts.FORWARD.head.pack(*head) + rest
    assert bytes(gpu.arguments.bytes[: len(whole)]) == whole


def test_an_append_to_pages(gpu: FakeGpu) -> None:
    """Three launches: new keys, the forward into a workspace, the merge of its parts."""
    given = {
        "q": at(1, 2, 1, 8, 64),
        "k_cache": at(2, 700, 16, 2, 64),
        "v_cache": at(3, 700, 16, 2, 32),
        "k": at(4, 2, 1, 2, 64),
        "v": at(5, 2, 1, 2, 32),
        "rotary_cos": at(6, 8192, 32),
        "rotary_sin": at(7, 8192, 32),
        "cache_seqlens": ints(8, 2),
        "block_table": ints(9, 2, 512),
        "cache_leftpad": ints(10, 2),
    }
    out, lse = rtflash.flash_attn_with_kvcache(**given, causal=True, return_softmax_lse=True)
    append, forward, combine = gpu.launched
    assert [type(x.spec) for x in gpu.launched] == [AppendSpec, Spec, CombineSpec]
    places = {
        "k": 2, "v": 3, "rotary_cos": 6, "rotary_sin": 7, "seqused_k": 8, "block_table": 9, "leftpad_k": 10,
    }  # fmt: skip
    assert pointers(append) == {**places, "k_new": 4, "v_new": 5}
    splits = forward.params["splits"]
    assert splits > 1
    assert gpu.made[:2] == [out, lse]
    (workspace,) = gpu.made[2:]
    assert len({x.ptr for x in gpu.made}) == 3
    sizes = math.prod(out.shape), math.prod(lse.shape)
    assert (workspace.shape, workspace.dtype) == ((splits * sum(sizes),), "fp32")
    behind = workspace.ptr + 4 * splits * sizes[0]
    assert pointers(forward) == {**places, "q": 1, "o": workspace.ptr, "lse": behind}
    assert pointers(combine) == {
        "o_partial": workspace.ptr, "lse_partial": behind, "o": out.ptr, "lse": lse.ptr,
    }  # fmt: skip
    assert lse.shape == (2, 8, 1)
    assert [x.params["seqlen_k"] for x in (append, forward)] == [8192, 8192]


@pytest.mark.parametrize("batch", [1, 64])
def test_packed_sequences_on_hopper(gpu: FakeGpu, batch: int) -> None:
    """With more tiles than CTAs they draw them: by a counter of the call's own, which starts at 0."""
    q, k, v = (at(place, 5000, 4, 64) for place in (1, 2, 3))
    offsets = ints(4, batch + 1)
    for _ in range(2):
        out = rtflash.flash_attn_varlen_func(q, k, v, offsets, offsets, 500, 500)
    first, second = gpu.launched
    assert isinstance(second.spec, Spec)
    assert second.spec.isa == 90
    draws = batch > 1
    assert second.shape[0] == (132 if draws else 4 * -(-500 // second.spec.block_m))
    _, counter = gpu.made[-2:]
    assert [x.params["next_tile"] for x in (first, second)] == (
        [gpu.made[1].ptr, counter.ptr] if draws else [0, 0]
    )
    assert gpu.cleared == ([(gpu.made[1].ptr, 0), (counter.ptr, 1)] if draws else [])
    assert (counter.shape, counter.dtype) == ((1,), "fp32") or not draws
    assert second.params["o"] == out.ptr
    maps = [second.params[name] for name in layouts.FORWARD_TMA.maps]
    assert maps == [encoded(x.ptr) for x in (q, k, v)]


def test_split_keys_on_hopper(gpu: FakeGpu) -> None:
    """The counter of tiles lies behind what the merge reads."""
    q, k, v = (at(place, 1, rows, 60, 64) for place, rows in ((1, 300), (2, 9000), (3, 9000)))
    out = rtflash.flash_attn_func(q, k, v, num_splits=3)
    forward, combine = gpu.launched
    assert forward.spec.split
    sizes = math.prod(out.shape), 60 * 300
    _, workspace = gpu.made
    assert workspace.shape == (3 * sum(sizes) + 1,)
    counter = workspace.ptr + 4 * 3 * sum(sizes)
    assert (forward.params["next_tile"], gpu.cleared) == (counter, [(counter, 0)])
    assert forward.params["o"] == combine.params["o_partial"] == workspace.ptr
    assert forward.params["lse"] == combine.params["lse_partial"]
    assert combine.params["o"] == out.ptr


def test_an_int_is_a_number_of_the_call(gpu: FakeGpu) -> None:
    q, cache = at(1, 2, 3, 8, 64), at(2, 2, 512, 2, 64)
    for length in (5, 500):
        rtflash.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=length)
    found = [x.params for x in gpu.launched if isinstance(x.spec, Spec)]
    assert [(p["seqlen_q"], p["seqlen_k"]) for p in found] == [(3, 5), (3, 500)]
    assert len(call._plans) == 1


def test_an_int_counts_the_keys_before_the_new_ones(gpu: FakeGpu) -> None:
    """The append kernel and the forward get the length after the append."""
    q, cache, new = at(1, 2, 3, 8, 64), at(2, 2, 512, 2, 64), at(3, 2, 3, 2, 64)
    for length in (0, 5, 509):
        rtflash.flash_attn_with_kvcache(
            q, cache, at(4, 2, 512, 2, 64), new, new, cache_seqlens=length
        )
        append, forward = (x for x in gpu.launched[-3:] if not isinstance(x.spec, CombineSpec))
        assert isinstance(append.spec, AppendSpec)
        assert isinstance(forward.spec, Spec)
        assert [x.params["seqlen_k"] for x in (append, forward)] == [length + 3] * 2
        gpu.launched.clear()
    assert len(call._plans) == 1


@pytest.mark.parametrize("warm", [False, True])
def test_an_int_past_the_room_is_refused(gpu: FakeGpu, warm: bool) -> None:
    """By a plan that is there, and before one is made, before a copy even."""
    q, k_cache, v_cache = at(1, 2, 3, 8, 64), at(2, 2, 512, 2, 64), at(3, 2, 512, 2, 64)
    new = view(2, 3, 2, 64, step=1 if warm else 2)

    def step(length: int) -> None:
        rtflash.flash_attn_with_kvcache(q, k_cache, v_cache, new, new, cache_seqlens=length)

    if warm:
        step(509)
    before = len(gpu.launched), len(gpu.made), len(gpu.kernels), len(call._plans)
    for length in (510, 512, 2**30):
        with pytest.raises(ValueError, match=f"^cache_seqlens is {length}; it must be in 0..509"):
            step(length)
    assert before == (len(gpu.launched), len(gpu.made), len(gpu.kernels), len(call._plans))


def dense_kv(kv: View, rows: int) -> None:
    rtflash.flash_attn_kvpacked_func(at(9, 2, rows, 2, 64), kv)


def dense_qkv(qkv: View, rows: int) -> None:
    rtflash.flash_attn_qkvpacked_func(qkv)


def varlen_kv(kv: View, rows: int) -> None:
    offsets = ints(8, 3)
    kv = kv._replace(shape=(2 * rows, *kv.shape[2:]), strides=kv.strides[1:])
    q = at(9, 2 * rows, 2, 64)
    rtflash.flash_attn_varlen_kvpacked_func(q, kv, offsets, offsets, rows, rows)


def varlen_qkv(qkv: View, rows: int) -> None:
    qkv = qkv._replace(shape=(2 * rows, *qkv.shape[2:]), strides=qkv.strides[1:])
    rtflash.flash_attn_varlen_qkvpacked_func(qkv, ints(8, 3), rows)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("function", "parts"), [(dense_kv, 2), (dense_qkv, 3), (varlen_kv, 2), (varlen_qkv, 3)]
)
def test_a_packed_axis_may_run_backwards(
    gpu: FakeGpu, function: Callable[..., None], parts: int, sign: int
) -> None:
    rows, heads = 16, 2
    packed = at(1, 2, rows, parts, heads, 64)
    batch, row, step, head, inner = packed.strides
    function(packed._replace(strides=(batch, row, sign * step, head, inner)), rows)
    ((_, _, params),) = gpu.launched
    first, size = packed.ptr, sign * 2 * step
    places = [params[name] for name in "qkv"[3 - parts :]]
    assert places == [first + i * size for i in range(parts)]
    assert parts == 3 or params["q"] == 9 << 20
    assert params["k_strides.row"] == row


def test_packed_tensors_without_elements_may_be_at_0(gpu: FakeGpu) -> None:
    kv = view(2, 0, 2, 2, 64, ptr=0)
    backwards = kv._replace(strides=(256, 256, -128, 64, 1))
    out = rtflash.flash_attn_kvpacked_func(at(9, 2, 5, 2, 64), backwards)
    assert pointers(gpu.launched[0]) == {"q": 9, "o": out.ptr}


def test_what_makes_another_plan(gpu: FakeGpu) -> None:
    """Geometry, alignment, options, and which inputs are given; no address."""
    q, k = at(1, 2, 64, 4, 64), at(2, 2, 64, 4, 64)
    for place in range(5):
        rtflash.flash_attn_func(q, at(place + 1, 2, 64, 4, 64), k)
    assert len(call._plans) == 1
    calls: list[dict[str, Any]] = [
        {"k": at(2, 2, 65, 4, 64), "v": at(2, 2, 65, 4, 64)},
        {"v": k._replace(ptr=k.ptr + 2)},
        {"k": k._replace(ptr=k.ptr + 2)},
        {"k": k._replace(strides=(65 * 256, *k.strides[1:]))},
        {"causal": True},
        {"alibi_slopes": at(3, 4, dtype="fp32")},
    ]
    for made, changes in enumerate(calls, 2):
        rtflash.flash_attn_func(**{"q": q, "k": k, "v": k, **changes})
        assert len(call._plans) == made
    assert len(gpu.launched) == 11


def test_each_alignment_has_a_plan(gpu: FakeGpu) -> None:
    q = at(1, 2, 64, 4, 64)
    for offset in (0, 8, 4, 2, 12, 16):
        rtflash.flash_attn_func(q, q._replace(ptr=q.ptr + offset), q)
    assert [x.spec.align for x in gpu.launched] == [16, 8, 4, 2, 4, 16]
    assert len(call._plans) == 5


def test_each_library_has_a_plan(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """What allocates is part of it."""
    q = at(1, 2, 64, 4, 64)
    first = rtflash.flash_attn_func(q, q, q)
    other = Library()
    monkeypatch.setitem(tensor._by_type, View, other)
    second = rtflash.flash_attn_func(q, q, q)
    assert (gpu.made, other.made) == ([first], [second])
    assert len(call._plans) == 2


def test_calls_without_work_launch_nothing(gpu: FakeGpu) -> None:
    for q, k in ((view(0, 5, 2, 64), view(0, 5, 2, 64)), (view(2, 0, 2, 64), view(2, 5, 2, 64))):
        for num_splits in (0, 3):
            out = rtflash.flash_attn_func(q, k, k, num_splits=num_splits)
            assert out.shape == q.shape
    assert gpu.launched == []


def test_inputs_are_held_until_the_launch_is_over(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Any] = []
    monkeypatch.setattr(LIBRARY, "hold", lambda *what: held.append((*what, len(gpu.launched))))
    q = at(1, 2, 1, 4, 64)
    k = at(2, 2, 4096, 4, 64)
    rtflash.flash_attn_func(q, k, k)
    assert held == [(7, 0, [q, k, k], 2)]


def test_the_current_device_is_made_current_once_and_kept(gpu: FakeGpu) -> None:
    q = view(2, 64, 4, 64)
    for _ in range(3):
        rtflash.flash_attn_func(q, q, q)
    assert gpu.was_set == [0]
    gpu.current = 3
    rtflash.flash_attn_func(q, q, q)
    assert gpu.was_set == [0, 0, 3]
    gpu.arguments.launch_kernel = None
    with pytest.raises(TypeError):
        rtflash.flash_attn_func(q, q, q)
    assert gpu.current == 3


Q = view(2, 5, 2, 64)
ROWS, OFFSETS = view(10, 2, 64), view(3, dtype="int32")
KV, QKV = view(2, 5, 2, 2, 64), view(2, 5, 3, 2, 64)
FUNCTIONS: list[tuple[str, tuple[Any, ...]]] = [
    ("flash_attn_func", (Q, Q, Q)),
    ("flash_attn_kvpacked_func", (Q, KV)),
    ("flash_attn_qkvpacked_func", (QKV,)),
    ("flash_attn_varlen_func", (ROWS, ROWS, ROWS, OFFSETS, OFFSETS, 5, 5)),
    ("flash_attn_varlen_kvpacked_func", (ROWS, view(10, 2, 2, 64), OFFSETS, OFFSETS, 5, 5)),
    ("flash_attn_varlen_qkvpacked_func", (view(10, 3, 2, 64), OFFSETS, 5)),
    ("flash_attn_with_kvcache", (Q, Q, Q)),
]


@pytest.mark.parametrize(("name", "inputs"), FUNCTIONS, ids=[name for name, _ in FUNCTIONS])
def test_whether_the_lse_is_wanted_must_be_a_truth_value(
    gpu: FakeGpu, name: str, inputs: tuple[Any, ...]
) -> None:
    option = "return_softmax_lse" if "kvcache" in name else "return_attn_probs"
    function = getattr(rtflash, name)
    for value in ("no", None, 1.0, Q):
        with pytest.raises(TypeError, match=f"^{option} is a .*; it must be True or False"):
            function(*inputs, **{option: value})
    assert gpu.launched == []
    assert isinstance(function(*inputs), View)
    for value in (True, 1):
        assert function(*inputs, **{option: value})[1].dtype == "fp32"


def test_an_empty_call_of_more_pairs_than_params_can_hold(gpu: FakeGpu) -> None:
    """It launches nothing, and so packs nothing."""
    q = at(1, 2**20, 0, 2**12, 64)
    k = at(2, 2**20, 5, 2**12, 64)
    assert rtflash.flash_attn_func(q, k, k).shape == q.shape
    assert gpu.launched == []


@pytest.mark.parametrize(
    ("arch", "shape", "splits", "words"),
    [
        ("sm_80", (2**20, 128, 2**12, 64), 1, r"seqlen_q 128 makes 4294967296 CTAs; CUDA launches"),
        ("sm_80", (2**14, 128, 2**12, 64), 64, r"x 64 splits makes 8589934592 CTAs; CUDA launches"),
        ("sm_90a", (2**14, 128, 2**12, 64), 64, r"x 64 splits makes 4294967296 tiles; Hopper's kernel"),
        ("sm_90a", (1, 9, 2**28, 64), 1, r"seqlen_q 9 x 268435456 heads of q .* make 2415919104 rows;"),
    ],
    ids=str,
)  # fmt: skip
def test_calls_too_large_for_a_grid(
    arch: str, shape: tuple[int, ...], splits: int, words: str
) -> None:
    """Each says what there are too many of: Hopper's CTAs stay, and count tiles."""
    batch, _, heads, dim = shape
    k = view(batch, 2**16, 1 if batch == 1 else heads, dim)
    with pytest.raises(ValueError, match=f"^batch .*{words}|^{words}"):
        select.forward(describe.dense(view(*shape), k, k, num_splits=splits), device.for_arch(arch))


@pytest.mark.parametrize(
    ("seqlen", "heads", "isa", "pairs"),
    [
        # Keys and values of 128 columns: 0.5 KiB a position; an H100 has 50 MiB of L2.
        (16384, (16, 16), 90, 4),
        (16384, (16, 16), 80, 2),
        (16384, (16, 4), 90, 16),
        (1024, (16, 16), 90, 48),  # all there are
        (2**20, (16, 16), 90, 1),
    ],
)
def test_keys_of_a_section_fit_l2(
    seqlen: int, heads: tuple[int, int], isa: int, pairs: int
) -> None:
    q, k = (at(place, 3, seqlen, n, 128) for place, n in enumerate(heads, 1))
    causal = describe.dense(q, k, k, causal=True)
    gpu = device.for_arch("sm_90a")
    assert select.section(causal, gpu, isa) == pairs
    assert select.section(describe.dense(q, k, k), gpu, isa) == 1
