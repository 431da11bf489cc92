"""The least traffic of the schedule: a CTA reads its query rows and the key tiles that they see, each once."""

from __future__ import annotations

from rtflash.problem import Problem
from rtflash.report import Report
from rtflash.spec import Spec


def visible_rows(spec: Spec, problem: Problem, first: int) -> int:
    """Rows of the key tiles that the query tile from row `first` on sees."""
    p, group = problem, group_of(spec, problem)
    shift = p.seqlen_k - p.seqlen_q
    last = min((first + spec.block_m - 1) // group, p.seqlen_q - 1)
    end = p.seqlen_k if p.window_right < 0 else min(p.seqlen_k, last + shift + p.window_right + 1)
    begin = 0 if p.window_left < 0 else max(first // group + shift - p.window_left, 0)
    n_begin, n_end = begin // spec.block_n, -(-max(end, 0) // spec.block_n)
    return max(0, min(n_end * spec.block_n, p.seqlen_k) - n_begin * spec.block_n)


def group_of(spec: Spec, problem: Problem) -> int:
    """Rows of a query position."""
    return problem.heads // problem.heads_k if spec.pack_gqa else 1


def check_traffic(report: Report, problem: Problem) -> None:
    """Assert that bytes of q, k and v are read, and bytes of o and the LSE written, as often as they must be.

    Of a dense call that is not split.
    """
    spec, p = report.spec, problem
    group = group_of(spec, p)
    firsts = range(0, p.seqlen_q * group, spec.block_m)
    keys = [visible_rows(spec, p, first) for first in firsts]
    lengths = [min(spec.block_m, p.seqlen_q * group - first) for first in firsts]
    query_rows = sum(rows for rows, seen in zip(lengths, keys, strict=True) if seen)
    pairs = 2 * p.batch * (p.heads // group)  # times the bytes of an element
    wanted = {
        "q": (pairs * query_rows * p.head_dim, 0),
        "k": (pairs * sum(keys) * p.head_dim, 0),
        "v": (pairs * sum(keys) * p.head_dim_v, 0),
        "o": (0, report.out.nbytes),
        "lse": (0, report.lse.nbytes),
    }
    got = {name: (traffic.read, traffic.written) for name, traffic in report.traffic.items()}
    got.pop("alibi_slopes", None)
    if "next_tile" in got:  # each tile is drawn but a CTA's first, and each CTA draws once in vain
        wanted["next_tile"] = (4 * len(firsts) * pairs // 2,) * 2
    assert got == wanted, f"bytes (read, written) are {got}; the schedule needs {wanted}"
