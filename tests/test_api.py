"""The public functions' signatures, return values and refusals, on host arrays and on GPU arrays alike."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from typing import Any

import numpy as np
import processes
import pytest
from backends import ALL_BACKENDS, Backend, params

import rtflash

on_all = pytest.mark.parametrize("backend", ALL_BACKENDS, indirect=True)

# FlashAttention 2's names, order and defaults.
OPTIONS = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}


VARLEN = {"cu_seqlens_q": None, "cu_seqlens_k": None, "max_seqlen_q": None, "max_seqlen_k": None}
CACHE = {
    "k": None,
    "v": None,
    "rotary_cos": None,
    "rotary_sin": None,
    "cache_seqlens": None,
    "cache_batch_idx": None,
    "cache_leftpad": None,
    "block_table": None,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "rotary_interleaved": True,
    "alibi_slopes": None,
    "num_splits": 0,
    "return_softmax_lse": False,
}
SPLITS = {"num_splits": 0}
USED = {"seqused_q": None, "seqused_k": None, "num_splits": 0}

# By name: what must be given, FlashAttention's options with their defaults, and the keywords that are ours.
SIGNATURES: dict[str, tuple[list[str], dict[str, Any], dict[str, Any]]] = {
    "flash_attn_func": (["q", "k", "v"], OPTIONS, SPLITS),
    "flash_attn_qkvpacked_func": (["qkv"], OPTIONS, SPLITS),
    "flash_attn_kvpacked_func": (["q", "kv"], OPTIONS, SPLITS),
    "flash_attn_varlen_func": (["q", "k", "v", *VARLEN], {**OPTIONS, "block_table": None}, USED),
    "flash_attn_varlen_qkvpacked_func": (["qkv", "cu_seqlens", "max_seqlen"], OPTIONS, USED),
    "flash_attn_varlen_kvpacked_func": (["q", "kv", *VARLEN], OPTIONS, USED),
    "flash_attn_with_kvcache": (["q", "k_cache", "v_cache"], CACHE, {"page_table": None}),
    "merge_attention_states": (["out_a", "lse_a", "out_b", "lse_b"], {}, {}),
    "flash_attn_combine": (["out_partial", "lse_partial"], {"out": None, "out_dtype": None}, {}),
}


@pytest.mark.parametrize("name", list(SIGNATURES))
def test_signatures_are_those_of_flash_attention(name: str) -> None:
    """FlashAttention-2's, for the last one FlashAttention-3's; what is ours is keyword-only and at the end."""
    required, options, ours = SIGNATURES[name]
    parameters = inspect.signature(getattr(rtflash, name)).parameters
    assert list(parameters) == [*required, *options, *ours]
    defaults = {key: p.default for key, p in parameters.items() if p.default is not p.empty}
    assert defaults == {**options, **ours}
    kinds = [parameter.kind for parameter in parameters.values()]
    plain, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    assert kinds == [plain] * (len(required) + len(options)) + [keyword] * len(ours)


def output_of(code: str) -> str:
    """What a fresh interpreter prints that runs the code."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=processes.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_import_is_light() -> None:
    """`import rtflash` brings in no CuPy, torch, JAX or Jinja."""
    code = "import json, sys; import rtflash; print(json.dumps(sorted(sys.modules)))"
    assert not {"cupy", "torch", "jax", "jinja2", "filelock"} & set(json.loads(output_of(code)))


def ones(backend: Backend, *shape: int, dtype: str = "fp16") -> Any:
    return backend.make(np.ones(shape, np.float32), dtype)


