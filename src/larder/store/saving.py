"""A session's state on its way to the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from torch import Tensor

from larder.cache.sequence import SequenceCache
from larder.core.errors import InputError
from larder.store import chunks as chunk_index
from larder.store.blobs import Ref
from larder.store.chunk_notes import Chunk
from larder.store.chunks import Chunks
from larder.store.coding import RAW, nbytes
from larder.store.envelopes import chunk_blob, is_lossless, owned, snapshot_blob
from larder.store.identity import Identity
from larder.store.ledger import Tier
from larder.store.pieces import chunk_of, is_whole, parts_of, rest_of
from larder.store.records import Held
from larder.store.shelves import Saving, Shelves
from larder.store.wording import ids_of, prefix_of, spelled


@dataclass(frozen=True)
class Snapshot:
    """A cache that is to outlive the process, and what made it.

    Args:
        cache: it is read, not changed.
        identity: of the model.
        policy: canonical spelling, sizes filled in.
        codec: how keys and values are spelled; a file in `store/codecs`.
        others: further caches of the same session, each of which has read some of its tokens.
        beside: what they do not say of their session; None for nothing.
    """

    cache: SequenceCache
    identity: Identity
    policy: str
    codec: str = RAW
    others: tuple[SequenceCache, ...] = ()
    beside: bytes | None = None

    @property
    def each(self) -> tuple[Snapshot, ...]:
        """Per cache, a snapshot of it alone."""
        bare = replace(self, others=(), beside=None)
        return tuple(replace(bare, cache=cache) for cache in (self.cache, *self.others))


def check(ids: Sequence[int], snapshot: Snapshot | None) -> None:
    """See that a cache is that of its tokens, or one of several that share them.

    Raises:
        InputError: it has read more or fewer; of several, more.
        UnknownName: there is no such codec.
    """
    if snapshot is None:
        return
    is_lossless(snapshot.codec)
    longest = max(each.cache.next_position for each in snapshot.each)
    if longest > len(ids) or (not snapshot.others and longest < len(ids)):
        raise InputError(
            f"The cache has read {longest} tokens, but {len(ids)} are to be "
            "saved with it: give exactly those that it has read."
        )


@dataclass(frozen=True)
class Written:
    """A cache as blobs.

    Args:
        spans: its blobs, in order.
        cache_bytes: of its tensors.
        lossless: whether it comes back to the bit.
        others: caches behind the first, where there are several.
        beside: the blob of what is told beside them.
    """

    spans: tuple[Ref, ...]
    cache_bytes: int
    lossless: bool
    others: tuple[Held, ...] = ()
    beside: Ref | None = None


def is_chunked(snapshot: Snapshot) -> bool:
    """Whether a cache is kept in chunks that others may share; of several none is."""
    return is_lossless(snapshot.codec) and not snapshot.others and is_whole(snapshot.cache)


class Writer:
    """Writes caches as blobs. Safe from threads."""

    def __init__(self, shelves: Shelves, chunks: Chunks) -> None:
        self._shelves, self._chunks = shelves, chunks

    def snapshot(
        self, saving: Saving, tenant: str, ids: Sequence[int], snapshot: Snapshot
    ) -> Written:
        """Write caches. A single one that is whole goes as chunks first, which are shared.

        Raises:
            BudgetError, StoreError: they cannot be kept.
        """
        chunked = is_chunked(snapshot)
        made = [self._one(saving, tenant, ids, each, chunked) for each in snapshot.each]
        held = [
            Held(each.cache.meta(), len(refs), count)
            for each, (refs, count) in zip(snapshot.each, made, strict=True)
        ]
        spans = tuple(ref for refs, _ in made for ref in refs)
        total = sum(count for _, count in made)
        beside = snapshot.beside
        told = None if beside is None else saving.put(owned(beside, tenant))
        return Written(spans, total, is_lossless(snapshot.codec), tuple(held[1:]), told)

    def _one(
        self, saving: Saving, tenant: str, ids: Sequence[int], snapshot: Snapshot, chunked: bool
    ) -> tuple[list[Ref], int]:
        """The blobs of one cache, and the bytes of its tensors."""
        cache = snapshot.cache
        with self._shelves.ledger.reserve(Tier.HOST, tenant, _needed(cache)):
            state = cache.state()
            count, refs = nbytes(state), []
            if chunked:
                shared = self._chunked(saving, tenant, ids, state, snapshot.identity)
                refs = [chunk.ref for chunk in shared]
                state = rest_of(state, shared[-1].stop if shared else 0)
            layers = len(cache.spec.layers)
            own = tenant, snapshot.identity, snapshot.policy, snapshot.codec, layers
            refs += [saving.put(snapshot_blob(part, *own)) for part in parts_of(state)]
        return refs, count

    def chunks(
        self, saving: Saving, tenant: str, ids: Sequence[int], cache: SequenceCache, who: Identity
    ) -> int:
        """Keep the beginning of a whole cache for other sessions; the tokens that are kept.

        Raises:
            BudgetError, StoreError: they cannot be kept.
        """
        if not is_whole(cache):
            return 0
        with self._shelves.ledger.reserve(Tier.HOST, tenant, _needed(cache)):
            made = self._chunked(saving, tenant, ids, cache.state(), who)
        return made[-1].stop if made else 0

    def _chunked(
        self,
        saving: Saving,
        tenant: str,
        ids: Sequence[int],
        state: Mapping[str, Tensor],
        identity: Identity,
    ) -> list[Chunk]:
        """The chunks of a text; those that are kept already are not written again."""
        size = chunk_index.TOKENS
        shared = self._chunks.longest(tenant, identity.key, ids)
        whole = (each.chunk for each in shared if each.tokens == size)
        found = list(takewhile(lambda chunk: saving.stays(chunk.ref), whole))
        for start in range(size * len(found), len(ids) - size + 1, size):
            stop = start + size
            span = {
                "start": start,
                "n_tokens": size,
                "tokens": ids_of(spelled(ids[start:stop])),
                "prefix": prefix_of(ids[:stop]),
            }
            ref = saving.put(chunk_blob(chunk_of(state, start, stop), tenant, identity, span))
            above = found[-1] if found else None
            added = self._chunks.add(tenant, identity.key, above, ids[:stop], ref)
            if added is None:  # what it continues has just left with the last session of it
                break
            found.append(added)
        return found


def _needed(cache: SequenceCache) -> int:
    """Bytes that saving holds beside the cache: a copy of its state, and the blob in the making."""
    return 2 * cache.nbytes
