"""The emulated kernels: every tile's numbers, conflicts and traffic, and that misdeeds are found and named.

test_forward.py and test_cases.py run emulated too, as one of their backends.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import backends
import gpu_results
import inference_calls
import numpy as np
import pytest
from calls import Call, solved
from compare import check, check_lse
from faults import strided
from inference_calls import CacheCall, VarlenCall
from layouts import decode, encode
from schedule import check_traffic

import rtflash
from rtflash import cxx, device, emulate, render, select, tiles
from rtflash.problem import Problem, Tensors
from rtflash.report import EmulationError, Report
from rtflash.spec import Spec

pytestmark = [pytest.mark.emulated, pytest.mark.usefixtures("emulated_ahead")]

CAUSAL_FEW = Call(4, 130, heads=4, heads_k=1, batch=1, causal=True)
# One architecture for each limit of shared memory in the tables that all share, and Hopper with its own.
ARCHS = {"sm_100a": 227, "sm_80": 163, "sm_86": 99, "sm_75": 64, "sm_90a": 227}


def attend(call: Call, arch: str = "sm_90a", spec: Spec | None = None, **options: Any) -> Report:
    """Run a call on the variant of an architecture, or a given one, and hold it to the bound."""
    given, expected = solved(call)
    problem = call.problem()
    chosen, grid = select.forward(problem, device.for_arch(arch))
    q, k, v = (
        strided(x, call.dtype, layout) for x, layout in zip(given[:3], call.layouts, strict=True)
    )
    options = {"section": grid.section, "splits": grid.splits, **options}
    report = emulate.run(spec or chosen, problem, q, k, v, given.slopes, **options)
    factor = 3 if call.softcap else 2
    check(report.out, expected.out, expected.same_dtype, call.dtype, factor)
    check_lse(report.lse, expected.lse)
    return report


def test_kernels_and_partials_are_used_to_the_letter() -> None:
    """Of the host's source, only what lies in templates/host/ is not the GPU's; and the GPU's holds nothing of it."""
    spec = Spec("bf16", 128, 96, 128, 64, 4, 2, mask="causal", softcap=True, prescale=True)
    sources = {}
    for target in render.TARGETS:
        parts: dict[str, list[str]] = {}
        file = ""
        for line in render.source(spec, target=target).splitlines():
            directive = re.fullmatch(r'#line \d+ "([^"]+)"', line)
            file = directive[1] if directive else file
            parts.setdefault(file, []).append(line)
        sources[target] = parts
    ours = {file: lines for file, lines in sources["host"].items() if not file.startswith("host/")}
    theirs = {file: lines for file, lines in sources["cuda"].items() if file != "ptx.cuh"}
    # An include more leads to a #line more.
    assert {f: [x for x in lines if x and x[:5] != "#line"] for f, lines in ours.items()} == {
        f: [x for x in lines if x and x[:5] != "#line"] for f, lines in theirs.items()
    }
    assert {"host/ptx.cuh", "host/cuda.cuh", "host/runtime.cuh"} <= set(sources["host"])
    assert not any(file.startswith("host/") for file in sources["cuda"])


def test_the_twin_has_every_function_of_its_partial() -> None:
    texts = render.templates()
    pattern = re.compile(r"^__device__ __forceinline__ [\w ]+? (\w+)\(", re.MULTILINE)
    for file in [name for name in texts if f"host/{name}" in texts]:
        wanted, got = (sorted(pattern.findall(texts[name])) for name in (file, f"host/{file}"))
        assert set(wanted) <= set(got)


@pytest.mark.parametrize(
    "call",
    [
        *(
            Call(65, 200, heads=4, heads_k=2, batch=1, head_dim=40, **features)
            for features in (
                {"softcap": 5.0, "magnitude": 3.0},
                {"alibi": "batch"},
                {"window": (40, 9)},
                {},
            )
        ),
        *(Call(heads_k=1, batch=1, head_dim=d, causal=True) for d in (1, 8, 46, 63, 72, 136, 192)),
        *(
            Call(65, 97, batch=1, head_dim=64, layouts=layouts)
            for layouts in (("align4", "bhsd", "align8"), ("bhsd", "every2", "reversed"))
        ),
    ],
    ids=lambda call: call.id,
)
@pytest.mark.parametrize("arch", ["sm_75"])
def test_instructions_of_sm_75(arch: str, call: Call) -> None:
    """What the backend `emulated`, which is an sm_90a, does not reach."""
    attend(call, arch)