REFUSALS: dict[str, tuple[type[Exception], str, Any]] = {
    "q of three axes": (
        ValueError,
        "q has shape",
        lambda b: ((ones(b, 2, 4, 8), *[ones(b, 2, 4, 2, 8)] * 2), {}),
    ),
    "head_dim of k": (
        ValueError,
        "k has shape",
        lambda b: ((ones(b, 2, 4, 2, 8), *[ones(b, 2, 4, 2, 16)] * 2), {}),
    ),
    "batch of k": (
        ValueError,
        "k has shape",
        lambda b: ((ones(b, 2, 4, 2, 8), *[ones(b, 3, 4, 2, 8)] * 2), {}),
    ),
    "rows of v": (
        ValueError,
        "v has shape",
        lambda b: ((ones(b, 2, 4, 2, 8), ones(b, 2, 5, 2, 8), ones(b, 2, 4, 2, 8)), {}),
    ),
    "heads": (
        ValueError,
        "heads",
        lambda b: ((ones(b, 2, 4, 3, 8), *[ones(b, 2, 4, 2, 8)] * 2), {}),
    ),
    "dtypes differ": (
        TypeError,
        "dtype",
        lambda b: (
            (ones(b, 2, 4, 2, 8), ones(b, 2, 4, 2, 8, dtype="bf16"), ones(b, 2, 4, 2, 8)),
            {},
        ),
    ),
    "fp32": (TypeError, "fp16 or bf16", lambda b: ([ones(b, 2, 4, 2, 8, dtype="fp32")] * 3, {})),
    "slopes' dtype": (
        TypeError,
        "alibi_slopes",
        lambda b: (plain(b), {"alibi_slopes": ones(b, 2)}),
    ),
    "slopes' shape": (
        ValueError,
        "alibi_slopes",
        lambda b: (plain(b), {"alibi_slopes": ones(b, 3, dtype="fp32")}),
    ),
    "window of three": (
        ValueError,
        "window_size",
        lambda b: (plain(b), {"window_size": (1, 2, 3)}),
    ),
    "window of floats": (TypeError, "window_size", lambda b: (plain(b), {"window_size": (1.0, 2)})),
    "negative softcap": (ValueError, "softcap", lambda b: (plain(b), {"softcap": -1.0})),
    "NaN softcap": (ValueError, "softcap", lambda b: (plain(b), {"softcap": float("nan")})),
    "infinite scale": (
        ValueError,
        "softmax_scale",
        lambda b: (plain(b), {"softmax_scale": float("inf")}),
    ),
    "scale as text": (TypeError, "softmax_scale", lambda b: (plain(b), {"softmax_scale": "1"})),
    "dropout": (NotImplementedError, "dropout", lambda b: (plain(b), {"dropout_p": 0.5})),
    "dropout of 1": (ValueError, "dropout_p", lambda b: (plain(b), {"dropout_p": 1.0})),
    "negative dropout": (ValueError, "dropout_p", lambda b: (plain(b), {"dropout_p": -0.1})),
    "a list": (TypeError, "list", lambda b: (([[[[1.0]]]], *plain(b)[1:]), {})),
    "None": (TypeError, "NoneType", lambda b: ((plain(b)[0], None, plain(b)[2]), {})),
}


def plain(backend: Backend) -> tuple[Any, Any, Any]:
    q, k, v = (ones(backend, 2, 4, 2, 8) for _ in range(3))
    return q, k, v


@pytest.mark.parametrize("name", list(REFUSALS))
@on_all
def test_refusals(backend: Backend, name: str) -> None:
    error, message, make = REFUSALS[name]
    tensors, options = make(backend)
    with pytest.raises(error, match=message):
        rtflash.flash_attn_func(*tensors, **options)


@on_all
def test_every_reason_is_listed(backend: Backend) -> None:
    q, k, v = ones(backend, 2, 4, 3, 300), ones(backend, 3, 4, 2, 16), ones(backend, 3, 5, 2, 8)
    with pytest.raises(ValueError, match="refused") as caught:
        rtflash.flash_attn_func(q, k, v, softcap=-1.0)
    for part in ("k has shape", "v has shape", "3 heads", "head_dim 300", "softcap"):
        assert part in str(caught.value)


@pytest.mark.parametrize("shape", [(2, 4, 2, 2, 8), (2, 4, 8), (2, 4, 3, 8)], ids=str)
@on_all
def test_qkvpacked_refuses_other_shapes(backend: Backend, shape: tuple[int, ...]) -> None:
    qkv = backend.upload(np.zeros(shape, np.uint16), "fp16")
    with pytest.raises(ValueError, match="qkv"):
        rtflash.flash_attn_qkvpacked_func(qkv)


