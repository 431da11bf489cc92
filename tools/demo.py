"""Two attention calls held against answers that rtflash had no part in: `rtflash demo`."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from importlib import resources
from typing import Any, NamedTuple

import numpy as np
import typer
from rich.markup import escape

import rtflash
from rtflash import device, settings

from . import generate
from .screen import console, duration, frameless, rate, working

Array = np.ndarray[Any, Any]

# Query rows that the reference checks: enough to meet every tile, few enough for float64 on a CPU.
CHECKED_ROWS = 33


class Backend(NamedTuple):
    """Where a demo call runs, and how its arrays get there and back."""

    name: str
    gpu: bool
    array: Callable[[Array, str], Any]
    host: Callable[[Any], Array]
    wait: Callable[[], object]


class Check(NamedTuple):
    """One call: its largest error beside the bound, seconds of the first and of a usual run."""

    title: str
    shape: str
    first: float
    seconds: float
    flops: float
    error: float
    bound: float

    @property
    def ok(self) -> bool:
        return self.error <= self.bound


def choose() -> Backend:
    """torch on the GPU, else CuPy on the GPU, else NumPy."""
    if device.why_no_gpu() is not None:
        name = f"{settings.host_backend()} on the CPU"
        return Backend(name, False, lambda x, _: as_fp16(x), np.asarray, lambda: None)
    try:
        import torch

        if torch.cuda.is_available():
            dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16}
            return Backend(
                f"torch {torch.__version__} on {torch.cuda.get_device_name()}",
                True,
                lambda x, dtype: torch.from_numpy(x).to("cuda", dtypes[dtype]),
                lambda x: x.float().cpu().numpy(),
                torch.cuda.synchronize,
            )
    except ImportError:
        pass
    import cupy

    name = device.get(cupy.cuda.Device().id).name
    return Backend(
        f"CuPy {cupy.__version__} on {name}",
        True,
        lambda x, _: cupy.asarray(as_fp16(x)),
        cupy.asnumpy,
        cupy.cuda.runtime.deviceSynchronize,
    )


def as_fp16(x: Array) -> Array:
    """`x` as float16."""
    return x.astype(np.float16)


def rounded(x: Array, dtype: str) -> Array:
    """`x` rounded to fp16 or bf16 (nearest even), kept as float64."""
    if dtype == "fp16":
        return x.astype(np.float16).astype(np.float64)
    bits = x.astype(np.float32).view(np.uint32)
    kept = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return kept.astype(np.uint32).view(np.float32).astype(np.float64)


def attention(q: Array, k: Array, v: Array, hidden: Array | None, dtype: str | None) -> Array:
    """softmax(q k^T / sqrt(d)) v of q (h, rows, d), k and v (h, keys, d), float64.

    With a dtype, scores, weights and result are rounded to it, as a framework of that dtype would.
    """

    def held(x: Array) -> Array:
        return rounded(x, dtype) if dtype else x

    scores = held(q @ k.swapaxes(1, 2) * q.shape[-1] ** -0.5)
    if hidden is not None:
        scores = np.where(hidden, -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return held(held(weights / weights.sum(-1, keepdims=True)) @ v)


def compare(got: Array, reference: Array, same_dtype: Array, dtype: str) -> tuple[float, float]:
    """(largest error, largest error allowed). The rule is that of FlashAttention-3's own tests.

    Allowed is twice the error of a naive implementation in the same dtype, and twice what adding
    and taking off 0.3 costs in it.
    """
    kept = rounded(reference, dtype)
    shifted = rounded(rounded(kept + 0.3, dtype) - 0.3, dtype)
    bound = 2 * np.abs(same_dtype - reference).max() + 2 * np.abs(shifted - kept).max()
    error = np.nan_to_num(np.abs(got - reference), nan=np.inf)
    return float(error.max()), float(bound)


def worst(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """The pair (error, bound) that comes nearest to its bound, or goes furthest past it."""
    return max(pairs, key=lambda pair: pair[0] / pair[1])


def timed(backend: Backend, call: Callable[[], Any], repeats: int) -> tuple[Any, float, float]:
    """(result, seconds of the first call, median seconds of `repeats` more).

    Each waits for the device.
    """
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        result = call()
        backend.wait()
        seconds.append(time.perf_counter() - start)
    return result, seconds[0], statistics.median(seconds[1:])


def causal_gqa(backend: Backend) -> Check:
    """A causal call with grouped key heads on random data, sampled rows of it in float64."""
    b, s, heads, heads_k, d = (2, 4096, 32, 8, 128) if backend.gpu else (1, 512, 8, 2, 64)
    dtype = "bf16" if backend.name.startswith("torch") else "fp16"
    rng = np.random.default_rng(0)
    data = [rng.standard_normal((b, s, h, d), np.float32) for h in (heads, heads_k, heads_k)]
    q, k, v = (backend.array(x, dtype) for x in data)

    def call() -> Any:
        return rtflash.flash_attn_func(q, k, v, causal=True)

    out, first, seconds = timed(backend, call, 10 if backend.gpu else 3)
    rows = np.unique(np.linspace(0, s - 1, CHECKED_ROWS).astype(int))
    hidden = np.arange(s) > rows[:, None]
    got = backend.host(out)[:, rows].astype(np.float64).swapaxes(1, 2)
    pairs = []
    for batch in range(b):
        q_rows = rounded(data[0][batch, rows], dtype).swapaxes(0, 1)
        keys, values = (rounded(x[batch], dtype).swapaxes(0, 1) for x in data[1:])
        keys, values = (np.repeat(x, heads // heads_k, 0) for x in (keys, values))
        exact = attention(q_rows, keys, values, hidden, None)
        same_dtype = attention(q_rows, keys, values, hidden, dtype)
        pairs.append(compare(got[batch], exact, same_dtype, dtype))
    shape = f"b{b} s{s} heads {heads}/{heads_k} d{d} {dtype}"
    flops = 2.0 * b * heads * s * s * d
    return Check("causal, grouped heads", shape, first, seconds, flops, *worst(pairs))


def minilm(backend: Backend) -> Check:
    """Sentences through a layer of MiniLM, their attention against the stored answer."""
    with resources.files("rtflash").joinpath("data/minilm_demo.npz").open("rb") as file:
        data = dict(np.load(file))
    ends = data["cu_seqlens"]
    spans = [slice(a, b) for a, b in itertools.pairwise(ends)]
    sentences = [[backend.array(data[x][None, span], "fp16") for x in "qkv"] for span in spans]

    def call() -> list[Any]:
        return [rtflash.flash_attn_func(q, k, v) for q, k, v in sentences]

    outs, first, seconds = timed(backend, call, 3)
    pairs, flops = [], 0.0
    for out, span in zip(outs, spans, strict=True):
        stored = data["out"][span].astype(np.float64).swapaxes(0, 1)
        q, k, v = (data[x][span].astype(np.float64).swapaxes(0, 1) for x in "qkv")
        got = backend.host(out)[0].astype(np.float64).swapaxes(0, 1)
        pairs.append(compare(got, stored, attention(q, k, v, None, "fp16"), "fp16"))
        flops += 4.0 * q.shape[0] * q.shape[1] ** 2 * q.shape[2]
    heads, d = data["q"].shape[1:]
    shape = f"{len(spans)} sentences, {ends[-1]} tokens, heads {heads} d{d} fp16"
    return Check("MiniLM activations", shape, first, seconds, flops, *worst(pairs))


def command() -> None:
    """Attention on this machine, held against answers that rtflash had no part in.

    Exits 1 if one is wrong.
    """
    backend = choose()
    console.print(f"rtflash {rtflash.__version__} with {escape(backend.name)}")
    reason = device.why_no_gpu()
    if reason is not None:
        console.print(f"[yellow]No GPU is used.[/] {escape(reason)}")
    with working("attending..."):
        checks = [causal_gqa(backend), minilm(backend)]
    right = ("first call", "then", "speed", "error", "allowed")
    table = frameless("call", *right, "", right=right)
    for check in checks:
        table.add_row(
            f"{check.title}\n[dim]{check.shape}[/]",
            duration(check.first),
            duration(check.seconds),
            rate(check.flops / check.seconds),
            f"{check.error:.1e}",
            f"{check.bound:.1e}",
            "[green]ok[/]" if check.ok else "[red]WRONG[/]",
        )
    console.print("", table)
    if not backend.gpu:
        compile_elsewhere()
    if not all(check.ok for check in checks):
        raise typer.Exit(1)


def compile_elsewhere() -> None:
    """Compile the causal demo's kernel for GPUs that are not here, or say what that needs."""
    console.print("\nKernel of a causal call (heads 32/8 d128 bf16), compiled without a GPU:")
    calls = generate.problems(["bf16"], [(128, 128)], ["causal"], [frozenset()], [(4096, 4096)])
    chosen, _ = generate.variants(["sm_80", "sm_90a"], calls)
    try:
        with working("compiling..."):
            outcomes = list(generate.compile_all(chosen, jobs=1))
    except (ImportError, RuntimeError) as error:
        console.print(f"[yellow]not done:[/] {escape(str(error))}")
        return
    console.print("", generate.table(outcomes), crop=False)
    for outcome in outcomes:
        if outcome.error:
            console.print(f"[red]{escape(outcome.error)}[/]")
            raise typer.Exit(1)
