"""rtflash under the name flash_attn, for libraries that import FlashAttention-2 by its name."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import rtflash

NAME = "flash_attn"
FUNCTIONS = (
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
)
# The release of FlashAttention whose functions these are; libraries compare it. The rest says whose they really are.
VERSION = f"2.8.4+rtflash.{rtflash.__version__}"

_replaced: dict[str, ModuleType] = {}


def install(replace: bool = False) -> None:
    """Make `import flash_attn` give rtflash in this process, until `uninstall`.

    There are then flash_attn, flash_attn.flash_attn_interface and flash_attn.bert_padding, and importlib finds a
    distribution flash-attn of version VERSION. Libraries look for these when they are imported: call this first.
    Calling it again changes nothing. Of the interface's private functions there are those by which other libraries
    build on it; the ones for backward raise NotImplementedError.

    Parameters
    ----------
    replace : hide a flash_attn that is installed.

    Raises
    ------
    RuntimeError
        A flash_attn is installed, and `replace` is False.
    """
    if is_installed():
        return
    found = real_place()
    if found and not replace:
        raise RuntimeError(
            f"flash_attn is there already ({found}); rtflash.compat.install(replace=True) hides it in this process"
        )
    _replaced.update({name: sys.modules.pop(name) for name in list(sys.modules) if is_ours(name)})
    sys.modules.update(modules())
    sys.meta_path.insert(0, _finder)


def uninstall() -> None:
    """Undo `install`; a flash_attn that it hid is there again. What was imported by name meanwhile stays."""
    if not is_installed():
        return
    sys.meta_path.remove(_finder)
    for name in [name for name in sys.modules if is_ours(name)]:
        del sys.modules[name]
    sys.modules.update(_replaced)
    _replaced.clear()


def is_installed() -> bool:
    """Whether flash_attn is rtflash in this process."""
    return _finder in sys.meta_path


def is_ours(name: str) -> bool:
    """Whether a module belongs to flash_attn."""
    return name.partition(".")[0] == NAME


def real_place() -> str:
    """Where a flash_attn that is not ours comes from; empty: there is none."""
    loaded = sys.modules.get(NAME)
    if loaded is not None:
        return getattr(loaded, "__file__", None) or "an imported module"
    spec = importlib.util.find_spec(NAME)
    if spec is None:
        return ""
    return spec.origin or ", ".join(spec.submodule_search_locations or ["a module"])


def modules() -> dict[str, ModuleType]:
    """The modules by their full names."""
    functions = {name: getattr(rtflash, name) for name in FUNCTIONS}
    interface = module(f"{NAME}.flash_attn_interface", {**functions, **private_functions()})
    padding = module(
        f"{NAME}.bert_padding",
        {x.__name__: x for x in (index_first_axis, pad_input, unpad_input)},
    )
    contents = {
        **functions,
        "__version__": VERSION,
        "flash_attn_interface": interface,
        "bert_padding": padding,
    }
    top = module(NAME, contents, is_package=True)
    return {x.__name__: x for x in (top, interface, padding)}


def private_functions() -> dict[str, Any]:
    """What ring-flash-attention, diffusers and others import besides the public functions."""
    found: dict[str, Any] = {}
    for form, forward in (("", dense_forward), ("varlen_", varlen_forward)):
        for prefix in ("_", "_wrapped_"):
            found[f"{prefix}flash_attn_{form}forward"] = forward
            backward = f"{prefix}flash_attn_{form}backward"
            found[backward] = functools.partial(refuse_backward, backward)
    return found


def dense_forward(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Any,
    return_softmax: bool,
) -> tuple[Any, Any, None, None]:
    """FlashAttention-2's `_flash_attn_forward`: (out, lse, S_dmask, rng_state), the last two None."""
    window = window_size_left, window_size_right
    out, lse, dmask = rtflash.flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, return_attn_probs=True
    )  # fmt: skip
    return out, lse, dmask, None


def varlen_forward(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    return_softmax: bool = False,
    block_table: Any = None,
    leftpad_k: Any = None,
    seqused_k: Any = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> tuple[Any, Any, None, None]:
    """FlashAttention-2's `_flash_attn_varlen_forward`, as `dense_forward`: see flash_attn_varlen_func.

    zero_tensors is accepted: rows of no sequence are always 0.
    """
    if leftpad_k is not None:
        raise NotImplementedError("leftpad_k is given; packed sequences have no left padding here")
    window = window_size_left, window_size_right
    out, lse, dmask = rtflash.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window,
        softcap, alibi_slopes, return_attn_probs=True, block_table=block_table, seqused_k=seqused_k,
        num_splits=num_splits,
    )  # fmt: skip
    return out, lse, dmask, None


def refuse_backward(name: str, *_: Any, **__: Any) -> None:
    """Stands for a private function that computes gradients."""
    raise NotImplementedError(f"{name} was called; rtflash has no backward yet")


def module(name: str, contents: dict[str, Any], is_package: bool = False) -> ModuleType:
    """A module with these attributes; its file is this one."""
    made = ModuleType(name, f"rtflash {rtflash.__version__} under the name {name}.")
    made.__spec__ = ModuleSpec(name, None, origin=__file__, is_package=is_package)
    made.__file__ = __file__
    if is_package:
        made.__path__ = []
    made.__dict__.update(contents)
    return made


class Distribution(importlib.metadata.Distribution):
    """What importlib.metadata finds."""

    def read_text(self, filename: str) -> str | None:
        """METADATA and top_level.txt; there are no other files."""
        return {
            "METADATA": f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {VERSION}\n"
            "Summary: rtflash, by rtflash.compat.install()\n",
            "top_level.txt": f"{NAME}\n",
        }.get(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Any:
        """Beside this file."""
        return Path(__file__).parent / path


class _Finder:
    """A finder on sys.meta_path that knows no module but the distribution."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """None: the modules are loaded already."""

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        """The distribution, if it or any is asked for."""
        name = None if context is None else context.name
        if name is None or re.sub(r"[-_.]+", "-", name).lower() == "flash-attn":
            yield Distribution()


_finder = _Finder()


def index_first_axis(x: Any, indices: Any) -> Any:
    """Rows `indices` (n,) of a PyTorch tensor (rows, ...)."""
    return x[indices]


def pad_input(hidden_states: Any, indices: Any, batch: int, seqlen: int) -> Any:
    """(batch, seqlen, ...) of packed PyTorch rows (n, ...) that go to places `indices` (n,) of (batch * seqlen)."""
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    padded[indices] = hidden_states
    return padded.reshape(batch, seqlen, *hidden_states.shape[1:])


def unpad_input(hidden_states: Any, attention_mask: Any, unused_mask: Any = None) -> Any:
    """Pack the rows of padded PyTorch sequences that a mask keeps. The host waits for the GPU, to learn how many.

    Parameters
    ----------
    hidden_states : (batch, seqlen, ...).
    attention_mask : (batch, seqlen) bool or int, 1 = the row counts.
    unused_mask : (batch, seqlen), 1 = the row is packed too, but does not count.

    Returns
    -------
    rows : (total, ...).
    indices : int64 (total,): where they were, in (batch * seqlen).
    cu_seqlens : int32 (batch + 1,).
    max_seqlen : int, the most rows of a sequence.
    seqused : int32 (batch,): how many count.
    """
    import torch

    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    used, lengths = (x.sum(dim=-1, dtype=torch.int32) for x in (attention_mask, kept))
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return hidden_states.flatten(0, 1)[indices], indices, cu_seqlens, longest, used