@pytest.mark.parametrize("shape", [(2, 4, 3, 2, 8), (2, 4, 8)], ids=str)
@on_all
def test_kvpacked_refuses_other_shapes(backend: Backend, shape: tuple[int, ...]) -> None:
    kv = backend.upload(np.zeros(shape, np.uint16), "fp16")
    with pytest.raises(ValueError, match="kv"):
        rtflash.flash_attn_kvpacked_func(ones(backend, 2, 4, 2, 8), kv)


@on_all
def test_kvpacked_with_fewer_kv_heads(backend: Backend) -> None:
    q = ones(backend, 2, 4, 6, 8)
    kv = backend.upload(np.zeros((2, 5, 2, 3, 8), np.uint16), "fp16")
    assert rtflash.flash_attn_kvpacked_func(q, kv).shape == (2, 4, 6, 8)


@on_all
def test_deterministic_changes_nothing(backend: Backend) -> None:
    q, k, v = (
        backend.make(x)
        for x in np.random.default_rng(0).standard_normal((3, 1, 9, 2, 16), np.float32)
    )
    wanted = backend.to_numpy(rtflash.flash_attn_func(q, k, v))
    np.testing.assert_array_equal(
        backend.to_numpy(rtflash.flash_attn_func(q, k, v, deterministic=True)), wanted
    )


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("backend", params("torch-cpu", "torch-cuda"), indirect=True)
def test_inputs_that_require_grad(backend: Backend, which: int) -> None:
    """Refused while gradients are recorded; under no_grad and inference_mode the call works."""
    import torch

    tensors = list(plain(backend))
    tensors[which] = tensors[which].clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="grad"):
        rtflash.flash_attn_func(*tensors)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = rtflash.flash_attn_func(*tensors)
        assert not out.requires_grad
        np.testing.assert_array_equal(backend.to_numpy(out), np.ones((2, 4, 2, 8)))
    detached = [x.detach() for x in tensors]
    assert not rtflash.flash_attn_func(*detached).requires_grad


@pytest.mark.parametrize("backend", params("torch-cpu", "torch-cuda"), indirect=True)
def test_packed_inputs_that_require_grad(backend: Backend) -> None:
    qkv = backend.upload(np.zeros((1, 4, 3, 2, 8), np.uint16), "fp16").requires_grad_()
    with pytest.raises(NotImplementedError, match="grad"):
        rtflash.flash_attn_qkvpacked_func(qkv)
    with pytest.raises(NotImplementedError, match="grad"):
        rtflash.flash_attn_kvpacked_func(qkv[:, :, 0].detach(), qkv[:, :, 1:])


@pytest.mark.parametrize("causal", [np.ones(1), np.array(True), "yes", 1.0], ids=str)
@on_all
def test_causal_must_be_a_truth_value(backend: Backend, causal: Any) -> None:
    """An array is refused whole: it may change between two calls, and reading one may block the host."""
    q = backend.make(np.zeros((1, 4, 2, 64), np.float32))
    with pytest.raises(TypeError, match="causal is a"):
        rtflash.flash_attn_func(q, q, q, causal=causal)


@on_all
def test_a_window_may_be_a_list(backend: Backend) -> None:
    q = backend.make(np.random.default_rng(5).standard_normal((1, 9, 2, 64), np.float32))
    wanted = backend.to_numpy(rtflash.flash_attn_func(q, q, q, window_size=(3, 0)))
    for _ in range(2):
        out = rtflash.flash_attn_func(q, q, q, window_size=[3, 0])
        np.testing.assert_array_equal(backend.to_numpy(out), wanted)


@pytest.mark.parametrize("backend", params("torch-cpu", "torch-cuda"), indirect=True)
def test_strides_of_single_element_axes_mean_nothing(backend: Backend) -> None:
    """Odd strides of an axis of one element neither misalign nor move anything."""
    import torch

    q = backend.make(np.random.default_rng(6).standard_normal((2, 1, 2, 64), np.float32))
    k = backend.make(np.random.default_rng(7).standard_normal((2, 1, 2, 64), np.float32))
    odd = [torch.as_strided(x, x.shape, (x.stride(0), 1, x.stride(2), 1)) for x in (q, k)]
    out = rtflash.flash_attn_func(odd[0], odd[1], odd[1])
    np.testing.assert_array_equal(backend.to_numpy(out), backend.to_numpy(k))


