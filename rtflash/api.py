"""The public functions: check, allocate, plan, run.

A call's geometry and options are its key to a Plan: everything that does not depend on addresses, made at the first
such call. Later calls look the plan up, allocate the output, and launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from . import build, cpu, device, launch, problem, select, settings, tensor
from .tensor import Framework, View

MAX_PLANS = 4096  # a plan is about 2 KB; a program that meets more geometries starts over

Window = tuple[int, int]


class Plan(NamedTuple):
    """What a call needs besides addresses."""

    kernel: build.Kernel | None  # None: there is no row to compute
    grid: select.Grid
    scalars: bytes
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    dtype: str
    device: int


_plans: dict[tuple[Any, ...], Plan] = {}


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention, softmax(q k^T * softmax_scale) v, without forming the matrix (FlashAttention-2: Dao, 2023).

    Query i stands at key i + seqlen_k - seqlen_q (bottom-right alignment). Query head i uses key head
    i // (heads / heads_k). Inputs are read in place, whatever their strides, if the inner stride is 1. Tensors on a
    GPU are computed there, on the framework's current stream; host tensors are computed by NumPy.

    Parameters
    ----------
    q : (batch, seqlen_q, heads, head_dim), fp16 or bf16, of any library: PyTorch, JAX, CuPy, NumPy, DLPack.
    k : (batch, seqlen_k, heads_k, head_dim); heads is a multiple of heads_k.
    v : (batch, seqlen_k, heads_k, head_dim_v). Both head_dims are in 1..256.
    dropout_p : must be 0 for now.
    softmax_scale : any finite number; None = head_dim ** -0.5.
    causal : query i sees keys up to its own position.
    window_size : (left, right): query i sees the keys from left before to right after its own position, both included;
        -1 = unbounded. causal sets right to 0.
    softcap : scores become softcap * tanh(score / softcap); 0 = off. Before ALiBi and masks.
    alibi_slopes : fp32 (heads,) or (batch, heads): -slope * abs(i + seqlen_k - seqlen_q - j) is added to scores
        (Press et al., 2022).
    deterministic : accepted for FlashAttention-2's sake; the forward always gives the same bits.
    return_attn_probs : return (out, softmax_lse, S_dmask).

    Returns
    -------
    out : (batch, seqlen_q, heads, head_dim_v), row-major, of q's library and dtype. 0 in rows that see no key.
    softmax_lse : (batch, heads, seqlen_q) fp32: natural logarithm of the sum of exponentials of a row's scores; -inf in
        rows that see no key. Only with return_attn_probs.
    S_dmask : None (there is no dropout). Only with return_attn_probs.

    Raises
    ------
    TypeError, ValueError
        Names the argument, what it was and what it must be; before any work.
    NotImplementedError
        dropout_p > 0, or an input that requires grad while grad mode is on.
    CompileError
        NVRTC refused the kernel.
    """
    return _attend(
        (q, k, v), ("q", "k", "v"), _apart, alibi_slopes,
        (dropout_p, softmax_scale, causal, _pair(window_size), softcap), return_attn_probs,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: Any,
    kv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of keys and values in one tensor, kv (batch, seqlen_k, 2, heads_k, head_dim)."""
    return _attend(
        (q, kv), ("q", "kv"), _unpack_kv, alibi_slopes,
        (dropout_p, softmax_scale, causal, _pair(window_size), softcap), return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of queries, keys and values in one tensor, qkv (batch, seqlen, 3, heads, head_dim)."""
    return _attend(
        (qkv,), ("qkv",), _unpack_qkv, alibi_slopes,
        (dropout_p, softmax_scale, causal, _pair(window_size), softcap), return_attn_probs,
    )  # fmt: skip


def warmup(
    head_dim: int,
    dtype: str = "bf16",
    *,
    head_dim_v: int | None = None,
    causal: bool = False,
    window: bool = False,
    softcap: bool = False,
    alibi: bool = False,
    device_index: int = 0,
) -> list[str]:
    """Compile and load, ahead of the first call, the four variants that lengths choose among.

    A softmax_scale that is not positive is another variant, which is compiled at its first call.

    Parameters
    ----------
    head_dim, head_dim_v : of q and k, and of v; head_dim_v None = head_dim.
    dtype : "fp16" or "bf16".
    causal, window, softcap, alibi : the features of the calls to come, on tensors as aligned as row-major ones.
    device_index : CUDA index.

    Returns
    -------
    names : of the variants.

    Raises
    ------
    TypeError, ValueError
        A dtype or head_dim that the kernels do not take.
    """
    from concurrent.futures import ThreadPoolExecutor

    bound = 1 if window else -1
    q, v = (
        View(0, (1, 2, 2, dim), (4 * dim, 2 * dim, dim, 1), dtype, device_index)
        for dim in (head_dim, head_dim if head_dim_v is None else head_dim_v)
    )
    call = problem.dense(
        q,
        q,
        v,
        causal=causal,
        window_size=(bound, bound),
        softcap=float(softcap),
        alibi_slopes=View(0, (2,), (1,), "fp32", device_index) if alibi else None,
    )
    gpu = device.get(device_index)
    specs = select.variants(select.forward(call, gpu)[0])
    with ThreadPoolExecutor() as pool:
        return [
            kernel.spec.name for kernel in pool.map(lambda spec: build.kernel(spec, gpu), specs)
        ]


def _pair(window_size: Any) -> Any:
    """A list as the tuple that it should be: options are part of a plan's key."""
    return tuple(window_size) if type(window_size) is list else window_size


def _apart(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    return q, k, v


def _unpack_kv(q: Any, kv: Any) -> tuple[Any, Any, Any]:
    return q, *_parts("kv", kv, 2)


def _unpack_qkv(qkv: Any) -> tuple[Any, Any, Any]:
    q, k, v = _parts("qkv", qkv, 3)
    return q, k, v


def _parts(name: str, packed: Any, count: int) -> list[Any]:
    """The `count` parts along axis 2 of a packed View or NumPy array."""
    shape = packed.shape
    if len(shape) != 5 or shape[2] != count:
        raise ValueError(
            f"{name} has shape {tuple(shape)}; it must be (batch, seqlen, {count}, heads, head_dim)"
        )
    if not isinstance(packed, View):
        return [packed[:, :, i] for i in range(count)]
    step = packed.strides[2] * problem.ELEMENT_BYTES
    return [
        packed._replace(
            ptr=packed.ptr + i * step,
            shape=(*shape[:2], *shape[3:]),
            strides=(*packed.strides[:2], *packed.strides[3:]),
        )
        for i in range(count)
    ]


def _attend(
    inputs: tuple[Any, ...],
    names: tuple[str, ...],
    unpack: Callable[..., tuple[Any, Any, Any]],
    alibi_slopes: Any,
    options: tuple[Any, ...],
    return_attn_probs: bool,
) -> Any:
    """Every public function: `unpack` makes q, k, v of the Views (or NumPy arrays) of `inputs`."""
    library = tensor.framework(inputs[0], names[0])
    library.refuse_tracing()
    views = list(map(_view, (library,) * len(inputs), inputs, names))
    slopes = None if alibi_slopes is None else _view(library, alibi_slopes, "alibi_slopes")
    if slopes is not None and slopes.ptr % 4:
        # Only a DLPack producer can place an fp32 so.
        alibi_slopes = library.contiguous(alibi_slopes)
        slopes = library.view(alibi_slopes)
    q, k, v = unpack(*views)
    if q.device >= 0:
        out, lse = _on_device(library, views, unpack, slopes, options, return_attn_probs, inputs)
    else:
        call = _check(q, k, v, slopes, options)
        out, lse = _on_host(library, call, inputs, unpack, alibi_slopes)
    return (out, lse, None) if return_attn_probs else out


def _view(library: Framework, x: Any, name: str) -> View:
    """The View of an input, which must come from the same library as the others."""
    if tensor.framework(x, name) is not library:
        raise TypeError(
            f"{name} is a {type(x).__name__}; it must come from the same library as the first input ({library.name})"
        )
    if library.needs_grad(x):
        raise NotImplementedError(
            f"{name} requires grad; rtflash has no backward yet: call it under torch.no_grad(), or detach {name}"
        )
    return library.view(x, name)


def _on_device(
    library: Framework,
    views: list[View],
    unpack: Callable[..., tuple[View, View, View]],
    slopes: View | None,
    options: tuple[Any, ...],
    want_lse: bool,
    inputs: tuple[Any, ...],
) -> tuple[Any, Any]:
    """(out, lse) of a call on a GPU: look the plan up, allocate, launch."""
    q, k, v = unpack(*views)
    # Of the addresses, only the alignment is part of the plan.
    key = (q[1:], k[1:], v[1:], (q.ptr | k.ptr | v.ptr) % 16, slopes and slopes[1:], options)
    try:
        plan, keep = _plans.get(key), True
    except TypeError:
        # An option without a hash: a NumPy array as window_size, or something that the checks refuse.
        plan, keep = None, False
    if plan is None:
        call = _check(q, k, v, slopes, options)
        if any(map(tensor.needs_copy, views)):
            copies = tuple(
                library.contiguous(x) if tensor.needs_copy(view) else x
                for x, view in zip(inputs, views, strict=True)
            )
            views = list(map(library.view, copies))
            return _on_device(library, views, unpack, slopes, options, want_lse, copies)
        plan = _plan(library, call, q, k, v, slopes)
        if keep:
            if len(_plans) >= MAX_PLANS:
                _plans.clear()
            _plans[key] = plan

    out = library.empty(plan.out_shape, plan.dtype, plan.device)
    lse = library.empty(plan.lse_shape, "fp32", plan.device) if want_lse else None
    if plan.kernel is not None:
        stream = library.stream(plan.device)
        pointers = (
            q.ptr,
            k.ptr,
            v.ptr,
            library.pointer(out),
            0 if lse is None else library.pointer(lse),
            0 if slopes is None else slopes.ptr,
        )
        launch.launch(plan.kernel, plan.grid, pointers, plan.scalars, stream, plan.device)
        library.hold(stream, plan.device, views if slopes is None else [*views, slopes])
    return library.result(out), lse if lse is None else library.result(lse)


def _check(
    q: View, k: View, v: View, slopes: View | None, options: tuple[Any, ...]
) -> problem.Problem:
    dropout_p, softmax_scale, causal, window_size, softcap = options
    return problem.dense(
        q,
        k,
        v,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=slopes,
    )


def _plan(
    library: Framework, call: problem.Problem, q: View, k: View, v: View, slopes: View | None
) -> Plan:
    """Choose the variant of a checked call on a GPU, and compile and load it."""
    gpu = device.get(q.device)
    spec, grid = select.forward(call, gpu)
    out_shape = (call.batch, call.seqlen_q, call.heads, call.head_dim_v)
    lse_shape = (call.batch, call.heads, call.seqlen_q)
    if grid.blocks == 0:
        return Plan(None, grid, b"", out_shape, lse_shape, call.dtype, q.device)
    if not build.is_loaded(spec, gpu):
        launch.refuse_capture(library.stream(q.device), spec.name)
    kernel = build.kernel(spec, gpu)
    scalars = launch.scalars(call, grid, q, k, v, slopes)
    return Plan(kernel, grid, scalars, out_shape, lse_shape, call.dtype, q.device)


def _on_host(
    library: Framework,
    call: problem.Problem,
    inputs: tuple[Any, ...],
    unpack: Callable[..., tuple[Any, Any, Any]],
    alibi_slopes: Any,
) -> tuple[Any, Any]:
    """(out, lse) of a checked call on host arrays, by NumPy or, if RTFLASH_BACKEND says so, by the emulated kernel."""
    q, k, v = unpack(*map(library.host, inputs))
    slopes = None if alibi_slopes is None else library.host(alibi_slopes)
    if settings.backend() == "emulate":
        from . import emulate

        out, lse = emulate.forward(call, q, k, v, slopes)
    else:
        out, lse = cpu.forward(call, q, k, v, slopes)
    like = inputs[0]
    return library.from_host(out, call.dtype, like), library.from_host(lse, "fp32", like)
