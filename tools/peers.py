"""The attention libraries that `rtflash bench` puts beside rtflash; none of them is required."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import rtflash

TORCH_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}


class Peer(NamedTuple):
    """One implementation on fixed inputs.

    `call()` queues it. `wait` is None if it runs on torch's current stream, else what blocks until
    a result is there.
    """

    name: str
    call: Callable[[], Any]
    wait: Callable[[Any], Any] | None = None


def make_rtflash(q: Any, k: Any, v: Any, causal: bool) -> Peer:
    """This package."""
    return Peer("rtflash", lambda: rtflash.flash_attn_func(q, k, v, causal=causal))


def make_sdpa(name: str, backend: str, q: Any, k: Any, v: Any, causal: bool) -> Peer:
    """torch's scaled_dot_product_attention held to one of its backends."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    chosen = getattr(SDPBackend, backend)
    arguments = [x.transpose(1, 2) for x in (q, k, v)]
    options = {"is_causal": causal, "enable_gqa": q.shape[2] != k.shape[2]}

    def call() -> Any:
        with sdpa_kernel(chosen):
            return torch.nn.functional.scaled_dot_product_attention(*arguments, **options)

    return Peer(name, call)


def make_plain_sdpa(q: Any, k: Any, v: Any, causal: bool) -> Peer:
    """torch's scaled_dot_product_attention as people call it: the yardstick of host overhead."""
    import torch

    arguments = [x.transpose(1, 2) for x in (q, k, v)]
    attention = torch.nn.functional.scaled_dot_product_attention
    gqa = q.shape[2] != k.shape[2]
    return Peer("torch-SDPA", lambda: attention(*arguments, is_causal=causal, enable_gqa=gqa))


def make_flex(q: Any, k: Any, v: Any, causal: bool) -> Peer:
    """torch's compiled flex_attention."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    arguments = [x.transpose(1, 2) for x in (q, k, v)]
    mask = None
    if causal:

        def below(b: Any, h: Any, i: Any, j: Any) -> Any:
            return i >= j

        mask = create_block_mask(below, None, None, q.shape[1], k.shape[1], device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    gqa = q.shape[2] != k.shape[2]
    return Peer("flex", lambda: compiled(*arguments, block_mask=mask, enable_gqa=gqa))


def make_fa3(q: Any, k: Any, v: Any, causal: bool) -> Peer:
    """FlashAttention-3: its torch build, or else the wheel flash_attn3_jax."""
    try:
        from flash_attn_interface import flash_attn_func
    except ImportError:
        # Else JAX takes most of the GPU's memory at its first use, under torch's feet.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        import jax
        from flash_attn3_jax import flash_mha

        arguments = [jax.dlpack.from_dlpack(x) for x in (q, k, v)]
        compiled = jax.jit(functools.partial(flash_mha, is_causal=causal))
        return Peer("FA3", lambda: compiled(*arguments), jax.block_until_ready)
    return Peer("FA3", lambda: flash_attn_func(q, k, v, causal=causal))


def make_fa4(q: Any, k: Any, v: Any, causal: bool) -> Peer:
    """FlashAttention-4 (the wheel flash-attn-4)."""
    from flash_attn.cute.interface import flash_attn_func

    return Peer("FA4-cute", lambda: flash_attn_func(q, k, v, causal=causal))


PEERS: dict[str, Callable[[Any, Any, Any, bool], Peer]] = {
    "rtflash": make_rtflash,
    "sdpa": make_plain_sdpa,
    "fa2": functools.partial(make_sdpa, "torch-FA2", "FLASH_ATTENTION"),
    "cudnn": functools.partial(make_sdpa, "cuDNN", "CUDNN_ATTENTION"),
    "flex": make_flex,
    "fa3": make_fa3,
    "fa4": make_fa4,
}


def make_peers(
    names: Sequence[str], q: Any, k: Any, v: Any, causal: bool, skipped: dict[str, str]
) -> list[Peer]:
    """The peers that import and answer once on these inputs.

    `skipped` collects the reasons of the others.
    """
    peers = []
    for name in names:
        try:
            peers.append(answers(PEERS[name](q, k, v, causal)))
        except Exception as error:  # a peer's failure, of whatever kind, must not end the run
            skipped.setdefault(name, reason(error))
    return peers


def answers(peer: Peer) -> Peer:
    """The peer, called once."""
    (peer.wait or (lambda result: result))(peer.call())
    return peer


def reason(error: Exception) -> str:
    """An exception in a line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:160]


def cpu_peers(q: Any, k: Any, v: Any, causal: bool, skipped: dict[str, str]) -> list[Peer]:
    """rtflash on NumPy arrays, and torch's attention on the CPU where torch is installed."""
    peers = [make_rtflash(q, k, v, causal)]
    try:
        import torch
    except ImportError:
        skipped["torch"] = "not installed"
        return peers
    q, k, v = (torch.from_numpy(x) for x in (q, k, v))
    return [*peers, make_plain_sdpa(q, k, v, causal)]