@pytest.mark.parametrize("backend", params("torch-cpu", "torch-cuda"), indirect=True)
def test_forward_mode_derivatives_are_not_lost(backend: Backend) -> None:
    import torch
    from torch.autograd import forward_ad

    q = backend.make(np.zeros((1, 4, 2, 64), np.float32))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="k requires grad"):
            rtflash.flash_attn_func(q, dual, q)
        rtflash.flash_attn_func(q, q, q)


@pytest.mark.gpu
@pytest.mark.parametrize("strided", [(1,), (0, 1, 2)], ids=str)
def test_copies_of_a_producers_tensors_stay_with_their_library(strided: tuple[int, ...]) -> None:
    """A DLPack producer's inner-strided tensors are copied, and the result still goes to the producer's library."""
    import cupy
    from capsules import CUDA, Producer

    wide = cupy.random.standard_normal((3, 2, 5, 2, 128), dtype="float32").astype("float16")
    flat = [cupy.ascontiguousarray(x[..., ::2]) for x in wide]
    wanted = rtflash.flash_attn_func(*flat)
    given = []
    for i, (base, packed) in enumerate(zip(wide, flat, strict=True)):
        source, step = (base, 2) if i in strided else (packed, 1)
        strides = (*(s // source.itemsize for s in source.strides[:-1]), step)
        owner = Producer(
            source, source.data.ptr, 0, packed.shape, strides, device=(CUDA, 0), versioned=True
        )
        given.append(owner)
    out = rtflash.flash_attn_func(*given)
    assert isinstance(out, cupy.ndarray)
    cupy.testing.assert_array_equal(out, wanted)


@pytest.mark.gpu
def test_misaligned_slopes_after_aligned_ones() -> None:
    """The second call has the first one's geometry, but its slopes start between two floats."""
    import cupy

    q = cupy.random.standard_normal((1, 33, 4, 64), dtype="float32").astype("float16")
    raw = cupy.zeros(18, cupy.uint8)
    slopes = cupy.asarray([0.1, 0.2, 0.3, 0.4], cupy.float32)
    raw[2:] = slopes.view(cupy.uint8)
    moved = cupy.ndarray((4,), cupy.float32, memptr=raw.data + 2)
    wanted = rtflash.flash_attn_func(q, q, q, alibi_slopes=slopes)
    out = rtflash.flash_attn_func(q, q, q, alibi_slopes=moved)
    cupy.testing.assert_array_equal(out, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "dtype"), [(300, "bf16"), (0, "fp16"), (64, "fp32")])
def test_warmup_refuses_what_no_call_may_have(head_dim: int, dtype: str) -> None:
    with pytest.raises((TypeError, ValueError), match=r"head_dim|fp32"):
        rtflash.warmup(head_dim, dtype)


@on_all
def test_numbers_too_large_for_a_float(backend: Backend) -> None:
    q = backend.make(np.zeros((1, 4, 2, 64), np.float32))
    for option in ("softmax_scale", "softcap", "dropout_p"):
        with pytest.raises(ValueError, match=option):
            rtflash.flash_attn_func(q, q, q, **{option: 10**400})


@pytest.mark.parametrize("window", [None, 5, {1, 2}, (1,), "12", np.array(3)], ids=str)
def test_a_window_is_a_pair(window: Any) -> None:
    q = np.zeros((1, 4, 2, 64), np.float16)
    with pytest.raises(ValueError, match="it must be a pair"):
        rtflash.flash_attn_func(q, q, q, window_size=window)


@pytest.mark.parametrize("option", ["softmax_scale", "softcap", "dropout_p"])
@pytest.mark.parametrize("value", [True, False, np.bool_(True)], ids=repr)
def test_truth_values_are_no_numbers(option: str, value: Any) -> None:
    q = np.zeros((1, 4, 2, 64), np.float16)
    with pytest.raises(TypeError, match=f"^{option} is a bool.*; it must be a number on the host"):
        rtflash.flash_attn_func(q, q, q, **{option: value})


def test_numbers_are_no_truth_values() -> None:
    q = np.zeros((1, 4, 2, 64), np.float16)
    for causal in (0, 1, np.True_, np.int32(1)):
        rtflash.flash_attn_func(q, q, q, causal=causal)
    with pytest.raises(ValueError, match=r"^causal is 2; it must be True or False$"):
        rtflash.flash_attn_func(q, q, q, causal=2)
    with pytest.raises(ValueError, match=r"^rotary_interleaved is -1; it must be True or False$"):
        rtflash.flash_attn_with_kvcache(q, q, q, rotary_interleaved=-1)


def test_names_that_do_not_exist_say_what_does() -> None:
    with pytest.raises(AttributeError, match="flash_attn_with_kvcache"):
        rtflash.flash_attn  # noqa: B018
    assert all(hasattr(rtflash, name) for name in rtflash.__all__)


def test_submodules_need_no_import_of_their_own() -> None:
    """In a process that has imported none of them."""
    code = (
        "import sys, rtflash; assert 'rtflash.compat' not in sys.modules; rtflash.compat.install();"
        "assert rtflash.compat is sys.modules['rtflash.compat']; rtflash.integrations;"
        "assert not hasattr(rtflash.integrations, 'others'); print(*dir(rtflash))"
    )
    assert output_of(code).split() == sorted([*rtflash.__all__, "compat", "integrations"])


PACKED_REFUSALS: dict[str, tuple[type[Exception], str, Any]] = {
    "qkv in fp32": (
        TypeError,
        r"^qkv is fp32; qkv must be fp16 or bf16 \(cast it first\)$",
        lambda b: rtflash.flash_attn_qkvpacked_func(ones(b, 2, 4, 3, 2, 8, dtype="fp32")),
    ),
    "qkv's head_dim": (
        ValueError,
        r"^qkv has head_dim 300; ",
        lambda b: rtflash.flash_attn_qkvpacked_func(ones(b, 2, 4, 3, 2, 300)),
    ),
    "kv's batch": (
        ValueError,
        r"^kv has shape \(3, 5, 2, 2, 8\); with q \(2, 4, 2, 8\) it must be \(2, seqlen_k, 2, heads_k, 8\)$",
        lambda b: rtflash.flash_attn_kvpacked_func(ones(b, 2, 4, 2, 8), ones(b, 3, 5, 2, 2, 8)),
    ),
    "kv's heads": (
        ValueError,
        r"^q has 3 heads and kv has 2; q's must be a multiple of kv's$",
        lambda b: rtflash.flash_attn_kvpacked_func(ones(b, 2, 4, 3, 8), ones(b, 2, 5, 2, 2, 8)),
    ),
    "kv's dtype": (
        TypeError,
        r"^q is fp16, kv is bf16; they must have one dtype \(cast first\)$",
        lambda b: rtflash.flash_attn_kvpacked_func(
            ones(b, 2, 4, 2, 8), ones(b, 2, 5, 2, 2, 8, dtype="bf16")
        ),
    ),
    "no kv": (
        TypeError,
        r"^kv is a NoneType",
        lambda b: rtflash.flash_attn_kvpacked_func(ones(b, 2, 4, 2, 8), None),
    ),
}


@pytest.mark.parametrize("name", list(PACKED_REFUSALS))
@on_all
def test_errors_name_what_the_caller_passed(backend: Backend, name: str) -> None:
    error, message, call = PACKED_REFUSALS[name]
    with pytest.raises(error, match=message):
        call(backend)


def integers(backend: Backend, values: Any) -> Any:
    return backend.make(values, "int32")


def normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


QUERIES, KEYS = (3, 0, 1, 9), (5, 4, 0, 17)


def offsets(lengths: tuple[int, ...]) -> Any:
    return np.cumsum((0, *lengths))


def sequences(backend: Backend, heads: int = 4, heads_k: int = 2) -> tuple[Any, Any, Any]:
    """Values of packed q, k and v with QUERIES and KEYS, and two rows that belong to no sequence."""
    return (
        normal(1, sum(QUERIES) + 2, heads, 32),
        normal(2, sum(KEYS) + 2, heads_k, 32),
        normal(3, sum(KEYS) + 2, heads_k, 32),
    )


@on_all
def test_varlen_is_dense_for_each_sequence(backend: Backend) -> None:
    q, k, v = sequences(backend)
    out, lse, dmask = rtflash.flash_attn_varlen_func(
        *map(backend.make, (q, k, v)),
        integers(backend, offsets(QUERIES)),
        integers(backend, offsets(KEYS)),
        max(QUERIES),
        max(KEYS),
        causal=True,
        return_attn_probs=True,
    )
    assert dmask is None
    assert tuple(out.shape) == q.shape
    assert tuple(lse.shape) == (4, len(q))
    out, lse = backend.to_numpy(out), backend.to_numpy(lse)
    rows, keys = offsets(QUERIES), offsets(KEYS)
    for b in range(len(QUERIES)):
        one = slice(rows[b], rows[b + 1])
        seen = slice(keys[b], keys[b + 1])
        wanted, wanted_lse, _ = rtflash.flash_attn_func(
            *(backend.make(x[None]) for x in (q[one], k[seen], v[seen])),
            causal=True,
            return_attn_probs=True,
        )
        np.testing.assert_allclose(out[one], backend.to_numpy(wanted)[0], atol=2e-3)
        np.testing.assert_allclose(lse[:, one], backend.to_numpy(wanted_lse)[0], atol=1e-3)
    assert not out[rows[-1] :].any()
    assert np.isneginf(lse[:, rows[-1] :]).all()


@on_all
def test_packed_varlen_is_varlen(backend: Backend) -> None:
    q, k, v = sequences(backend, 2)
    given = integers(backend, offsets(QUERIES)), integers(backend, offsets(KEYS)), 9, 17
    wanted = rtflash.flash_attn_varlen_func(*map(backend.make, (q, k, v)), *given)
    kv = backend.make(np.stack([k, v], 1))
    out = rtflash.flash_attn_varlen_kvpacked_func(backend.make(q), kv, *given)
    np.testing.assert_array_equal(backend.to_numpy(out), backend.to_numpy(wanted))
    keys = integers(backend, offsets(KEYS))
    wanted = rtflash.flash_attn_varlen_func(*map(backend.make, (k, k, v)), keys, keys, 17, 17)
    qkv = backend.make(np.stack([k, k, v], 1))
    out = rtflash.flash_attn_varlen_qkvpacked_func(qkv, keys, 17)
    np.testing.assert_array_equal(backend.to_numpy(out), backend.to_numpy(wanted))


@on_all
def test_seqused_shortens_sequences(backend: Backend) -> None:
    q, k, v = sequences(backend)
    used_q, used_k = (2, 0, 1, 5), (5, 1, 0, 8)
    out, lse, _ = rtflash.flash_attn_varlen_func(
        *map(backend.make, (q, k, v)),
        integers(backend, offsets(QUERIES)),
        integers(backend, offsets(KEYS)),
        9,
        17,
        seqused_q=integers(backend, used_q),
        seqused_k=integers(backend, used_k),
        return_attn_probs=True,
    )
    out, lse = backend.to_numpy(out), backend.to_numpy(lse)
    last, first = offsets(QUERIES)[3], offsets(KEYS)[3]
    wanted = rtflash.flash_attn_func(
        *(
            backend.make(x[None])
            for x in (q[last : last + 5], k[first : first + 8], v[first : first + 8])
        )
    )
    np.testing.assert_allclose(out[last : last + 5], backend.to_numpy(wanted)[0], atol=2e-3)
    assert not out[last + 5 :].any()
    assert np.isneginf(lse[:, last + 5 :]).all()


@on_all
def test_pages_hold_what_a_cache_holds(backend: Backend) -> None:
    """The same keys in a cache, in pages of 4 under each of the table's names, and packed with a table."""
    lengths = (6, 0, 9)
    cache_k, cache_v = normal(1, 3, 12, 2, 32), normal(2, 3, 12, 2, 32)
    q = backend.make(normal(3, 3, 1, 4, 32))
    used = integers(backend, lengths)
    wanted, wanted_lse = rtflash.flash_attn_with_kvcache(
        q, backend.make(cache_k), backend.make(cache_v), cache_seqlens=used, return_softmax_lse=True
    )
    order = np.random.default_rng(0).permutation(9)
    table = integers(backend, np.argsort(order).reshape(3, 3))
    pages = [backend.make(x.reshape(9, 4, 2, 32)[order]) for x in (cache_k, cache_v)]
    for name in ("block_table", "page_table"):
        out, lse = rtflash.flash_attn_with_kvcache(
            q, *pages, cache_seqlens=used, return_softmax_lse=True, **{name: table}
        )
        np.testing.assert_array_equal(backend.to_numpy(out), backend.to_numpy(wanted))
        np.testing.assert_array_equal(backend.to_numpy(lse), backend.to_numpy(wanted_lse))
    packed = backend.make(backend.to_numpy(q)[:, 0])
    starts = integers(backend, [0, 1, 2, 3])
    for keys, seqused in ((integers(backend, offsets(lengths)), None), (None, used)):
        out = rtflash.flash_attn_varlen_func(
            packed, *pages, starts, keys, 1, 12, block_table=table, seqused_k=seqused
        )
        np.testing.assert_array_equal(backend.to_numpy(out), backend.to_numpy(wanted)[:, 0])


WRITABLE = params("numpy", "torch-cpu", "emulated", "torch-cuda", "cupy")


@pytest.mark.parametrize("as_int", [False, True], ids=["tensor", "int"])
@pytest.mark.parametrize("backend", WRITABLE, indirect=True)
def test_new_keys_are_appended_in_place(backend: Backend, as_int: bool) -> None:
    cache_k, cache_v = normal(1, 2, 12, 2, 32), normal(2, 2, 12, 2, 32)
    k, v = normal(3, 2, 3, 2, 32), normal(4, 2, 3, 2, 32)
    q = backend.make(normal(5, 2, 3, 4, 32))
    caches = [backend.make(x) for x in (cache_k, cache_v)]
    length = 5 if as_int else integers(backend, [5, 5])
    out = rtflash.flash_attn_with_kvcache(
        q, *caches, backend.make(k), backend.make(v), cache_seqlens=length, causal=True
    )
    cache_k[:, 5:8], cache_v[:, 5:8] = k, v
    for cache, values in zip(caches, (cache_k, cache_v), strict=True):
        np.testing.assert_array_equal(
            backend.to_numpy(cache), backend.to_numpy(backend.make(values))
        )
    wanted = rtflash.flash_attn_func(
        q, backend.make(cache_k[:, :8]), backend.make(cache_v[:, :8]), causal=True
    )
    np.testing.assert_allclose(backend.to_numpy(out), backend.to_numpy(wanted), atol=2e-3)


@pytest.mark.parametrize("backend", params("jax-cpu", "jax-cuda"), indirect=True)
def test_jax_caches_are_not_written(backend: Backend) -> None:
    q = ones(backend, 2, 1, 2, 8)
    cache = ones(backend, 2, 4, 2, 8)
    _, new, _ = rtflash.flash_attn_with_kvcache(q, cache, cache, q + 1, q, cache_seqlens=1)
    assert backend.to_numpy(new).sum() == backend.to_numpy(cache).sum() + q.size
    np.testing.assert_array_equal(backend.to_numpy(cache), np.ones((2, 4, 2, 8)))
    out = rtflash.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=1)
    np.testing.assert_array_equal(backend.to_numpy(out), np.ones((2, 1, 2, 8)))
    with pytest.raises(TypeError, match="out is a JAX array"):
        rtflash.flash_attn_combine(q[None], ones(backend, 1, 2, 1, 2, dtype="fp32"), q)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@on_all
