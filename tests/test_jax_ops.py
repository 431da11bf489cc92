"""JAX: jit, vmap, shard_map, scan, gradients, appends; and what a callback on a GPU does, without one."""

from __future__ import annotations

import functools
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import processes
import pytest
from backends import Backend, params
from fake_gpu import STREAM, FakeGpu, Launched

import rtflash

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from rtflash import jax_callbacks  # noqa: E402

on_both = pytest.mark.parametrize("backend", params("jax-cpu", "jax-cuda"), indirect=True)
# One part: then results do not depend on the batch, which vmap may change.
causal = functools.partial(rtflash.flash_attn_func, causal=True, num_splits=1)
decode = functools.partial(
    rtflash.flash_attn_with_kvcache, causal=True, num_splits=1, return_softmax_lse=True
)


def normal(backend: Backend, *shape: int, seed: int = 0, dtype: str = "bf16") -> Any:
    return backend.make(np.random.default_rng(seed).standard_normal(shape), dtype)


def qkv(backend: Backend, rows: int = 40) -> list[Any]:
    return [normal(backend, 2, rows, heads, 32, seed=seed) for seed, heads in enumerate((4, 2, 2))]


def cached(backend: Backend) -> list[Any]:
    """q, k_cache, v_cache, k, v, cache_seqlens of two sequences."""
    q, k, v = qkv(backend, 3)
    caches = [normal(backend, 2, 32, 2, 32, seed=seed) for seed in (3, 4)]
    return [q, *caches, k, v, backend.make(np.array([3, 7]), "int32")]


def same(got: Any, wanted: Any) -> None:
    """Both have equal leaves."""
    ours, others = jax.tree.leaves(got), jax.tree.leaves(wanted)
    assert len(ours) == len(others)
    for x, y in zip(ours, others, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def varlen(q: Any, k: Any, v: Any, cu: Any, **options: Any) -> Any:
    packed = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    return rtflash.flash_attn_varlen_func(*packed, cu, cu, 70, 70, causal=True, **options)


@on_both
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window_size": [5, 0], "softcap": 4.0},
        {"softmax_scale": -0.3, "num_splits": 3},
        {"window_size": np.array([5, 0])},
    ],
    ids=str,
)
def test_jit_gives_what_a_plain_call_gives(backend: Backend, options: dict[str, Any]) -> None:
    call = functools.partial(rtflash.flash_attn_func, return_attn_probs=True, **options)
    same(jax.jit(call)(*qkv(backend)), call(*qkv(backend)))


