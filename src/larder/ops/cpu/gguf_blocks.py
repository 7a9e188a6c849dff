"""Values in bfloat16 of quantized GGUF blocks, by the C library."""

from __future__ import annotations

import torch
from torch import Tensor

from larder.ops.cpu.c_library import c_library

# Values and bytes of a block of the types that the C library reads, by their numbers in the format.
BLOCKS = {
    2: (32, 18),  # Q4_0
    3: (32, 20),  # Q4_1
    6: (32, 22),  # Q5_0
    7: (32, 24),  # Q5_1
    8: (32, 34),  # Q8_0
    10: (256, 84),  # Q2_K
    11: (256, 110),  # Q3_K
    12: (256, 144),  # Q4_K
    13: (256, 176),  # Q5_K
    14: (256, 210),  # Q6_K
}


def supports(kind: int) -> bool:
    """True for types that the C library reads, if it is there."""
    library = c_library()
    return kind in BLOCKS and library is not None and hasattr(library, "larder_dequantize_blocks")


def dequantize_blocks(stored: Tensor, kind: int, values: Tensor) -> None:
    """Write the values of blocks; thread-safe.

    Args:
        stored: bytes of whole blocks, in one piece.
        kind: number of the type, one that is supported.
        values: bfloat16, in one piece; overwritten.
    """
    size, width = BLOCKS[kind]
    count = stored.numel() // width
    if stored.numel() != count * width or values.numel() != count * size:
        raise ValueError(
            f"{stored.numel()} bytes of blocks of {width} do not hold {values.numel()} values."
        )
    if values.dtype is not torch.bfloat16:
        raise ValueError(f"values must be bfloat16, got {values.dtype}.")
    library = c_library()
    assert library is not None
    library.larder_dequantize_blocks(kind, stored.data_ptr(), count, values.data_ptr())