def test_merged_halves_are_the_whole(backend: Backend, packed: bool, dtype: str) -> None:
    q, k, v = (backend.make(normal(seed, 2, 9, 2, 32), dtype) for seed in (1, 2, 3))
    whole, whole_lse, _ = rtflash.flash_attn_func(q, k, v, return_attn_probs=True)
    halves = [
        rtflash.flash_attn_func(q, k[:, keys], v[:, keys], return_attn_probs=True)[:2]
        for keys in (slice(0, 3), slice(3, 9))
    ]
    if packed:
        halves = [(out[0], lse[0]) for out, lse in halves]
        whole, whole_lse = whole[0], whole_lse[0]
    out, lse = rtflash.merge_attention_states(*halves[0], *halves[1])
    assert backend.owns(out, q)
    assert backend.owns(lse, q)
    assert backend.dtype_name(out) == backend.dtype_name(q)
    assert tuple(lse.shape) == tuple(whole_lse.shape)
    atol = 2e-3 if dtype == "fp16" else 2e-2
    np.testing.assert_allclose(backend.to_numpy(out), backend.to_numpy(whole), atol=atol)
    np.testing.assert_allclose(backend.to_numpy(lse), backend.to_numpy(whole_lse), atol=1e-5)


@on_all
def test_merging_with_nothing_changes_nothing(backend: Backend) -> None:
    """NaN in the part that saw no key does not count; a row that saw none in either is 0, its LSE -inf."""
    out = backend.make(normal(1, 1, 2, 1, 8), "fp32")
    lse = backend.make(np.array([[[0.5, -np.inf]]]), "fp32")
    nothing = backend.make(np.full((1, 2, 1, 8), np.nan), "fp32")
    never = backend.make(np.full((1, 1, 2), -np.inf), "fp32")
    merged, merged_lse = rtflash.merge_attention_states(out, lse, nothing, never)
    wanted = backend.to_numpy(out).copy()
    wanted[:, 1] = 0
    np.testing.assert_allclose(backend.to_numpy(merged), wanted, rtol=1e-6)
    np.testing.assert_allclose(backend.to_numpy(merged_lse), backend.to_numpy(lse), rtol=1e-6)