@on_both
def test_jit_of_every_function(backend: Backend) -> None:
    q, k, v = qkv(backend)
    packed = jnp.stack([k, k, v], 2)
    slopes = backend.make(np.array([0.1, 0.2, 0.3, 0.4]), "fp32")
    cu, used = (backend.make(np.array(x), "int32") for x in ((0, 70, 80), (60, 5)))
    lse = jnp.zeros((2, 4, 40))
    parts, sums = jnp.stack([q, q + 1]), jnp.zeros((2, 2, 40, 4))
    calls: list[Callable[[], Any]] = [
        lambda: rtflash.flash_attn_func(q, k, v, alibi_slopes=slopes),
        lambda: rtflash.flash_attn_kvpacked_func(q, packed[:, :, 1:]),
        lambda: rtflash.flash_attn_qkvpacked_func(packed),
        lambda: varlen(q, k, v, cu, seqused_k=used, return_attn_probs=True),
        lambda: rtflash.flash_attn_varlen_qkvpacked_func(
            packed.reshape(80, 3, 2, 32), cu, 70, seqused_q=used
        ),
        lambda: rtflash.flash_attn_with_kvcache(q, k, v, cache_seqlens=7),
        lambda: rtflash.flash_attn_with_kvcache(q, k, v, cache_seqlens=cu[1:] // 10),
    ]
    for call in calls:
        plain = call()
        # Closed-over arrays are concrete, so that one traced value has to do: whichever it is.
        inputs = [q, k, v, packed, slopes, cu, used]

        def traced(*values: Any, call: Callable[[], Any] = call) -> Any:
            nonlocal q, k, v, packed, slopes, cu, used
            q, k, v, packed, slopes, cu, used = values
            return call()

        try:
            same(jax.jit(traced)(*inputs), plain)
        finally:
            q, k, v, packed, slopes, cu, used = inputs
    for merge, given in (
        (rtflash.merge_attention_states, (q, lse, q + 1, lse + 1)),
        (rtflash.flash_attn_combine, (parts, sums)),
    ):
        for x, y in zip(jax.jit(merge)(*given), merge(*given), strict=True):
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
            np.testing.assert_allclose(backend.to_numpy(x), backend.to_numpy(y), 1e-2, 1e-2)


@on_both
def test_one_traced_value_is_enough(backend: Backend) -> None:
    q, k, v = qkv(backend)
    wanted = causal(q, k, v)
    same(jax.jit(lambda q: causal(q, k, v))(q), wanted)
    same(jax.jit(lambda v: causal(q, k, v))(v), wanted)


@on_both
def test_nested_jit_checkpoint_and_control_flow(backend: Backend) -> None:
    q, k, v = qkv(backend)
    once = causal(q, k, v)
    same(jax.jit(jax.checkpoint(jax.jit(causal)))(q, k, v), once)
    same(jax.jit(lambda p: jax.lax.cond(p, lambda: causal(q, k, v), lambda: q))(True), once)
    twice = jax.jit(lambda q: jax.lax.fori_loop(0, 2, lambda _, x: causal(x, k, v), q))(q)
    same(twice, causal(once, k, v))
    assert jax.eval_shape(causal, q, k, v).shape == q.shape


@on_both
def test_without_jit(backend: Backend) -> None:
    values = cached(backend)
    q, k, v = values[0], values[3], values[4]
    wanted = causal(q, k, v), decode(*values[:5], cache_seqlens=values[5])
    with jax.disable_jit():
        same(jax.vmap(causal)(q[None], k[None], v[None])[0], wanted[0])
        same(decode(*values[:5], cache_seqlens=values[5]), wanted[1])


@on_both
def test_empty_work(backend: Backend) -> None:
    q, k, v = qkv(backend)
    call = jax.jit(functools.partial(causal, return_attn_probs=True))
    assert call(q[:, :0], k, v)[0].shape == (2, 0, 4, 32)
    assert call(q[:0], k[:0], v[:0])[0].shape == (0, 40, 4, 32)
    out, lse, _ = call(q, k[:, :0], v[:, :0])
    assert not np.asarray(out).any()
    assert np.isneginf(np.asarray(lse)).all()
    assert jax.vmap(causal)(q[:, None][:0], k[:, None][:0], v[:, None][:0]).shape[:2] == (0, 1)
    assert jax.vmap(causal)(q[None, :0], k[None, :0], v[None, :0]).shape[:2] == (1, 0)


def mapped(values: list[Any], axes: tuple[Any, ...]) -> list[Any]:
    """Values with a further axis where one is named: of another value and, behind it, the given one."""
    return [
        x if axis is None else jnp.stack([x * 2, x], axis)
        for x, axis in zip(values, axes, strict=True)
    ]


@on_both
@pytest.mark.parametrize(
    "axes", [(0, 0, 0, 0), (2, 1, 0, None), (0, None, None, None), (None, None, None, 1)]
)
@pytest.mark.parametrize("of_each", [False, True])
def test_vmap_of_dense_calls(backend: Backend, axes: tuple[Any, ...], of_each: bool) -> None:
    """`of_each`: slopes of each sequence."""
    slopes = backend.make(np.full((2, 4) if of_each else (4,), 0.1), "fp32")

    def call(q: Any, k: Any, v: Any, slopes: Any) -> Any:
        return causal(q, k, v, alibi_slopes=slopes, return_attn_probs=True)[:2]

    values = [*qkv(backend), slopes]
    wanted = call(*values)
    got = jax.vmap(call, axes)(*mapped(values, axes))
    same([x[1] for x in got], wanted)
    twice = jax.jit(jax.vmap(jax.vmap(call, axes), axes))(*mapped(mapped(values, axes), axes))
    same([x[1, 1] for x in twice], wanted)


@on_both
@pytest.mark.parametrize(
    "axes",
    [(0,) * 6, (0, None, None, None, None, None), (None,) * 5 + (0,), (None, 0, 0, 0, 0, None)],
)
@pytest.mark.parametrize("more_rows", [0, 2])
def test_vmap_of_appends(backend: Backend, axes: tuple[Any, ...], more_rows: int) -> None:
    values = cached(backend)
    values[1:3] = [jnp.concatenate([x, x[:more_rows]]) for x in values[1:3]]
    wanted = decode(*values[:5], cache_seqlens=values[5])
    got = jax.vmap(lambda *x: decode(*x[:5], cache_seqlens=x[5]), axes)(*mapped(values, axes))
    same([x[1] for x in got], wanted)


@on_both
def test_vmap_of_packed_sequences_and_pages(backend: Backend) -> None:
    q, k, v = qkv(backend)
    cu = backend.make(np.array([0, 10, 80]), "int32")
    call = functools.partial(varlen, num_splits=1)
    same(
        jax.vmap(call, (0, None, None, None))(jnp.stack([q * 2, q]), k, v, cu)[1], call(q, k, v, cu)
    )
    q, k_cache, v_cache, k, v, lengths = cached(backend)
    pages = [x.reshape(8, 8, 2, 32) for x in (k_cache, v_cache)]
    table = backend.make(np.array([[3, 1, 0, 2], [4, 6, 7, 5]]), "int32")

    def paged(table: Any, cos: Any = None) -> Any:
        return decode(q, *pages, k, v, cos, cos, lengths, block_table=table)

    same([x[1] for x in jax.vmap(paged)(jnp.stack([table, table]))], paged(table))
    cos = jnp.ones((32, 4), q.dtype)
    contiguous = functools.partial(decode, q, k_cache, v_cache, k, v, cache_seqlens=lengths)
    got = jax.vmap(lambda cos: contiguous(rotary_cos=cos, rotary_sin=cos))(jnp.stack([cos, cos]))
    same([x[1] for x in got], contiguous(rotary_cos=cos, rotary_sin=cos))


@on_both
@pytest.mark.parametrize("lengths", ["array", "int"])
def test_appends_return_new_caches(backend: Backend, lengths: str) -> None:
    q, k_cache, v_cache, k, v, counts = cached(backend)
    before = [np.asarray(x).copy() for x in (k_cache, v_cache)]
    length = counts if lengths == "array" else 7
    eager = decode(q, k_cache, v_cache, k, v, cache_seqlens=length)
    jitted = jax.jit(lambda *x: decode(*x, cache_seqlens=length))(q, k_cache, v_cache, k, v)
    same([k_cache, v_cache], before)
    same(jitted[2:], eager[2:])
    # On a GPU lengths in an array are served by another variant than an int.
    np.testing.assert_allclose(backend.to_numpy(jitted[0]), backend.to_numpy(eager[0]), atol=2e-2)
    numbers = np.asarray(counts) if lengths == "array" else [7, 7]
    for cache, old, new in zip(eager[2:], before, (k, v), strict=True):
        for row, count in enumerate(numbers):
            old[row, count : count + 3] = np.asarray(new)[row]
        same(cache, old)
    out, *caches = rtflash.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=length, causal=True, num_splits=1
    )
    same([out, *caches], [eager[0], *eager[2:]])
    plain = rtflash.flash_attn_with_kvcache(q, *caches, cache_seqlens=length, causal=True)
    assert plain.shape == q.shape


