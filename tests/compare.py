"""The accuracy bound that every backend is held to."""

from __future__ import annotations

from typing import Any

import numpy as np
import reference
from numpy.typing import NDArray

Array = NDArray[Any]


def check(out: Array, ref: Array, same_dtype: Array, dtype: str, factor: float = 2.0) -> None:
    """Assert that `out` is within the bound, and that NaN and infinities stand in equal places.

    max|out - ref| <= factor * max|same_dtype - ref| + 2 * max|(ref + 0.3 - 0.3) - ref|

    The bound of FlashAttention-3's own tests (hopper/test_flash_attn.py,
    Dao-AILab/flash-attention); its last term is evaluated in the input's dtype and stands for the
    dtype's resolution around the result.

    Parameters
    ----------
    out : the result under test: float16, `ml_dtypes.bfloat16`, bf16 bits in uint16, or anything
        that converts to float32.
    ref : `reference.attention`'s output, float64, of the same shape.
    same_dtype : `reference.same_dtype`'s output. Where it overflows and ref does not, it does not
        count.
    dtype : "fp16" or "bf16".
    factor : 2, or 3 with softcap.
    """
    got = reference.to_float64(np.asarray(out))
    assert got.shape == ref.shape == same_dtype.shape, (
        f"shapes differ: out {got.shape}, ref {ref.shape}, same_dtype {same_dtype.shape}"
    )
    expected = reference.rounded(ref, dtype)
    same_places("out", got, expected)
    finite = np.isfinite(got) & np.isfinite(expected)
    if not finite.any():
        return
    error = np.where(finite, np.abs(np.where(finite, got, 0) - np.where(finite, ref, 0)), 0)
    plain = finite & np.isfinite(same_dtype)
    framework_error = np.abs(same_dtype[plain] - ref[plain]).max(initial=0.0)
    r = expected[finite]
    resolution = np.abs(reference.rounded(reference.rounded(r + 0.3, dtype) - 0.3, dtype) - r).max(
        initial=0.0
    )
    bound = factor * framework_error + 2 * resolution
    worst = np.unravel_index(int(error.argmax()), error.shape)
    assert error[worst] <= bound, (
        f"max|out - ref| = {error[worst]:.3e} exceeds {bound:.3e}"
        f" = {factor:g} * {framework_error:.3e} (error of the plain {dtype} result)"
        f" + 2 * {resolution:.3e} (resolution of {dtype} around ref);"
        f" worst at {tuple(map(int, worst))}: out {got[worst]:.6g}, ref {ref[worst]:.6g};"
        f" {int((error > bound).sum())} of {error.size} values exceed the bound"
    )


def check_lse(lse: Array, ref: Array, atol: float = 1e-4, rtol: float = 1e-5) -> None:
    """Assert |lse - ref| <= atol + rtol * |ref|, and NaN, inf and -inf in equal places.

    The defaults leave fp32 score sums of 256 terms and a hardware exp2 room, and nothing more: a
    wrong base, a lost row term or a dropped key is far outside.
    """
    got = np.asarray(lse, np.float64)
    assert got.shape == ref.shape, f"shapes differ: lse {got.shape}, ref {ref.shape}"
    same_places("lse", got, ref)
    finite = np.isfinite(ref)
    error = np.abs(np.where(finite, got, 0) - np.where(finite, ref, 0))
    excess = error - (atol + rtol * np.abs(np.where(finite, ref, 0)))
    if excess.size and excess.max() > 0:
        worst = np.unravel_index(int(excess.argmax()), excess.shape)
        raise AssertionError(
            f"|lse - ref| = {error[worst]:.3e} exceeds {atol:g} + {rtol:g} * |ref|;"
            f" worst at {tuple(map(int, worst))}: lse {got[worst]:.6g}, ref {ref[worst]:.6g};"
            f" {int((excess > 0).sum())} of {excess.size} values exceed it"
        )


def same_places(name: str, got: Array, expected: Array) -> None:
    """Assert that NaN, inf and -inf stand in equal places."""
    for kind, test in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        differs = test(got) != test(expected)
        if differs.any():
            first = tuple(int(i) for i in np.argwhere(differs)[0])
            raise AssertionError(
                f"{name}: {kind} in {int(test(got).sum())} places,"
                f" expected in {int(test(expected).sum())};"
                f" first difference at {first}:"
                f" got {got[first]:.6g}, expected {expected[first]:.6g}"
            )
