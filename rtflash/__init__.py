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

__all__ = [
    "CompileError",
    "__version__",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "warmup",
]
