"""A small sweep of kernels under compute-sanitizer's memcheck and racecheck.

usage: python tools/sanitize.py [memcheck] [racecheck] [initcheck] [synccheck]     (default: memcheck racecheck)

Needs a GPU, CuPy and compute-sanitizer (CUDA toolkit). Prints a line per tool; exit status 1 if one reports an error.
Arrays are single allocations of exactly their size, so that memcheck sees one element past an end.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")


@dataclass(frozen=True)
class Sample:
    """A dense call. `offset` is the tensors' first element: 1 makes every load 2 bytes wide."""

    seqlen_q: int
    seqlen_k: int
    head_dim: int
    heads: int = 2
    heads_k: int = 1
    head_dim_v: int = 0
    dtype: str = "float16"
    offset: int = 0
    alibi: bool = False
    options: tuple[tuple[str, Any], ...] = ()


CAUSAL, WINDOW = ("causal", True), ("window_size", (70, 5))
SWEEP = (
    *(
        Sample(97, 129, d, options=options)
        for d in (40, 64, 128, 256)
        for options in ((), (CAUSAL,), (WINDOW,))
    ),
    *(Sample(256, 256, d, options=(CAUSAL,), dtype="bfloat16") for d in (64, 128, 256)),
    *(Sample(sq, sk, 64, options=(CAUSAL,)) for sq, sk in ((1, 300), (300, 1), (63, 65), (130, 2))),
    *(Sample(65, 97, d, offset=offset) for d in (40, 64) for offset in (1, 2, 4)),
    Sample(97, 129, 46, heads=6, heads_k=2),
    Sample(97, 129, 192, head_dim_v=128, options=(CAUSAL,)),
    Sample(97, 129, 40, head_dim_v=17),
    Sample(97, 129, 64, alibi=True, options=(CAUSAL,)),
    Sample(97, 129, 128, options=(("softcap", 5.0), WINDOW)),
    Sample(97, 129, 64, options=(("softmax_scale", -0.3),)),
)


@dataclass(frozen=True)
class Packed:
    """flash_attn_varlen_func on sequences of 0, 1, 97 and 130 queries, with 5 rows of no sequence behind them."""

    head_dim: int
    page_size: int = 0
    used: bool = False
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Cached:
    """flash_attn_with_kvcache on 3 sequences, of a cache of 300 slots and 4 rows, or of pages in random order."""

    head_dim: int
    seqlen_q: int = 1
    heads: int = 8
    page_size: int = 0
    num_splits: int = 0
    seqlen_new: int = 0
    rotary: str = ""
    indexed: bool = False
    leftpad: bool = False
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Merge:
    """flash_attn_combine of fp32 parts, or merge_attention_states of two fp16 ones."""

    splits: int
    head_dim: int
    two: bool = False


INFERENCE = (
    *(Packed(d, options=options) for d in (64, 128) for options in ((), (CAUSAL,), (WINDOW,))),
    Packed(40, used=True, options=(CAUSAL,)),
    *(Packed(64, page_size=size, options=(CAUSAL,)) for size in (1, 16, 100)),
    *(Cached(d, num_splits=splits) for d in (64, 128, 192, 256) for splits in (1, 3)),
    *(Cached(128, seqlen_q=n, num_splits=s, options=(CAUSAL,)) for n in (3, 40) for s in (1, 5)),
    *(Cached(128, page_size=size, num_splits=s) for size in (1, 16, 100) for s in (1, 3)),
    Cached(46, heads=6, indexed=True, leftpad=True, options=(WINDOW,)),
    Cached(64, indexed=True, leftpad=True, seqlen_new=2, seqlen_q=2, options=(CAUSAL,)),
    Cached(64, seqlen_new=7, seqlen_q=7, rotary="interleaved", options=(CAUSAL,)),
    Cached(128, page_size=1, seqlen_new=1, rotary="halves", options=(CAUSAL,)),
    Cached(40, page_size=16, seqlen_new=3, rotary="halves", num_splits=2),
    *(Merge(splits, d) for splits in (1, 3, 40) for d in (64, 46)),
    Merge(2, 128, two=True),
)


def main(tools: list[str]) -> int:
    """Run the sweep under each tool; the exit status."""
    unknown = sorted(set(tools) - set(TOOLS))
    if unknown:
        print(f"no such tool: {', '.join(unknown)}; there are {', '.join(TOOLS)}")
        return 2
    sanitizer = shutil.which("compute-sanitizer") or shutil.which(
        "/usr/local/cuda/bin/compute-sanitizer"
    )
    if sanitizer is None:
        print("compute-sanitizer is not on PATH; it comes with the CUDA toolkit")
        return 2
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    sweep = [sys.executable, str(Path(__file__).resolve()), "--sweep"]
    # Compile outside the tools, which slow the host down.
    if subprocess.run(sweep, env=environment, check=False).returncode != 0:
        print("the sweep fails without a tool")
        return 1
    failed = False
    for tool in tools or TOOLS[:2]:
        command = [sanitizer, "--tool", tool, "--error-exitcode", "86", *sweep]
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        found = SUMMARY.findall(done.stdout)
        clean = done.returncode == 0 and found and all(count == "0" for count in found)
        print(f"{tool}: {'clean' if clean else 'FAILED'} over {len(SWEEP) + len(INFERENCE)} calls")
        if not clean:
            print((done.stdout + done.stderr)[-8000:])
            failed = True
    return int(failed)


