"""What only the kernel for Hopper, isa 90, is made with: the layout of its shared memory, wgmma's operands."""

from __future__ import annotations

from collections.abc import Iterable

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


def wgmma_variables(dtype: str, head_dim: int, keys: int, head_dim_v: int) -> dict[str, str]:
    """The two products as inline assembly: a wgmma for each k16 step, and its operands.

    S = Q K^T is m64 x `keys` x `head_dim`, O += P V is m64 x `head_dim_v` x `keys`; all multiples of 16.
    """
    types = {"fp16": "f16.f16", "bf16": "bf16.bf16"}[dtype]

    def product(columns: int, operands: Iterable[str]) -> str:
        """One wgmma for each of `operands`: what stands behind the accumulator's registers, %0 and up."""
        shape = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{types}"
        registers = ", ".join(f"%{i}" for i in range(columns // 2))
        return "".join(f"{shape} {{{registers}}}, {rest};\\n" for rest in operands)

    def accumulator(columns: int) -> str:
        return ", ".join(f'"+f"(d[0][{i // 4}][{i % 4}])' for i in range(columns // 2))

    def descriptors(name: str, steps: int) -> list[str]:
        return [f'"l"({name}.of_step[{k}])' for k in range(steps)]

    steps, add = head_dim // 16, keys // 2  # %add: the first operand of S behind the accumulator
    q = add + 1
    scores = (
        f"%{q + k}, %{q + steps + k}, {'1' if k else 'add'}, 1, 1, 0, 0" for k in range(steps)
    )
    key_steps, p = keys // 16, head_dim_v // 2
    v = p + 4 * key_steps
    outputs = (
        f"{{{', '.join(f'%{p + 4 * k + i}' for i in range(4))}}}, %{v + k}, 1, 1, 1, 1"
        for k in range(key_steps)
    )
    fragments = [f'"r"(a[{k}][{i}])' for k in range(key_steps) for i in range(4)]
    return {
        "score_product": f"{{.reg .pred add;\\nsetp.ne.b32 add, %{add}, 0;\\n{product(keys, scores)}}}",
        "score_accumulator": accumulator(keys),
        "score_operands": ", ".join((*descriptors("a", steps), *descriptors("b", steps))),
        "output_product": product(head_dim_v, outputs),
        "output_accumulator": accumulator(head_dim_v),
        "output_operands": ", ".join((*fragments, *descriptors("b", key_steps))),
    }
