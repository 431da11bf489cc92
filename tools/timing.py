"""Time of calls on a GPU: peers that take turns, CUDA graphs, the bandwidth of a copy."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence

from .peers import Peer, reason

ROUNDS, TURN_MS = 5, 15.0
# Calls of a graph: enough that starting it costs little beside them.
GRAPH_CALLS = 20
COPIED_BYTES = 2**30


def turn(peer: Peer, calls: int) -> list[float]:
    """Milliseconds of queued calls: each by CUDA events, or their mean by the clock.

    The clock is for peers on a stream that torch's events cannot see.
    """
    import torch

    if peer.wait:
        start = time.perf_counter()
        for _ in range(calls):
            result = peer.call()
        peer.wait(result)
        return [(time.perf_counter() - start) * 1e3 / calls]
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
    for begin, end in events:
        begin.record()
        peer.call()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]


def medians(peers: Sequence[Peer]) -> dict[str, float]:
    """Median milliseconds of each peer.

    They take turns of TURN_MS, round after round, so that a clock that falls under the power limit
    falls for all.
    """
    calls = {}
    for peer in peers:
        turn(peer, 3)
        calls[peer.name] = int(min(200, max(4, TURN_MS / max(turn(peer, 2)[-1], 1e-3))))
    times: dict[str, list[float]] = {peer.name: [] for peer in peers}
    for _, peer in itertools.product(range(ROUNDS), peers):
        times[peer.name] += turn(peer, calls[peer.name])
    return {name: statistics.median(values) for name, values in times.items()}


def graph_medians(peers: Sequence[Peer], skipped: dict[str, str]) -> dict[str, float]:
    """Median milliseconds of a call of each peer in a CUDA graph: of the GPU alone, whatever the host needs.

    `skipped` collects the reasons of those that cannot be captured.
    """
    graphs = []
    for peer in peers:
        if peer.wait:
            skipped.setdefault(f"{peer.name} in a CUDA graph", "it is not on torch's stream")
            continue
        try:
            graphs.append(graphed(peer))
        except RuntimeError as error:
            skipped.setdefault(f"{peer.name} in a CUDA graph", reason(error))
    return {name: time / GRAPH_CALLS for name, time in medians(graphs).items()}


def graphed(peer: Peer) -> Peer:
    """A peer whose call replays GRAPH_CALLS calls of `peer`."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            peer.call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(GRAPH_CALLS):
            peer.call()
    return Peer(peer.name, graph.replay)


def copy_bandwidth() -> float:
    """Bytes that a copy of COPIED_BYTES reads and writes in a second."""
    import torch

    source = torch.empty(COPIED_BYTES, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    milliseconds = medians([Peer("copy", lambda: target.copy_(source))])["copy"]
    return 2 * COPIED_BYTES / milliseconds * 1e3
