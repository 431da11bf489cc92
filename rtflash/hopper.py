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


def wgmma_variables(dtype: str, columns_q: int, keys: int, columns_o: int) -> dict[str, str]:
    """What sm90/ptx.cuh makes the two products of: registers and operands of a wgmma for each k16 step.

    S = Q K^T is m64 x `keys` x `columns_q`, O += P V is m64 x `columns_o` x `keys`; all multiples of 16.
    """
    score_steps, key_steps = range(columns_q // 16), range(keys // 16)
    # Operands are numbered: the accumulator's registers, then those of A, then those of B.
    q, p = keys // 2, columns_o // 2
    k, v = q + len(score_steps), p + 4 * len(key_steps)
    fragments = [", ".join(f"%{p + 4 * step + i}" for i in range(4)) for step in key_steps]
    return {
        "wgmma_types": {"fp16": "f16.f16", "bf16": "bf16.bf16"}[dtype],
        "score_shape": f"n{keys}",
        "score_registers": ", ".join(f"%{i}" for i in range(q)),
        "score_accumulator": accumulator(keys),
        "score_steps": " ".join(
            f'STEP("%{q + step}", "%{k + step}", "{min(step, 1)}")' for step in score_steps
        ),
        "score_operands": ", ".join(
            f'"l"({name}.of_step[{step}])' for name in "ab" for step in score_steps
        ),
        "output_shape": f"n{columns_o}",
        "output_registers": ", ".join(f"%{i}" for i in range(p)),
        "output_accumulator": accumulator(columns_o),
        "output_steps": " ".join(
            f'STEP("{fragments[step]}", "%{v + step}")' for step in key_steps
        ),
        "output_operands": ", ".join([
            *(f'"r"(a[{step}][{i}])' for step in key_steps for i in range(4)),
            *(f'"l"(b.of_step[{step}])' for step in key_steps),
        ]),
    }  # fmt: skip


def accumulator(columns: int) -> str:
    """A thread's registers of an m64 accumulator, read and written."""
    return ", ".join(f'"+f"(d[0][{i // 4}][{i % 4}])' for i in range(columns // 2))
