"""Coarser level of `entropy`: steps twice as wide (CacheGen, arXiv:2310.07240, section 5.3)."""

from __future__ import annotations

from typing import ClassVar

from larder.store.codecs.entropy import STEP_SCALE, Entropy


class CoarseEntropy(Entropy):
    """Delta coding in steps twice as wide."""

    step_scale: ClassVar[float] = 2 * STEP_SCALE


Part = CoarseEntropy
