"""Command-line tools: the `rtflash` commands and what developers of the kernels use."""
