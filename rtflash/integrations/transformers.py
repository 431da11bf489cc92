"""Hugging Face Transformers: `register()` makes attn_implementation="rtflash" known to its models.

Transformers' own integration of FlashAttention-2 does the work: it unpads what a padding mask covers, cuts static
caches, and says what is causal. It gets rtflash's functions in place of flash_attn's.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import transformers

from .. import checks
from ..api import flash_attn_func
from ..inference import flash_attn_varlen_func, flash_attn_with_kvcache

OLDEST = "5.4"
try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers import modeling_flash_attention_utils as utils
    from transformers.integrations.flash_attention import flash_attention_forward
    from transformers.masking_utils import flash_attention_mask
except ImportError as error:
    raise ImportError(
        f"Transformers is {transformers.__version__} ({error}); it must be {OLDEST} or newer"
    ) from error

NAME = "rtflash"
# What other attention functions of Transformers add to the scores, and rtflash does not.
ADDED = {"s_aux": "attention sinks", "position_bias": "a position bias"}
# What Transformers gives to functions that make masks, and what stands beside its lookup of implementations. (That
# gives five functions, a cache's among them, where the module keeps five.)
GIVEN = ("batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "attention_mask")
BESIDE = ("_lazy_imports", "_flash_with_kvcache_fn", "_pad_input", "_unpad_input")


def register() -> None:
    """Make `attn_implementation="rtflash"` work: in from_pretrained, from_config and set_attn_implementation.

    Models must be fp16 or bf16. Causal and full attention, grouped heads, sliding windows, soft caps, padding masks
    (batch, keys), packed sequences, dynamic and static caches are taken; what a model asks for beyond that raises
    NotImplementedError in its forward. To be called once; more often does no harm.

    Raises
    ------
    ImportError
        Transformers is not installed, or of a version without the functions that this needs (5.4 to 5.17 have them).
    """
    check_version()
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, padding_mask)
    # Names with "flash" in them are looked up there; others than flash_attn's are taken for repositories of kernels.
    if not hasattr(utils._lazy_imports, "without_rtflash"):
        utils._lazy_imports = with_rtflash(utils._lazy_imports)


def check_version() -> None:
    """Raise ImportError unless Transformers calls masks, and looks implementations up, as those here expect."""
    given = inspect.signature(flash_attention_mask).parameters
    missing = [f"an argument {name} of flash_attention_mask" for name in GIVEN if name not in given]
    missing += [f"{utils.__name__}.{name}" for name in BESIDE if not hasattr(utils, name)]
    if missing:
        raise ImportError(
            f"Transformers is {transformers.__version__}, without {checks.listed(missing)}; it must be {OLDEST} or"
            " newer, and have them"
        )


def with_rtflash(lookup: Any) -> Any:
    """`lookup`, which gives the functions of an implementation by its name, knowing of rtflash."""

    @functools.wraps(lookup)
    def found(implementation: str | None, *arguments: Any, **options: Any) -> tuple[Any, ...]:
        if implementation != NAME:
            return lookup(implementation, *arguments, **options)
        padding = utils._pad_input, utils._unpad_input
        return flash_attn_func, varlen, flash_attn_with_kvcache, *padding

    found.without_rtflash = lookup  # type: ignore[attr-defined]
    return found


@functools.wraps(flash_attn_varlen_func)
def varlen(*arguments: Any, max_seqlen_q: Any, max_seqlen_k: Any, **options: Any) -> Any:
    """`flash_attn_varlen_func` of lengths that may be tensors of one element."""
    options["max_seqlen_q"] = longest = int(max_seqlen_q)
    # One tensor is read once: a read waits for the GPU.
    options["max_seqlen_k"] = longest if max_seqlen_k is max_seqlen_q else int(max_seqlen_k)
    return flash_attn_varlen_func(*arguments, **options)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention of a layer.

    Parameters
    ----------
    query : (batch, heads, seqlen_q, head_dim), fp16 or bf16.
    key, value : (batch, heads_k, seqlen_k, head_dim).
    attention_mask : bool (batch, keys), False where there is padding; None: there is none. Keys past it do not count.
    options : Transformers'.

    Returns
    -------
    out : (batch, seqlen_q, heads, head_dim); and None, for there are no attention weights.

    Raises
    ------
    NotImplementedError
        The model adds something to the scores, or brings a mask of its own.
    TypeError
        A dtype other than fp16 and bf16.
    """
    for option, what in ADDED.items():
        if options.get(option) is not None:
            raise NotImplementedError(
                f"{type(module).__name__} has {what} ({option}), which rtflash has not yet; use another"
                " attn_implementation"
            )
    if attention_mask is not None and attention_mask.ndim != 2:
        raise NotImplementedError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; with rtflash it must be a padding mask, (batch,"
            " keys)"
        )
    if query.dtype == torch.float32 and not torch.is_autocast_enabled(query.device.type):
        raise TypeError(
            f"{type(module).__name__} computes in fp32; rtflash takes fp16 and bf16: load the model with"
            " dtype=torch.bfloat16, or run it under torch.autocast"
        )
    return flash_attention_forward(module, query, key, value, attention_mask, **options)


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor | None:
    """The mask that `attend` gets: the caller's padding mask, if it hides anything.

    Parameters
    ----------
    kv_length : keys that a layer attends to, unused slots of a static cache included.
    q_offset, kv_offset : positions of the first query and of the first key.
    attention_mask : bool (batch, tokens so far).
    options : Transformers', `device` among them.
    """
    if attention_mask is None:
        used = int(q_offset + q_length - kv_offset)
        if used >= kv_length:
            return None
        # Slots of a static cache that were not written yet.
        return torch.ones((batch_size, used), dtype=torch.bool, device=options.get("device"))
    return flash_attention_mask(
        batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask=attention_mask
    )
