"""What came of the variants that `rtflash generate` compiled: faults, files, report, table, plot."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rtflash import artifacts, bundle, device, dump, layouts
from rtflash.other_specs import AppendSpec
from rtflash.spec import WARP_SIZE, AnySpec, Spec

from .screen import Named
from .served import Variant
from .trial import SM_REGISTERS, residents

# Warps that an SM holds, from the CUDA C++ Programming Guide ("Technical Specifications per Compute Capability").
SM_WARPS = {"sm_75": 32, "sm_86": 48, "sm_87": 48, "sm_89": 48, "sm_120": 48}
OTHER_SM_WARPS = 64
# A thread's registers are allocated by so many (the same table: 256 a warp).
REGISTER_UNIT = 8


class Outcome(NamedTuple):
    """What came of a variant: its artifact, or the compiler's words."""

    variant: Variant
    artifact: artifacts.Artifact | None
    error: str

    @property
    def faults(self) -> list[str]:
        """What a shipped kernel must not have: local memory, spills, the compiler's warnings."""
        if self.artifact is None:
            return [self.error]
        used = self.artifact.resources
        counted = {
            "bytes of local memory": used.local_bytes,
            "bytes of spill stores": used.spill_stores,
            "bytes of spill loads": used.spill_loads,
        }
        faults = [f"{count} {what}" for what, count in counted.items() if count]
        return faults + list(self.artifact.warnings)


def edited_file(outcome: Outcome, folder: Path) -> Path | None:
    """The source of a variant under `folder` that is another one than was compiled; None where there is none."""
    if outcome.artifact is None:
        return None
    file = dump.folder(folder, *outcome.variant) / dump.SOURCE
    compiled = artifacts.to_entry(outcome.artifact).files[dump.SOURCE]
    return file if dump.is_edited(file, compiled) else None


def write(outcome: Outcome, folder: Path) -> None:
    """Put a variant's files under `folder`/<arch>/<name>/, as the cache has them, and launch.json.

    Where somebody has edited the source, all stays as it is.
    """
    if outcome.artifact is None or edited_file(outcome, folder):
        return
    spec, arch = outcome.variant
    entry = artifacts.to_entry(outcome.artifact)
    how = json.dumps(launch_record(spec), indent=1) + "\n"
    files = {**entry.files, "launch.json": how.encode()}
    dump.write(dump.folder(folder, spec, arch), files, entry.record)


def packed(outcomes: Iterable[Outcome]) -> list[bundle.Packed]:
    """What a bundle holds of the variants that compiled."""
    made = [outcome.artifact for outcome in outcomes if outcome.artifact is not None]
    return [
        bundle.Packed(
            x.spec, x.arch, x.cubin, x.options, x.compiler, dataclasses.asdict(x.resources)
        )
        for x in made
    ]


def launch_record(spec: AnySpec) -> dict[str, Any]:
    """How a kernel is launched, for `launch.json`: grid, block, shared memory, and the fields of its one argument.

    A "tensor map" is a CUtensorMap, as rtflash/tensor_map.py encodes it. The grid is a formula of Params' fields and of
    the batch (packed rows to merge: batch 1).
    """
    if isinstance(spec, Spec):
        rows, heads = (
            ("seqlen_q * group", "heads / group") if spec.pack_gqa else ("seqlen_q", "heads")
        )
        grid = f"ceil({rows} / {spec.block_m}) * batch * {heads} * splits"
        layout = layouts.forward(spec)
        if spec.isa == 90:  # the CTAs stay, and share the tiles
            grid = f"min({grid}, multiprocessors)"
    elif isinstance(spec, AppendSpec):
        grid, layout = "batch * seqlen_new * heads", layouts.APPEND
    else:
        grid, layout = "batch * seqlen * heads", layouts.COMBINE
    fields = layout.described()
    return {
        "symbol": spec.name,
        "grid": grid,
        "threads": spec.threads,
        "dynamic_shared_bytes": spec.shared_bytes,
        "params_bytes": layout.size,
        "params": [{"name": name, "type": kind, "offset": at} for name, kind, at in fields],
    }