@on_both
def test_a_donated_cache_is_written_where_it_is(backend: Backend) -> None:
    q, k_cache, v_cache, k, v, lengths = cached(backend)
    wanted = decode(q, k_cache, v_cache, k, v, cache_seqlens=lengths)
    # Memory of XLA's own: what NumPy made may be lent to it, and is not to be given away.
    k_cache, v_cache = k_cache + 0, v_cache + 0
    places = {x.unsafe_buffer_pointer() for x in (k_cache, v_cache)}
    step = jax.jit(lambda *x: decode(*x[:5], cache_seqlens=x[5]), donate_argnums=(1, 2))
    got = step(q, k_cache, v_cache, k, v, lengths)
    same(got, wanted)
    assert k_cache.is_deleted()
    assert v_cache.is_deleted()
    assert {x.unsafe_buffer_pointer() for x in got[2:]} == places


@on_both
def test_scan_of_decode_steps(backend: Backend) -> None:
    _, k_cache, v_cache, _, _, lengths = cached(backend)
    steps = tuple(
        normal(backend, 5, 2 * heads * 32, seed=seed).reshape(5, 2, 1, heads, 32)
        for seed, heads in enumerate((4, 2, 2))
    )

    def step(carry: Any, new: Any) -> Any:
        k_cache, v_cache, lengths = carry
        q, k, v = new
        out, _, k_cache, v_cache = decode(q, k_cache, v_cache, k, v, cache_seqlens=lengths)
        return (k_cache, v_cache, lengths + 1), out

    carry = k_cache, v_cache, lengths
    scanned, outs = jax.jit(lambda carry, steps: jax.lax.scan(step, carry, steps))(carry, steps)
    for i in range(5):
        carry, out = step(carry, tuple(x[i] for x in steps))
        same(outs[i], out)
    same(scanned, carry)


