"""`quantized_pairs`: the latest exact, the others rounded, and shared if both layers hold them."""

from __future__ import annotations

from references.quantized import grades

__all__ = ["grades"]
