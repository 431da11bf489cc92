"""A small sweep of kernels under compute-sanitizer's memcheck and racecheck.

usage: python tools/sanitize.py [memcheck] [racecheck] [initcheck] [synccheck]     (default: memcheck racecheck)

Needs a GPU, CuPy and compute-sanitizer (CUDA toolkit). Prints a line per tool; exit status 1 if one reports an error.
Arrays are single allocations of exactly their size, so that memcheck sees one element past an end.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")


@dataclass(frozen=True)
class Sample:
    """One call of the sweep. `offset` is the tensors' first element: 1 makes every load 2 bytes wide."""

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
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        found = SUMMARY.findall(done.stdout)
        clean = done.returncode == 0 and found and all(count == "0" for count in found)
        print(f"{tool}: {'clean' if clean else 'FAILED'} over {len(SWEEP)} calls")
        if not clean:
            print((done.stdout + done.stderr)[-8000:])
            failed = True
    return int(failed)


def run_sweep() -> None:
    """Make every call of the sweep and look at its result."""
    import cupy

    cupy.cuda.set_allocator(None)
    for sample in SWEEP:
        out, lse = attend(sample)
        cupy.cuda.runtime.deviceSynchronize()
        bits = cupy.asnumpy(out.view("uint16"))
        exponent = 0x7C00 if sample.dtype == "float16" else 0x7F80
        assert ((bits & exponent) != exponent).all(), f"not finite: {dataclasses.asdict(sample)}"
        assert not cupy.asnumpy(cupy.isnan(lse)).any(), f"LSE is NaN: {dataclasses.asdict(sample)}"


def attend(sample: Sample) -> tuple[Any, Any]:
    """Output and LSE of one call on normal random values."""
    import cupy
    import numpy as np

    import rtflash

    random = np.random.default_rng(0)

    def make(seqlen: int, heads: int, head_dim: int) -> Any:
        shape = (2, seqlen, heads, head_dim)
        values = random.standard_normal(sample.offset + int(np.prod(shape)), np.float32)
        if sample.dtype == "float16":
            flat = cupy.asarray(values.astype(np.float16))
        else:
            import ml_dtypes

            flat = cupy.asarray((values.view(np.uint32) >> 16).astype(np.uint16)).view(
                ml_dtypes.bfloat16
            )
        return flat[sample.offset :].reshape(shape)

    q = make(sample.seqlen_q, sample.heads, sample.head_dim)
    k = make(sample.seqlen_k, sample.heads_k, sample.head_dim)
    v = make(sample.seqlen_k, sample.heads_k, sample.head_dim_v or sample.head_dim)
    slopes = cupy.linspace(0.1, 0.5, sample.heads, dtype=np.float32) if sample.alibi else None
    out, lse, _ = rtflash.flash_attn_func(
        q, k, v, alibi_slopes=slopes, return_attn_probs=True, **dict(sample.options)
    )
    return out, lse


if __name__ == "__main__":
    if sys.argv[1:] == ["--sweep"]:
        run_sweep()
    else:
        sys.exit(main(sys.argv[1:]))
