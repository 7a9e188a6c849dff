"""A session's state on its way back: verified in every respect, or not given back."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any

from torch import Tensor

from larder.cache.layers import Form, Makeup
from larder.cache.sequence import SequenceCache
from larder.core.errors import CacheError, Damaged, LarderError, Refused
from larder.core.spec import ModelSpec
from larder.store.behind import Behind
from larder.store.chunk_notes import Shared
from larder.store.container import peek
from larder.store.envelopes import CHUNK, SNAPSHOT, opened
from larder.store.identity import Identity
from larder.store.ledger import ByteLedger, Tier
from larder.store.pieces import check_fits, joined
from larder.store.rates import Rates
from larder.store.records import Record
from larder.store.vault import Vault

Pieces = dict[str, Tensor]
READERS = 4  # blobs that are read and verified at once
AHEAD = 8  # blobs in memory, the one that is used included


class Reader:
    """Reads caches from blobs. Safe from threads."""

    def __init__(self, vault: Vault, ledger: ByteLedger, rates: Rates) -> None:
        self._vault, self._ledger, self._rates = vault, ledger, rates

    def caches(
        self, record: Record, ids: Sequence[int], identity: Identity, spec: ModelSpec
    ) -> list[SequenceCache]:
        """The caches that a record tells of.

        Args:
            ids: its tokens, as its log has them.

        Raises:
            Damaged: a blob is missing, or not what was written.
            Refused: it is whole, but another's.
            BudgetError: it does not fit in host memory.
            StoreError: the disk fails.
        """
        stored = sum(ref.bytes for ref in record.spans)
        begun = time.perf_counter()
        with self._ledger.reserve(Tier.HOST, record.tenant, stored + 2 * record.cache_bytes):
            found: list[SequenceCache] = []
            for each in record.each:
                chunks, rest = self._spans(each, ids, identity)
                state = joined(chunks, rest, spec, len(ids)) if chunks else rest
                found.append(restored(spec, state, each.cache))
        longest = max(cache.next_position for cache in found)
        if longest > len(ids) or (len(found) == 1 and longest < len(ids)):
            raise Damaged(f"The saved cache has read {longest} tokens, its log has {len(ids)}.")
        self._rates.loaded(Tier.DISK, stored, time.perf_counter() - begun)
        return found

    def prefix(
        self,
        tenant: str,
        shared: Sequence[Shared],
        ids: Sequence[int],
        identity: Identity,
        spec: ModelSpec,
        unusable: Callable[[Shared, LarderError], None],
    ) -> SequenceCache | None:
        """The cache of the longest beginning of a text whose chunks are whole; None of nothing.

        Args:
            shared: chunks that hold the beginning, as `Chunks.longest` finds them.
            unusable: told of the first chunk that cannot be used, and why.

        Raises:
            BudgetError: it does not fit in host memory.
        """
        stored = sum(each.chunk.ref.bytes for each in shared)
        begun = time.perf_counter()
        with self._ledger.reserve(Tier.HOST, tenant, 3 * stored):
            pieces: list[Pieces] = []
            behind = Behind(ids)
            for each in shared:
                try:
                    data = self._vault.get(each.chunk.ref, tenant)
                    pieces.append(_chunk(data, tenant, identity, behind, each.tokens))
                except LarderError as error:
                    unusable(each, error)
                    break
            length = behind.start
            if not pieces:
                return None
            meta = Makeup(Form.DENSE).meta() | {"next_position": str(length)}
            cache = restored(spec, joined(pieces, {}, spec, length), meta)
        self._rates.loaded(Tier.DISK, stored, time.perf_counter() - begun)
        return cache

    def _spans(
        self, record: Record, ids: Sequence[int], identity: Identity
    ) -> tuple[list[Pieces], Pieces]:
        """Chunks in their order, and what is the session's alone."""
        chunks: list[Pieces] = []
        rest: Pieces = {}
        behind = Behind(ids)
        for data in self._each(record):
            told = peek(data)
            if told.get("kind") == CHUNK:
                chunks.append(_chunk(data, record.tenant, identity, behind, _count(told)))
            else:
                part = _part(data, record, identity)
                if rest.keys() & part.keys():
                    raise Damaged("Two parts of the saved cache hold the same tensor.")
                rest |= part
        return chunks, rest

    def _each(self, record: Record) -> Iterator[bytes]:
        """Blobs in their order; the next ones are read and verified meanwhile."""
        with ThreadPoolExecutor(READERS) as pool:
            later = iter(record.spans)
            coming = deque[Future[bytes]]()
            try:
                while True:
                    for ref in islice(later, AHEAD - len(coming)):
                        coming.append(pool.submit(self._vault.get, ref, record.tenant))
                    if not coming:
                        return
                    yield coming.popleft().result()
            finally:
                pool.shutdown(cancel_futures=True)


def restored(spec: ModelSpec, state: Pieces, meta: Mapping[str, str]) -> SequenceCache:
    """A cache of a state that was read.

    Raises:
        Damaged: the two do not make one.
    """
    check_fits(state, spec)
    try:
        return SequenceCache.adopt(spec, state, meta)
    except CacheError as error:
        raise Damaged(f"The saved cache does not fit the model: {error}") from error
    except (KeyError, ValueError, TypeError, IndexError, RuntimeError) as error:
        raise Damaged(f"The saved cache cannot be put together ({error}).") from error


def _part(data: bytes, record: Record, identity: Identity) -> Pieces:
    tensors, told = opened(data, SNAPSHOT, record.tenant, identity, record.cache_bytes)
    if told.get("policy") != {"name": record.policy}:
        raise Refused("A part of the saved cache was made by another policy.", "policy")
    return tensors


def _chunk(data: bytes, tenant: str, identity: Identity, behind: Behind, count: int) -> Pieces:
    """A chunk's tensors, once it is known to stand behind these tokens and to begin with the rest.

    Args:
        behind: where it should stand; goes on behind it.
        count: tokens that are wanted of it.
    """
    tensors, told = opened(data, CHUNK, tenant, identity, 2 * len(data))
    span, start = told.get("span"), behind.start
    wanted = list(behind.ids[start : start + count])
    tokens = span.get("tokens") if isinstance(span, dict) else None
    if not isinstance(span, dict) or not isinstance(tokens, list):
        raise Damaged("A chunk of the saved cache does not tell where it belongs.")
    is_behind = span.get("start") == start and tokens[: len(wanted)] == wanted
    if not is_behind or span.get("prefix") != behind.digest(tokens):
        raise Refused("A chunk of the saved cache belongs to another text.", "tokens")
    behind.advance(wanted)
    return {name: tensor[:, : len(wanted)] for name, tensor in tensors.items()}


def _count(told: Mapping[str, Any]) -> int:
    span = told.get("span")
    count = span.get("n_tokens") if isinstance(span, dict) else None
    if type(count) is not int or count < 1:
        raise Damaged("A chunk of the saved cache does not tell how many tokens it has.")
    return count