def run_sweep() -> None:
    """Make every call of the sweep and look at its result."""
    import cupy

    cupy.cuda.set_allocator(None)
    calls: dict[type, Callable[[Any], tuple[Any, Any]]] = {
        Sample: attend, Packed: attend_packed, Cached: attend_cached, Merge: merge,
    }  # fmt: skip
    for sample in (*SWEEP, *INFERENCE):
        out, lse = calls[type(sample)](sample)
        cupy.cuda.runtime.deviceSynchronize()
        assert is_finite(out), f"not finite: {sample}"
        assert not cupy.asnumpy(cupy.isnan(lse)).any(), f"LSE is NaN: {sample}"


def is_finite(out: Any) -> bool:
    """Whether a CuPy array of fp16, bf16 or fp32 holds neither NaN nor infinity."""
    import cupy

    if str(out.dtype) == "bfloat16":
        bits = cupy.asnumpy(out.view("uint16"))
        return bool(((bits & 0x7F80) != 0x7F80).all())
    return bool(cupy.isfinite(out).all())


def draw(*shape: int, dtype: str = "float16", offset: int = 0) -> Any:
    """Normal random values in an allocation of their own, from element `offset` on."""
    import cupy
    import numpy as np

    size = offset + int(np.prod(shape))
    values = np.random.default_rng(size).standard_normal(size, np.float32)
    if dtype == "bfloat16":
        import ml_dtypes

        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        flat = cupy.asarray(bits).view(ml_dtypes.bfloat16)
    else:
        flat = cupy.asarray(values.astype(dtype))
    return flat[offset:].reshape(shape)


def ints(values: Any) -> Any:
    """Values as int32 on the GPU."""
    import cupy
    import numpy as np

    return cupy.asarray(np.array(values, np.int32))


def attend(sample: Sample) -> tuple[Any, Any]:
    """Output and LSE of a dense call."""
    import cupy

    import rtflash

    s = sample
    how: dict[str, Any] = {"dtype": s.dtype, "offset": s.offset}
    q = draw(2, s.seqlen_q, s.heads, s.head_dim, **how)
    k = draw(2, s.seqlen_k, s.heads_k, s.head_dim, **how)
    v = draw(2, s.seqlen_k, s.heads_k, s.head_dim_v or s.head_dim, **how)
    slopes = cupy.linspace(0.1, 0.5, s.heads, dtype="float32") if s.alibi else None
    out, lse, _ = rtflash.flash_attn_func(
        q, k, v, alibi_slopes=slopes, return_attn_probs=True, **dict(s.options)
    )
    return out, lse


def attend_packed(sample: Packed) -> tuple[Any, Any]:
    """Output and LSE of packed sequences."""
    import rtflash

    d, size, keys = sample.head_dim, sample.page_size, [40, 0, 130, 97]
    cu_q, cu_k = ints([0, 0, 1, 98, 228]), ints([0, *itertools.accumulate(keys)])
    places: tuple[int, ...] = (sum(keys) + 5,)
    table = None
    if size:
        columns = -(-max(keys) // size)
        places, table = (4 * columns, size), page_table(4, columns)
    k, v = (draw(*places, 2, d) for _ in range(2))
    used = {"seqused_q": ints([0, 1, 50, 130]), "seqused_k": ints([40, 0, 99, 0])}
    out, lse, _ = rtflash.flash_attn_varlen_func(
        draw(233, 4, d), k, v, cu_q, cu_k, 130, 130, block_table=table, return_attn_probs=True,
        **dict(sample.options), **(used if sample.used else {}),
    )  # fmt: skip
    return out, lse


def attend_cached(sample: Cached) -> tuple[Any, Any]:
    """Output and LSE of a call over a cache, with a call of full sequences among them."""
    import rtflash

    s, d, new = sample, sample.head_dim, sample.seqlen_new
    capacity, places, table = 300, (4, 300), None
    if s.page_size:
        columns = -(-capacity // s.page_size)
        places, table = (3 * columns, s.page_size), page_table(3, columns)
    k, v = (draw(*places, 2, d) for _ in range(2))
    given: dict[str, Any] = dict(s.options)
    if new:
        given |= {"k": draw(3, new, 2, d), "v": draw(3, new, 2, d)}
    if s.rotary:
        tables = (draw(capacity + 100, d // 4) for _ in range(2))
        given |= dict(zip(("rotary_cos", "rotary_sin"), tables, strict=True))
        given["rotary_interleaved"] = s.rotary == "interleaved"
    if s.indexed:
        given["cache_batch_idx"] = ints([3, 0, 2])
    if s.leftpad:
        given["cache_leftpad"] = ints([0, 7, 20])
    out, lse = rtflash.flash_attn_with_kvcache(
        draw(3, s.seqlen_q, s.heads, d), k, v, cache_seqlens=ints([0, capacity - new, 129]),
        block_table=table, num_splits=s.num_splits, return_softmax_lse=True, **given,
    )  # fmt: skip
    return out, lse


def page_table(batch: int, columns: int) -> Any:
    """A block table over all pages, in a random order."""
    import numpy as np

    return ints(np.random.default_rng(0).permutation(batch * columns).reshape(batch, columns))


def merge(sample: Merge) -> tuple[Any, Any]:
    """Output and LSE of merged parts."""
    import rtflash

    if sample.two:
        outs, lses = draw(2, 3, 5, 4, sample.head_dim), draw(2, 3, 4, 5, dtype="float32")
        return rtflash.merge_attention_states(outs[0], lses[0], outs[1], lses[1])
    shape = (sample.splits, 3, 5, 4)
    parts = draw(*shape, sample.head_dim, dtype="float32"), draw(*shape, dtype="float32")
    return rtflash.flash_attn_combine(*parts, out_dtype="fp16")


if __name__ == "__main__":
    if sys.argv[1:] == ["--sweep"]:
        run_sweep()
    else:
        sys.exit(main(sys.argv[1:]))