@on_both
def test_gradients_are_refused(backend: Backend) -> None:
    q, k, v = qkv(backend)
    lengths = backend.make(np.array([3, 7]), "int32")

    def loss(q: Any) -> Any:
        return causal(q, k, v).astype(jnp.float32).sum()

    refused = pytest.raises(NotImplementedError, match=r"^flash_attn_func .* no backward yet")
    for transform in (jax.grad, lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(jax.jit(f))):
        with refused:
            transform(loss)(q)
    with refused:
        jax.jvp(loss, (q,), (q,))
    with refused:
        jax.linearize(loss, q)
    with pytest.raises(NotImplementedError, match=r"^flash_attn_with_kvcache .* no backward yet"):
        jax.grad(lambda k: decode(q, k, v, cache_seqlens=lengths)[1].sum())(k)
    # Where no derivative depends on the call, there is nothing to refuse.
    stopped = jax.grad(lambda s: s * loss(jax.lax.stop_gradient(q)))(2.0)
    np.testing.assert_allclose(stopped, loss(q), rtol=1e-6)


@on_both
def test_merges_have_gradients(backend: Backend) -> None:
    q, _, _ = qkv(backend, 5)
    a, b = q.astype(jnp.float32), q.astype(jnp.float32) + 1
    lse = jnp.zeros((2, 4, 5)).at[0].set(-jnp.inf)

    def merged(a: Any, lse_a: Any) -> Any:
        out, total = rtflash.merge_attention_states(a, lse_a, b, lse)
        return out.sum() + jnp.where(jnp.isfinite(total), total, 0).sum()

    of_a, of_lse = jax.grad(merged, (0, 1))(a, lse)
    np.testing.assert_array_equal(np.asarray(of_a), np.repeat([0.0, 0.5], 640).reshape(a.shape))
    np.testing.assert_allclose(np.asarray(of_lse)[1], 0.5 - 32 * 0.25, atol=1e-5)
    assert np.isfinite(np.asarray(of_lse)).all()


