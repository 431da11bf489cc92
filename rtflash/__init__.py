"""FlashAttention with nothing to build: kernels rendered and compiled by NVRTC for the call at hand.

The public functions are FlashAttention-2's: `import rtflash as flash_attn` is a migration.
"""

from .api import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    warmup,
)
from .build import CompileError

__version__ = "0.1.0"

# FlashAttention-2's other functions.
_NOT_YET = {
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
}


def __getattr__(name: str) -> object:
    reason = "is not there yet" if name in _NOT_YET else "does not exist"
    raise AttributeError(f"rtflash.{name} {reason}; rtflash {__version__} has {', '.join(__all__)}")


__all__ = [
    "CompileError",
    "__version__",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "warmup",
]
