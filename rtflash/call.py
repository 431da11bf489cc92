"""What every attention function does: check, allocate, plan, run.

A call's geometry and options are its key to a Plan: everything that does not depend on addresses, made at the first
such call. Later calls look the plan up, allocate the output, and launch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import cpu, dlpack, lengths, plan, settings, tensor
from .checks import Names, truth
from .problem import Problem, Tensors
from .spec import ELEMENT_BYTES
from .tensor import Framework, View
from .tensor_base import ALIGN, Seen

MAX_PLANS = 4096  # a plan is 2 KB, with tensor maps up to 80; a program that meets more geometries starts over

Window = tuple[int, int]


@dataclass(frozen=True, eq=False, slots=True)
class Signature:
    """A public function's tensors.

    Attributes
    ----------
    function : its name.
    inputs : what the caller calls them, in the order in which `attend` gets them.
    required : how many of them, from the first on, must not be None.
    arrange : makes Tensors of them, be they Views or NumPy arrays.
    check : makes the Problem of Tensors of Views, the options and `names`; raises where the call is refused.
    names : what the caller calls the fields of Tensors, where that is another name.
    dense : whether every sequence has the same length.
    wants_lse : what the caller calls the option that asks for the LSE.
    """

    function: str
    inputs: tuple[str, ...]
    required: int
    arrange: Callable[..., Tensors]
    check: Callable[[Tensors, tuple[Any, ...], Names], Problem]
    names: Names
    dense: bool = False
    wants_lse: str = "return_attn_probs"


_plans: dict[tuple[Any, ...], plan.Plan] = {}


def pair(window_size: Any) -> Any:
    """A list as the tuple that it should be: options are part of a plan's key."""
    return tuple(window_size) if type(window_size) is list else window_size


def parts(name: str, packed: Any, count: int, axes: str) -> list[Any]:
    """The `count` parts of a packed View or NumPy array along its third axis from the end.

    `axes` names those before.
    """
    shape = packed.shape
    if len(shape) != axes.count(",") + 4 or shape[-3] != count:
        raise ValueError(
            f"{name} has shape {tuple(shape)}; it must be ({axes}, {count}, heads, head_dim)"
        )
    if not isinstance(packed, View):
        return [packed[..., i, :, :] for i in range(count)]
    step = packed.strides[-3] * ELEMENT_BYTES
    return [
        packed._replace(
            ptr=packed.ptr + i * step,
            shape=(*shape[:-3], *shape[-2:]),
            strides=(*packed.strides[:-3], *packed.strides[-2:]),
        )
        for i in range(count)
    ]


def views_of(library: Framework, inputs: tuple[Any, ...], names: tuple[str, ...]) -> list[Any]:
    """The Views of inputs, which must all come from the library of the first one; None where one is not given."""
    kind, view = type(inputs[0]), library.view
    views: list[Any] = []
    for x, name in zip(inputs, names):  # noqa: B905  strict costs 0.1 us
        if x is None:
            views.append(None)
            continue
        if type(x) in (list, tuple) or (
            type(x) is not kind and tensor.framework(x, name) is not library
        ):
            raise foreign(x, name, names[0], library)
        views.append(view(x, name))
    return views


def foreign(x: Any, name: str, first: str, library: Framework) -> TypeError:
    """What to raise for an input that does not come from the library of the first one."""
    if type(x) in (list, tuple):
        an_int = "an int, or " if name == "cache_seqlens" else ""
        return TypeError(
            f"{name} is a {type(x).__name__}; it must be {an_int}a tensor of {first}'s library ({library.name})"
        )
    return TypeError(
        f"{name} is a {type(x).__name__}; it must come from the same library as {first} ({library.name})"
    )


def seen_of(views: list[View | None]) -> Seen:
    """What `Framework.see` gives, by Views."""
    addresses = [0 if view is None else view.ptr for view in views]
    geometry = [None if view is None else (view.ptr % ALIGN, *view[1:]) for view in views]
    return addresses, geometry, [view for view in views if view is not None]


def views_from(seen: Seen) -> list[View | None]:
    """The Views of what was seen."""
    addresses, geometry, _ = seen
    pairs = zip(addresses, geometry, strict=True)
    return [None if form is None else View(address, *form[1:]) for address, form in pairs]


def attend(
    signature: Signature,
    inputs: tuple[Any, ...],
    options: tuple[Any, ...],
    want_lse: bool,
    cache_seqlen: int = -1,
) -> tuple[Any, Any]:
    """(out, lse) of a public function's call.

    Parameters
    ----------
    inputs : tensors of any library, all of one; None where one is not given.
    options : for signature.check; hashable, else the call is checked every time.
    want_lse : on a GPU, lse is None else.
    cache_seqlen : keys that a cache holds of each sequence; -1: not one number for all.
    """
    if (
        tensor.dynamo_traces(inputs[0])
        or (library := tensor.framework(inputs[0], signature.inputs[0])).is_recording()
    ):
        from . import torch_ops

        return torch_ops.attend(signature, inputs, options, want_lse, cache_seqlen)
    if type(want_lse) is not bool:
        want_lse = truth(signature.wants_lse, want_lse)
    if library.is_traced(inputs):
        from . import jax_ops

        return jax_ops.attend(signature, inputs, options, want_lse, cache_seqlen)
    seen = library.see(inputs) or seen_of(views_of(library, inputs, signature.inputs))
    if seen[1][0][-1] >= 0:
        return on_device(library, signature, inputs, seen, options, want_lse, cache_seqlen)
    return on_host(library, signature, inputs, seen, options, cache_seqlen)