def ctas(made: artifacts.Artifact) -> int:
    """CTAs of a kernel that an SM holds, by its registers, shared memory and warps; 0 for an unknown architecture."""
    used, spec = made.resources, made.spec
    try:
        chip = device.for_arch(made.arch)
    except ValueError:
        return 0
    registers = -(-used.registers // REGISTER_UNIT) * REGISTER_UNIT
    return min(
        SM_REGISTERS // max(1, registers * spec.threads),
        residents(used.static_shared_bytes + spec.shared_bytes, chip),
        sm_warps(made.arch) * WARP_SIZE // spec.threads,
    )


def sm_warps(arch: str) -> int:
    """Warps that an SM holds."""
    return SM_WARPS.get(arch, OTHER_SM_WARPS)


def report(outcome: Outcome) -> dict[str, Any]:
    """A variant's row of the JSON report."""
    variant, artifact = outcome.variant, outcome.artifact
    row: dict[str, Any] = {"name": variant.spec.name, "arch": variant.arch}
    if artifact is not None:
        used, resident = artifact.resources, ctas(artifact)
        warps = resident * variant.spec.threads // WARP_SIZE
        row |= {
            "registers": used.registers,
            "threads": variant.spec.threads,
            "shared_bytes": used.static_shared_bytes + variant.spec.shared_bytes,
            "ctas_per_sm": resident,
            "occupancy": round(warps / sm_warps(variant.arch), 3),
            "local_bytes": used.local_bytes,
            "spill_bytes": used.spill_stores + used.spill_loads,
            "cubin_bytes": len(artifact.cubin),
            "seconds": round(used.seconds, 3),
        }
    return row | {"faults": outcome.faults}


def short(name: str) -> str:
    """A kernel's name without what all of them share."""
    return name.removeprefix("rtflash_").removeprefix("forward_")


def table(outcomes: Iterable[Outcome]) -> Named:
    """The report for the terminal."""
    right = ("registers", "shared KB", "CTAs/SM", "occupancy", "spilled B", "cubin KB", "seconds")
    grid = Named("kernel", "arch", *right, right=right)
    for row in map(report, outcomes):
        if "registers" not in row:
            grid.add_row(short(row["name"]), row["arch"], *["[red]failed[/]"] * len(right))
            continue
        spilled = row["spill_bytes"] + row["local_bytes"]
        cells = (
            f"{row['registers']}",
            f"{row['shared_bytes'] / 1024:.0f}",
            f"{row['ctas_per_sm'] or '-'}",
            f"{row['occupancy']:.0%}" if row["occupancy"] else "-",
            f"[red]{spilled}[/]" if spilled else "0",
            f"{row['cubin_bytes'] / 1024:.0f}",
            f"{row['seconds']:.2f}",
        )
        grid.add_row(short(row["name"]), row["arch"], *cells)
    return grid


def plot(outcomes: Sequence[Outcome], file: Path) -> None:
    """Registers, shared memory and occupancy of the kernels that compiled, a line a kernel, into a .png, .svg or .pdf.

    Raises
    ------
    ValueError
        There is none.
    """
    rows = [row for row in map(report, outcomes) if "registers" in row]
    if not rows:
        raise ValueError("no kernel compiled")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = {
        "registers of a thread": [row["registers"] for row in rows],
        "shared memory of a CTA, KB": [row["shared_bytes"] / 1024 for row in rows],
        "occupancy, % of an SM's warps": [row["occupancy"] * 100 for row in rows],
    }
    places = range(len(rows))
    figure, axes = pyplot.subplots(
        1, len(panels), sharey=True, figsize=(13, 0.8 + 0.18 * len(rows)), layout="constrained"
    )
    archs = list(dict.fromkeys(row["arch"] for row in rows))
    colours = [f"C{archs.index(row['arch'])}" for row in rows]
    for axis, (title, values) in zip(axes, panels.items(), strict=True):
        axis.barh(places, values, color=colours, height=0.7)
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_axisbelow(True)
        axis.grid(axis="x", color="#e8e8e8")
    names = [f"{row['arch']}  {short(row['name'])}" for row in rows]
    axes[0].set_yticks(places, names, fontsize=7)
    axes[0].set_ylim(len(rows) - 0.4, -0.6)  # a single bar does not fill its panel
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