@on_both
def test_refusals_come_when_the_call_is_traced(backend: Backend) -> None:
    q, k_cache, v_cache, k, v, lengths = cached(backend)
    call, append = rtflash.flash_attn_func, rtflash.flash_attn_with_kvcache
    cases: list[tuple[type[Exception], str, Callable[[Any], Any]]] = [
        (TypeError, "q is fp32; q, k and v", lambda q: call(q.astype(jnp.float32), k, v)),
        (ValueError, "k has shape", lambda q: call(q, k[0], v)),
        (TypeError, "k is a ndarray.*as q .jax", lambda q: call(q, np.asarray(k), v)),
        (TypeError, "k is a .*Tracer.*as q .numpy", lambda q: call(np.asarray(k), q, v)),
        (TypeError, "softmax_scale is a .*Tracer", lambda q: call(q, k, v, softmax_scale=q[0, 0, 0, 0])),
        (TypeError, "causal is a .*static_argnames", lambda q: call(q, k, v, causal=q[0, 0, 0, 0] > 0)),
        (NotImplementedError, "dropout_p", lambda q: call(q, k, v, 0.1)),
        (ValueError, "cache_seqlens is 33", lambda q: append(q, k_cache, v_cache, cache_seqlens=33)),
        (TypeError, "cache_seqlens is a list; it must be an int", lambda q: append(q, k, v, k, v, cache_seqlens=[1])),
        (ValueError, r"cache_seqlens has shape \(\)", lambda q: append(q, k_cache, v_cache, cache_seqlens=lengths[0])),
        (ValueError, "v is None and k is not", lambda q: append(q, k_cache, v_cache, k, cache_seqlens=lengths)),
        (TypeError, "k_cache is a NoneType", lambda q: append(q, None, v_cache, cache_seqlens=lengths)),
    ]  # fmt: skip
    for kind, message, refused in cases:
        with pytest.raises(kind, match=message):
            jax.jit(refused)(q)
    with pytest.raises(
        ValueError, match=r"cache_seqlens is 30; it must be in 0\.\.29 with 3 new keys"
    ):
        append(q, k_cache, v_cache, k, v, cache_seqlens=30)
    with pytest.raises(TypeError, match="out is a JAX array"):
        jax.jit(rtflash.flash_attn_combine)(q[None], jnp.zeros((1, 2, 3, 4)), q)


def test_lengths_on_the_host_are_refused_inside_jit_too() -> None:
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        x = jnp.zeros((2, 8, 1, 16), jnp.float16)
        lengths = jnp.array([9, 1], jnp.int32)
    call = jax.jit(lambda x, n: rtflash.flash_attn_with_kvcache(x, x, x, cache_seqlens=n))
    with pytest.raises(Exception, match=r"cache_seqlens\[0\] is 9; it must be in 0\.\.8"):
        call(x, lengths).block_until_ready()
    with pytest.raises(ValueError, match=r"cache_seqlens\[0\] is 9; it must be in 0\.\.7"):
        rtflash.flash_attn_with_kvcache(x, x, x, x[:, :1], x[:, :1], cache_seqlens=lengths)


@on_both
def test_64_bit_mode(backend: Backend) -> None:
    values = cached(backend)
    wanted = decode(*values[:5], cache_seqlens=values[5])
    with jax.enable_x64(True):
        same(jax.jit(lambda *x: decode(*x[:5], cache_seqlens=x[5]))(*values), wanted)
        same(decode(*values[:5], cache_seqlens=values[5]), wanted)
        decode(*values[:5], cache_seqlens=3)


