"""A list of entries per head; what a query may see is decided by true position alone."""

from __future__ import annotations

from collections.abc import Sequence

from references.cache.ragged import RaggedLoop


class WindowLoop(RaggedLoop):
    """Forgets nothing: the window is in the attention, so forgetting must not be noticed."""

    def keep(self, chosen: Sequence[Sequence[int]]) -> None:
        raise ValueError("a window slides by itself")
