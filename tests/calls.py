"""A described attention call: its inputs, its expected result and its run on any backend.

`Call` holds everything that decides the inputs, so that the Specs of a whole session can be compiled ahead, in
parallel, before the first test runs.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from backends import Backend
from compare import check, check_lse
from layouts import alignment, decode, encode, fits_tma, repeat
from numpy.typing import NDArray
from reference import attention, same_dtype

import rtflash
from rtflash.problem import Problem


@dataclass(frozen=True)
class Call:
    """Shapes, options and layouts of one call. `layouts` are those of q, k, v; `alibi`: see draw_slopes."""

    seqlen_q: int = 97
    seqlen_k: int = 129
    heads: int = 2
    heads_k: int = 2
    head_dim: int = 64
    head_dim_v: int = 0
    batch: int = 2
    dtype: str = "fp16"
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: str = ""
    scale: float | None = None
    layouts: tuple[str, str, str] = ("bshd", "bshd", "bshd")
    magnitude: float = 1.0

    @property
    def id(self) -> str:
        """Its differences from the default call, as a pytest id."""
        parts = [f"{self.seqlen_q}x{self.seqlen_k}", self.dtype, f"d{self.head_dim}"]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value == field.default or field.name in (
                "seqlen_q",
                "seqlen_k",
                "dtype",
                "head_dim",
            ):
                continue
            if field.name == "layouts":
                parts.append("-".join(dict.fromkeys(value)))
            elif isinstance(value, tuple):
                parts.append(f"{field.name}{value[0]},{value[1]}")
            else:
                parts.append(field.name if value is True else f"{field.name}{value}")
        return "_".join(parts)

    @property
    def dim_v(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def shapes(self) -> tuple[tuple[int, int, int, int], ...]:
        """Shapes of q, k and v."""
        return (
            (self.batch, self.seqlen_q, self.heads, self.head_dim),
            (self.batch, self.seqlen_k, self.heads_k, self.head_dim),
            (self.batch, self.seqlen_k, self.heads_k, self.dim_v),
        )

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of flash_attn_func, without the slopes."""
        return {
            "softmax_scale": self.scale,
            "causal": self.causal,
            "window_size": self.window,
            "softcap": self.softcap,
        }

    def problem(self) -> Problem:
        """What rtflash will see, for compiling ahead."""
        left, right = self.window
        aligns = [
            alignment(layout, shape)
            for layout, shape in zip(self.layouts, self.shapes, strict=True)
        ]
        boxes = all(map(fits_tma, self.layouts, self.shapes))
        return Problem(
            batch=self.batch,
            seqlen_q=self.seqlen_q,
            seqlen_k=self.seqlen_k,
            heads=self.heads,
            heads_k=self.heads_k,
            head_dim=self.head_dim,
            head_dim_v=self.dim_v,
            dtype=self.dtype,
            softmax_scale=self.head_dim**-0.5 if self.scale is None else self.scale,
            window_left=left,
            window_right=0 if self.causal else right,
            softcap=self.softcap,
            alibi=bool(self.alibi),
            align=min(aligns),
            boxes=boxes,
        )


class Inputs(NamedTuple):
    """fp32 values that the call's dtype holds exactly, and fp32 slopes."""

    q: NDArray
    k: NDArray
    v: NDArray
    slopes: NDArray | None


class Expected(NamedTuple):
    """The float64 result and what a naive computation in the call's own dtype gives."""

    out: NDArray
    lse: NDArray
    same_dtype: NDArray


def inputs(call: Call) -> Inputs:
    """Normal random values from a seed that the call's own description decides."""
    random = np.random.default_rng(zlib.crc32(call.id.encode()))

    def draw(shape: tuple[int, ...], layout: str, factor: float = 1.0) -> NDArray:
        values = random.standard_normal(shape, np.float32) * np.float32(factor)
        return decode(encode(repeat(values, layout), call.dtype), call.dtype)

    factors = (call.magnitude, call.magnitude, 1.0)
    q, k, v = (draw(*given) for given in zip(call.shapes, call.layouts, factors, strict=True))
    return Inputs(q, k, v, draw_slopes(random, call.alibi, call.batch, call.heads))


def draw_slopes(random: np.random.Generator, kind: str, batch: int, heads: int) -> NDArray | None:
    """ALiBi's slopes up to 0.3; of "signed" those of odd heads are negative, and a tenth of that."""
    shape = {"": None, "heads": (heads,), "signed": (heads,), "batch": (batch, heads)}[kind]
    if shape is None:
        return None
    slopes = random.random(shape, np.float32) * np.float32(0.3)
    if kind == "signed":
        slopes[1::2] *= np.float32(-0.1)
    return slopes


@functools.lru_cache(maxsize=8)
def solved(call: Call) -> tuple[Inputs, Expected]:
    """The call's inputs and its expected result."""
    given = inputs(call)
    options = {**call.options, "alibi_slopes": given.slopes}
    out, lse = attention(given.q, given.k, given.v, **options)
    return given, Expected(out, lse, same_dtype(given.q, given.k, given.v, call.dtype, **options))


def arrays(backend: Backend, call: Call, given: Inputs) -> tuple[Any, Any, Any, Any]:
    """q, k, v in the call's layouts and the slopes (or None), on the backend."""
    q, k, v = (
        backend.make(x, call.dtype, layout)
        for x, layout in zip(given[:3], call.layouts, strict=True)
    )
    return q, k, v, None if given.slopes is None else backend.make(given.slopes, "fp32")


def poison(backend: Backend, call: Call) -> None:
    """Fill the memory that the call's output and LSE will probably come from with NaN."""
    rows = call.batch * call.seqlen_q * call.heads
    backend.poison(2 * rows * call.dim_v, 4 * rows)


def run(backend: Backend, call: Call) -> None:
    """Run the call on the backend and hold its output and LSE to the bound."""
    given, expected = solved(call)
    q, k, v, slopes = arrays(backend, call, given)
    poison(backend, call)
    out, lse, dmask = rtflash.flash_attn_func(
        q, k, v, alibi_slopes=slopes, return_attn_probs=True, **call.options
    )
    assert dmask is None
    assert backend.owns(out, q)
    assert backend.owns(lse, q)
    assert tuple(out.shape) == (*call.shapes[0][:3], call.dim_v)
    assert tuple(lse.shape) == (call.batch, call.heads, call.seqlen_q)
    assert backend.dtype_name(out) == backend.dtype_name(q)
    assert backend.dtype_name(lse) == "float32"
    factor = 3 if call.softcap else 2
    check(backend.to_numpy(out), expected.out, expected.same_dtype, call.dtype, factor)
    check_lse(backend.to_numpy(lse), expected.lse)