SHARDED = """
    import functools, jax, jax.numpy as jnp, numpy as np, rtflash
    from jax.sharding import NamedSharding, PartitionSpec as P

    call = functools.partial(rtflash.flash_attn_func, causal=True, num_splits=1)
    q, k, v = jax.random.normal(jax.random.key(0), (3, 4, 40, 4, 32), jnp.bfloat16)
    slopes = jnp.arange(4.0)
    wanted = call(q, k, v, alibi_slopes=slopes)
    devices = np.array(jax.devices()[:4])
    assert len(devices) > 1
    mesh = jax.sharding.Mesh(devices, ("x",))
    heads, batch = P(None, None, "x"), P("x")

    def check(got):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))

    for spec, of_slopes in ((heads, P("x")), (batch, P())):
        for more in ({}, {"check_vma": False}):
            specs = {"in_specs": (spec, spec, spec, of_slopes), "out_specs": spec, **more}
            part = lambda q, k, v, s: call(q, k, v, alibi_slopes=s)
            check(jax.jit(jax.shard_map(part, mesh=mesh, **specs))(q, k, v, slopes))
            inner = lambda q, k, v, s: jax.vmap(part)(q[None], k[None], v[None], s[None])[0]
            check(jax.jit(jax.shard_map(inner, mesh=mesh, **specs))(q, k, v, slopes))
    loop = lambda q, k, v: jax.lax.scan(lambda q, _: (call(q, k, v), None), q, None, length=2)[0]
    specs = {"in_specs": heads, "out_specs": heads}
    sharded = jax.jit(jax.shard_map(loop, mesh=mesh, **specs))(q, k, v)
    np.testing.assert_array_equal(np.asarray(sharded), np.asarray(loop(q, k, v)))
    # Without shard_map the call runs whole on each device.
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        place = NamedSharding(jax.make_mesh((len(devices),), ("x",), (kind,)), heads)
        check(jax.jit(lambda *x: call(*x, alibi_slopes=slopes, return_attn_probs=True))(
            *(jax.device_put(x, place) for x in (q, k, v)))[0])
    print("done")
"""


def run(code: str, **environment: str) -> None:
    """Run code in a process of its own, in which XLA_FLAGS and the like count; it must end by printing "done"."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(
        command,
        env=processes.environment(**environment),
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.stdout.split() == ["done"], done.stderr[-3000:]


def test_shard_map_over_heads_and_batch() -> None:
    run(SHARDED, JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=4")


@pytest.mark.gpu
def test_shard_map_over_gpus() -> None:
    if len([x for x in jax.devices() if x.platform == "gpu"]) < 2:
        pytest.skip("there are fewer than 2 GPUs")
    run(SHARDED)


CACHED = """
    import jax, numpy as np, rtflash, tempfile

    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        x = jax.random.normal(jax.random.key(0), (1, 40, 2, 16), "float16")
        for scale in (0.25, 1.0, 0.25):
            call = lambda x: rtflash.flash_attn_func(x, x, x, softmax_scale=scale)
            for _ in range(2):
                np.testing.assert_array_equal(np.asarray(jax.jit(call)(x)), np.asarray(call(x)))
                jax.clear_caches()
    print("done")
"""


def test_options_are_right_in_programs_that_the_persistent_cache_takes_for_one() -> None:
    run(CACHED, JAX_PLATFORMS="cpu")


@pytest.mark.gpu
def test_options_are_right_in_programs_that_the_persistent_cache_takes_for_one_on_a_gpu() -> None:
    if not any(x.platform == "gpu" for x in jax.devices()):
        pytest.skip("this JAX has no GPU")
    run(CACHED)


def test_importing_rtflash_leaves_jax_alone() -> None:
    code = "import sys, rtflash; print('jax' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=processes.environment(), capture_output=True, text=True
    )
    assert done.stdout.split() == ["False"], done.stderr


class Context:
    """XLA's, as far as a callback asks."""

    stream = STREAM


class Buffer:
    """XLA's buffer on GPU 0, as far as a callback asks: its memory is NumPy's."""

    def __init__(self, x: Any) -> None:
        self.array = np.zeros(x.shape, np.float16 if x.dtype.itemsize == 2 else x.dtype)
        self.address = self.array.ctypes.data
        self.__dlpack__ = self.array.__dlpack__

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