INFERENCE = (
    VarlenCall(causal=True, tail=3, num_splits=3, used_k=(129, 0, 90)),
    VarlenCall(page_size=7, window=(40, 9), head_dim=72, num_splits=1),
    VarlenCall(lengths_q=(1, 2, 0), alibi="batch", softcap=5.0),
    CacheCall(seqlen_new=2, seqlen_q=2, causal=True, rotary="halves", rotary_dim=24, leftpad=(9, 0, 1)),
    CacheCall(seqlen_new=1, page_size=16, heads=8, head_dim=136, num_splits=4),
    CacheCall(seqlen_q=20, seqlen_new=20, page_size=3, causal=True, rotary="interleaved", rotary_dim=64),
    CacheCall(rows=5, batch_idx=(4, 0, 2), lengths=77, head_dim=40, head_dim_v=33, num_splits=3),
)  # fmt: skip


@pytest.mark.parametrize("call", INFERENCE, ids=lambda call: call.id)
@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch != emulate.ARCH])
def test_sequences_and_caches_of_other_architectures(
    monkeypatch: pytest.MonkeyPatch, arch: str, call: VarlenCall | CacheCall
) -> None:
    monkeypatch.setenv("RTFLASH_BACKEND", "emulate")
    monkeypatch.setattr(emulate, "run_call", functools.partial(emulate.run_call, arch=arch))
    inference_calls.run(backends.backend(backends.EMULATED), call)


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_warps_gives_the_same_bits(seed: int) -> None:
    call = Call(130, 200, heads_k=1, batch=1, causal=True)
    first, other = attend(call), attend(call, seed=seed, workers=1 + seed % 3)
    np.testing.assert_array_equal(first.out.view(np.uint16), other.out.view(np.uint16))
    np.testing.assert_array_equal(first.lse, other.lse)
    assert first.counts == other.counts


@pytest.mark.parametrize("call", gpu_results.CALLS, ids=lambda call: call.id)
def test_equals_the_gpu(call: Call) -> None:
    """Within one rounding of the output type at the scale of the row, on the variant that the GPU ran."""
    with np.load(gpu_results.RECORD) as kept:
        spec = Spec(**json.loads(str(kept[f"{call.id}.spec"])))
        out, lse = kept[f"{call.id}.out"], kept[f"{call.id}.lse"]
    report = attend(call, spec=spec)
    got = report.out.view(np.uint16).reshape(out.shape)
    assert gpu_results.excess(call, decode(got, call.dtype), out) <= 1
    np.testing.assert_allclose(report.lse, lse, atol=1e-5, rtol=1e-6)


def test_a_cache_is_left_alone_where_something_is_found(tmp_path: Path) -> None:
    """And sequences may append to one slot."""
    folder = tmp_path / "templates"
    shutil.copytree(render.default_folder(), folder)
    kernel = folder / "append.cu"
    old = "slot >= params.slots"
    text = kernel.read_text(encoding="utf-8")
    assert text.count(old) == 1
    kernel.write_text(text.replace(old, "slot > params.slots"), encoding="utf-8")
    cache, new = np.ones((1, 8, 1, 64), np.float16), np.full((2, 1, 1, 64), 2, np.float16)
    rows = np.zeros(2, np.int32)
    for used, what in ((7, set()), (8, {"outside the tensors"})):
        lengths = np.full(2, used, np.int32)
        tensors = Tensors(
            new, cache.copy(), cache.copy(), None, None, None, None, lengths, None, rows, None, new, new
        )  # fmt: skip
        problem = Problem(
            2, 1, 8, 1, 1, 64, 64, "fp16", 1.0, -1, -1, 0.0, False, 16, False, ragged=True, cache_batch=1,
            seqlen_new=1,
        )  # fmt: skip
        spec, _ = select.forward(problem, device.for_arch(emulate.ARCH))
        if what:
            with pytest.raises(EmulationError):
                emulate.run_variant(spec, problem, tensors, templates=folder)
            assert (tensors.k == 1).all()
        report = emulate.run_variant(spec, problem, tensors, templates=folder, check=False)
        assert {found.what for found in report.findings} == what
        assert {found.place.file for found in report.findings} <= {"append.cu"}
        assert (tensors.k[0, :7] == 1).all()
        assert (tensors.v[0, 7] == 2).all() == (used == 7)


