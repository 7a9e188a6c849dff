"""`kvpress`: what the press that it names by default is published to do, the length of each key."""

from __future__ import annotations

from references.keynorm import scores

__all__ = ["scores"]