@pytest.mark.parametrize("shape", [(3, 2, 4, 2, 8), (3, 4, 2, 8)], ids=str)
@on_all
def test_combine(backend: Backend, shape: tuple[int, ...]) -> None:
    parts, lses = normal(1, *shape), normal(2, *shape[:-1])
    given = backend.make(parts.copy(), "fp32"), backend.make(lses, "fp32")
    weights = np.exp(lses - np.log(np.exp(lses).sum(0)))
    wanted = (parts * weights[..., None]).sum(0)
    out, lse = rtflash.flash_attn_combine(*given)
    assert backend.dtype_name(out) == "float32"
    np.testing.assert_allclose(backend.to_numpy(out), wanted, atol=1e-5)
    np.testing.assert_allclose(backend.to_numpy(lse), np.log(np.exp(lses).sum(0)), atol=1e-5)
    like = ones(backend, 1, dtype="bf16")
    for dtype in ("bf16", like.dtype):
        out, _ = rtflash.flash_attn_combine(*given, out_dtype=dtype)
        assert backend.dtype_name(out) == "bfloat16"
        np.testing.assert_allclose(backend.to_numpy(out), wanted, atol=0.03)


@pytest.mark.parametrize("backend", WRITABLE, indirect=True)
def test_combine_into_a_given_tensor(backend: Backend) -> None:
    parts, lses = normal(1, 3, 2, 4, 2, 8), normal(2, 3, 2, 4, 2)
    given = backend.make(parts, "fp32"), backend.make(lses, "fp32")
    target = backend.upload(np.zeros((2, 4, 2, 8), np.uint16), "fp16")
    out, _ = rtflash.flash_attn_combine(*given, out=target)
    assert out is target
    wanted = backend.to_numpy(rtflash.flash_attn_combine(*given, out_dtype="fp16")[0])
    np.testing.assert_array_equal(backend.to_numpy(target), wanted)
    with pytest.raises(ValueError, match="out is fp16; with out_dtype it must be bf16"):
        rtflash.flash_attn_combine(*given, out=target, out_dtype="bf16")
    with pytest.raises(TypeError, match="out_dtype is 'int8'"):
        rtflash.flash_attn_combine(*given, out_dtype="int8")


@on_all
def test_num_splits_is_checked(backend: Backend) -> None:
    q, k, v = plain(backend)
    for splits in (-1, 257):
        with pytest.raises(ValueError, match=f"num_splits is {splits}; it must be in 0..256"):
            rtflash.flash_attn_func(q, k, v, num_splits=splits)
    with pytest.raises(TypeError, match="num_splits is a float"):
        rtflash.flash_attn_with_kvcache(q, k, v, num_splits=2.0)
    with pytest.raises(TypeError, match="num_splits is a bool"):
        rtflash.flash_attn_with_kvcache(q, k, v, num_splits=True)