def test_partial_results_that_nobody_wrote_are_not_to_be_read(tmp_path: Path) -> None:
    """A part that saw no key writes none; a combine kernel that does not skip it is found out."""
    given, _ = solved(CAUSAL_FEW)
    q, k, v = (strided(x, "fp16", "bshd") for x in given[:3])
    problem = dataclasses.replace(CAUSAL_FEW.problem(), num_splits=4)
    spec, grid = select.forward(problem, device.for_arch(emulate.ARCH))
    assert spec.split
    report = emulate.run(spec, problem, q, k, v, splits=grid.splits)
    assert report.traffic["o_partial"].written == report.traffic["o_partial"].read
    assert report.traffic["o_partial"].written < grid.splits * 2 * report.out.nbytes
    folder = tmp_path / "templates"
    shutil.copytree(render.default_folder(), folder)
    kernel = folder / "combine.cu"
    text, old = kernel.read_text(encoding="utf-8"), "if (weight == 0.f) continue;"
    assert text.count(old) == 1
    kernel.write_text(text.replace(old, ""), encoding="utf-8")
    report = emulate.run(spec, problem, q, k, v, splits=grid.splits, templates=folder, check=False)
    assert {(found.what, found.place.file) for found in report.findings} == {
        ("read of global memory that nobody wrote", "combine.cu")
    }


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("dim", [64, 33])
def test_combine(monkeypatch: pytest.MonkeyPatch, dtype: str, dim: int) -> None:
    random = np.random.default_rng(dim)
    out = random.standard_normal((40, 2, 3, 2, dim)).astype(np.float32)
    lse = random.standard_normal(out.shape[:-1]).astype(np.float32)
    lse[3:, 1], lse[:, 0, 0], out[3:, 1] = -np.inf, -np.inf, np.nan
    expected, expected_lse = rtflash.flash_attn_combine(out, lse)
    monkeypatch.setenv("RTFLASH_BACKEND", "emulate")
    got, got_lse = rtflash.flash_attn_combine(out, lse, out_dtype=dtype)
    bound = {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp32": 1e-6}[dtype]
    np.testing.assert_allclose(got.astype(np.float32), expected, atol=1e-6, rtol=bound)
    np.testing.assert_allclose(got_lse, expected_lse, atol=1e-5)


def test_empty_work() -> None:
    for seqlen_q, seqlen_k, batch in ((0, 5, 1), (5, 0, 1), (5, 5, 0), (130, 0, 1)):
        attend(Call(seqlen_q, seqlen_k, batch=batch, head_dim=256))


def test_empty_work_of_more_pairs_than_params_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RTFLASH_BACKEND", "emulate")
    q = np.empty((2**12, 0, 2**20, 8), np.float16)
    out, lse, _ = rtflash.flash_attn_func(q, q, q, return_attn_probs=True)
    assert (out.shape, lse.shape) == (q.shape, (2**12, 2**20, 0))
    part = np.empty((0, 2**31, 2, 8), np.float16), np.empty((0, 2, 2**31), np.float32)
    merged = rtflash.merge_attention_states(*part, *part)
    assert [x.shape for x in merged] == [x.shape for x in part]


def test_forward_takes_what_the_numpy_backend_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    given, expected = solved(Call(causal=True))
    q, k, v = (strided(x, "fp16", "bshd") for x in given[:3])
    reversed_q = np.ascontiguousarray(q[..., ::-1])[..., ::-1]
    monkeypatch.setenv("RTFLASH_BACKEND", "emulate")
    out = rtflash.flash_attn_func(reversed_q, k, v, causal=True)
    check(out, expected.out, expected.same_dtype, "fp16")
    monkeypatch.delattr(cxx, "make_kernel")
    assert rtflash.flash_attn_func(q, k, v, causal=True).tobytes() == out.tobytes()


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    code = (
        "import numpy as np, rtflash; from rtflash import cxx; x = np.ones((1, 3, 1, 8), np.float16);"
        "assert (rtflash.flash_attn_func(x, x, x) == 1).all(); print(cxx.compile_count)"
    )
    root = Path(rtflash.__file__).parents[1]
    variables = {"RTFLASH_BACKEND": "emulate", "RTFLASH_CACHE_DIR": str(tmp_path)}
    for compiled in ("1", "0"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **variables, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stdout.strip()) == (0, compiled), done.stderr


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RTFLASH_CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C++ compiler" in str(cxx.why_not())
    monkeypatch.setenv("RTFLASH_CXX", "no-such-compiler")
    assert "RTFLASH_CXX is 'no-such-compiler'" in str(cxx.why_not())


# Conflicts and traffic.


ONE: dict[str, Any] = {"heads": 1, "heads_k": 1, "batch": 1}


GROUP: dict[str, Any] = {"heads": 5, "heads_k": 1, "batch": 1}
TABLES = {"tiles": tiles.TILES, "few": tiles.FEW, "some": tiles.SOME}
HOPPER = {"hopper": tiles.HOPPER}


def tables(arch: str) -> dict[str, tiles.Table]:
    """The tables to try as an architecture."""
    return HOPPER if arch == "sm_90a" else TABLES


# Lengths, heads and options of calls for each table.
KINDS: dict[str, dict[str, tuple[tuple[int, int], dict[str, Any]]]] = {
    "tiles": {
        "full": ((130, 150), ONE),
        "even": ((256, 384), {"causal": True, **ONE}),
        "narrow": ((130, 150), {"scale": -1.0, "window": (70, 3), **ONE}),
    },
    "hopper": {
        "full": ((130, 150), ONE),
        "even": ((384, 384), {"causal": True, **ONE}),
        "prescaled": ((130, 150), {"scale": -1.0, "window": (70, 3), **ONE}),
        "narrow": ((23, 150), {"heads": 4, "heads_k": 1, "batch": 1}),
    },
    "few": {
        "one": ((1, 300), GROUP),
        "causal": ((3, 260), {"causal": True, **GROUP}),
        "narrow": ((2, 280), {"scale": -1.0, "window": (70, 3), **GROUP}),
    },
    "some": {
        "full": ((12, 150), GROUP),
        "causal": ((50, 130), {"causal": True, **ONE}),
        "narrow": ((9, 150), {"scale": -1.0, "window": (70, 3), **GROUP}),
    },
}


def table_calls() -> list[Any]:
    """(arch, table, call) for each row of each table: its tiles, and a head_dim that is padded."""
    found = []
    for arch, limit in ARCHS.items():
        dtype = "fp16" if arch == "sm_75" else "bf16"
        for name, table in tables(arch).items():
            for row in table[limit * device.KIB]:
                d, kinds = row.max_head_dim, KINDS[name]
                dv = row.max_head_dim_v if row.max_head_dim_v < d else 0
                calls = {
                    kind: Call(*lengths, head_dim=d, head_dim_v=dv, dtype=dtype, **options)
                    for kind, (lengths, options) in kinds.items()
                }
                lengths, options = kinds["causal" if "causal" in kinds else "even"]
                calls["padded"] = Call(
                    *lengths, head_dim=d - 24, head_dim_v=dv, dtype=dtype, **options
                )
                found += [
                    pytest.param(
                        arch, name, c, id=f"{arch}-{name}-d{d}{f'v{dv}' if dv else ''}-{kind}"
                    )
                    for kind, c in calls.items()
                ]
    return found


def test_every_tile_of_the_tables_is_among_the_calls() -> None:
    for arch, limit in ARCHS.items():
        for name, table in tables(arch).items():
            rows = table[limit * device.KIB]
            wanted = {
                tile for row in rows for tile in (row.tile, row.narrow, row.prescaled) if tile
            }
            assert wanted == {
                tiles.Tile(*(getattr(spec, field) for field in tiles.Tile._fields))
                for case in table_calls()
                if case.values[:2] == (arch, name)
                for spec, _ in [select.forward(case.values[2].problem(), device.for_arch(arch))]
            }
    assert {len(table) for table in TABLES.values()} == {len(ARCHS) - 1}


@pytest.mark.parametrize(("arch", "table", "call"), table_calls())
def test_each_tile_has_no_conflict_and_the_least_traffic(arch: str, table: str, call: Call) -> None:
    report = attend(call, arch)
    conflicts = {str(place): n for place, n in report.bank_conflicts.items()}
    if table == "few" and call.head_dim % 64:
        # Lanes whose chunk is padding come to the copies' lines less often than the others, and so the model sees rows
        # of different passes as one access.
        conflicts = {place: n for place, n in conflicts.items() if "copy.cuh" not in place}
    assert conflicts == {}
    assert report.instructions["wgmma.scores" if table == "hopper" else "ldmatrix.x4"] > 0
    check_traffic(report, call.problem())


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "call",
    [
        Call(256, 256, heads=4, heads_k=2, head_dim=64),
        Call(300, 333, heads=2, heads_k=1, head_dim=96, head_dim_v=40, causal=True),
        Call(333, 300, heads=2, heads_k=2, head_dim=136, head_dim_v=128, causal=True),
        Call(300, 500, heads=1, heads_k=1, head_dim=46, window=(70, 20)),
        Call(129, 129, heads=1, heads_k=1, head_dim=63),
    ],
    ids=lambda call: call.id,
)
def test_traffic_is_what_the_schedule_needs(arch: str, call: Call) -> None:
    check_traffic(attend(call, arch), call.problem())


