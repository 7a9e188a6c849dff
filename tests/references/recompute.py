"""`recompute`: nothing is done for the rejected here; the cache has them computed again."""

from __future__ import annotations

from references.drop import settle

__all__ = ["settle"]
