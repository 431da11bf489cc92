"""What only the kernel for Hopper, isa 90, is made with: the layout of its shared memory, wgmma's operands."""

from __future__ import annotations

TILE_ALIGNMENT = 1024  # bytes; of a tile that TMA swizzles
MBARRIER_BYTES = 8
PLACE_BYTES = 64
SM90_SHARED_BYTES = 227 * 1024  # of a CTA


def shared_bytes(q_bytes: int, kv_bytes: int, stages: int) -> int:
    """Dynamic shared memory of a CTA: the buffers of Q, all buffers of K and V (`stages` of each), and the rest."""
    count = q_stages(q_bytes, kv_bytes, stages)
    return count * q_bytes + kv_bytes + extra_bytes(count, stages)


def q_stages(q_bytes: int, kv_bytes: int, stages: int) -> int:
    """Buffers of Q: two where they fit, so that the next tile's Q travels in time."""
    return 2 if 2 * q_bytes + kv_bytes + extra_bytes(2, stages) <= SM90_SHARED_BYTES else 1


def extra_bytes(q_stages: int, stages: int) -> int:
    """Shared memory beside the tiles: their alignment, places of query tiles, two barriers a buffer."""
    buffers = q_stages + 2 * stages
    return TILE_ALIGNMENT + (q_stages + 2) * PLACE_BYTES + 2 * buffers * MBARRIER_BYTES


def wgmma_variables(dtype: str, score: int, output: int) -> dict[str, str]:
    """Operands of wgmma in inline assembly, where each register of the accumulators has a number of its own.

    `score`, `output`: columns of S and of O.
    """
    widths = {"score": score, "output": output}
    texts = {"wgmma_types": {"fp16": "f16.f16", "bf16": "bf16.bf16"}[dtype]}
    for name, width in widths.items():
        registers = width // 2  # of a thread
        tiles = [(i // 4, i % 4) for i in range(registers)]
        texts |= {
            f"{name}_shape": f"n{width}",
            f"{name}_registers": ", ".join(f"%{i}" for i in range(registers)),
            f"{name}_operands": ", ".join(f'"+f"(d[0][{j}][{i}])' for j, i in tiles),
        }
    scores, outputs = score // 2, output // 2
    return texts | {
        "score_a": f"%{scores}",
        "score_b": f"%{scores + 1}",
        "score_add": f"%{scores + 2}",
        "output_a": ", ".join(f"%{outputs + i}" for i in range(4)),
        "output_b": f"%{outputs + 4}",
    }