def launched(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], *inputs: Any
) -> tuple[list[Launched], list[Buffer], list[Buffer]]:
    """What the callback of a call launches; its operands, and its results and workspace."""
    gpu = FakeGpu(monkeypatch)
    one = type("Device", (), {"local_hardware_id": 0})()
    monkeypatch.setattr(jax, "local_devices", lambda backend: [one])
    made = jax.make_jaxpr(function)(*inputs).eqns[-1]
    op, operands = made.params["op"], [x.aval for x in made.invars]
    callback = jax_callbacks.DeviceCall(op, operands)
    given = [Buffer(x) for x in operands]
    results = [Buffer(x) for x in (*op.results(operands), *callback.workspace)]
    for place, cache in zip(op.written(), results[1 + op.want_lse :], strict=False):
        given[place] = cache
    for _ in range(2):
        callback(Context(), results, *given)
    steps = len(gpu.launched) // 2
    assert gpu.launched[:steps] == gpu.launched[steps:]
    assert not gpu.made
    return gpu.launched[:steps], given, results


def test_a_callback_on_a_gpu_launches_over_the_buffers_it_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k, v = jnp.zeros((3, 1, 64, 4, 64), jnp.float16)
    steps, given, (out, lse) = launched(
        monkeypatch, lambda *x: causal(*x, return_attn_probs=True)[:2], q, k, v
    )
    (step,) = steps
    places = [step.params[name] for name in ("q", "k", "v", "o", "lse")]
    assert places == [x.address for x in (*given, out, lse)]


def test_a_callback_on_a_gpu_splits_into_workspace_of_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    q = jnp.zeros((1, 1, 4, 64), jnp.float16)
    cache = jnp.zeros((1, 4096, 4, 64), jnp.float16)
    length = jnp.zeros(1, jnp.int32)
    call = functools.partial(rtflash.flash_attn_with_kvcache, num_splits=8)
    steps, given, results = launched(
        monkeypatch, lambda *x: call(*x[:5], cache_seqlens=x[5]), q, cache, cache, q, q, length
    )
    append, forward, combine = steps
    out, k_cache, v_cache, workspace = results
    assert workspace.array.size == 8 * (4 * 64 + 4)
    assert [append.params[name] for name in ("k", "v")] == [k_cache.address, v_cache.address]
    assert forward.params["o"] == combine.params["o_partial"] == workspace.address
    assert combine.params["o"] == out.address
    # Operands stand in the order of the function's inputs: q, caches, lengths, k, v.
    assert append.params["sequences.seqused_k"] == given[3].address


def test_nothing_is_launched_for_empty_results(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = jnp.zeros((1, 0, 4, 64), jnp.float16), jnp.zeros((1, 8, 4, 64), jnp.float16)
    assert launched(monkeypatch, causal, q, k, k)[0] == []


@pytest.mark.gpu
@pytest.mark.parametrize("backend", params("jax-cuda"), indirect=True)
def test_jit_runs_on_xlas_stream_and_copies_nothing_to_the_host(backend: Backend) -> None:
    """Work before and behind the call is ordered; a transfer of an operand to the host would be refused."""
    q, k, v = qkv(backend, 2048)

    @jax.jit
    def chain(q: Any, k: Any, v: Any) -> Any:
        for _ in range(20):
            q = causal(q * 1.0, k, v) + q
        return q

    with jax.transfer_guard("disallow"):
        got = chain(q, k, v)
    wanted = q
    for _ in range(20):
        wanted = causal(wanted, k, v) + wanted
    np.testing.assert_allclose(backend.to_numpy(got), backend.to_numpy(wanted), rtol=0.05, atol=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", params("jax-cuda"), indirect=True)
def test_jit_with_splits_under_pressure(backend: Backend) -> None:
    """Many calls in flight share no workspace."""
    q, cache = normal(backend, 4, 1, 8, 64), normal(backend, 4, 4096, 2, 64, seed=1)
    lengths = backend.make(np.array([4096, 1, 3000, 77]), "int32")
    call = functools.partial(rtflash.flash_attn_with_kvcache, cache_seqlens=lengths, num_splits=8)
    wanted = call(q, cache, cache)
    step = jax.jit(lambda q: call(q, cache, cache))
    for got in [step(q) for _ in range(50)]:
        same(got, wanted)
