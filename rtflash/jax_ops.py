"""JAX: calls inside jit, vmap, shard_map and scan; and appends to caches, which JAX never changes in place.

A call is one primitive. Its shapes are those of the Problem; it is lowered to a callback (jax_callbacks.py) that XLA
gives its buffers and, on a GPU, its stream: nothing is copied, and the host waits for nothing. On the CPU the callback
runs NumPy.

Imported by the first such call, not before.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from . import call, lengths, tensor
from .call import Signature
from .checks import truth
from .dlpack import View, row_major
from .jax_callbacks import SOMEWHERE, DeviceCall, HostCall, lowered
from .partials import Combine
from .problem import Problem
from .tensor_base import numpy_dtype, short_name

CACHES = ("k_cache", "v_cache")
MAX_EAGER = 4096  # compiled calls on concrete arrays


class Op(NamedTuple):
    """All of a call but its arrays: the primitive's parameter.

    Attributes
    ----------
    signature, options, want_lse, cache_seqlen : see call.attend.
    given : which of the signature's inputs are not None; only these are the primitive's operands.
    appends : whether the caches are results too.
    """

    signature: Signature
    options: tuple[Any, ...]
    want_lse: bool
    cache_seqlen: int
    given: tuple[bool, ...]
    appends: bool

    def spread(self, operands: Sequence[Any]) -> list[Any]:
        """Operands, each at its input's place, and None for those that are not given."""
        rest = iter(operands)
        return [next(rest) if given else None for given in self.given]

    def names(self) -> list[str]:
        """What the caller calls the operands."""
        return [
            name for name, given in zip(self.signature.inputs, self.given, strict=False) if given
        ]

    def written(self) -> list[int]:
        """Which operands are written and returned."""
        return [self.names().index(name) for name in CACHES] if self.appends else []

    def views(self, operands: Sequence[Any], index: int = 0) -> list[View | None]:
        """Row-major Views of the inputs, somewhere on a device."""
        return [
            None if x is None else somewhere(x)._replace(device=index)
            for x in self.spread(operands)
        ]

    def problem(self, operands: Sequence[Any]) -> Problem:
        """The checked Problem; raises where the call is refused."""
        return call.check(
            self.signature, tuple(self.spread(operands)), self.views(operands), self.options
        )

    def results(self, operands: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of out, LSE if it is wanted, and caches that are written."""
        problem = self.problem(operands)
        shapes = [jax.ShapeDtypeStruct(problem.out_shape, numpy_dtype(problem.dtype))]
        if self.want_lse:
            shapes.append(jax.ShapeDtypeStruct(problem.lse_shape, np.float32))
        caches = [operands[i] for i in self.written()]
        return shapes + [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in caches]


def somewhere(x: Any) -> View:
    """The View of a row-major array on a device."""
    shape = tuple(x.shape)
    return View(SOMEWHERE, shape, row_major(shape), short_name(np.dtype(x.dtype)), 0)


def attend(
    signature: Signature,
    inputs: tuple[Any, ...],
    options: tuple[Any, ...],
    want_lse: Any,
    cache_seqlen: int,
) -> tuple[Any, Any]:
    """(out, lse) of a call whose inputs are traced; lse None: not wanted. See call.attend."""
    op, operands = described(signature, inputs, options, want_lse, cache_seqlen, False)
    results = bind(op, operands)
    return results[0], results[1] if op.want_lse else None


def append(
    signature: Signature,
    inputs: tuple[Any, ...],
    options: tuple[Any, ...],
    want_lse: Any,
    cache_seqlen: int,
) -> tuple[Any, Any, Any, Any]:
    """(out, lse, k_cache, v_cache) of a call that appends, on traced or concrete arrays.

    XLA copies a cache first where the caller may still use the old one.
    """
    traced = tensor.framework(inputs[0]).is_traced(inputs)
    if not traced and all(x.platform == "cpu" for x in inputs[0].sharding.device_set):
        return append_on_host(signature, inputs, options, want_lse, cache_seqlen)
    op, operands = described(signature, inputs, options, want_lse, cache_seqlen, True)
    if cache_seqlen >= 0 and not traced:
        # An int is part of what XLA compiles; concrete arrays are decoded in a loop, with another int each time.
        place = signature.inputs.index("cache_seqlens")
        rows = jnp.full(operands[0].shape[0], cache_seqlen, jnp.int32)
        inputs = (*inputs[:place], rows, *inputs[place + 1 :])
        counted = (*options[:-1], False)
        op, operands = described(signature, inputs, counted, want_lse, -1, True)
    results = bind(op, operands)
    return results[0], results[1] if op.want_lse else None, *results[-2:]


def append_on_host(
    signature: Signature,
    inputs: tuple[Any, ...],
    options: tuple[Any, ...],
    want_lse: Any,
    cache_seqlen: int,
) -> tuple[Any, Any, Any, Any]:
    """`append` of concrete arrays on the CPU: what lengths say is refused as usual, not from inside of XLA."""
    library = tensor.framework(inputs[0])
    call.check(signature, inputs, call.views_of(library, inputs, signature.inputs), options)
    arrays = [None if x is None else np.asarray(x) for x in inputs]
    arrays[1:3] = caches = [np.array(x) for x in inputs[1:3]]
    out, lse = call.attend(signature, tuple(arrays), options, want_lse, cache_seqlen)
    made = [library.from_host(x, short_name(x.dtype), inputs[0]) for x in (out, lse, *caches)]
    return made[0], made[1], made[2], made[3]


def described(
    signature: Signature,
    inputs: tuple[Any, ...],
    options: tuple[Any, ...],
    want_lse: Any,
    cache_seqlen: int,
    appends: bool,
) -> tuple[Op, list[Any]]:
    """The Op of a call that is not refused, and its operands."""
    refuse_others(inputs, signature.inputs)
    # A parameter of a primitive must have a hash.
    kept = tuple(tuple(x.tolist()) if isinstance(x, np.ndarray) else x for x in options)
    given = tuple(x is not None for x in inputs)
    op = Op(signature, kept, truth(signature.wants_lse, want_lse), cache_seqlen, given, appends)
    operands = [x for x in inputs if x is not None]
    problem = op.problem(operands)
    if cache_seqlen >= 0:
        lengths.check_length(problem, cache_seqlen)
    return op, operands


def refuse_others(inputs: tuple[Any, ...], names: Sequence[str]) -> None:
    """Raise TypeError unless all are JAX's, or None."""
    for x, name in zip(inputs, names, strict=False):
        if x is not None and not isinstance(x, jax.Array):
            raise call.foreign(x, name, names[0], tensor.framework(inputs[0]))


def views_of(inputs: tuple[Any, ...], names: Sequence[str]) -> list[View | None]:
    """Views of JAX's arrays, traced or not, by their shapes; None where one is not given."""
    refuse_others(inputs, names)
    return [None if x is None else somewhere(x) for x in inputs]


def bind(op: Op, operands: Sequence[Any]) -> list[Any]:
    """The primitive's results."""
    return attention.bind(*vary_alike(operands), op=op)


def vary_alike(operands: Sequence[Any]) -> list[Any]:
    """Operands that vary over the same axes of a shard_map: JAX wants that said of each."""
    axes: list[frozenset[Any]] = [getattr(jax.typeof(x), "vma", frozenset()) for x in operands]
    every = frozenset[Any]().union(*axes)
    return [
        x if own == every else jax.lax.pcast(x, tuple(every - own), to="varying")
        for x, own in zip(operands, axes, strict=True)
    ]


attention = Primitive("rtflash_attention")
attention.multiple_results = True


@functools.lru_cache(MAX_EAGER)
def compiled(op: Op) -> Any:
    """The primitive under jit, for concrete arrays."""
    return jax.jit(functools.partial(attention.bind, op=op))


@attention.def_impl
def run_eagerly(*operands: Any, op: Op) -> Any:
    with jax.disable_jit(False):  # a callback is nothing but what XLA calls
        return compiled(op)(*operands)


@attention.def_abstract_eval
def abstract_results(*operands: Any, op: Op) -> Any:
    # XLA runs the call whole on each device of a mesh; shard_map is what splits it. (The first operand's type says
    # over which axes of a shard_map results vary.)
    first = operands[0]
    mesh = first.sharding.mesh
    return [
        first.update(
            shape=x.shape,
            dtype=np.dtype(x.dtype),
            weak_type=False,
            sharding=NamedSharding(mesh, PartitionSpec(*(None,) * len(x.shape))),
        )
        for x in op.results(operands)
    ]


def refuse_gradients(primals: Any, tangents: Any, *, op: Op) -> Any:
    """The rule for jvp, and with it for grad."""
    raise NotImplementedError(
        f"{op.signature.function} was called under jax.grad, jax.jvp or the like, and rtflash has no backward yet;"
        " inputs that are not to be differentiated must go through jax.lax.stop_gradient"
    )


ad.primitive_jvps[attention] = refuse_gradients


def batch(operands: Sequence[Any], axes: Sequence[int | None], *, op: Op) -> Any:
    """The rule for vmap: the mapped axis joins the batch where that is all there is to it, else a scan runs over it."""
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    mapped = [axis is not None for axis in axes]
    operands = [
        x if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(operands, axes, strict=True)
    ]
    if is_foldable(op, operands, mapped):
        pairs = zip(op.names(), operands, mapped, strict=True)
        rows = operands[0].shape[1 if mapped[0] else 0]
        results = bind(op, [folded(name, x, own, size, rows) for name, x, own in pairs])
        results = [
            x.reshape(size, x.shape[0] // size if size else rows, *x.shape[1:]) for x in results
        ]
    else:
        moving = [x for x, own in zip(operands, mapped, strict=True) if own]

        def step(_: None, parts: list[Any]) -> tuple[None, Any]:
            part = iter(parts)
            return None, bind(
                op, [next(part) if own else x for x, own in zip(operands, mapped, strict=True)]
            )

        _, results = jax.lax.scan(step, None, moving)
    return results, [0] * len(results)


batching.primitive_batchers[attention] = batch


def is_foldable(op: Op, operands: Sequence[Any], mapped: Sequence[bool]) -> bool:
    """Whether sequences of all places along a mapped axis can be one batch: each has its own keys, and tables alike."""
    if op.signature.dense:
        return True
    names = dict(zip(op.names(), zip(operands, mapped, strict=True), strict=True))
    if "k_cache" not in names or names.keys() & {"block_table", "page_table", "cache_batch_idx"}:
        return False
    if any(names[x][1] for x in ("rotary_cos", "rotary_sin") if x in names):
        return False
    (q, own_q), (k, own_k) = names["q"], names["k_cache"]
    return q.shape[int(own_q)] == k.shape[int(own_k)]


def folded(name: str, x: Any, mapped: bool, size: int, rows: int) -> Any:
    """An operand of `size` calls at once; `rows`: the batch of each."""
    if name in ("rotary_cos", "rotary_sin") or (
        name == "alibi_slopes" and not mapped and x.ndim == 1
    ):
        return x
    if not mapped:
        x = jnp.broadcast_to(x, (size, *x.shape))
    if name == "alibi_slopes" and x.ndim == 2:
        x = jnp.broadcast_to(x[:, None], (size, rows, x.shape[1]))
    return x.reshape(size * x.shape[1], *x.shape[2:])


mlir.register_lowering(attention, lowered(HostCall), platform="cpu")
mlir.register_lowering(attention, lowered(DeviceCall), platform="cuda")


def merge(partial: Combine, out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> tuple[Any, Any]:
    """merge_attention_states of traced values."""
    lses = jnp.stack([jnp.moveaxis(x, -2, -1) for x in (lse_a, lse_b)])
    out, lse = combine(partial, jnp.stack([out_a, out_b]), lses)
    return out, jnp.moveaxis(lse, -1, -2)


def combine(partial: Combine, outs: Any, lses: Any) -> tuple[Any, Any]:
    """Merge traced results over parts of the keys: operations of XLA's, differentiable like any others.

    Parameters
    ----------
    outs : (splits, *rows, heads, head_dim_v).
    lses : (splits, *rows, heads).

    Returns
    -------
    out, lse : (*rows, heads, head_dim_v) of the Combine's dtype, (*rows, heads) float32. See cpu.combine.
    """
    unseen = jnp.isneginf(lses)
    nowhere = unseen.all(axis=0)
    top = jax.lax.stop_gradient(jnp.where(nowhere, 0, lses.max(axis=0)))
    # Where nothing was seen, the untaken branches of `where` must be finite for gradients to be.
    weights = jnp.where(unseen, 0, jnp.exp(jnp.where(unseen, 0, lses - top)))
    total = jnp.where(nowhere, 1, weights.sum(axis=0))
    shares = (weights / total)[..., None]
    parts = jnp.where(weights[..., None] == 0, 0, outs.astype(jnp.float32))
    out = (shares * parts).sum(axis=0)
    lse = jnp.where(nowhere, -jnp.inf, top + jnp.log(total))
    return out.astype(numpy_dtype(partial.dtype)), lse
