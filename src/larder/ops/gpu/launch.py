"""Launch of Triton kernels; type checkers do not know what `triton.jit` makes of a function."""

from __future__ import annotations

from typing import Any


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **sizes: Any) -> None:
    """Launch a kernel on a grid of programs, compiled for the given sizes."""
    kernel[grid](*args, **sizes)