def on_device(
    library: Framework,
    signature: Signature,
    inputs: tuple[Any, ...],
    seen: Seen,
    options: tuple[Any, ...],
    want_lse: bool,
    cache_seqlen: int,
) -> tuple[Any, Any]:
    """(out, lse) of a call on a GPU: look the plan up, allocate, launch.

    Equal options are one: where True was allowed, 1 and 1.0 find its plan and are not refused again. (Their types in
    the key would cost 0.8 us.)
    """
    addresses, geometry, held = seen
    key = (library, signature, options, *geometry)
    try:
        found, keep = _plans.get(key), True
    except TypeError:
        # An option without a hash: a NumPy array as window_size, or something that the checks refuse.
        found, keep = None, False
    if found is None:
        views = views_from(seen)
        call = check(signature, inputs, views, options)
        if cache_seqlen >= 0:
            lengths.check_length(call, cache_seqlen)  # before a copy or a compilation
        if any(map(must_copy, views, signature.inputs)):
            inputs = tuple(
                library.contiguous(x) if must_copy(view, name) else x
                for x, view, name in zip(inputs, views, signature.inputs, strict=False)
            )
            seen = seen_of([None if x is None else library.view(x) for x in inputs])
            return on_device(library, signature, inputs, seen, options, want_lse, cache_seqlen)
        found = plan.make(library, signature.arrange, call, views)
        if keep:
            if len(_plans) >= MAX_PLANS:
                _plans.clear()
            _plans[key] = found
    if cache_seqlen > found.longest:
        lengths.check_length(found.call, cache_seqlen)
    if found.call.seqlen_new and any(map(dlpack.is_read_only, held)):
        given = iter(held)
        views = [None if form is None else next(given) for form in geometry]
        refuse_read_only(signature.arrange(*views), signature.names)

    out = found.new_out()
    lse = found.new_lse() if want_lse else None
    plan.run(found, library, addresses, held, out, lse, cache_seqlen)
    return library.result(out), lse if lse is None else library.result(lse)


def check(
    signature: Signature,
    inputs: tuple[Any, ...],
    views: list[Any],
    options: tuple[Any, ...],
) -> Problem:
    """The Problem of a call whose shapes, dtypes, devices and options are right."""
    for x, name in zip(inputs[: signature.required], signature.inputs, strict=False):
        if x is None:
            tensor.framework(x, name)  # raises: None is no tensor
    return signature.check(signature.arrange(*views), options, signature.names)


def must_copy(view: View | None, name: str) -> bool:
    """Whether the kernels cannot read an input where it is. Slopes have a stride, so only their address counts."""
    if view is None:
        return False
    return view.ptr % 4 != 0 if name == "alibi_slopes" else tensor.needs_copy(view)


def on_host(
    library: Framework,
    signature: Signature,
    inputs: tuple[Any, ...],
    seen: Seen,
    options: tuple[Any, ...],
    cache_seqlen: int,
) -> tuple[Any, Any]:
    """(out, lse) of a call on host arrays, by NumPy or, if RTFLASH_BACKEND says so, by the emulated kernels."""
    call = check(signature, inputs, views_from(seen), options)
    tensors = signature.arrange(*(None if x is None else host(library, x) for x in inputs))
    emulated = settings.get().backend == "emulate"
    if emulated:
        from . import emulate
    else:
        cpu.note(call)
    if signature.dense and not emulated:
        out, lse = cpu.forward(call, *tensors[:4])
    else:
        lengths.check(call, tensors, cache_seqlen, signature.names)
        refuse_read_only(tensors, signature.names)
        run = emulate.run_call if emulated else cpu.run
        out, lse = run(call, tensors, cache_seqlen)
    like = inputs[0]
    return library.from_host(out, call.dtype, like), library.from_host(lse, "fp32", like)


def host(library: Framework, x: Any) -> np.ndarray[Any, Any]:
    """A host tensor as a NumPy array; a copy only where its elements are not aligned."""
    return np.require(library.host(x), requirements="A")


def refuse_read_only(tensors: Tensors, names: Names) -> None:
    """Raise ValueError if new keys and values are to be written where nothing can be; Tensors of arrays or Views."""
    if tensors.k_new is None or 0 in tensors.k_new.shape:
        return
    for field in ("k", "v"):
        x = getattr(tensors, field)
        if dlpack.is_read_only(x) if isinstance(x, View) else not x.flags.writeable:
            raise ValueError(
                f"{names.get(field, field)} is read-only; it must be writable: {names.get('k_new', 'k_new')} is"
                " written into it"
            )
