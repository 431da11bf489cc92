"""FlashAttention with nothing to build: kernels rendered and compiled by NVRTC for the call at hand.

The public functions are FlashAttention-2's: `import rtflash as flash_attn` is a migration.
"""

from .ahead import warmup
from .api import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from .artifacts import CompileError
from .build import MissingKernelError
from .inference import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from .merging import flash_attn_combine, merge_attention_states

__version__ = "0.1.0"


# Imported when they are first asked for.
_MODULES = ("compat", "integrations")
_UNDER_FLASH_ATTN = ("bert_padding", "flash_attn_interface")


def __getattr__(name: str) -> object:
    if name in _MODULES:
        import importlib

        return importlib.import_module(f"{__name__}.{name}")
    if name in _UNDER_FLASH_ATTN:
        raise AttributeError(
            f"rtflash.{name} does not exist; after rtflash.compat.install(), `import flash_attn.{name}` gives it"
        )
    raise AttributeError(
        f"rtflash.{name} does not exist; rtflash {__version__} has {', '.join(__all__)}"
    )


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])


__all__ = [
    "CompileError",
    "MissingKernelError",
    "__version__",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "merge_attention_states",
    "warmup",
]
