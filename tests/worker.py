"""One attention call in a process of its own, on the GPU through CuPy, for tests of the cache among processes.

usage: python worker.py HEAD_DIM

Prints one JSON object: digest of the output, compilations, warnings, and seconds of the first
call, with the libraries imported and the CUDA context made.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
import warnings


def main(head_dim: int) -> None:
    import cupy
    import numpy as np

    import rtflash
    from rtflash import artifacts

    random = np.random.default_rng(0)
    q, k, v = (
        cupy.asarray(random.standard_normal((1, 65, 2, head_dim)).astype(np.float16))
        for _ in range(3)
    )
    cupy.cuda.runtime.deviceSynchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        start = time.perf_counter()
        out = rtflash.flash_attn_func(q, k, v, causal=True)
        seconds = time.perf_counter() - start
    report = {
        "digest": hashlib.sha256(cupy.asnumpy(out).tobytes()).hexdigest(),
        "compilations": artifacts.compile_count,
        "warnings": [str(warning.message) for warning in caught],
        "seconds": seconds,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(int(sys.argv[1]))
