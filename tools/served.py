"""Calls to serve, and the kernels that serve them on an architecture: what `rtflash generate` compiles."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rtflash import device, listed, nvrtc, select
from rtflash.ahead import Inference, inference_calls
from rtflash.problem import Problem
from rtflash.spec import ALIGNMENTS, ELEMENT_BYTES, ISAS, AnySpec, Spec

# Query and key lengths that every tile divides, and that none does.
LENGTHS: dict[str, list[tuple[int, int]]] = {
    "even": [(8192, 8192)],
    "odd": [(8191, 8191)],
    "all": [(sq, sk) for sq in (8192, 8191) for sk in (8192, 8191)],
}
FEATURES = ("softcap", "alibi")
WINDOWS = {"full": (-1, -1), "causal": (-1, 0), "window": (1024, 0)}


class Variant(NamedTuple):
    """A kernel for an architecture."""

    spec: AnySpec
    arch: str


def problems(
    dtypes: Sequence[str],
    head_dims: Sequence[tuple[int, int]],
    masks: Sequence[str],
    features: Sequence[frozenset[str]],
    lengths: Sequence[tuple[int, int]],
    strided: bool = False,
) -> Iterator[Problem]:
    """One representative call per combination, on row-major tensors.

    Parameters
    ----------
    dtypes : "fp16", "bf16".
    head_dims : (head_dim, head_dim_v).
    masks : keys of WINDOWS.
    features : sets of FEATURES.
    lengths : (seqlen_q, seqlen_k).
    strided : whether each call comes on tensors that TMA cannot read, too.
    """
    for dtype, (d, dv), mask, extra, (sq, sk) in itertools.product(
        dtypes, head_dims, masks, features, lengths
    ):
        left, right = WINDOWS[mask]
        align = math.gcd(max(ALIGNMENTS), d * ELEMENT_BYTES, dv * ELEMENT_BYTES)
        call = Problem(
            batch=4,
            seqlen_q=sq,
            seqlen_k=sk,
            heads=32,
            heads_k=8,
            head_dim=d,
            head_dim_v=dv,
            dtype=dtype,
            softmax_scale=d**-0.5,
            window_left=left,
            window_right=right,
            softcap=30.0 if "softcap" in extra else 0.0,
            alibi="alibi" in extra,
            align=align,
            boxes=align == max(ALIGNMENTS),
        )
        yield call
        if strided:
            yield dataclasses.replace(call, boxes=False)


def variants(
    archs: Iterable[str], calls: Iterable[Problem], wanted: Inference | None = None
) -> tuple[list[Variant], list[str]]:
    """The distinct kernels that serve the calls, and why some calls have none.

    `wanted`: calls of inference beside each of the dense ones.

    Raises
    ------
    ValueError
        An architecture is unknown.
    """
    devices = {arch: device.for_arch(arch) for arch in archs}
    found: dict[Variant, None] = {}
    refused: dict[str, None] = {}
    for arch, call in itertools.product(devices, list(calls)):
        try:
            specs: list[AnySpec] = [select.forward(call, devices[arch])[0]]
            for other in inference_calls(call, wanted or Inference()):
                specs += listed.every_variant(other, devices[arch])
            found.update(dict.fromkeys(Variant(spec, arch) for spec in specs))
        except (ValueError, TypeError, NotImplementedError) as error:
            refused[f"{arch}: {error}"] = None
    return list(found), list(refused)


def table_variants(archs: Iterable[str]) -> list[Variant]:
    """Every kernel that the shipped tile table makes on the architectures."""
    return [Variant(s, arch) for arch in archs for s in listed.table_specs(device.for_arch(arch))]


def why_not_on_its_gpu(variant: Variant) -> str | None:
    """None where the GPUs of a variant's architecture can launch it, or are not known here; else the reason."""
    spec, arch = variant
    if nvrtc.is_ptx(arch) and isinstance(spec, Spec):
        return why_not_as_ptx(spec, arch)
    try:
        chip = device.for_arch(arch)
    except ValueError:
        return None
    if isinstance(spec, Spec):
        known = chip.major * 10 + chip.minor
        isas = [x for x in ISAS if (select.is_hopper(chip) if x == 90 else x <= known)]
        if spec.isa not in isas:
            return f"isa is {spec.isa}; for {arch} it must be {' or '.join(map(str, isas))}"
    needed, most = spec.shared_bytes, chip.shared_bytes_per_block
    if needed > most:
        return f"{spec.name} needs {needed} bytes of shared memory; for {arch} it must be at most {most}"
    return None


def why_not_as_ptx(spec: Spec, arch: str) -> str | None:
    """None where drivers compile a variant from PTX for an architecture, else the reason."""
    known = int(arch.removeprefix("compute_"))
    if known < min(ISAS):
        return f"arch is {arch}; it must be compute_{min(ISAS)} or newer"
    isas = [x for x in ISAS if x <= known and x != 90]
    if spec.isa in isas:
        return None
    others = " or ".join(map(str, isas))
    if spec.isa == 90:
        return (
            f"isa is 90; for {arch} it must be {others}: wgmma and setmaxnreg are sm_90a's alone, for which NVRTC makes"
            " a cubin"
        )
    return f"isa is {spec.isa}; for {arch} it must be {others}"
