"""The public functions as operators of torch.library, `torch.ops.rtflash.*`: what torch.compile, torch.export, make_fx
and fake tensors record in place of a call. Eager calls do not come here.

Imported when such a call is met first. An operator takes a public function's tensors and options by position, always
gives both results, and runs the same function on real tensors. What its shape functions do not check is refused when it
runs, with the same words as in eager.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import api, call, inference, merging, partials, tensor
from .call import Signature
from .tensor_direct import no_backward

SCORES = "float? softmax_scale, bool causal, SymInt[] window_size, float softcap"
DENSE = f"float dropout_p, {SCORES}, SymInt num_splits"
VARLEN = f"SymInt max_seqlen_q, SymInt max_seqlen_k, {DENSE}"
# -1: cache_seqlens is a tensor or None.
CACHE = f"{SCORES}, bool rotary_interleaved, SymInt num_splits, SymInt cache_seqlen"
WRITTEN = ("k_cache", "v_cache")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

TORCH: Any = tensor.framework(torch.empty(0))
LIBRARY = torch.library.Library("rtflash", "DEF")

Pair = tuple[torch.Tensor, torch.Tensor]


def attend(
    signature: Signature,
    inputs: tuple[Any, ...],
    options: tuple[Any, ...],
    want_lse: bool,
    cache_seqlen: int,
) -> tuple[Any, Any]:
    """`call.attend`, recorded; Dynamo traces this."""
    inputs = with_no_grad(inputs, signature.inputs)
    inputs += (None,) * (len(signature.inputs) - len(inputs))
    name = signature.function
    if name == "flash_attn_with_kvcache":
        options = (*options[:-1], cache_seqlen)  # the last one says whether there is a cache_seqlen
        if inputs[4] is not None:
            name += "_append"
    out, lse = getattr(torch.ops.rtflash, name)(*inputs, *options, want_lse)
    return out, lse if want_lse else None


def merge(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> tuple[Any, Any]:
    """`merge_attention_states`, recorded; Dynamo traces this."""
    inputs = with_no_grad((out_a, lse_a, out_b, lse_b), ("out_a", "lse_a", "out_b", "lse_b"))
    return torch.ops.rtflash.merge_attention_states(*inputs)


def combine(out_partial: Any, lse_partial: Any, out: Any, out_dtype: Any) -> tuple[Any, Any]:
    """`flash_attn_combine`, recorded; Dynamo traces this."""
    given = (out_partial, lse_partial, out)
    out_partial, lse_partial, out = with_no_grad(given, ("out_partial", "lse_partial", "out"))
    if out_dtype is not None:
        try:
            out_dtype = DTYPES[partials.dtype_name("out_dtype", out_dtype)]
        except TypeError as error:
            if not torch.compiler.is_dynamo_compiling():
                raise
            out_partial, out_dtype = torch.ops.rtflash.refuse(out_partial, str(error)), None
    if out is None:
        return torch.ops.rtflash.flash_attn_combine(out_partial, lse_partial, out_dtype)
    return out, torch.ops.rtflash.flash_attn_combine_into(out_partial, lse_partial, out, out_dtype)


def with_no_grad(inputs: tuple[Any, ...], names: tuple[str, ...]) -> tuple[Any, ...]:
    """The inputs, of which none requires grad to Dynamo: what does raises when the graph runs.

    (Dynamo turns what is raised while it traces into errors of its own.)
    """
    if not (torch.compiler.is_dynamo_compiling() and torch.is_grad_enabled()):
        return inputs
    checked = []
    for x, name in zip(inputs, names, strict=False):
        if getattr(x, "requires_grad", False):
            x = torch.ops.rtflash.refuse_grad(x.detach(), name)
        checked.append(x)
    return tuple(checked)


def define_attention(
    signature: Signature, options: str, suffix: str = "", written: tuple[str, ...] = ()
) -> None:
    """Define the operator of a public function that attends."""
    count = len(signature.inputs)
    cached = options is CACHE

    def compute(*arguments: Any) -> Pair:
        inputs, want_lse = arguments[:count], arguments[-1]
        given = tuple(map(call.pair, arguments[count:-1]))
        cache_seqlen = -1
        if cached:
            *rest, cache_seqlen = given
            given = (*rest, cache_seqlen >= 0)
        out, lse = call.attend(signature, inputs, given, want_lse, cache_seqlen)
        return out, lse if want_lse else no_lse(out)

    def shapes(*arguments: Any) -> Pair:
        tensors = signature.arrange(*arguments[:count])
        q, v = tensors.q, tensors.v
        out = q.new_empty((*q.shape[:-1], *v.shape[-1:]))
        if not arguments[-1]:
            return out, no_lse(out)
        # The LSE has its heads before the rows of a sequence, or of all.
        rows = (*q.shape[:-3], *q.shape[-2:-1], *q.shape[-3:-2])
        return out, q.new_empty(rows, dtype=torch.float32)

    tensors = ", ".join(
        f"Tensor{mark(name, written)}{'' if i < signature.required else '?'} {name}"
        for i, name in enumerate(signature.inputs)
    )
    schema = f"({tensors}, {options}, bool {signature.wants_lse}) -> (Tensor, Tensor)"
    define(signature.function + suffix, schema, compute, shapes, written)


def mark(name: str, written: tuple[str, ...]) -> str:
    """A schema's mark of a tensor that is written."""
    return f"({'abc'[written.index(name)]}!)" if name in written else ""


