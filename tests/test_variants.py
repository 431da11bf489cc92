"""Compiles the shipped tile table for its architectures, without a GPU, and holds its resources to tests/variants.json.

usage of the file itself: python tests/test_variants.py --update   rewrite tests/variants.json
                          python tests/test_variants.py --all      compile the whole table, report faults, write nothing

The tests take a sample: every tile with the features that press hardest on registers. A variant may use fewer registers
than the table says, never more; another NVRTC than the table's is only held to what the hardware has.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rtflash import artifacts, device, listed, nvrtc, select
from rtflash.other_specs import AppendSpec, CombineSpec
from rtflash.problem import Problem
from rtflash.spec import AnySpec, Spec

TABLE = Path(__file__).with_name("variants.json")
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
# One architecture of each shared-memory limit is sampled widely; the others share its tiles.
WIDE = ("sm_75", "sm_80", "sm_86", "sm_90")
REGISTERS_PER_SM = 65536
# A warp's registers are allocated in units of 256, 8 a thread.
REGISTER_UNIT = 8


def sample(arch: str) -> list[AnySpec]:
    """Variants of every tile that an architecture's tables ship, and of the kernels beside the forward.

    Lengths even and odd, both dtypes, the three masks, the terms that press hardest on registers together, an odd
    head_dim, whose rows are loaded 2 bytes at a time; packed rows split, ragged, paged and rotated.
    """
    gpu = device.for_arch(arch)
    table = listed.table_specs(gpu)
    first, last = table[0].dtype, table[-1].dtype
    wide = arch in WIDE
    chosen: dict[AnySpec, None] = {}
    for spec in table:
        kind = spec.mask, spec.softcap, spec.alibi, spec.prescale, spec.even_m, spec.even_n
        if spec.pack_gqa or spec.ragged:
            if spec.dtype == last and is_pressing(spec, wide):
                chosen[spec] = None
            continue
        even = spec.isa != 90  # which has no variants of even lengths
        if kind == ("causal", False, False, False, even, even) and spec.dtype == last:
            chosen[spec] = None
        if kind == ("full", False, False, False, False, False):
            if spec.dtype == (first if wide else last):
                chosen[spec] = None
            if spec.dtype == last and wide:
                dim = spec.head_dim - 1
                odd = dataclasses.replace(CALL, head_dim=dim, head_dim_v=dim, dtype=last, align=2)
                chosen[select.variant(odd, gpu, select.TILES)] = None
            if spec.gather:
                chosen |= {dataclasses.replace(spec, align=align): None for align in (8, 4, 2)}
        if spec.dtype == last and wide:
            if kind == ("window", True, True, True, False, False):
                chosen[spec] = None
            if kind == ("causal", False, False, True, False, False):
                chosen[spec] = None
    chosen[CombineSpec(last)] = chosen[CombineSpec(first, first, 1)] = None
    chosen[AppendSpec(last, "interleaved")] = chosen[AppendSpec(first, "halves")] = None
    return list(chosen)


def is_pressing(spec: Spec, wide: bool) -> bool:
    """Whether a variant of packed or ragged rows is in the sample."""
    hardest = (spec.mask, spec.softcap, spec.alibi) == ("window", True, True)
    if not spec.pack_gqa:
        return wide and hardest
    if hardest:
        return wide and spec.rotary != "none" and not spec.split
    if (spec.mask, spec.prescale) != ("full", False) or spec.rotary != "none":
        return False
    return spec.split if spec.paged else wide and not spec.ragged and not spec.split


CALL = Problem(
    batch=1,
    seqlen_q=1,
    seqlen_k=1,
    heads=8,
    heads_k=8,
    head_dim=64,
    head_dim_v=64,
    dtype="fp16",
    softmax_scale=1.0,
    window_left=-1,
    window_right=-1,
    softcap=0.0,
    alibi=False,
    align=16,
    boxes=True,
)
VARIANTS = [(arch, spec) for arch in ARCHS for spec in sample(arch)]


def target(arch: str) -> str:
    """What the kernels of an architecture are compiled for, "sm_90a" for "sm_90"."""
    return device.for_arch(arch).arch


def faults(arch: str, made: artifacts.Artifact) -> list[str]:
    """What a shipped kernel must not have, table or no table."""
    used, spec = made.resources, made.spec
    gpu = device.for_arch(arch)
    rounded = -(-used.registers // REGISTER_UNIT) * REGISTER_UNIT
    found = {
        "spills": used.spill_stores or used.spill_loads,
        "local memory": used.local_bytes,
        "compiler warnings": made.warnings,
        "static shared memory": used.static_shared_bytes,
        "more shared memory than a CTA has": spec.shared_bytes > gpu.shared_bytes_per_block,
        "too many registers for its CTAs per SM": rounded
        * spec.threads
        * getattr(spec, "blocks_per_sm", 1)
        > REGISTERS_PER_SM,
        "no cubin": made.cubin[:4] != b"\x7fELF",
    }
    return [f"{what} ({value})" for what, value in found.items() if value]


@pytest.fixture(scope="module")
def compiled(
    request: pytest.FixtureRequest,
) -> Iterator[Callable[[str, AnySpec], artifacts.Artifact]]:
    """The artifact of a variant. Those of all selected tests are compiled ahead, a core each.

    Under pytest-xdist the workers share the tests out, so each compiles its own as they come.
    """
    pytest.importorskip("cupy")
    known = nvrtc.supported_archs()
    futures: dict[tuple[str, AnySpec], Future[artifacts.Artifact]] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:

        def get(arch: str, spec: AnySpec) -> artifacts.Artifact:
            if target(arch) not in known:
                pytest.skip(f"NVRTC {nvrtc.version()} does not know {target(arch)}")
            if (arch, spec) not in futures:
                futures[arch, spec] = pool.submit(artifacts.compile, spec, target(arch))
            return futures[arch, spec].result()

        if "PYTEST_XDIST_WORKER" not in os.environ:
            for item in request.session.items:
                wanted: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
                if "arch" in wanted and "spec" in wanted and target(wanted["arch"]) in known:
                    key = wanted["arch"], wanted["spec"]
                    futures[key] = pool.submit(artifacts.compile, key[1], target(key[0]))
        yield get
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize(
    ("arch", "spec"),
    [pytest.param(arch, spec, id=f"{arch}-{spec.name}") for arch, spec in VARIANTS],
)
def test_variant(
    compiled: Callable[[str, AnySpec], artifacts.Artifact], arch: str, spec: AnySpec
) -> None:
    made = compiled(arch, spec)
    assert not faults(arch, made)
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    kept = table["variants"].get(arch, {}).get(spec.name)
    assert kept is not None, (
        "not in tests/variants.json: run python tests/test_variants.py --update"
    )
    registers, shared_bytes = kept
    assert spec.shared_bytes == shared_bytes
    if table["nvrtc"] == list(nvrtc.version()):
        assert made.resources.registers <= registers


def test_the_table_holds_nothing_else() -> None:
    kept = json.loads(TABLE.read_text(encoding="utf-8"))["variants"]
    wanted = {(arch, spec.name) for arch, spec in VARIANTS}
    assert {(arch, name) for arch, names in kept.items() for name in names} == wanted


@pytest.mark.parametrize("mask", [(-1, -1), (-1, 0), (100, 0)], ids=["full", "causal", "window"])
@pytest.mark.parametrize("arch", ARCHS)
def test_a_hundred_random_lengths_meet_at_most_four_variants(
    arch: str, mask: tuple[int, int]
) -> None:
    """Of a kernel: the tile of few, of some or of many rows, on Hopper of packed ones too; whatever the lengths, the
    batch and the heads."""
    random = np.random.default_rng(0)
    for head_dim in (1, 40, 64, 96, 128, 160, 192, 256):
        met: set[AnySpec] = set()
        known: set[AnySpec] = set()
        for _ in range(100):
            seqlen_q, seqlen_k = (int(2 ** random.uniform(0, 17)) for _ in range(2))
            seqlen_q, seqlen_k = (n // 256 * 256 if n % 3 == 0 else n for n in (seqlen_q, seqlen_k))
            call = dataclasses.replace(
                CALL,
                batch=int(random.integers(1, 100)),
                seqlen_q=seqlen_q,
                seqlen_k=seqlen_k,
                heads=8 * int(random.integers(1, 9)),
                heads_k=int(2 ** random.integers(0, 4)),
                head_dim=head_dim,
                head_dim_v=head_dim,
                window_left=mask[0],
                window_right=mask[1],
            )
            met.add(select.forward(call, device.for_arch(arch))[0])
            known |= set(listed.every_variant(call, device.for_arch(arch)))
        tiles = Counter((spec.block_m, spec.block_n, spec.key_warps, spec.pack_gqa) for spec in met)
        assert len(tiles) <= (4 if select.is_hopper(device.for_arch(arch)) else 3)
        assert max(tiles.values()) <= 4
        assert met <= known


def compile_all(variants: Sequence[tuple[str, AnySpec]]) -> dict[str, dict[str, list[int]]]:
    """Compile, print every fault and the median time; registers and shared bytes by architecture and name."""
    made: dict[str, dict[str, list[int]]] = {arch: {} for arch in ARCHS}
    seconds, bad = [], 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        pending = {
            pool.submit(artifacts.compile, spec, target(arch)): arch for arch, spec in variants
        }
        for future in as_completed(pending):
            arch, artifact = pending[future], future.result()
            used, spec = artifact.resources, artifact.spec
            made[arch][spec.name] = [used.registers, spec.shared_bytes]
            seconds.append(used.seconds)
            if found := faults(arch, artifact):
                bad += 1
                print(
                    f"{arch} {spec.name}: {used.registers} registers; {', '.join(found)}",
                    flush=True,
                )
    print(f"{len(variants)} variants, {bad} with faults; median {statistics.median(seconds):.2f} s")
    return made


def write(variants: dict[str, dict[str, list[int]]]) -> None:
    """Write tests/variants.json, a line per variant."""
    archs = []
    for arch, names in variants.items():
        lines = [f'   "{name}": {json.dumps(values)}' for name, values in sorted(names.items())]
        archs.append(f'  "{arch}": {{\n' + ",\n".join(lines) + "\n  }")
    head = f'{{\n "nvrtc": {json.dumps(nvrtc.version())},\n "columns": ["registers", "shared_bytes"],\n'
    body = ' "variants": {\n' + ",\n".join(archs) + "\n }\n}\n"
    TABLE.write_text(head + body, encoding="utf-8")


def main() -> int:
    """Command line; the exit status."""
    parser = argparse.ArgumentParser(description="Resources of the shipped kernels.")
    parser.add_argument("--update", action="store_true", help="rewrite tests/variants.json")
    parser.add_argument("--all", action="store_true", help="compile the whole table")
    arguments = parser.parse_args()
    if arguments.all:
        compile_all([(a, spec) for a in ARCHS for spec in listed.table_specs(device.for_arch(a))])
    if arguments.update:
        write(compile_all(VARIANTS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
