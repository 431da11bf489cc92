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


@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("flash_attn_func", ["q", "k", "v"]),
        ("flash_attn_qkvpacked_func", ["qkv"]),
        ("flash_attn_kvpacked_func", ["q", "kv"]),
    ],
)
def test_signatures_are_those_of_flash_attention_2(name: str, tensors: list[str]) -> None:
    parameters = inspect.signature(getattr(rtflash, name)).parameters
    assert list(parameters) == [*tensors, *OPTIONS]
    assert {key: parameters[key].default for key in OPTIONS} == OPTIONS
    assert all(
        parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters.values()
    )


def test_import_is_light() -> None:
    """`import rtflash` brings in no CuPy, torch, JAX or Jinja."""
    code = "import json, sys; import rtflash; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=processes.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert not {"cupy", "torch", "jax", "jinja2", "filelock"} & set(json.loads(done.stdout))


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


@pytest.mark.parametrize("backend", params("torch-cpu", "torch-cuda"), indirect=True)
def test_tracers_are_refused(backend: Backend) -> None:
    """What records torch's operations would not see ours, and give stale or no results later."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    q = backend.make(np.zeros((1, 4, 2, 64), np.float32))
    with pytest.raises(TypeError, match="make_fx"):
        make_fx(lambda x: rtflash.flash_attn_func(x, x, x))(q)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(TypeError, match="FakeTensor"):
        rtflash.flash_attn_func(q, q, q)
    with pytest.raises(TypeError, match=r"jit\.trace"):
        torch.jit.trace(lambda x: rtflash.flash_attn_func(x, x, x), q)
    rtflash.flash_attn_func(q, q, q)


@on_all
def test_numbers_too_large_for_a_float(backend: Backend) -> None:
    q = backend.make(np.zeros((1, 4, 2, 64), np.float32))
    for option in ("softmax_scale", "softcap", "dropout_p"):
        with pytest.raises(ValueError, match=option):
            rtflash.flash_attn_func(q, q, q, **{option: 10**400})


@pytest.mark.parametrize("window", [None, 5, {1, 2}, (1,), "12"], ids=str)
def test_a_window_is_a_pair(window: Any) -> None:
    q = np.zeros((1, 4, 2, 64), np.float16)
    with pytest.raises(ValueError, match="it must be a pair"):
        rtflash.flash_attn_func(q, q, q, window_size=window)


def test_functions_that_are_not_there_yet_say_so() -> None:
    with pytest.raises(AttributeError, match="flash_attn_varlen_func is not there yet"):
        rtflash.flash_attn_varlen_func  # noqa: B018
    assert not hasattr(rtflash, "flash_attn")
