"""The dense public functions. Those for inference are in inference.py and merging.py."""

from __future__ import annotations

from typing import Any

from . import describe
from .call import Signature, Window, attend, pair, parts
from .checks import Names
from .describe import PLAIN
from .problem import Problem, Tensors


def _check(tensors: Tensors, options: tuple[Any, ...], names: Names) -> Problem:
    dropout_p, softmax_scale, causal, window_size, softcap, num_splits = options
    return describe.dense(
        tensors.q,
        tensors.k,
        tensors.v,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=tensors.alibi_slopes,
        num_splits=num_splits,
        names=names,
    )


def _of_kv(q: Any, kv: Any, alibi_slopes: Any) -> Tensors:
    k, v = parts("kv", kv, 2, "batch, seqlen")
    return Tensors(q, k, v, alibi_slopes)


def _of_qkv(qkv: Any, alibi_slopes: Any) -> Tensors:
    q, k, v = parts("qkv", qkv, 3, "batch, seqlen")
    return Tensors(q, k, v, alibi_slopes)


KV: Names = {"k": "kv", "v": "kv"}
QKV: Names = {"q": "qkv", "k": "qkv", "v": "qkv"}
DENSE = Signature(
    "flash_attn_func", ("q", "k", "v", "alibi_slopes"), 3, Tensors, _check, PLAIN, dense=True
)
DENSE_KV = Signature(
    "flash_attn_kvpacked_func", ("q", "kv", "alibi_slopes"), 2, _of_kv, _check, KV, dense=True
)
DENSE_QKV = Signature(
    "flash_attn_qkvpacked_func", ("qkv", "alibi_slopes"), 1, _of_qkv, _check, QKV, dense=True
)


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
    *,
    num_splits: int = 0,
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
    softmax_scale : any number up to 2^60 in magnitude, zero and negative ones too; None = head_dim ** -0.5.
    causal : query i sees keys up to its own position.
    window_size : (left, right): query i sees the keys from left before to right after its own position, both included;
        -1 = unbounded. causal sets right to 0.
    softcap : scores become softcap * tanh(score / softcap); 0 = off, else 2^-60..2^60. Before ALiBi and masks.
    alibi_slopes : fp32 (heads,) or (batch, heads): -slope * abs(i + seqlen_k - seqlen_q - j) is added to scores
        (Press et al., 2022).
    deterministic : accepted for FlashAttention-2's sake; the forward always gives the same bits.
    return_attn_probs : return (out, softmax_lse, S_dmask).
    num_splits : parts of the keys that are computed apart and merged, at most 256; 1 = none, 0 = a heuristic decides.

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
    options = dropout_p, softmax_scale, causal, pair(window_size), softcap, num_splits
    out, lse = attend(DENSE, (q, k, v, alibi_slopes), options, return_attn_probs)
    return (out, lse, None) if return_attn_probs else out


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
    *,
    num_splits: int = 0,
) -> Any:
    """`flash_attn_func` of keys and values in one tensor.

    Parameters
    ----------
    q : (batch, seqlen_q, heads, head_dim), fp16 or bf16, of any library.
    kv : (batch, seqlen_k, 2, heads_k, head_dim): keys are kv[:, :, 0], values kv[:, :, 1], both read in place.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes : as flash_attn_func's.
    deterministic, return_attn_probs, num_splits : as flash_attn_func's.

    Returns
    -------
    As flash_attn_func.

    Raises
    ------
    As flash_attn_func.
    """
    options = dropout_p, softmax_scale, causal, pair(window_size), softcap, num_splits
    out, lse = attend(DENSE_KV, (q, kv, alibi_slopes), options, return_attn_probs)
    return (out, lse, None) if return_attn_probs else out


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
    *,
    num_splits: int = 0,
) -> Any:
    """`flash_attn_func` of queries, keys and values in one tensor.

    Parameters
    ----------
    qkv : (batch, seqlen, 3, heads, head_dim), fp16 or bf16, of any library: queries are qkv[:, :, 0], keys and values
        the next two, all read in place.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes : as flash_attn_func's.
    deterministic, return_attn_probs, num_splits : as flash_attn_func's.

    Returns
    -------
    As flash_attn_func: out (batch, seqlen, heads, head_dim).

    Raises
    ------
    As flash_attn_func.
    """
    options = dropout_p, softmax_scale, causal, pair(window_size), softcap, num_splits
    out, lse = attend(DENSE_QKV, (qkv, alibi_slopes), options, return_attn_probs)
    return (out, lse, None) if return_attn_probs else out