# Misdeeds: small kernels, each a case of a switch over window_left.

SPEC = Spec("fp16", 64, 64, block_m=32, block_n=16, warps=2, stages=1)
OWN = "smem + 4 * thread"
CHUNK = "smem + 16 * thread"
NEXT_CHUNK = "smem + 16 * ((thread + 1) % kThreads)"
LANE = "smem + 16 * (thread ^ 1)"
OTHER = "smem + 16 * (thread ^ 32)"
WRITTEN = f"store_shared_16({CHUNK}, v); barrier_cta();"
COPY = f"cp_async_16({CHUNK}, params.q + 8 * (thread % 8)); cp_async_commit();"

CLEAN = {
    "own bytes": f"store_shared_4({OWN}, 1); store_shared_4({OWN}, 2);",
    "barrier": f"store_shared_16({CHUNK}, v); barrier_cta(); load_shared_16(v, {NEXT_CHUNK});",
    "copy": f"{COPY} cp_async_wait<0>(); load_shared_16(v, {CHUNK});",
    "barrier of the warp": f"store_shared_16({CHUNK}, v); barrier_warp(); load_shared_16(v, {LANE});",
    "read, barrier of the warp, write": (
        f"{WRITTEN} load_shared_16(v, {LANE}); barrier_warp(); store_shared_16({CHUNK}, v);"
    ),
    "ldmatrix, barrier of the warp, copy": (
        f"{WRITTEN} ldmatrix_x4(v, {CHUNK}); barrier_warp(); {COPY} cp_async_wait<0>();"
        f" barrier_warp(); load_shared_16(v, {LANE});"
    ),
    "a ring of a warp": (
        f"for (int i = 0; i < 3; ++i) {{ store_shared_4({OWN}, 1); barrier_warp();"
        " load_shared_4(smem + (4 * thread ^ 4)); barrier_warp(); }"
    ),
    "pairs": "store_shared_8(smem + 8 * thread, 1, 2); load_shared_4(smem + 8 * thread + 4);",
    "copy, barrier": f"{COPY} cp_async_wait<0>(); barrier_cta(); load_shared_16(v, {NEXT_CHUNK});",
    "older group": f"{COPY} cp_async_commit(); cp_async_wait<1>(); load_shared_16(v, {CHUNK});",
    "nothing read": f"cp_async_16({CHUNK}, params.q + (1 << 30), 0); cp_async_commit();",
    "printf": 'if (thread == 3) printf("thread %d\\n", thread);',
}
RACE = "race"
FAULTS = {
    "write, read": (
        f"{WRITTEN} store_shared_16({CHUNK}, v); load_shared_16(v, {NEXT_CHUNK});",
        RACE,
    ),
    "write, write": ("store_shared_4(smem, thread);", RACE),
    "read, write": (
        f"{WRITTEN} load_shared_16(v, {NEXT_CHUNK}); store_shared_16({CHUNK}, v);",
        RACE,
    ),
    "a shuffle orders nothing": (
        f"{WRITTEN} store_shared_16({CHUNK}, v); shuffle_xor(0.f, 1); load_shared_16(v, {NEXT_CHUNK});",
        RACE,
    ),
    "nor does a vote": (
        f"{WRITTEN} store_shared_16({CHUNK}, v); any_lane(true); load_shared_16(v, {LANE});",
        RACE,
    ),
    "nor does ldmatrix": (
        f"{WRITTEN} store_shared_16({CHUNK}, v); shuffle_index(1, 2); ldmatrix_x4(v, {LANE});",
        RACE,
    ),
    "write, barrier of the warp, read of another": (
        f"{WRITTEN} store_shared_16({CHUNK}, v); barrier_warp();"
        " load_shared_16(v, smem + 16 * ((thread + 32) % kThreads));",
        RACE,
    ),
    "read, barrier of the warp, write of another": (
        f"{WRITTEN} load_shared_16(v, {CHUNK}); barrier_warp();"
        " store_shared_16(smem + 16 * ((thread + 32) % kThreads), v);",
        RACE,
    ),
    "read by one warp, then by another, then written": (
        f"{WRITTEN} load_shared_16(v, {CHUNK}); barrier_warp(); if (thread < 32) {{ load_shared_16(v,"
        f" {CHUNK}); }} else {{ load_shared_16(v, {OTHER}); }} barrier_warp(); if (thread < 32)"
        f" store_shared_16({CHUNK}, v);",
        RACE,
    ),
    "only one of two barriers of the warp": (
        f"for (int i = 0; i < 3; ++i) {{ store_shared_4({OWN}, 1); barrier_warp();"
        " load_shared_4(smem + (4 * thread ^ 4)); }",
        RACE,
    ),
    "copy, barrier of the warp, wait": (
        f"{WRITTEN} {COPY} barrier_warp(); cp_async_wait<0>(); any_lane(true);"
        f" load_shared_16(v, {LANE});",
        RACE,
    ),
    "copy, barrier of the warp, no wait": (
        f"{COPY} barrier_warp(); load_shared_16(v, {LANE});",
        "read before a wait covers the copy",
    ),
    "ldmatrix, write": (
        f"{WRITTEN} ldmatrix_x4(v, {CHUNK}); store_shared_16({CHUNK}, v);",
        RACE,
    ),
    "ldmatrix, copy": (f"{WRITTEN} ldmatrix_x4(v, {CHUNK}); {COPY}", RACE),
    "copy, no barrier": (
        f"{WRITTEN} {COPY} cp_async_wait<0>(); load_shared_16(v, {NEXT_CHUNK});",
        RACE,
    ),
    "unwritten": (
        f"load_shared_16(v, {CHUNK});",
        "read of shared memory that nobody wrote",
    ),
    "no wait": (f"{COPY} load_shared_16(v, {CHUNK});", "read before a wait covers the copy"),
    "barrier, no wait": (
        f"{COPY} barrier_cta(); load_shared_16(v, {NEXT_CHUNK});",
        "read before a wait covers the copy",
    ),
    "newest group": (
        f"cp_async_commit(); {COPY} cp_async_wait<1>(); load_shared_16(v, {CHUNK});",
        "read before a wait covers the copy",
    ),
    "no commit": (
        f"cp_async_16({CHUNK}, params.q); cp_async_wait<0>(); load_shared_16(v, {CHUNK});",
        "read before a wait covers the copy",
    ),
    "write over a copy": (
        f"{COPY} store_shared_16({CHUNK}, v);",
        "write before a wait covers the copy",
    ),
    "past the end": ("store_shared_4(smem + 8192, 1);", "outside shared memory"),
    "before the start": ("store_shared_4(smem - 4, 1);", "outside shared memory"),
    "misaligned": (f"store_shared_16({OWN} + 4, v);", "misaligned in shared memory"),
    "misaligned copy": (
        f"cp_async_16({CHUNK}, params.q + 4);",
        "misaligned in global memory",
    ),
    "misaligned load": ("load_global_4(params.q + 1);", "misaligned in global memory"),
    "before q": ("load_global_16(v, params.q - 8);", "outside the tensors"),
    "copy past q": (
        f"cp_async_16({CHUNK}, params.q + 32 * params.q_strides.row);",
        "outside the tensors",
    ),
    "padding": ("load_global_2(params.q + 64);", "between the elements of a tensor"),
    "half a chunk of padding": (
        f"cp_async_16({CHUNK}, params.q + 64, 8);",
        "between the elements of a tensor",
    ),
    "input written": (
        "store_global_2(const_cast<Element*>(params.q), 0);",
        "write to an input",
    ),
    "output read": ("load_global_2(params.o);", "read of an output"),
    "output twice": ("store_global_2(params.o, 0);", "output written twice"),
    "more bytes than a copy has": (
        f"cp_async_8({CHUNK}, params.q, 16);",
        "cp.async of more bytes than it copies",
    ),
    "half of the block": (
        "if (thread < 32) barrier_cta();",
        "threads of the block end without the barrier",
    ),
    "two instructions": (
        "if (lane < 16) { shuffle_xor(0.f, 1); } else { any_lane(true); }",
        "lanes of the warp wait at another instruction",
    ),
    "half of the warp at its barrier": (
        "if (lane < 16) barrier_warp();",
        "lanes of the warp have ended",
    ),
    "half of the warp": ("if (lane < 16) shuffle_xor(0.f, 1);", "lanes of the warp have ended"),
    "barrier or shuffle": (
        "if (lane < 16) { shuffle_xor(0.f, 1); } else { barrier_cta(); }",
        "lanes of the warp wait at a barrier instead",
    ),
}
BANKS = {
    "one word": ("store_shared_4(smem + 128 * (thread / 32), 0);", 0),
    "one row": (f"store_shared_4({OWN}, 0);", 0),
    "one bank": ("store_shared_4(smem + 128 * lane + 4 * (thread / 32), 0);", 2 * 31),
    "every other bank": ("store_shared_4(smem + 8 * thread, 0);", 2 * 1),
    "pairs": ("store_shared_8(smem + 8 * thread, 0, 0);", 0),
    "a column of pairs": ("if (thread < 32) store_shared_8(smem + 128 * lane, 0, 0);", 2 * 15),
    "chunks": (f"store_shared_16({CHUNK}, v);", 0),
    "a column of chunks": ("if (thread < 32) store_shared_16(smem + 128 * lane, v);", 4 * 7),
    "a copied column": ("if (thread < 32) cp_async_16(smem + 128 * lane, params.q);", 4 * 7),
    "a column of matrices": (
        "for (int i = 0; i < 8; ++i) store_shared_16(smem + 1024 * i + 16 * thread, v);"
        " barrier_cta(); ldmatrix_x4(v, smem + 128 * lane);",
        2 * 4 * 7,
    ),
    "swizzled matrices": (
        "for (int i = 0; i < 8; ++i) store_shared_16(smem + 1024 * i + 16 * thread, v);"
        " barrier_cta(); ldmatrix_x4(v, smem + 128 * lane + 16 * (lane % 8));",
        0,
    ),
}
BODIES = [*CLEAN.values(), *(body for body, _ in (*FAULTS.values(), *BANKS.values()))]
HEAD = """#include "epilogue.cuh"
extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    KERNEL_NAME(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) unsigned char shared_smem[];
  const uint32 smem = shared_address(shared_smem);
  const int thread = thread_index();
  const int lane = thread % 32;
  uint32 v[4] = {};
  switch (params.window_left) {
"""


