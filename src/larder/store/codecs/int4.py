"""Codes of 4 bits: keys per channel, values per token.

Zirui Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache" (2024),
arXiv:2402.02750, section 3.1, with 4 bits.
"""

from __future__ import annotations

from typing import ClassVar

from larder.store.codecs.base import AffineCodec


class Int4(AffineCodec):
    """Two numbers per byte; one offset and scale for every 64 numbers."""

    bits: ClassVar[int] = 4


Part = Int4
