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

import numpy as np
from calls import Call, solved
from compare import check, check_lse
from layouts import embed, encode
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray
from schedule import check_traffic

from rtflash import emulate, problem, render
from rtflash.build import CompileError
from rtflash.problem import Problem
from rtflash.report import EmulationError
from rtflash.select import Tile
from rtflash.spec import Spec
from rtflash.tensor import View

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 120.0  # a mutated loop may never end
SURVIVORS = 0.05  # of all faults


@dataclass(frozen=True)
class Probe:
    """A call on a variant of a fixed tile: what the mutations need must not change with the tables."""

    call: Call
    tile: Tile
    isa: int = 80
    section: int = 1

    def spec(self, described: Problem) -> Spec:
        """The variant."""
        p = described
        return Spec(
            dtype=p.dtype,
            head_dim=p.head_dim,
            head_dim_v=p.head_dim_v,
            isa=self.isa,
            mask=p.mask,
            softcap=p.softcap > 0,
            alibi=p.alibi,
            prescale=p.softcap > 0 or p.alibi,
            even_m=p.seqlen_q % self.tile.block_m == 0,
            even_n=p.seqlen_k % self.tile.block_n == 0,
            align=p.align,
            **self.tile._asdict(),
        )


TWO_STAGES = Tile(128, 64, 4, 2, q_in_regs=True)
ONE_STAGE = Tile(128, 64, 4, 1)
PADDED = ("padded", "bhsd", "every2")
ONE = {"heads": 1, "heads_k": 1, "batch": 1}
# Lengths put limits of masks at the edges of tiles: 192 - 130 = 62 is one less than a tile's last
# key, and the window of 60 to its left starts one key after a tile's first.
PROBES = {
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
WAIT_K = """    wait_copies<0>();
    barrier_cta();
    if constexpr (kStages == 1) {"""
WAIT_V = """      wait_copies<0>();
      barrier_cta();
      if (n > n_begin) {"""
WAIT_Q = "      wait_copies<1>();"
NEXT_V = """    } else if (n > n_begin) {
      load_v<false>(next_stage(), kBlockN);
      commit_copies();"""

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
        "block.batch * k.batch",
        "block.batch * v.batch",
        "causal",
    ),
    Fault(
        "ragged V rows not checked",
        PIPELINE,
        "load_v<!kEvenN>(stage_smem, rows)",
        "load_v<false>(stage_smem, rows)",
        "window",
    ),
    Fault(
        "first tile one key late",
        PIPELINE,
        "(block.n_end - 1) * kBlockN;",
        "(block.n_end - 1) * kBlockN + 1;",
        "even",
    ),
    Fault("Q waits for a group too few", KERNEL, WAIT_Q, WAIT_Q.replace("<1>", "<2>"), "causal"),
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
        "      barrier_cta();     // every",
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
        KERNEL,
        "copy.load_async<!kEvenM>",
        "copy.load_async<false>",
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
        "row_end = first_row + shift + right + 1 - first_column",
        "row_end = first_row + shift + right - first_column",
        "causal",
    ),
    Fault(
        "window's left end one key late",
        MASK,
        "row_begin = first_row + shift - params.window_left - first_column",
        "row_begin = first_row + shift - params.window_left + 1 - first_column",
        "window",
    ),
    Fault(
        "cut to the right found a key late",
        MASK,
        "shift + right + 1);",
        "shift + right + 2);",
        "causal",
    ),
    Fault(
        "cut to the left found a key late",
        MASK,
        "+ shift - params.window_left;\n    end",
        "+ shift - params.window_left - 1;\n    end",
        "left window",
    ),
    Fault(
        "keys past the end seen", MASK, ": min(end, row_end + row);", ": row_end + row;", "window"
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
        "block.n_end = min(block.n_end, (keys_end + kBlockN - 1) / kBlockN);",
        "block.n_end = (keys_end + kBlockN - 1) / kBlockN;",
        "early window",
    ),
    Fault(
        "tiles before the keys",
        BLOCK,
        "max(block.m_begin + shift - params.window_left, 0) / kBlockN",
        "(block.m_begin + shift - params.window_left) / kBlockN",
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
        "min(params.section, params.head_batches - section * params.section)",
        "params.section",
        "even",
    ),
    Fault(
        "key heads dealt in turn",
        BLOCK,
        "block.head / params.group",
        "block.head % params.group",
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
        "shuffle_xor(row_max, 2)",
        "shuffle_xor(row_max, 1)",
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
        "overwrites.\n  barrier_cta();",
        "overwrites.\n",
        "even",
    ),
    Fault(
        "no barrier after O is staged",
        EPILOGUE,
        "wrote them.\n  barrier_cta();",
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
        EPILOGUE,
        "* params.heads + block.head;",
        "* params.heads + block.head_k;",
        "causal",
    ),
    Fault("ragged rows of O stored", EPILOGUE, "if (!kEvenM && row >= rows) break;", "", "causal"),
    Fault(
        "ragged rows of the LSE stored",
        EPILOGUE,
        "if (kEvenM || row < rows)",
        "if (true)",
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
        "static_cast<float>(abs(distance))",
        "static_cast<float>(distance)",
        "features",
    ),
    Fault("ALiBi's rows", "score.cuh", "8 * (i / 2) - 8 * j", "8 * (i % 2) - 8 * j", "features"),
    Fault(
        "half of the inner dimension",
        "sm80/mma.cuh",
        "mma_m16n8k8_fp16(d, a[2], a[3], b1);",
        "",
        "old",
    ),
    Fault(
        "fp16 for bf16",
        "sm80/mma.cuh",
        "return pack_bf16(low, high);",
        "return pack_fp16(low, high);",
        "window",
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


def run(probe: Probe, templates: Path | None = None) -> None:
    """Run a probe; raise if its numbers, its conflicts or anything that it does is wrong."""
    call = probe.call
    given, expected = solved(call)
    q, k, v = (
        strided(x, call.dtype, layout) for x, layout in zip(given[:3], call.layouts, strict=True)
    )
    views = (
        View(x.ctypes.data, x.shape, tuple(s // 2 for s in x.strides), call.dtype, -1)
        for x in (q, k, v)
    )
    described = dataclasses.replace(call.problem(), align=problem.alignment(*views))
    report = emulate.run(
        probe.spec(described),
        described,
        q,
        k,
        v,
        given.slopes,
        section=probe.section,
        workers=1,
        templates=templates,
    )
    check(report.out, expected.out, expected.same_dtype, call.dtype, 3 if call.softcap else 2)
    check_lse(report.lse, expected.lse)
    if described.align == 16:
        conflicts = {str(place): count for place, count in report.bank_conflicts.items()}
        assert not conflicts, f"bank conflicts: {conflicts}"
    check_traffic(report, described)


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
