"""Codes of 8 bits: keys per channel, values per token.

Zirui Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache" (2024),
arXiv:2402.02750, section 3.1, with 8 bits.
"""

from __future__ import annotations

from typing import ClassVar

from larder.store.codecs.base import AffineCodec


class Int8(AffineCodec):
    """One byte per number; one offset and scale for every 64 numbers."""

    bits: ClassVar[int] = 8


Part = Int8