def own_kernel(folder: Path, text: str) -> Path:
    """A copy of the templates whose kernel is `text`."""
    shutil.copytree(render.default_folder(), folder)
    (folder / SPEC.kernel_file).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def misdeeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Templates with one kernel of all BODIES: body i is case i, on line 10 + i."""
    cases = "".join(f"case {i}: {{ {body} }} break;\n" for i, body in enumerate(BODIES))
    return own_kernel(tmp_path_factory.mktemp("misdeeds") / "templates", f"{HEAD}{cases}}}\n}}\n")


def run_body(templates: Path, body: str, seed: int = 0) -> Report:
    """Run one of BODIES in one block; q has rows of 64 elements, 72 apart."""
    q = np.zeros((1, 32, 1, 72), np.float16)[..., :64]
    k = np.zeros((1, 64, 1, 64), np.float16)
    problem = Problem(
        1, 32, 64, 1, 1, 64, 64, "fp16", 1.0, BODIES.index(body), -1, 0.0, False, 16, False
    )
    return emulate.run(SPEC, problem, q, k, k, seed=seed, check=False, templates=templates)


def misdeeds_of(report: Report) -> set[str]:
    """What was found, but that the small kernels write no output."""
    return {
        found.what for found in report.findings if "that nobody wrote" not in found.what[5:]
    } | {found.what for found in report.findings if found.what.startswith("read of shared")}


@pytest.mark.parametrize("name", CLEAN)
def test_nothing_is_found_where_nothing_is_wrong(misdeeds: Path, name: str) -> None:
    for seed in range(3):
        assert misdeeds_of(run_body(misdeeds, CLEAN[name], seed)) == set()


@pytest.mark.parametrize("name", FAULTS)
def test_misdeeds_are_found(misdeeds: Path, name: str) -> None:
    body, what = FAULTS[name]
    for seed in range(3):
        report = run_body(misdeeds, body, seed)
        assert misdeeds_of(report) == {what}
        found = next(finding for finding in report.findings if finding.what == what)
        line = 10 + BODIES.index(body)
        assert (found.place.file, found.place.line) == (SPEC.kernel_file, line)
        assert found.race == (what == RACE)
        if found.race:
            assert found.other is not None
            assert (found.other.file, found.other.line) == (SPEC.kernel_file, line)
        assert f"{SPEC.kernel_file}:{line} ({found.place.instruction})" in str(found)


@pytest.mark.parametrize("name", BANKS)
def test_bank_conflicts_are_counted(misdeeds: Path, name: str) -> None:
    body, conflicts = BANKS[name]
    report = run_body(misdeeds, body)
    assert sum(report.bank_conflicts.values()) == conflicts


def test_an_error_names_the_lines(misdeeds: Path) -> None:
    body, _ = FAULTS["copy, no barrier"]
    report = run_body(misdeeds, body)
    message = str(EmulationError(report))
    place = rf"{SPEC.kernel_file}:{10 + BODIES.index(body)}"
    assert f"race: {place} (ld.shared.16) and {place} (cp.async.16), block 0, thread" in message
    assert "bytes of an output that nobody wrote: o" in message


def test_printf(misdeeds: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_body(misdeeds, CLEAN["printf"])
    ctypes.CDLL(None).fflush(None)
    assert capfd.readouterr().out == "thread 3\n"


CONVERT = """#include "epilogue.cuh"
extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    KERNEL_NAME(const __grid_constant__ Params params) {
  if (block_index() > 0) return;  // one block walks over all numbers
  for (int i = thread_index(); i < params.seqlen_q * params.heads; i += kThreads) {
    const float x = __builtin_bit_cast(float, load_global_4(params.alibi_slopes + i));
    store_global_2(params.o + i, static_cast<uint16>(pack_elements(x, 0.f)));
    store_global_4(params.lse + i, __builtin_bit_cast(uint32, exp2_approx(x)));
  }
}
"""


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_conversions(tmp_path: Path, dtype: str) -> None:
    """Rounding of every kind of fp32 number, and 2^x at its ends."""
    random = np.random.default_rng(zlib.crc32(dtype.encode()))
    values = random.integers(0, 2**32, 6000, np.uint32).view(np.float32)
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    neighbours = np.float32(1) + np.float32(2**-11) * np.arange(-1, 2, dtype=np.float32)
    with np.errstate(all="ignore"):
        ties = np.concatenate([halves[::7] * factor for factor in neighbours])
    edges = np.array([0.0, -0.0, 65519.996, 65520.0, 2.0**-25, 3 * 2.0**-25, 2.0**-14], np.float32)
    ends = np.array([np.inf, -np.inf, np.nan, -126.5, -127.0, 128.0], np.float32)
    x = np.concatenate([values, ties, edges, ends])
    spec = dataclasses.replace(SPEC, dtype=dtype, head_dim=1, head_dim_v=1, align=2)
    q = np.zeros((1, 1, x.size, 1), np.float16)
    problem = Problem(1, 1, 1, x.size, 1, 1, 1, dtype, 1.0, -1, -1, 0.0, True, 2, False)
    folder = own_kernel(tmp_path / "templates", CONVERT)
    report = emulate.run(
        spec, problem, q, q[:, :, :1], q[:, :, :1], x, check=False, templates=folder
    )
    got = report.out.view(np.uint16).reshape(-1)
    with np.errstate(over="ignore"):
        wanted = encode(x, dtype)
    finite = ~np.isnan(x)
    np.testing.assert_array_equal(got[finite], wanted[finite])
    assert (got[~finite] == 0x7FFF).all()
    with np.errstate(all="ignore"):
        powers = np.exp2(x.astype(np.float64)).astype(np.float32)
    powers[np.abs(powers) < 2.0**-126] = 0
    np.testing.assert_allclose(report.lse.reshape(-1), powers, rtol=3e-7)


@pytest.mark.parametrize("rows", [70, 1])
@pytest.mark.parametrize("scale", [1e10, 2.0**60, 2.0**16 * 0.99])
def test_great_scales(monkeypatch: pytest.MonkeyPatch, scale: float, rows: int) -> None:
    """The rounding of maximum * scale must not be left in an exponent."""
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((1, 70, 2, 64)).astype(np.float16) for _ in range(3))
    expected, expected_lse, _ = rtflash.flash_attn_func(
        q[:, :rows], k, v, softmax_scale=scale, return_attn_probs=True
    )
    monkeypatch.setenv("RTFLASH_BACKEND", "emulate")
    out, lse, _ = rtflash.flash_attn_func(
        q[:, :rows], k, v, softmax_scale=scale, return_attn_probs=True
    )
    np.testing.assert_allclose(out.astype(np.float32), expected.astype(np.float32), atol=2e-3)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)


def test_parts_without_keys_are_not_read_beside_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = np.ones((1, 1, 1, 8), np.float16), np.ones((1, 200, 1, 8), np.float16)
    v = np.ones_like(k)
    k[0, 0] = np.inf
    lengths = np.array([3], np.int32)
    monkeypatch.setenv("RTFLASH_BACKEND", "emulate")
    out = rtflash.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, num_splits=3)
    assert np.isnan(out).all()


def test_empty_appends(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not written may be read-only, and expanded."""
    random = np.random.default_rng(0)
    q, cache = (random.standard_normal((2, n, 1, 8)).astype(np.float16) for n in (1, 5))
    cache[1] = cache[0]
    cache = np.broadcast_to(cache[:1], cache.shape)
    new = np.zeros((2, 0, 1, 8), np.float16)
    wanted = rtflash.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=5)
    for backend in ("numpy", "emulate"):
        monkeypatch.setenv("RTFLASH_BACKEND", backend)
        got = rtflash.flash_attn_with_kvcache(q, cache, cache, new, new, cache_seqlens=5)
        np.testing.assert_allclose(got, wanted, atol=2e-3)
