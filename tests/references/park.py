"""`park`: nothing is done for the rejected here; the cache parks them."""

from __future__ import annotations

from references.drop import settle

__all__ = ["settle"]
