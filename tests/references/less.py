"""`less`: nothing is done for the rejected here; the cache adds them to its state."""

from __future__ import annotations

from references.drop import settle

__all__ = ["settle"]