def no_lse(out: torch.Tensor) -> torch.Tensor:
    """An operator's second result where the LSE is not wanted."""
    return out.new_empty(0, dtype=torch.float32)


def merged_shapes(out_a: torch.Tensor, lse_a: torch.Tensor, *_: torch.Tensor) -> Pair:
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)


def combined_shapes(
    out_partial: torch.Tensor, lse_partial: torch.Tensor, out_dtype: torch.dtype | None
) -> Pair:
    out = out_partial.new_empty(out_partial.shape[1:], dtype=out_dtype)
    return out, lse_partial.new_empty(lse_partial.shape[1:])


def combine_into(*arguments: Any) -> torch.Tensor:
    return merging.flash_attn_combine(*arguments)[1]


def combined_lse_shape(_: torch.Tensor, lse_partial: torch.Tensor, *__: Any) -> torch.Tensor:
    return lse_partial.new_empty(lse_partial.shape[1:])


def combine_new(
    out_partial: torch.Tensor, lse_partial: torch.Tensor, out_dtype: torch.dtype | None
) -> Pair:
    return merging.flash_attn_combine(out_partial, lse_partial, None, out_dtype)


def refuse_grad(x: torch.Tensor, name: str) -> torch.Tensor:
    raise no_backward(name)


def refuse(x: torch.Tensor, message: str) -> torch.Tensor:
    """What `combine` refuses while Dynamo traces it, once the graph runs."""
    raise TypeError(message)


def same_shape(x: torch.Tensor, _: str) -> torch.Tensor:
    return torch.empty_like(x)


def define(
    name: str,
    schema: str,
    compute: Callable[..., Any],
    shapes: Callable[..., Any],
    written: tuple[str, ...] = (),
) -> None:
    """Define torch.ops.rtflash.`name`, with its shape function, and without gradients.

    (Not by torch.library.custom_op: of an operator without a backward that complains only when gradients are
    computed, and it costs a third more host time in inference mode.)
    """
    LIBRARY.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
    LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"rtflash::{name}", shapes, lib=LIBRARY)
    operator = getattr(torch.ops.rtflash, name).default
    tensors = {
        i: argument.name
        for i, argument in enumerate(operator._schema.arguments)
        if "Tensor" in str(argument.type)
    }

    def without_gradients(keys: Any, *arguments: Any) -> Any:
        for i, argument in tensors.items():
            x = arguments[i]
            if x is not None and TORCH.needs_grad(x):
                raise no_backward(argument)
        return operator.redispatch(keys & torch._C._after_autograd_keyset, *arguments)

    LIBRARY.impl(name, without_gradients, "Autograd", with_keyset=True)


for dense in (api.DENSE, api.DENSE_KV, api.DENSE_QKV):
    define_attention(dense, DENSE)
for packed in (inference.VARLEN, inference.VARLEN_KV, inference.VARLEN_QKV):
    define_attention(packed, VARLEN)
define_attention(inference.KVCACHE, CACHE)
define_attention(inference.KVCACHE, CACHE, "_append", WRITTEN)
define(
    "merge_attention_states",
    "(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)",
    merging.merge_attention_states,
    merged_shapes,
)
define(
    "flash_attn_combine",
    "(Tensor out_partial, Tensor lse_partial, ScalarType? out_dtype) -> (Tensor, Tensor)",
    combine_new,
    combined_shapes,
)
define(
    "flash_attn_combine_into",
    "(Tensor out_partial, Tensor lse_partial, Tensor(a!) out, ScalarType? out_dtype) -> Tensor",
    combine_into,
    combined_lse_shape,
    ("out",),
)
define("refuse_grad", "(Tensor x, str name) -> Tensor", refuse_grad, same_shape)
define("refuse", "(Tensor x, str message) -> Tensor", refuse, same_shape)
