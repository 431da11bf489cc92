"""Seeded faults: small mutations of the templates, each of which the emulated tests must catch.

usage: python tests/faults.py [--jobs N] [NAME ...]

Each fault is made in a copy of the templates and run, in a process of its own, on the probe that reaches the mutated
code.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import inference_calls
import numpy as np
from calls import Call, solved
from compare import check, check_lse
from inference_calls import CacheCall, Inputs, VarlenCall, dtype_of, hold
from layouts import decode, embed, encode
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray
from schedule import check_traffic

from rtflash import checks, emulate, inference, render, select
from rtflash.artifacts import CompileError
from rtflash.problem import Problem, Tensors
from rtflash.report import EmulationError
from rtflash.spec import Spec
from rtflash.tensor import View
from rtflash.tiles import Tile

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 120.0  # a mutated loop may never end
SURVIVORS = 0.05  # of all faults


def spec_of(described: Problem, tile: Tile, isa: int, **flags: object) -> Spec:
    """The variant of a tile for a call."""
    p = described
    return Spec(
        dtype=p.dtype,
        head_dim=p.head_dim,
        head_dim_v=p.head_dim_v,
        isa=isa,
        mask=p.mask,
        softcap=p.softcap > 0,
        alibi=p.alibi,
        prescale=p.softcap > 0 or p.alibi,
        align=p.align,
        **flags,
        **tile._asdict(),
    )


@dataclass(frozen=True)
class Probe:
    """A call on a variant of a fixed tile: what the mutations need must not change with the tables."""

    call: Call
    tile: Tile
    isa: int = 80
    section: int = 1
    blocks: int = 0

    def spec(self, described: Problem) -> Spec:
        """The variant."""
        return spec_of(
            described,
            self.tile,
            self.isa,
            even_m=self.isa != 90 and described.seqlen_q % self.tile.block_m == 0,
            even_n=self.isa != 90 and described.seqlen_k % self.tile.block_n == 0,
        )


@dataclass(frozen=True)
class SequenceProbe:
    """A call on packed sequences or on a cache, with the query heads of a key head packed.

    With isa 90 only if `packed`. `splits` of the keys, more than one, make partial results and merge them. With
    `malformed`, the first sequence's new keys have no page, and the last one of the last sequence has no slot.
    """

    call: VarlenCall | CacheCall
    tile: Tile
    splits: int = 1
    malformed: bool = False
    isa: int = 80
    blocks: int = 0
    packed: bool = False

    def spec(self, described: Problem) -> Spec:
        """The variant."""
        p = described
        return spec_of(
            p,
            self.tile,
            self.isa,
            pack_gqa=self.isa != 90 or self.packed,
            split=self.splits > 1,
            ragged=p.ragged,
            paged=p.page_size > 0,
            rotary=p.rotary,
            gather=self.isa == 90 and select.why_not_tma(p) is not None,
        )


TWO_STAGES = Tile(128, 64, 4, 2, q_in_regs=True)
ONE_STAGE = Tile(128, 64, 4, 1)
PADDED = ("padded", "bhsd", "every2")
RING = Tile(16, 64, 4, 2, True, key_warps=4)
ROWS = Tile(64, 64, 4, 2)
GROUPS = Tile(128, 64, 8, 2)
ONE = {"heads": 1, "heads_k": 1, "batch": 1}
# Lengths put limits of masks at the edges of tiles: 192 - 130 = 62 is one less than a tile's last
# key, and the window of 60 to its left starts one key after a tile's first.
PROBES: dict[str, Probe | SequenceProbe] = {
    "causal": Probe(Call(130, 192, heads_k=1, causal=True, layouts=PADDED), TWO_STAGES),
    "square": Probe(Call(256, 256, causal=True, **ONE), TWO_STAGES),
    "blind": Probe(Call(150, 65, causal=True, **ONE), TWO_STAGES),
    "window": Probe(Call(130, 172, batch=1, head_dim=128, dtype="bf16", window=(40, 9)), ONE_STAGE),
    "left window": Probe(Call(130, 192, window=(60, -1), **ONE), ONE_STAGE),
    "early window": Probe(Call(70, 128, window=(200, 5), **ONE), TWO_STAGES),
    "features": Probe(
        Call(
            70,
            130,
            heads=4,
            heads_k=2,
            head_dim=40,
            softcap=5.0,
            alibi="batch",
            magnitude=3.0,
        ),
        TWO_STAGES,
    ),
    "old": Probe(Call(batch=1, head_dim=96, head_dim_v=46), Tile(128, 32, 4, 1), isa=75),
    "narrow": Probe(
        Call(65, 97, batch=1, head_dim=46, dtype="bf16", layouts=("align4", "bshd", "align8")),
        TWO_STAGES,
    ),
    "even": Probe(
        Call(256, 128, heads=3, heads_k=3, batch=1, head_dim=32),
        Tile(128, 64, 4, 2),
        section=2,
    ),
    "wide cap": Probe(Call(70, 130, softcap=50.0, magnitude=3.0, **ONE), TWO_STAGES),
    "no cap": Probe(Call(70, 130, softcap=2.0**60, magnitude=3.0, **ONE), TWO_STAGES),
    "peaked": Probe(Call(128, 256, magnitude=8.0, head_dim=128, **ONE), Tile(128, 64, 4, 2)),
    # Five, none and three tiles of a ring of two.
    "ring": SequenceProbe(
        CacheCall(
            heads=6,
            head_dim_v=72,
            seqlen_q=2,
            lengths=(310, 7, 150),
            capacity=310,
            leftpad=(9, 7, 0),
            rows=5,
            batch_idx=(3, 0, 4),
        ),
        RING,
    ),
    # Pages of a size that is no power of two; the last key of the second sequence is in the last slot.
    "pages": SequenceProbe(
        CacheCall(
            head_dim_v=40,
            seqlen_q=2,
            lengths=(129, 318, 0),
            capacity=320,
            page_size=20,
            leftpad=(23, 0, 0),
            seqlen_new=2,
            rotary="halves",
            rotary_dim=32,
        ),
        RING,
    ),
    # Tiles of 64 rows over pages: the last tile ends within a page, and the first sequence's at a page's end.
    "tiles of pages": SequenceProbe(
        CacheCall(
            heads=6,
            head_dim_v=72,
            seqlen_q=20,
            causal=True,
            lengths=(140, 318, 0),
            capacity=320,
            page_size=20,
            leftpad=(23, 0, 0),
        ),
        ROWS,
    ),
    "malformed": SequenceProbe(
        CacheCall(lengths=(7, 38), batch=2, capacity=40, page_size=20, seqlen_new=2),
        RING,
        malformed=True,
    ),
    # Parts of two tiles and of one, and parts and sequences without a key.
    "parts": SequenceProbe(
        VarlenCall(
            heads=6,
            head_dim_v=72,
            causal=True,
            lengths_q=(20, 1, 30),
            lengths_k=(270, 0, 40),
            tail=3,
        ),
        ROWS,
        splits=3,
    ),
    "parts of pages": SequenceProbe(
        CacheCall(
            seqlen_q=2,
            lengths=(129, 280, 0),
            capacity=300,
            page_size=20,
            rotary="interleaved",
            seqlen_new=1,
        ),
        RING,
        splits=3,
    ),
    # The last sequence writes rows behind it that are more than its tiles have.
    "packed": SequenceProbe(
        VarlenCall(
            heads=6,
            alibi="batch",
            lengths_q=(40, 3, 33),
            lengths_k=(70, 65, 64),
            used_q=(21, 3, 30),
            used_k=(70, 64, 10),
            tail=50,
        ),
        ROWS,
    ),
    "groups": Probe(Call(130, 400, head_dim=128, dtype="bf16", **ONE), GROUPS, isa=90, blocks=1),
    # O is rescaled before the exponentials, by rows whose maxima grow from tile to tile.
    "groups, peaked": Probe(
        Call(130, 600, head_dim=64, magnitude=8.0, **ONE), GROUPS, isa=90, blocks=1
    ),
    # One buffer of Q, and several tiles of rows for one CTA, of which warpgroups skip keys.
    "groups' tiles": Probe(
        Call(500, 100, heads=1, heads_k=1, batch=2, head_dim=128, causal=True),
        Tile(128, 176, 8, 2),
        isa=90,
        blocks=1,
    ),
    "groups, causal": Probe(
        Call(300, 300, head_dim=96, causal=True, **ONE), GROUPS, isa=90, blocks=2
    ),
    # Tiles of V hold rows of the next sequence.
    "groups, packed": SequenceProbe(
        VarlenCall(lengths_q=(130, 3, 70), lengths_k=(200, 65, 100), tail=70),
        GROUPS,
        isa=90,
        blocks=2,
    ),
    # Prescaled: one loop has every tile's softmax.
    "groups, prescaled": SequenceProbe(
        VarlenCall(
            softcap=50.0, alibi="heads", lengths_q=(130, 3, 70), lengths_k=(300, 65, 100), tail=70
        ),
        GROUPS,
        isa=90,
        blocks=2,
    ),
    # Groups are packed, and a warp finds the pages.
    "groups, pages": SequenceProbe(
        CacheCall(seqlen_q=40, heads=8, heads_k=2, lengths=(129, 40, 90), page_size=8),
        Tile(128, 128, 8, 2),
        splits=3,
        isa=90,
        blocks=20,
        packed=True,
    ),
    # A split of no keys: the consumers wait for nothing but its place.
    "groups, no keys": SequenceProbe(
        VarlenCall(heads=2, heads_k=1, head_dim=192, lengths_q=(65,), lengths_k=(2,), page_size=16),
        Tile(128, 96, 8, 2),
        splits=2,
        isa=90,
        packed=True,
    ),
    # Rows are copied one by one.
    "groups, rows": SequenceProbe(
        CacheCall(seqlen_q=130, heads=2, heads_k=2, lengths=(190, 40, 90), page_size=3),
        GROUPS,
        isa=90,
        blocks=2,
    ),
    # One buffer of Q: nothing may be held back while it is waited for.
    "groups, last rows": SequenceProbe(
        CacheCall(
            seqlen_q=150,
            heads=1,
            heads_k=1,
            head_dim=256,
            causal=True,
            lengths=(60, 0, 190),
            page_size=3,
        ),
        GROUPS,
        isa=90,
        blocks=2,
    ),
    "groups, rotated": SequenceProbe(
        CacheCall(
            seqlen_q=80,
            seqlen_new=80,
            lengths=(100, 40, 90),
            causal=True,
            rotary="halves",
            rotary_dim=24,
        ),
        GROUPS,
        isa=90,
    ),
}


@dataclass(frozen=True)
class Fault:
    """`old`, which stands in `file` just once, becomes `new`; `probe` is the one that must notice.

    `survives` explains why it need not.
    """

    name: str
    file: str
    old: str
    new: str
    probe: str
    survives: str = ""


KERNEL, PIPELINE, COPY = "forward_sm80.cu", "sm80/pipeline.cuh", "sm80/copy.cuh"
SOFTMAX, MASK, EPILOGUE, BLOCK = "softmax.cuh", "mask.cuh", "epilogue.cuh", "block.cuh"
RING_FLOW, EPILOGUE_KEYS, OUTPUT = "sm80/ring.cuh", "epilogue_keys.cuh", "output.cuh"
COMBINE, APPEND, ROTARY, PAGES = "combine.cu", "append.cu", "rotary.cuh", "pages.cuh"
QUERY = "query.cuh"
GROUPS_KERNEL, GROUPS_PIPELINE, GROUPS_BOXES, GROUPS_ROWS, GROUPS_MMA, GROUPS_TILES = (
    "forward_sm90.cu",
    "sm90/pipeline.cuh",
    "sm90/boxes.cuh",
    "sm90/rows.cuh",
    "sm90/mma.cuh",
    "sm90/tiles.cuh",
)
WAIT_K = """    wait_copies<0>();
    barrier_cta();
    if constexpr (kStages == 1) {"""
WAIT_V = """      wait_copies<0>();
      barrier_cta();
      if (n > block.n_begin) {"""
WAIT_Q = "wait_copies<KeyValuePipeline::kStartGroups>();"
NEXT_V = """    } else if (n > block.n_begin) {
      load_v<false>(next_stage(), n - 1);
      commit_copies();"""
WAIT_FOR_K = "    mbarrier_wait(smem.k_full(ring.stage), ring.round);\n"
RELEASE_K = "    self.release(smem.k_empty(ring.stage));\n"
WAIT_FOR_S = "    wgmma_wait<1>();\n    pin(s);\n"
RELEASE_V = "    if (v_empty != 0) self.release(v_empty);\n"
WAIT_FOR_O = f"    wgmma_wait<0>();\n    pin(o);\n{RELEASE_V}"

FAULTS = (
    Fault("no barrier before S", PIPELINE, WAIT_K, WAIT_K.replace("barrier_cta();", ""), "causal"),
    Fault("K waits for a group too few", PIPELINE, WAIT_K, WAIT_K.replace("<0>", "<1>"), "window"),
    Fault("no wait before S", PIPELINE, WAIT_K, WAIT_K.replace("wait_copies<0>();", ""), "causal"),
    Fault(
        "no barrier before P V", PIPELINE, WAIT_V, WAIT_V.replace("barrier_cta();", ""), "window"
    ),
    Fault("V waits for a group too few", PIPELINE, WAIT_V, WAIT_V.replace("<0>", "<1>"), "window"),
    Fault(
        "no barrier before P V, isa 75",
        PIPELINE,
        WAIT_V,
        WAIT_V.replace("barrier_cta();", ""),
        "old",
    ),
    Fault(
        "next V not committed", PIPELINE, NEXT_V, NEXT_V.replace("commit_copies();", ""), "causal"
    ),
    Fault("one stage for two", PIPELINE, "all_stages_sum - stage_smem :", "stage_smem :", "causal"),
    Fault(
        "V takes K's row stride",
        PIPELINE,
        "v_gmem -= kBlockN * params.v_strides.row",
        "v_gmem -= kBlockN * params.k_strides.row",
        "causal",
    ),
    Fault(
        "V of the query head", PIPELINE, "block.head_k * v.head", "block.head * v.head", "features"
    ),
    Fault(
        "K of the wrong batch stride",
        PIPELINE,
        "block.k_batch * k.batch",
        "block.k_batch * v.batch",
        "causal",
    ),
    Fault(
        "ragged V rows not checked",
        PIPELINE,
        "load_v<!kEvenN>(stage_smem, n)",
        "load_v<false>(stage_smem, n)",
        "window",
    ),
    Fault(
        "first tile one key late",
        PIPELINE,
        "(block.n_end - 1) * kBlockN + block.k_begin;",
        "(block.n_end - 1) * kBlockN + block.k_begin + 1;",
        "even",
    ),
    Fault("Q waits for a group too few", KERNEL, WAIT_Q, WAIT_Q.replace(">", " + 1>"), "causal"),
    Fault(
        "O not zero at first",
        KERNEL,
        "OutputTile o = {};",
        "OutputTile o;",
        "even",
        survives="the first maximum scales what O holds by 0; GCC's poison is finite (clang's is NaN)",
    ),
    Fault("S not zero at first", KERNEL, "ScoreTile s = {};", "ScoreTile s;", "even"),
    Fault(
        "no barrier after Q",
        KERNEL,
        "      barrier_cta();                                  // every",
        "      // every",
        "causal",
    ),
    Fault(
        "K's lane map is Q's",
        KERNEL,
        "KeyTile::offset(0, lane / 16 * 8 + lane % 8, lane / 8 % 2)",
        "KeyTile::offset(0, lane % 16, lane / 16)",
        "even",
    ),
    Fault("V not transposed", KERNEL, "ldmatrix_x4_trans(b", "ldmatrix_x4(b", "even"),
    Fault(
        "operands of neighbouring tiles mixed",
        KERNEL,
        "mma_16x8x16(s[m][j], q[m], b[0], b[1]);",
        "mma_16x8x16(s[m][j], q[m], b[0], b[2]);",
        "even",
    ),
    Fault(
        "ragged Q rows not checked",
        QUERY,
        "copy.template load_async<!kEvenM>",
        "copy.template load_async<false>",
        "causal",
    ),
    Fault("first column of the next lane", KERNEL, "lane % 4 * 2;", "lane % 4 * 2 + 1;", "causal"),
    Fault(
        "last tile forgotten", KERNEL, "n >= block.n_begin; --n", "n > block.n_begin; --n", "even"
    ),
    Fault(
        "swizzle of the writer only",
        COPY,
        "(lane_smem ^ (chunk % kSlabChunks * kChunkBytes))",
        "(lane_smem + chunk % kSlabChunks * kChunkBytes)",
        "even",
    ),
    Fault("swizzle with conflicts", COPY, "chunk ^ ((row >> 1) & 3)", "chunk ^ (row & 3)", "even"),
    Fault(
        "columns of padding read",
        COPY,
        "min(max((kDim - first) * kElementBytes, 0), kChunkBytes)",
        "kChunkBytes",
        "narrow",
    ),
    Fault(
        "narrow copies not clipped",
        COPY,
        "min(max(bytes - piece, 0), kLoadBytes)",
        "kLoadBytes",
        "narrow",
    ),
    Fault(
        "padded columns left as they were", COPY, "(kDim + 15) / 16 * 16", "kDim / 16 * 16", "old"
    ),
    Fault(
        "high half of a chunk's pair lost",
        COPY,
        "value[i] = low | high << 16;",
        "value[i] = low | high << 15;",
        "old",
    ),
    Fault(
        "rows one step off",
        COPY,
        "source_gmem += kRowStep * row_stride;",
        "source_gmem += (kRowStep + 1) * row_stride;",
        "even",
    ),
    Fault(
        "causal limit one key early",
        MASK,
        "keys_end[r] = own + right + 1;",
        "keys_end[r] = own + right;",
        "causal",
    ),
    Fault(
        "window's left end one key late",
        MASK,
        "keys_begin[r] = own - params.window_left;",
        "keys_begin[r] = own - params.window_left + 1;",
        "window",
    ),
    Fault(
        "cut to the right found a key late",
        MASK,
        "first + right + 1);",
        "first + right + 2);",
        "causal",
    ),
    Fault(
        "cut to the left found a key late",
        MASK,
        "cut_left = last - params.window_left;",
        "cut_left = last - params.window_left - 1;",
        "left window",
    ),
    Fault(
        "keys past the end seen",
        MASK,
        ": min(end, keys_end[own] + row);",
        ": keys_end[own] + row;",
        "window",
    ),
    Fault(
        "ragged last tile not cut",
        MASK,
        "kMask == MaskKind::full && kEvenN",
        "kMask == MaskKind::full",
        "old",
    ),
    Fault(
        "query tiles at each other's places",
        MASK,
        "16 * m + 8 * half",
        "8 * m + 16 * half",
        "causal",
    ),
    Fault(
        "tiles past the keys",
        BLOCK,
        "seen.end = min(seen.end, (keys_end + kBlockN - 1) / kBlockN);",
        "seen.end = (keys_end + kBlockN - 1) / kBlockN;",
        "early window",
    ),
    Fault(
        "tiles before the keys",
        BLOCK,
        "max(first - params.window_left, 0) / kBlockN",
        "(first - params.window_left) / kBlockN",
        "early window",
    ),
    Fault(
        "one key tile too many",
        BLOCK,
        "(keys_end + kBlockN - 1) / kBlockN);",
        "(keys_end + kBlockN) / kBlockN);",
        "square",
    ),
    Fault(
        "last section not clipped",
        BLOCK,
        "min(params.section, params.pairs - section * params.section)",
        "params.section",
        "even",
    ),
    Fault(
        "key heads dealt in turn",
        BLOCK,
        "kPackGqa ? head : divide(head, params.group)",
        "kPackGqa ? head : head % params.group.value",
        "features",
    ),
    Fault("sums not rescaled", SOFTMAX, "row_sum[r] *= factor;", "", "peaked"),
    Fault("half of O not rescaled", SOFTMAX, "o[r / 2][j][r % 2 * 2 + 1] *= factor;", "", "peaked"),
    Fault(
        "never rescaled", SOFTMAX, "kRescaleThreshold = 8.f", "kRescaleThreshold = 1e30f", "peaked"
    ),
    Fault(
        "no guard against -inf minus -inf",
        SOFTMAX,
        "reference[r] = kLowest;",
        "reference[r] = -kInfinity;",
        "blind",
    ),
    Fault(
        "maximum over half of the quad",
        SOFTMAX,
        "shuffle_xor(highest, 2)",
        "shuffle_xor(highest, 1)",
        "peaked",
    ),
    Fault(
        "sum over half of the quad",
        SOFTMAX,
        "row_sum[r] += shuffle_xor(row_sum[r], 2);",
        "",
        "even",
    ),
    Fault("P's lane map", SOFTMAX, "s[m][2 * k + i / 2]", "s[m][2 * k + i % 2]", "even"),
    Fault(
        "P's rows",
        SOFTMAX,
        "const int r = 2 * m + i % 2;",
        "const int r = 2 * m + i / 2;",
        "peaked",
    ),
    Fault(
        "no barrier before O is staged",
        EPILOGUE,
        "overwrites.\n    barrier_cta();",
        "overwrites.\n",
        "even",
    ),
    Fault(
        "no barrier after O is staged",
        EPILOGUE,
        "wrote them.\n    barrier_cta();",
        "wrote them.\n",
        "even",
    ),
    Fault("no guard of an empty row", EPILOGUE, "empty ? 0 : pair", "pair", "blind"),
    Fault(
        "every lane stores the LSE",
        EPILOGUE,
        "params.lse == nullptr || lane % 4 != 0",
        "params.lse == nullptr",
        "even",
    ),
    Fault(
        "LSE of the key head",
        OUTPUT,
        "head * params.lse_head_stride",
        "block.head_k * params.lse_head_stride",
        "causal",
    ),
    Fault("ragged rows of O stored", EPILOGUE, "if (!place.inside(block)) break;", "", "causal"),
    Fault(
        "ragged rows of the LSE stored",
        EPILOGUE,
        "if (place.inside(block)) store_lse(",
        "store_lse(",
        "causal",
    ),
    Fault(
        "unstaged columns of O read",
        EPILOGUE,
        "if (!whole && bytes == 0) continue;",
        "",
        "features",
    ),
    Fault(
        "softcap without its 2",
        "score.cuh",
        "1.f - 2.f * reciprocal",
        "1.f - 1.f * reciprocal",
        "features",
    ),
    Fault("tanh's series of x", "score.cuh", "y * (1.f + square", "x * (1.f + square", "wide cap"),
    Fault("tanh's series too far out", "score.cuh", "square < 0.01f", "square < 1.f", "features"),
    Fault("tanh without its series", "score.cuh", "square < 0.01f", "square < 0.f", "no cap"),
    Fault(
        "ALiBi's distance signed",
        "score.cuh",
        "fabsf(distance)",
        "distance",
        "features",
    ),
    Fault("ALiBi's rows", "score.cuh", "r = 2 * m + i / 2;", "r = 2 * m + i % 2;", "features"),
    Fault(
        "half of the inner dimension",
        "sm80/mma.cuh",
        "mma_m16n8k8_fp16(d, a[2], a[3], b1);",
        "",
        "old",
    ),
    Fault(
        "fp16 for bf16",
        "element.cuh",
        "return pack_bf16(low, high);",
        "return pack_fp16(low, high);",
        "window",
    ),
    Fault(
        "no barrier before a stage is filled again",
        RING_FLOW,
        "    barrier_warp();\n    load_next();",
        "    load_next();",
        "ring",
    ),
    Fault(
        "no barrier after a lane's own copies",
        RING_FLOW,
        "others visible.\n    barrier_warp();",
        "others visible.\n",
        "ring",
    ),
    Fault(
        "no barrier in a ring of pages",
        RING_FLOW,
        "others visible.\n    barrier_warp();",
        "others visible.\n",
        "pages",
    ),
    Fault(
        "a ring waits for a group too few",
        RING_FLOW,
        "    wait_copies<kStages - 1>();",
        "    wait_copies<kStages>();",
        "ring",
    ),
    Fault(
        "a ring never wraps",
        RING_FLOW,
        "stage + kStageBytes == kRingBytes ? 0 : stage + kStageBytes",
        "stage + kStageBytes",
        "ring",
    ),
    Fault(
        "a ring's group not committed",
        RING_FLOW,
        "    }\n    commit_copies();",
        "    }",
        "parts of pages",
    ),
    Fault(
        "every warp takes the first keys",
        RING_FLOW,
        "warp_key(thread / 32 * kWarpKeys)",
        "warp_key(0)",
        "ring",
    ),
    Fault(
        "all warps share a ring", RING_FLOW, "thread / 32 * kRingBytes", "0 * kRingBytes", "ring"
    ),
    Fault(
        "page of the next lane",
        RING_FLOW,
        "shuffle_index(page, row)",
        "shuffle_index(page, row + 1)",
        "pages",
    ),
    Fault(
        "pages before the left padding",
        RING_FLOW,
        "page_of(block.k_begin + key)",
        "page_of(key)",
        "pages",
    ),
    Fault(
        "keys of the left padding",
        RING_FLOW,
        "kBlockN + warp_key + block.k_begin;",
        "kBlockN + warp_key;",
        "ring",
    ),
    Fault(
        "pages past the keys looked up",
        RING_FLOW,
        "lane < kWarpKeys && key < block.seqlen_k",
        "lane < kWarpKeys",
        "pages",
    ),
    Fault(
        "a ring's rows of V not checked",
        RING_FLOW,
        "v_copy.load_async<true>(v_smem",
        "v_copy.load_async<false>(v_smem",
        "ring",
    ),
    Fault(
        "longer parts do not move the next",
        BLOCK,
        "block.split * part + min(block.split, longer);",
        "block.split * part;",
        "parts",
    ),
    Fault("no part is longer", BLOCK, "+ part + (block.split < longer ? 1 : 0)", "+ part", "parts"),
    Fault(
        "new keys not counted",
        BLOCK,
        "load_int(given.seqused_k, b) + params.seqlen_new",
        "load_int(given.seqused_k, b)",
        "pages",
    ),
    Fault("left padding counted", BLOCK, "    block.seqlen_k -= pad;\n", "", "ring"),
    Fault(
        "rows behind the last sequence left",
        BLOCK,
        "(last ? params.total_q : end) - begin",
        "end - begin",
        "packed",
    ),
    Fault(
        "every query counts",
        BLOCK,
        "min(max(load_int(given.seqused_q, b), 0), block.seqlen_q)",
        "block.seqlen_q",
        "packed",
    ),
    Fault(
        "key head for the group's first",
        BLOCK,
        "kPackGqa ? head * params.group.value : head",
        "head",
        "packed",
    ),
    Fault(
        "the cache's rows in order",
        BLOCK,
        "block.k_batch = load_int(given.cache_batch_idx, b);",
        "block.k_batch = b;",
        "ring",
    ),
    Fault(
        "rows past the queries count",
        OUTPUT,
        "counts(kEvenM || position < block.seqlen_q)",
        "counts(true)",
        "packed",
    ),
    Fault(
        "packed rows all of the first head",
        OUTPUT,
        "head(block.head + (kPackGqa ? block.m_begin + row - position * params.group.value : 0))",
        "head(block.head)",
        "packed",
    ),
    Fault(
        "rest of the packed rows not cleared",
        OUTPUT,
        "row < end; row += kWarps",
        "row < 0; row += kWarps",
        "packed",
    ),
    Fault(
        "rest cleared by every tile",
        OUTPUT,
        "if (block.m_begin + kBlockM < covered) return;",
        "",
        "packed",
    ),
    Fault(
        "slope of the group's first head",
        "score.cuh",
        "block.head + (kPackGqa ? row - position * params.group.value : 0)",
        "block.head",
        "packed",
    ),
    Fault(
        "no barrier before a warp leaves its part",
        EPILOGUE_KEYS,
        "  barrier_cta();\n  leave_part",
        "  leave_part",
        "ring",
    ),
    Fault(
        "no barrier after the parts are left",
        EPILOGUE_KEYS,
        "  barrier_cta();\n  const Block block",
        "  const Block block",
        "ring",
    ),
    Fault(
        "warps' parts not weighed",
        EPILOGUE_KEYS,
        "value[i] += state.weight[warp] * ",
        "value[i] += ",
        "ring",
    ),
    Fault(
        "warps' sums not weighed",
        EPILOGUE_KEYS,
        "sum += weight[warp] * ",
        "sum += ",
        "ring",
    ),
    Fault(
        "warps' parts with conflicts",
        EPILOGUE_KEYS,
        "(kHeadDimVPadded + 8) * 4",
        "kHeadDimVPadded * 4",
        "ring",
    ),
    Fault("parts of no weight read", COMBINE, "      if (weight == 0.f) continue;\n", "", "parts"),
    Fault(
        "no guard of a row without parts",
        COMBINE,
        "largest == -kInfinity ? 0.f : largest",
        "largest",
        "parts",
    ),
    Fault(
        "no barrier after the weights",
        COMBINE,
        "weights are there.\n  barrier_cta();",
        "weights are there.\n",
        "parts",
    ),
    Fault(
        "no barrier after the warps' sums",
        COMBINE,
        "sum is there.\n  barrier_cta();",
        "sum is there.\n",
        "parts of pages",
    ),
    Fault(
        "parts by the LSE's stride",
        COMBINE,
        "split * params.o_split_stride",
        "split * params.lse_split_stride",
        "parts",
    ),
    Fault(
        "new keys past the cache",
        APPEND,
        "slot < 0 || slot >= params.slots",
        "slot < 0",
        "malformed",
    ),
    Fault(
        "last slot never written",
        APPEND,
        "slot >= params.slots",
        "slot >= params.slots - 1",
        "pages",
    ),
    Fault("new keys in no page", APPEND, "if (!pages.exists(page)) return;", "", "malformed"),
    Fault("new keys in one slot", APPEND, "slot = cached + i;", "slot = cached;", "pages"),
    Fault(
        "turned the other way",
        ROTARY,
        "(second ? other : -other)",
        "(second ? -other : other)",
        "pages",
    ),
    Fault("turned a column too far", ROTARY, "column >= 2 * half", "column > 2 * half", "pages"),
    Fault(
        "turned with the wrong neighbour",
        ROTARY,
        "interleaved ? column ^ 1",
        "interleaved ? column + 1",
        "parts of pages",
    ),
    Fault(
        "queries turned by row",
        QUERY,
        "params.rotate_by_row ? position : 0",
        "position",
        "pages",
    ),
    Fault(
        "a page's rows by the tile's",
        COPY,
        "pages.row_offset(page, slot + tile_row, strides)",
        "pages.row_offset(page, tile_row, strides)",
        "tiles of pages",
    ),
    Fault(
        "one page for a whole tile",
        COPY,
        "pages.page_of(slot + tile_row)",
        "pages.page_of(slot)",
        "tiles of pages",
    ),
    Fault(
        "pages past the keys looked up by tiles",
        COPY,
        "tile_row < rows ? pages.page_of",
        "tile_row <= rows ? pages.page_of",
        "tiles of pages",
    ),
    Fault(
        "rows of no page not zero",
        COPY,
        "load_row_async<true>(tile_smem, pass, head_gmem",
        "load_row_async<false>(tile_smem, pass, head_gmem",
        "tiles of pages",
    ),
    Fault(
        "pages of V by K's strides",
        PIPELINE,
        "v_gmem, params.v_strides,\n                              Pages",
        "v_gmem, params.k_strides,\n                              Pages",
        "tiles of pages",
    ),
    Fault(
        "pages of V before the left padding",
        PIPELINE,
        "Pages(params, block.batch), block.k_begin + n * kBlockN, rows);",
        "Pages(params, block.batch), n * kBlockN, rows);",
        "tiles of pages",
    ),
    Fault(
        "slots of pages by mask",
        PAGES,
        "slot - divide(slot, page_size) * page_size.value",
        "slot & (page_size.value - 1)",
        "pages",
    ),
    Fault(
        "K copied before its buffer is free",
        GROUPS_PIPELINE,
        "    mbarrier_wait(smem.k_empty(k.stage), k.round ^ 1);\n",
        "",
        "groups",
    ),
    Fault(
        "V copied before its buffer is free",
        GROUPS_PIPELINE,
        "    mbarrier_wait(smem.v_empty(v.stage), v.round ^ 1);\n",
        "",
        "groups",
    ),
    Fault(
        "Q copied before its buffer is free",
        GROUPS_PIPELINE,
        "    mbarrier_wait(smem.q_empty(q.stage), q.round ^ 1);\n",
        "",
        "groups' tiles",
    ),
    Fault(
        "a ring's first round finds no empty buffer",
        GROUPS_PIPELINE,
        "k.round ^ 1",
        "k.round",
        "groups",
    ),
    Fault("a ring stays in its round", GROUPS_PIPELINE, "      round ^= 1;\n", "", "groups"),
    Fault(
        "more bytes expected than come",
        GROUPS_BOXES,
        "\n  mbarrier_arrive_expect(full, Tile::kBytes);",
        "\n  mbarrier_arrive_expect(full, Tile::kBytes + 16);",
        "groups",
    ),
    Fault(
        "no bytes expected",
        GROUPS_BOXES,
        "\n  mbarrier_arrive_expect(full, Tile::kBytes);",
        "\n  mbarrier_arrive(full);",
        "groups",
    ),
    Fault(
        "a slab of a tile is not copied",
        GROUPS_BOXES,
        "\n  for (int slab = 0; slab < Tile::kSlabs; ++slab)",
        "\n  for (int slab = 0; slab < Tile::kSlabs - 1; ++slab)",
        "groups",
    ),
    Fault(
        "slabs of the same columns",
        GROUPS_BOXES,
        "slab * Tile::kSlabColumns, head",
        "0, head",
        "groups",
    ),
    Fault(
        "head and row exchanged",
        GROUPS_BOXES,
        "slab * Tile::kSlabColumns, head, row,",
        "slab * Tile::kSlabColumns, row, head,",
        "groups",
    ),
    Fault(
        "mbarriers without a fence", GROUPS_PIPELINE, "    fence_mbarrier_init();\n", "", "groups"
    ),
    Fault(
        "mbarriers without a barrier",
        GROUPS_KERNEL,
        "  barrier_cta();  // the barriers are there\n",
        "",
        "groups",
    ),
    Fault(
        "full counts an arrival too many",
        GROUPS_PIPELINE,
        "mbarrier_init(full(i), kHanders);",
        "mbarrier_init(full(i), kHanders + 1);",
        "groups",
    ),
    Fault(
        "empty counts a warp too few",
        GROUPS_PIPELINE,
        "mbarrier_init(empty(i), kWarps);",
        "mbarrier_init(empty(i), kWarps - 1);",
        "groups",
    ),
    Fault(
        "tiles off their swizzle",
        GROUPS_PIPELINE,
        "(start + kTileAlignment - 1) / kTileAlignment * kTileAlignment",
        "start",
        "groups",
    ),
    Fault(
        "a place fewer",
        GROUPS_PIPELINE,
        "constexpr int kPlaces = kQueryStages + 2;",
        "constexpr int kPlaces = kQueryStages;",
        "groups' tiles",
    ),
    Fault(
        "no place with Q",
        GROUPS_PIPELINE,
        "if (first) store_block(smem.places + place.stage * kPlaceBytes, tiles.block());",
        "if (first) tiles.block();",
        "groups",
    ),
    Fault(
        "lanes do not meet before one releases",
        GROUPS_KERNEL,
        "    barrier_warp();  // all lanes have: one that still waits would miss the phase\n",
        "",
        "groups' tiles",
    ),
    Fault(
        "every lane releases",
        GROUPS_KERNEL,
        "if (lane == 0) mbarrier_arrive(empty);",
        "mbarrier_arrive(empty);",
        "groups",
    ),
    Fault(
        "K is not waited for",
        GROUPS_KERNEL,
        f"{WAIT_FOR_K}    self.await_turn();",
        "    self.await_turn();",
        "groups",
    ),
    Fault(
        "the first K is not waited for",
        GROUPS_KERNEL,
        f"{WAIT_FOR_K}    start_scores();",
        "    start_scores();",
        "groups",
    ),
    Fault(
        "V is not waited for",
        GROUPS_KERNEL,
        "    mbarrier_wait(smem.v_full(place.stage), place.round);\n",
        "",
        "groups",
    ),
    Fault(
        "Q is not waited for",
        GROUPS_KERNEL,
        "    mbarrier_wait(smem.q_full(q.stage), q.round);\n",
        "",
        "groups",
    ),
    Fault(
        "K released before it is read",
        GROUPS_KERNEL,
        WAIT_FOR_S + RELEASE_K,
        RELEASE_K + WAIT_FOR_S,
        "groups",
    ),
    Fault(
        "V released before it is read",
        GROUPS_KERNEL,
        WAIT_FOR_O,
        RELEASE_V + WAIT_FOR_O.removesuffix(RELEASE_V),
        "groups",
    ),
    Fault(
        "Q released before it is read",
        GROUPS_KERNEL,
        "      work.first_scores();\n",
        "      self.release(smem.q_empty(q.stage));\n      work.first_scores();\n",
        "groups' tiles",
    ),
    Fault(
        "P packed while it is read",
        GROUPS_KERNEL,
        WAIT_FOR_O,
        f"    pack_probabilities(p, s);\n{WAIT_FOR_O}",
        "groups",
    ),
    Fault(
        "O rescaled in flight",
        GROUPS_KERNEL,
        WAIT_FOR_O,
        f"    softmax.rescale_by(factor, o);\n{WAIT_FOR_O}",
        "groups",
    ),
    Fault(
        "O rescaled early in flight",
        GROUPS_KERNEL,
        "      wgmma_wait<0>();\n      pin(o);\n      softmax.rescale_by",
        "      softmax.rescale_by",
        "groups, peaked",
    ),
    Fault(
        "O not rescaled early",
        GROUPS_KERNEL,
        "      softmax.rescale_by(factor, o);\n      outgrown = false;\n",
        "      outgrown = false;\n",
        "groups, peaked",
    ),
    Fault(
        "one of four sums is lost",
        SOFTMAX,
        "row_sum[1] = sums[2] + sums[3];",
        "row_sum[1] = sums[2];",
        "groups",
    ),
    Fault(
        "S read in flight",
        GROUPS_KERNEL,
        "    wgmma_wait<1>();\n",
        "    wgmma_wait<2>();\n",
        "groups",
    ),
    Fault(
        "the last P V is not waited for",
        GROUPS_KERNEL,
        "    start_output(ring);\n    finish_output();\n",
        "    start_output(ring);\n",
        "groups",
    ),
    Fault(
        "no fence of registers before S",
        GROUPS_KERNEL,
        "    pin(s);\n    wgmma_fence();\n",
        "    pin(s);\n",
        "groups",
    ),
    Fault(
        "the one softmax never rescales",
        GROUPS_KERNEL,
        "work.exponentiate<true, true>(n);",
        "work.exponentiate<true, false>(n);",
        "groups, prescaled",
    ),
    Fault(
        "the one softmax masks no ragged end",
        GROUPS_KERNEL,
        "work.exponentiate<true, true>(n);",
        "work.exponentiate<kMask != MaskKind::full, true>(n);",
        "groups, prescaled",
    ),
    Fault(
        "the loop of one softmax ends a tile early",
        GROUPS_KERNEL,
        "if (n == n_begin) break;",
        "if (n <= n_begin + 1) break;",
        "groups, prescaled",
    ),
    Fault(
        "S is not committed",
        GROUPS_MMA,
        "(k_tile));\n  wgmma_commit();\n",
        "(k_tile));\n",
        "groups",
    ),
    Fault(
        "another swizzle",
        GROUPS_MMA,
        "Tile::kSlabColumns == 64 ? 1 : 2",
        "Tile::kSlabColumns == 64 ? 2 : 1",
        "groups",
    ),
    Fault(
        "another stride between eight rows",
        GROUPS_MMA,
        "8 * Tile::kPitch >> 4",
        "16 * Tile::kPitch >> 4",
        "groups",
    ),
    Fault(
        "another stride between slabs",
        GROUPS_MMA,
        "Tile::kSlabBytes >> 4) << 16",
        "Tile::kPitch >> 4) << 16",
        "groups",
    ),
    Fault(
        "steps of half the columns",
        GROUPS_MMA,
        "k % kSlabSteps * 16 * kElementBytes",
        "k % kSlabSteps * 8 * kElementBytes",
        "groups",
    ),
    Fault(
        "steps of half the rows",
        GROUPS_MMA,
        "k * 16 * ValueTile::kPitch >> 4",
        "k * 8 * ValueTile::kPitch >> 4",
        "groups",
    ),
    Fault(
        "both warpgroups the same rows",
        GROUPS_KERNEL,
        "self.index * kConsumerRows * QueryTile::kPitch",
        "0",
        "groups",
    ),
    Fault(
        "nobody has the first turn",
        GROUPS_KERNEL,
        "if (self.index == kConsumers - 1) self.pass_turn();",
        "",
        "groups",
    ),
    Fault(
        "turns are not passed on",
        GROUPS_KERNEL,
        "    start_output(before);\n    self.pass_turn();\n",
        "    start_output(before);\n",
        "groups",
    ),
    Fault(
        "one turn for all",
        GROUPS_KERNEL,
        "barrier_sync(kTurnBarrier + index, 2 * kWarpgroupThreads)",
        "barrier_sync(kTurnBarrier, 2 * kWarpgroupThreads)",
        "groups",
    ),
    Fault(
        "a skipped tile takes no turn",
        GROUPS_KERNEL,
        "      if (n > cta_begin) self.let_turn_pass();\n",
        "",
        "groups, causal",
    ),
    Fault(
        "a skipped tile is not released",
        GROUPS_KERNEL,
        "  self.release(smem.v_empty(ring.stage));\n  ring.advance();\n}\n",
        "  ring.advance();\n}\n",
        "groups, causal",
    ),
    Fault(
        "more registers than there are",
        GROUPS_KERNEL,
        "kConsumers == 2 ? 40 : 32;",
        "kConsumers == 2 ? 48 : 32;",
        "groups",
    ),
    Fault(
        "registers not given back",
        GROUPS_KERNEL,
        "    release_registers<kProducerRegisters>();\n",
        "",
        "groups",
    ),
    Fault(
        "no fence after rows of V are cleared",
        GROUPS_KERNEL,
        "  fence_proxy_async();  // the product reads what was cleared\n",
        "",
        "groups, packed",
    ),
    Fault(
        "no barrier after rows of V are cleared",
        GROUPS_KERNEL,
        "  barrier_sync(kConsumersBarrier, kWarps * 32);\n",
        "",
        "groups, packed",
    ),
    Fault(
        "a row of V behind the last key stays",
        GROUPS_KERNEL,
        "i = first * kChunks + thread;",
        "i = (first + 1) * kChunks + thread;",
        "groups, packed",
    ),
    Fault(
        "a place read before it is there",
        GROUPS_PIPELINE,
        "kPlaceBytes, tiles.block());\n      barrier_loaders();\n",
        "kPlaceBytes, tiles.block());\n",
        "groups, pages",
    ),
    Fault(
        "a page's next row",
        GROUPS_BOXES,
        "pages.row_of(slot)",
        "pages.row_of(slot + 1)",
        "groups, pages",
    ),
    Fault(
        "a lane misses a phase",
        GROUPS_BOXES,
        "    barrier_loaders();  // all have waited for it: one that still waits would miss the phase\n",
        "",
        "groups, no keys",
    ),
    Fault(
        "every lane draws",
        GROUPS_PIPELINE,
        "if (first && n == min(n_begin, n_last)) tiles.draw();",
        "if (n == min(n_begin, n_last)) tiles.draw();",
        "groups, pages",
    ),
    Fault(
        "no fence after rows are copied",
        GROUPS_ROWS,
        "      fence_proxy_async();  // wgmma reads what was written\n",
        "",
        "groups, rows",
    ),
    Fault(
        "rows handed over before they have landed",
        GROUPS_ROWS,
        "wait_copies<1>();",
        "wait_copies<2>();",
        "groups, rows",
    ),
    Fault(
        "no fence after the last rows are copied",
        GROUPS_ROWS,
        "    wait_copies<0>();\n    fence_proxy_async();\n",
        "    wait_copies<0>();\n",
        "groups, last rows",
    ),
    Fault(
        "the last rows handed over before they have landed",
        GROUPS_ROWS,
        "    wait_copies<0>();\n",
        "",
        "groups, last rows",
    ),
    Fault(
        "the last rows held back while Q is waited for",
        GROUPS_PIPELINE,
        "    if (block.n_begin >= block.n_end) copies.flush();\n",
        "",
        "groups, last rows",
    ),
    Fault(
        "the sign to stop is not handed over",
        GROUPS_PIPELINE,
        "    load_q();\n    copies.flush();\n",
        "    load_q();\n",
        "groups, rows",
    ),
    Fault(
        "rows handed over by one thread",
        GROUPS_ROWS,
        "      mbarrier_arrive(handed);\n",
        "      if (thread == 0) mbarrier_arrive(handed);\n",
        "groups, rows",
    ),
    Fault(
        "rows of the next key tile",
        GROUPS_ROWS,
        "block.k_begin + n * kBlockN",
        "block.k_begin + (n + 1) * kBlockN",
        "groups, rows",
    ),
    Fault(
        "rows behind the last key copied",
        GROUPS_ROWS,
        "block.seqlen_k - n * kBlockN",
        "kBlockN",
        "groups, rows",
    ),
    Fault(
        "packed rows taken for positions",
        GROUPS_BOXES,
        "block.q_begin + row_position(params, block.m_begin)",
        "block.q_begin + block.m_begin",
        "groups, pages",
    ),
    Fault(
        "each split is the first",
        GROUPS_TILES,
        "kSplit ? index - tile * params.splits : 0",
        "0",
        "groups, pages",
    ),
    Fault(
        "no fence after queries are rotated",
        GROUPS_KERNEL,
        "  fence_proxy_async();  // the product reads what was written\n",
        "",
        "groups, rotated",
    ),
    Fault(
        "no barrier after queries are rotated",
        GROUPS_KERNEL,
        "  barrier_sync(kRotatedBarrier + self.index, kWarpgroupThreads);\n",
        "",
        "groups, rotated",
    ),
    Fault(
        "a head's tiles left out",
        GROUPS_TILES,
        "      end += m_tiles * heads;\n",
        "      end += m_tiles * (heads - 1);\n",
        "groups, packed",
    ),
    Fault(
        "rows behind the last sequence left out",
        GROUPS_TILES,
        "query_rows(params, batch).slots",
        "query_rows(params, batch).length",
        "groups, packed",
    ),
    Fault(
        "two tiles drawn at once",
        GROUPS_TILES,
        "atomic_add(params.next_tile, 1)",
        "atomic_add(params.next_tile, 2)",
        "groups, packed",
    ),
    Fault(
        "the first tiles drawn again",
        GROUPS_TILES,
        ": atomic_add(params.next_tile, 1);",
        ": atomic_add(params.next_tile, 1) - params.blocks;",
        "groups, packed",
    ),
)


def mutated(fault: Fault) -> str:
    """The file's text with the fault; ValueError if it does not apply."""
    text = (render.default_folder() / fault.file).read_text(encoding="utf-8")
    if text.count(fault.old) != 1:
        raise ValueError(
            f"{fault.name}: {fault.old!r} stands {text.count(fault.old)} times in {fault.file}"
        )
    return text.replace(fault.old, fault.new)


def make(fault: Fault, folder: Path) -> Path:
    """A copy of the templates with the fault."""
    shutil.copytree(render.default_folder(), folder)
    (folder / fault.file).write_text(mutated(fault), encoding="utf-8")
    return folder


def strided(values: NDArray, dtype: str, layout: str) -> NDArray:
    """The values in a layout, inside a buffer of NaN."""
    embedded = embed(encode(values, dtype), layout)
    flat = embedded.buffer.view(np.float16 if dtype == "fp16" else np.uint16)
    strides = [stride * flat.itemsize for stride in embedded.strides]
    return as_strided(flat[embedded.offset :], embedded.shape, strides)


def run(probe: Probe | SequenceProbe, templates: Path | None = None) -> None:
    """Run a probe; raise if its numbers, its conflicts or anything that it does is wrong."""
    if isinstance(probe, Probe):
        run_dense(probe, templates)
    else:
        run_sequences(probe, templates)


def run_dense(probe: Probe, templates: Path | None) -> None:
    """`run` of a dense call."""
    call = probe.call
    given, expected = solved(call)
    q, k, v = (
        strided(x, call.dtype, layout) for x, layout in zip(given[:3], call.layouts, strict=True)
    )
    views = (
        View(x.ctypes.data, x.shape, tuple(s // 2 for s in x.strides), call.dtype, -1)
        for x in (q, k, v)
    )
    described = dataclasses.replace(call.problem(), align=checks.alignment(*views))
    report = emulate.run(
        probe.spec(described),
        described,
        q,
        k,
        v,
        given.slopes,
        section=probe.section,
        blocks=probe.blocks,
        workers=1,
        templates=templates,
    )
    check(report.out, expected.out, expected.same_dtype, call.dtype, 3 if call.softcap else 2)
    check_lse(report.lse, expected.lse)
    if described.align == 16:
        conflicts = {str(place): count for place, count in report.bank_conflicts.items()}
        assert not conflicts, f"bank conflicts: {conflicts}"
    check_traffic(report, described)


def run_sequences(probe: SequenceProbe, templates: Path | None) -> None:
    """`run` of a call on packed sequences or on a cache."""
    call = probe.call
    given, expected = inference_calls.solved(call)
    if probe.malformed:
        given = spoil(given)
    tensors = arranged(call, given)
    described = call.problem()
    report = emulate.run_variant(
        probe.spec(described),
        described,
        tensors,
        splits=probe.splits,
        blocks=probe.blocks,
        workers=1,
        templates=templates,
    )
    got = results(call, report.out, report.lse, tensors)
    if probe.malformed:
        for cache, name in zip(got.caches, "kv", strict=True):
            wanted = given[f"{name}_cache"].copy()
            wanted[given["block_table"][-1, -1], -1] = given[name][-1, 0]
            np.testing.assert_array_equal(cache, wanted, f"{name}_cache")
    else:
        hold(call, got, expected)
    # Those of the merge are not avoided.
    conflicts = {
        str(place): count for place, count in report.bank_conflicts.items() if place.file != COMBINE
    }
    assert not conflicts, f"bank conflicts: {conflicts}"


def spoil(given: Inputs) -> Inputs:
    """The inputs of a malformed call: see SequenceProbe. What the call must not read is 0, since now it is read."""
    made = {name: np.nan_to_num(x) for name, x in given.items()}
    made["cache_seqlens"][-1] += 1
    made["block_table"][0] = -1
    return made


def arranged(call: VarlenCall | CacheCall, given: Inputs) -> Tensors:
    """The inputs as rtflash takes them: fresh arrays of the call's dtypes."""

    def array(name: str) -> NDArray | None:
        if name not in given:
            return None
        dtype = dtype_of(call, name)
        if dtype in ("fp32", "int32"):
            return given[name].copy()
        bits = encode(given[name], dtype)
        return bits.view(np.float16) if dtype == "fp16" else bits

    signature = inference.VARLEN if isinstance(call, VarlenCall) else inference.KVCACHE
    return signature.arrange(*map(array, signature.inputs))


def results(
    call: VarlenCall | CacheCall, out: NDArray, lse: NDArray, tensors: Tensors
) -> inference_calls.Result:
    """The results as fp32, and the caches after the call."""
    caches = (tensors.k, tensors.v) if isinstance(call, CacheCall) else ()
    values = (decode(x.view(np.uint16), call.dtype) for x in (out, *caches))
    first, *rest = values
    return inference_calls.Result(first, lse, tuple(rest))


def answer(name: str) -> str:
    """How a fault shows, or "" if it does not; in this process."""
    fault = next(fault for fault in FAULTS if fault.name == name)
    with tempfile.TemporaryDirectory(prefix="rtflash-fault-") as folder:
        templates = make(fault, Path(folder, "templates"))
        try:
            run(PROBES[fault.probe], templates)
        except EmulationError as error:
            return str(error.report.findings[0])
        except AssertionError as error:
            return str(error).splitlines()[0]
        except CompileError as error:
            return f"error: does not compile: {error}"
    return ""


def caught(fault: Fault) -> str:
    """How a fault shows, or "" if it does not; in a process of its own, since it may crash or never end."""
    command = [sys.executable, str(Path(__file__).resolve()), "--answer", fault.name]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    try:
        done = subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"no end within {TIMEOUT_S:g} s"
    if done.returncode < 0:
        return f"ended by signal {-done.returncode}"
    if done.returncode > 0:
        return f"error: {done.stderr.strip()}"
    return done.stdout.strip()


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("names", nargs="*", metavar="NAME")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - {fault.name for fault in FAULTS}
    if unknown:
        parser.error(f"no fault is called {', '.join(sorted(unknown))}")
    if arguments.answer:
        print(answer(arguments.names[0]))
        return 0
    with tempfile.TemporaryDirectory(prefix="rtflash-faults-") as folder:
        os.environ["RTFLASH_CACHE_DIR"] = folder  # the mutants are no use to anyone later
        return run_faults(arguments.names, arguments.jobs)


def run_faults(names: list[str], jobs: int) -> int:
    """Run and print the named faults, or all; 1 if more survive than may."""
    chosen = [fault for fault in FAULTS if not names or fault.name in names]
    for probe in PROBES.values():
        run(probe)
    survivors = 0
    with ThreadPoolExecutor(jobs) as pool:
        for fault, shown in zip(chosen, pool.map(caught, chosen), strict=True):
            survived = not shown or shown.startswith("error:")
            survivors += survived
            word = "SURVIVED" if survived else "caught  "
            print(f"{word}  {fault.name}: {shown or fault.survives}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} faults caught")
    return int(survivors > SURVIVORS * len(chosen))


if __name__ == "__main__":
    sys.exit(main())
