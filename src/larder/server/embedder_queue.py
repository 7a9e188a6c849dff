"""Embedder of a server, which its tenants use in turn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from anyio import CapacityLimiter, Lock, to_thread
from jaxtyping import Float32

from larder.session.embedders.base import Embedder

BATCH = 32  # texts between two turns


class EmbedderQueue:
    """Queue of the tenants before an embedder: each has one batch of texts in it, so that no tenant
    waits for more than a batch of every other. For one event loop.

    Args:
        embedder: used by one thread at a time.
    """

    def __init__(self, embedder: Embedder) -> None:
        self.embedder = embedder
        self._turns = defaultdict[str, Lock](Lock)
        self._threads = CapacityLimiter(1)  # apart from those that wait for answers

    async def embed(self, tenant: str, texts: Sequence[str]) -> Float32[np.ndarray, "N D"]:
        """One unit row per text."""
        rows = list[Float32[np.ndarray, "M D"]]()
        for start in range(0, len(texts), BATCH):
            batch = texts[start : start + BATCH]
            async with self._turns[tenant]:
                embed = self.embedder.embed_segments
                rows.append(await to_thread.run_sync(embed, batch, limiter=self._threads))
        return np.concatenate(rows)

    async def num_tokens(self, tenant: str, texts: Sequence[str]) -> list[int]:
        """Number of tokens of each text."""

        def count() -> list[int]:
            return [self.embedder.num_tokens(text) for text in texts]

        async with self._turns[tenant]:
            return await to_thread.run_sync(count, limiter=self._threads)
