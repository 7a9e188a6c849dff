"""Embedder of a server, which its tenants use in turn."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from anyio import CancelScope, Lock
from jaxtyping import Float32

from larder.session.embedders.base import Embedder

BATCH = 32  # texts between two turns

Result = TypeVar("Result")


class EmbedderQueue:
    """Queue of the tenants before an embedder: each has one batch of texts in it, so that no tenant
    waits for more than a batch of every other. For one event loop.

    One thread uses the embedder: every thread that multiplies matrices keeps megabytes of buffers
    in the libraries of torch for as long as it lives.

    Args:
        embedder: used by the queue's thread alone.
        name: name that requests give.
    """

    def __init__(self, embedder: Embedder, name: str) -> None:
        self.embedder, self.name = embedder, name
        self._turns = defaultdict[str, Lock](Lock)
        self._thread = ThreadPoolExecutor(1, "larder embedding")

    async def embed(self, tenant: str, texts: Sequence[str]) -> Float32[np.ndarray, "N D"]:
        """One unit row per text."""
        rows = list[Float32[np.ndarray, "M D"]]()
        for start in range(0, len(texts), BATCH):
            batch = texts[start : start + BATCH]
            rows.append(await self._run(tenant, self.embedder.embed_segments, batch))
        return np.concatenate(rows)

    async def num_tokens(self, tenant: str, texts: Sequence[str]) -> list[int]:
        """Number of tokens of each text, up to the first that is longer than the embedder reads."""
        counts = list[int]()
        for start in range(0, len(texts), BATCH):
            batch = texts[start : start + BATCH]
            counts += await self._run(tenant, self._counts, batch)
            if self._is_too_long(counts[-1]):
                break
        return counts

    async def _run(
        self, tenant: str, work: Callable[[Sequence[str]], Result], batch: Sequence[str]
    ) -> Result:
        """Result of one batch of a tenant, in its turn, which ends with the batch even where the
        request is cancelled."""
        async with self._turns[tenant]:
            result = asyncio.wrap_future(self._thread.submit(work, batch))
            with CancelScope(shield=True):
                await asyncio.wait([result])
            return result.result()

    def _counts(self, texts: Sequence[str]) -> list[int]:
        """Number of tokens of each text, up to the first that is too long."""
        counts = list[int]()
        for text in texts:
            counts.append(self.embedder.num_tokens(text))
            if self._is_too_long(counts[-1]):
                break
        return counts

    def _is_too_long(self, count: int) -> bool:
        limit = self.embedder.max_tokens
        return limit is not None and count > limit
