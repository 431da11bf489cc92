"""Results of the kernels on a GPU, recorded, that the emulated kernels must equal.

usage: python tests/gpu_results.py     run CALLS on the GPU here and write the record
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from calls import Call, arrays, solved
from layouts import decode, encode
from numpy.typing import NDArray

import rtflash
from rtflash import device, select

RECORD = Path(__file__).parent / "data" / "gpu_results.npz"
SMALL: dict[str, Any] = {"batch": 1, "heads_k": 1}
CALLS = (
    Call(dtype="fp16", **SMALL),
    Call(dtype="bf16", causal=True, **SMALL),
    Call(dtype="bf16", head_dim=128, causal=True, **SMALL),
    Call(130, 192, dtype="fp16", head_dim=128, **SMALL),
    Call(dtype="bf16", head_dim=40, head_dim_v=17, **SMALL),
    Call(65, 130, dtype="fp16", head_dim=96, window=(40, 9), **SMALL),
    Call(70, 97, dtype="bf16", head_dim=160, alibi="batch", **SMALL),
    Call(70, 97, dtype="fp16", head_dim=192, softcap=5.0, magnitude=3.0, **SMALL),
    Call(64, 97, dtype="bf16", head_dim=256, **SMALL),
    Call(129, 65, dtype="bf16", causal=True, **SMALL),
    Call(64, 256, dtype="fp16", head_dim=128, magnitude=8.0, **SMALL),
)


def record() -> None:
    """Run the calls on the GPU and write their results, with the Specs that they ran with."""
    from backends import backend

    cupy, gpu = backend("cupy"), device.get(0)
    kept: dict[str, NDArray] = {}
    for call in CALLS:
        q, k, v, slopes = arrays(cupy, call, solved(call)[0])
        out, lse, _ = rtflash.flash_attn_func(
            q, k, v, alibi_slopes=slopes, return_attn_probs=True, **call.options
        )
        spec, _ = select.forward(call.problem(), gpu)
        kept[f"{call.id}.out"] = encode(cupy.to_numpy(out), call.dtype)
        kept[f"{call.id}.lse"] = cupy.to_numpy(lse)
        kept[f"{call.id}.spec"] = np.array(json.dumps(spec.to_dict()))
    np.savez_compressed(RECORD, device=np.array(f"{gpu.name} ({gpu.arch})"), **kept)
    print(f"{len(CALLS)} results of {gpu.name} in {RECORD}")


def excess(call: Call, out: NDArray, wanted_bits: NDArray) -> float:
    """The largest difference from the recorded output, in last places of the row's largest value."""
    wanted = decode(wanted_bits, call.dtype).astype(np.float64)
    _, exponent = np.frexp(np.abs(wanted).max(axis=-1, keepdims=True))
    last_place = np.ldexp(1.0, exponent - (11 if call.dtype == "fp16" else 8))
    return float((np.abs(out - wanted) / last_place).max())


if __name__ == "__main__":
    sys.exit(record())
