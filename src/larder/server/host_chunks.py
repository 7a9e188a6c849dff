"""Chunks of contexts in host memory: their entries, reservations and eviction, by tenant.

Variants of a chunk (Cache-Craft), changes of an anchor (KVCOMM) and hidden states for other models
(DroidSpeak) are kept beside the entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from larder.cache.chunk_entries import ChunkEntries
from larder.cache.sequence import SequenceCache
from larder.core.errors import BudgetError
from larder.core.spec import ModelSpec
from larder.core.types import TokenIds
from larder.prefill.contexts import (
    STATES,
    ChunkAnchor,
    ChunkChange,
    ChunkSource,
    ChunkStates,
    ChunkVariant,
    StoredChunk,
    anchor_key,
    anchors_of,
    variant_key,
)
from larder.store.eviction.base import Candidate, CandidateColumns, EvictionPolicy
from larder.store.eviction.lru import Lru
from larder.store.ledger import ByteLedger, Reservation, Tier

HOST_SHARE = 0.25  # of host memory that chunks of all tenants take, at most

# Prefix and tokens of a chunk; or the key of a variant or an anchor (`larder.prefill.contexts`).
HostKey = tuple[object, ...]


@dataclass
class HostChunk:
    """Entries of a chunk in host memory, and its reservation there.

    Args:
        candidate: what the eviction policy knows of it; its parent is the chunk that it was read
            behind.
    """

    entries: StoredChunk
    reservation: Reservation
    candidate: Candidate


class HostChunks:
    """Chunks of all tenants in host memory, evicted across tenants when their share is full.

    A chunk is found by its own tenant alone. For the model's thread.

    Args:
        policy: eviction policy. `gdsf` is the priority of RAGCache (arXiv:2404.12457, section 5.1):
            clock + frequency * cost / size, and a chunk leaves after those that were read behind
            it. What differs: the cost is what a chunk adds to those before it, by operations; the
            paper interpolates measured times, and averages them over all that a request computes.
        operations: number of operations for reading a text, by its number of tokens.
    """

    def __init__(
        self,
        ledger: ByteLedger,
        policy: EvictionPolicy = Lru(),  # noqa: B008, frozen
        operations: Callable[[int], float] = float,
    ) -> None:
        self._ledger, self._policy, self._operations = ledger, policy, operations
        self.state_layers: tuple[int, ...] = ()  # before which states are kept for other models
        self._held = dict[tuple[str, HostKey], HostChunk]()
        self._names = dict[tuple[str, tuple[int, ...]], str]()  # by tenant and text to the end
        self._uses, self._clock = 0, 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return sum(held.reservation.bytes for held in self._held.values())

    def find(self, tenant: str, prefix: TokenIds, ids: TokenIds) -> ChunkEntries | None:
        """Entries of a chunk, which becomes the most recently used one."""
        held = self._held.get((tenant, (prefix, ids)))
        if held is None:
            return None
        self._use(held)
        assert isinstance(held.entries, ChunkEntries)
        return held.entries

    def add(self, tenant: str, prefix: TokenIds, ids: TokenIds, cache: SequenceCache) -> None:
        """Keep a chunk, unless it is held or there is no room for it."""
        if (held := self._held.get((tenant, (prefix, ids)))) is not None:
            self._use(held)
            return
        start, stop = len(prefix), cache.next_position
        parent = self._names.get((tenant, prefix), "")
        reservation = self._reserved(tenant, cache.spec.full_bytes(stop - start), parent)
        if reservation is None:
            return
        entries = ChunkEntries.of(cache, start, stop).to("cpu")
        cost = self._operations(stop) - self._operations(start)
        self._hold((tenant, (prefix, ids)), entries, reservation, cost, parent)
        self._names[tenant, prefix + ids] = str(self._uses)

    def beginning_with(self, tenant: str, key: HostKey) -> list[StoredChunk]:
        """Chunks whose keys begin with `key`, the least recently used first; counts as a use."""
        found = [
            held
            for (owner, own), held in self._held.items()
            if owner == tenant and own[: len(key)] == key
        ]
        found.sort(key=lambda held: held.candidate.last_used)
        for held in found:
            self._use(held)
        return [held.entries for held in found]

    def keep(
        self, tenant: str, key: HostKey, chunk: StoredChunk, tokens: int, parent: str = ""
    ) -> None:
        """Keep a variant or a change of `tokens` tokens, unless there is no room for it.

        Args:
            parent: name of the chunk that may not be evicted before it; empty for none.
        """
        if (tenant, key) in self._held:
            self._held.pop((tenant, key)).reservation.release()
        reservation = self._reserved(tenant, chunk.nbytes, parent)
        if reservation is not None:
            own, cost = chunk.to("cpu"), self._operations(tokens)
            self._hold((tenant, key), own, reservation, cost, parent)

    def name(self, tenant: str, text: TokenIds) -> str:
        """Name of the chunk that ends a text; empty if it is not held."""
        return self._names.get((tenant, text), "")

    def _hold(
        self,
        key: tuple[str, HostKey],
        chunk: StoredChunk,
        reservation: Reservation,
        cost: float,
        parent: str,
    ) -> None:
        self._uses += 1
        used, count = float(self._uses), max(1, chunk.nbytes)
        candidate = Candidate(str(self._uses), count, cost, used, clock=self._clock, parent=parent)
        self._held[key] = HostChunk(chunk, reservation, candidate)

    def _use(self, chunk: HostChunk) -> None:
        self._uses += 1
        uses = chunk.candidate.uses + 1
        chunk.candidate = replace(
            chunk.candidate, last_used=float(self._uses), uses=uses, clock=self._clock
        )

    def _drop(self, tenant: str | None, parent: str, count: int) -> bool:
        """Drop chunks to free `count` bytes; False if there are none.

        Args:
            tenant: only chunks of this tenant; None for any.
            parent: name of a chunk that stays, with those before it.
        """
        staying = self._path(parent)
        keys = [
            key
            for key, held in self._held.items()
            if tenant in (None, key[0]) and held.candidate.name not in staying
        ]
        columns = CandidateColumns.of([self._held[key].candidate for key in keys])
        order = self._policy.select_victims(columns, float(self._uses), count)
        self._clock = max(self._clock, order.clock)
        for row in order.rows:
            held = self._held.pop(keys[row])
            held.reservation.release()
            self._names = {text: n for text, n in self._names.items() if n != held.candidate.name}
        return bool(order.rows)

    def _path(self, name: str) -> set[str]:
        """Names of a chunk and of those before it."""
        parents = {held.candidate.name: held.candidate.parent for held in self._held.values()}
        path = set[str]()
        while name in parents:
            path.add(name)
            name = parents[name]
        return path

    def _reserved(self, tenant: str, count: int, parent: str) -> Reservation | None:
        """Host memory for a chunk behind another one, which stays; None if there is no room, even
        without other chunks."""
        ledger = self._ledger
        limit = int(HOST_SHARE * ledger.limit(Tier.HOST))
        most = ledger.limit(Tier.HOST) - ledger.used(Tier.HOST) + self.nbytes
        if count > min(limit, most, ledger.tenant_limit(Tier.HOST, tenant)):
            return None
        while True:
            excess = self.nbytes + count - limit
            if excess <= 0:
                try:
                    return ledger.reserve(Tier.HOST, tenant, count)
                except BudgetError:
                    excess = ledger.used(Tier.HOST) + count - ledger.limit(Tier.HOST)
            # Chunks of others make no room in the tenant's own budget.
            is_own = excess <= 0
            missing = count - ledger.free_bytes(Tier.HOST, tenant) if is_own else excess
            if not self._drop(tenant if is_own else None, parent, max(1, missing)):
                return None


class TenantChunks(ChunkSource):
    """Chunks of one tenant among those in host memory. For the model's thread."""

    def __init__(self, chunks: HostChunks, tenant: str) -> None:
        self._chunks, self._tenant = chunks, tenant

    def find(self, spec: ModelSpec, prefix: TokenIds, ids: TokenIds) -> ChunkEntries | None:
        found = self._chunks.find(self._tenant, prefix, ids)
        return None if found is None else found.to(spec.device)

    def add(self, prefix: TokenIds, ids: TokenIds, cache: SequenceCache) -> None:
        self._chunks.add(self._tenant, prefix, ids, cache)

    def variants(self, spec: ModelSpec, prefix: TokenIds, ids: TokenIds) -> list[ChunkVariant]:
        found = self._chunks.beginning_with(self._tenant, variant_key(prefix, ids))
        return [own for own in found if isinstance(own, ChunkVariant)]

    def add_variant(self, prefix: TokenIds, ids: TokenIds, variant: ChunkVariant) -> None:
        key = variant_key(prefix, ids, variant.profile.before)
        self._chunks.keep(self._tenant, key, variant, len(ids))

    @property
    def state_layers(self) -> tuple[int, ...]:
        return self._chunks.state_layers

    def states(self, spec: ModelSpec, prefix: TokenIds, ids: TokenIds) -> ChunkStates | None:
        found = self._chunks.beginning_with(self._tenant, (STATES, prefix, ids))
        own = found[0] if found else None
        return own.to(spec.device) if isinstance(own, ChunkStates) else None

    def add_states(self, prefix: TokenIds, ids: TokenIds, states: ChunkStates) -> None:
        chunk = self._chunks.name(self._tenant, prefix + ids)
        if chunk:  # there was room for it
            self._chunks.keep(self._tenant, (STATES, prefix, ids), states, len(ids), chunk)

    def anchors(self, spec: ModelSpec, prefix: TokenIds, index: int) -> list[ChunkAnchor]:
        found = self._chunks.beginning_with(self._tenant, anchor_key(prefix, index))
        changes = [own for own in found if isinstance(own, ChunkChange)]
        bases = [self._chunks.find(self._tenant, prefix, own.ids) for own in changes]
        return anchors_of(changes, bases)

    def add_anchor(self, prefix: TokenIds, index: int, anchor: ChunkAnchor) -> None:
        base = self._chunks.name(self._tenant, prefix + anchor.ids)
        if not base:  # there was no room for it
            return
        key, change = anchor_key(prefix, index, (anchor.ids,)), anchor.change
        self._chunks.keep(self._tenant, key, ChunkChange(anchor.ids, change), len(anchor.ids), base)
