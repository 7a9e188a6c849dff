"""Prompts with contexts: texts in front of the first user message that are read apart.

A context may be named by its id in place of its text, once the tenant has sent the text: `chunk-`
and the SHA-256 of the text. Under a policy that reads contexts apart (`cacheblend`, `ape`) the
entries of each are kept in host memory, for the tenant that sent it; under other policies contexts
are text of the message, and reused like every prefix.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from os import urandom
from sys import getsizeof

from larder.cache.chunk_entries import ChunkEntries
from larder.cache.sequence import SequenceCache
from larder.core.errors import BudgetError
from larder.core.spec import ModelSpec
from larder.prefill.base import ContextText
from larder.prefill.contexts import (
    ChunkAnchor,
    ChunkChange,
    ChunkSource,
    ChunkVariant,
    KeptChunk,
    anchor_key,
    anchors_of,
    variant_key,
)
from larder.server.api_errors import invalid_request
from larder.server.context_order import ContextOrder, ContextOrders, importance_line
from larder.server.image_prompts import rendered_prompt
from larder.server.request import ApiError, ChatMessage, Request
from larder.session.files.loader import SEPARATOR
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter
from larder.store.eviction.base import Candidate, CandidateColumns, EvictionPolicy
from larder.store.eviction.lru import Lru
from larder.store.ledger import ByteLedger, Reservation, Tier

CHUNK_ID = re.compile(r"chunk-[0-9a-f]{64}")
MOST_TEXTS = 4096  # texts of one tenant that ids stand for
TEXT_BYTES = 2**24  # of memory that they take, at most
TEXT_SHARE = 1 / 16  # of host memory that texts of all tenants take, at most
ENTRY_BYTES = 512  # of memory that a text takes beside its characters
HOST_SHARE = 0.25  # of host memory that chunks of all tenants take, at most
MARK_BYTES = 16  # of the mark that stands for the contexts while a prompt is rendered

# Prefix and tokens of a chunk; or the key of a variant or an anchor (`larder.prefill.contexts`).
HostKey = tuple[object, ...]


def chunk_id(text: str) -> str:
    """Id of a context."""
    return f"chunk-{sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}"


@dataclass
class HostChunk:
    """Entries of a chunk in host memory, and its reservation there.

    Args:
        candidate: what the eviction policy knows of it; its parent is the chunk that it was read
            behind.
    """

    entries: KeptChunk
    reservation: Reservation
    candidate: Candidate


class HostChunks:
    """Chunks of all tenants in host memory; some leave a full one, whosever they are.

    A chunk is found by its own tenant alone. For the model's thread.

    Args:
        rule: eviction policy. `gdsf` is the priority of RAGCache (arXiv:2404.12457, section 5.1):
            clock + frequency * cost / size, and a chunk leaves after those that were read behind
            it. What differs: the cost is what a chunk adds to those before it, by operations; the
            paper interpolates measured times, and averages them over all that a request computes.
        operations: of reading a text of so many tokens.
    """

    def __init__(
        self,
        ledger: ByteLedger,
        rule: EvictionPolicy = Lru(),  # noqa: B008, frozen
        operations: Callable[[int], float] = float,
    ) -> None:
        self._ledger, self._rule, self._operations = ledger, rule, operations
        self._held = dict[tuple[str, HostKey], HostChunk]()
        self._names = dict[tuple[str, tuple[int, ...]], str]()  # by tenant and text to the end
        self._uses, self._clock = 0, 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return sum(held.reservation.bytes for held in self._held.values())

    def find(
        self, tenant: str, prefix: tuple[int, ...], ids: tuple[int, ...]
    ) -> ChunkEntries | None:
        """Entries of a chunk, which becomes the most recently used one."""
        held = self._held.get((tenant, (prefix, ids)))
        if held is None:
            return None
        self._use(held)
        assert isinstance(held.entries, ChunkEntries)
        return held.entries

    def add(
        self, tenant: str, prefix: tuple[int, ...], ids: tuple[int, ...], cache: SequenceCache
    ) -> None:
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

    def beginning_with(self, tenant: str, key: HostKey) -> list[KeptChunk]:
        """Chunks whose keys begin so, the least recently used first; all become so again."""
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
        self, tenant: str, key: HostKey, chunk: KeptChunk, tokens: int, parent: str = ""
    ) -> None:
        """Keep a variant or a change of so many tokens, unless there is no room for it.

        Args:
            parent: name of the chunk that it leaves before; empty for none.
        """
        if (tenant, key) in self._held:
            self._held.pop((tenant, key)).reservation.release()
        reservation = self._reserved(tenant, chunk.nbytes, parent)
        if reservation is not None:
            own, cost = chunk.to("cpu"), self._operations(tokens)
            self._hold((tenant, key), own, reservation, cost, parent)

    def name(self, tenant: str, text: tuple[int, ...]) -> str:
        """Name of the chunk that ends a text; empty if it is not held."""
        return self._names.get((tenant, text), "")

    def _hold(
        self,
        key: tuple[str, HostKey],
        chunk: KeptChunk,
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
        """Drop chunks that free some bytes; False if there are none.

        Args:
            tenant: whose they are; None for anybody's.
            parent: name of a chunk that stays, with those before it.
        """
        staying = self._path(parent)
        keys = [
            key
            for key, held in self._held.items()
            if tenant in (None, key[0]) and held.candidate.name not in staying
        ]
        columns = CandidateColumns.of([self._held[key].candidate for key in keys])
        order = self._rule.select_victims(columns, float(self._uses), count)
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
            missing = count - ledger.room(Tier.HOST, tenant) if is_own else excess
            if not self._drop(tenant if is_own else None, parent, max(1, missing)):
                return None


class TenantChunks(ChunkSource):
    """Chunks of one tenant among those in host memory. For the model's thread."""

    def __init__(self, chunks: HostChunks, tenant: str) -> None:
        self._chunks, self._tenant = chunks, tenant

    def find(
        self, spec: ModelSpec, prefix: tuple[int, ...], ids: tuple[int, ...]
    ) -> ChunkEntries | None:
        found = self._chunks.find(self._tenant, prefix, ids)
        return None if found is None else found.to(spec.device)

    def add(self, prefix: tuple[int, ...], ids: tuple[int, ...], cache: SequenceCache) -> None:
        self._chunks.add(self._tenant, prefix, ids, cache)

    def variants(
        self, spec: ModelSpec, prefix: tuple[int, ...], ids: tuple[int, ...]
    ) -> list[ChunkVariant]:
        found = self._chunks.beginning_with(self._tenant, variant_key(prefix, ids))
        return [own for own in found if isinstance(own, ChunkVariant)]

    def add_variant(
        self, prefix: tuple[int, ...], ids: tuple[int, ...], variant: ChunkVariant
    ) -> None:
        key = variant_key(prefix, ids, variant.profile.before)
        self._chunks.keep(self._tenant, key, variant, len(ids))

    def anchors(self, spec: ModelSpec, prefix: tuple[int, ...], place: int) -> list[ChunkAnchor]:
        found = self._chunks.beginning_with(self._tenant, anchor_key(prefix, place))
        changes = [own for own in found if isinstance(own, ChunkChange)]
        bases = [self._chunks.find(self._tenant, prefix, own.ids) for own in changes]
        return anchors_of(changes, bases)

    def add_anchor(self, prefix: tuple[int, ...], place: int, anchor: ChunkAnchor) -> None:
        base = self._chunks.name(self._tenant, prefix + anchor.ids)
        if not base:  # there was no room for it
            return
        key, change = anchor_key(prefix, place, (anchor.ids,)), anchor.change
        self._chunks.keep(self._tenant, key, ChunkChange(anchor.ids, change), len(anchor.ids), base)


@dataclass(frozen=True)
class HostText:
    """Text in host memory, and its reservation there."""

    text: str
    reservation: Reservation


class HostTexts:
    """Texts of all tenants by id, in host memory; the oldest leave, whosever they are.

    A text is found by its own tenant alone. For the model's thread.
    """

    def __init__(self, ledger: ByteLedger) -> None:
        self._ledger = ledger
        self._held = OrderedDict[tuple[str, str], HostText]()
        self._counts, self._bytes = Counter[str](), Counter[str]()

    @property
    def nbytes(self) -> int:
        """Bytes of all texts."""
        return self._bytes.total()

    def find(self, tenant: str, name: str) -> str | None:
        """Text of an id."""
        held = self._held.get((tenant, name))
        return None if held is None else held.text

    def add(self, tenant: str, text: str) -> None:
        """Keep a text, unless there is no room for it even without older ones."""
        key = tenant, chunk_id(text)
        if key in self._held:
            self._held.move_to_end(key)
            return
        reservation = self._reserved(tenant, getsizeof(text) + ENTRY_BYTES)
        if reservation is not None:
            self._held[key] = HostText(text, reservation)
            self._counts[tenant] += 1
            self._bytes[tenant] += reservation.bytes

    def _reserved(self, tenant: str, count: int) -> Reservation | None:
        """Host memory for a text; None if there is no room, even without older ones."""
        ledger, own = self._ledger, self._bytes[tenant]
        limit = int(TEXT_SHARE * ledger.limit(Tier.HOST))
        most = ledger.limit(Tier.HOST) - ledger.used(Tier.HOST) + self.nbytes
        quota = ledger.tenant_limit(Tier.HOST, tenant) - ledger.used(Tier.HOST, tenant) + own
        if count > min(limit, TEXT_BYTES, most, quota):
            return None
        while True:
            is_full = self.nbytes + count > limit
            has_most = self._counts[tenant] >= MOST_TEXTS
            if not (is_full or has_most or self._bytes[tenant] + count > TEXT_BYTES):
                try:
                    return ledger.reserve(Tier.HOST, tenant, count)
                except BudgetError:
                    is_full = ledger.limit(Tier.HOST) - ledger.used(Tier.HOST) < count
            # Texts of others make no room in the tenant's own budget.
            oldest = next((key for key in self._held if is_full or key[0] == tenant), None)
            if oldest is None:
                return None
            self._drop(oldest)

    def _drop(self, key: tuple[str, str]) -> None:
        held = self._held.pop(key)
        self._counts[key[0]] -= 1
        self._bytes[key[0]] -= held.reservation.bytes
        held.reservation.release()


class ContextPrompts:
    """Contexts of requests: their texts by id, their tokens, and their chunks, by tenant.

    For the model's thread.

    Args:
        chunks: entries of contexts that were read.
    """

    def __init__(self, tokenizer: TokenizerAdapter, ledger: ByteLedger, chunks: HostChunks) -> None:
        self._tokenizer, self._chunks = tokenizer, chunks
        self._texts, self._orders = HostTexts(ledger), ContextOrders(ledger)

    def source(self, tenant: str) -> TenantChunks:
        """Chunks of a tenant."""
        return TenantChunks(self._chunks, tenant)

    def resolved(self, request: Request) -> Request:
        """Request with the texts of its contexts in place of ids.

        Raises:
            ApiError: 404 `context_not_found`, or 400 for an empty context.
        """
        texts = (_text(given, request.tenant, self._texts) for given in request.contexts)
        return replace(request, contexts=tuple(texts))

    def keep(self, request: Request) -> None:
        """Keep the texts of a resolved request, which was found to be valid, for their ids."""
        for text in request.contexts:
            self._texts.add(request.tenant, text)

    def as_message(self, request: Request) -> Request:
        """Request with its contexts in front of the text of its first user message, in the order
        that it wants."""
        texts = request.contexts
        if request.context_order is ContextOrder.SHARED:
            texts = self._in_shared_order(request)
        whole = "".join(map(_separated, texts))
        return replace(request, turns=_with_opening(request.turns, whole), contexts=())

    def _in_shared_order(self, request: Request) -> tuple[str, ...]:
        """Contexts without repeated ones, those that were read before first, and a line that tells
        the order that was given."""
        texts = {chunk_id(text): text for text in request.contexts}
        sizes = {name: len(text) for name, text in texts.items()}
        order = self._orders.shared(request.tenant, sizes)
        self._orders.add(request.tenant, order)
        line = importance_line(list(texts), order)
        return (*(texts[name] for name in order), *((line,) if line else ()))

    def prompt(self, request: Request) -> ContextText:
        """Tokens of a request whose contexts are read apart.

        Raises:
            ApiError: 400: there is no message of the user, or nothing behind the contexts.
        """
        # Random, so that no message can contain it; no template changes it.
        mark = f"0context{urandom(MARK_BYTES).hex()}0"
        turns = _with_opening(request.turns, mark)
        before, _, after = rendered_prompt(self._tokenizer, (), turns).text.partition(mark)
        encode = self._tokenizer.encode
        if not after:
            raise invalid_request(
                "Nothing stands behind the contexts: ask a question in the first message of the "
                "user.",
                "messages",
            )
        contexts = tuple(encode(_separated(text)) for text in request.contexts)
        return ContextText(encode(before), contexts, encode(after))


def _separated(text: str) -> str:
    return text.rstrip() + SEPARATOR


def _text(context: str, tenant: str, hosts: HostTexts) -> str:
    """Text of a context, which a request gives as such or by its id."""
    if not context.strip():
        raise invalid_request("A context is empty: send a text, or leave it out.", "contexts")
    if CHUNK_ID.fullmatch(context) is None:
        return context
    text = hosts.find(tenant, context)
    if text is None:
        raise ApiError(
            f"The context {context} is not known here: send its text.",
            404,
            "context_not_found",
            "contexts",
        )
    return text


def _with_opening(turns: tuple[ChatMessage, ...], text: str) -> tuple[ChatMessage, ...]:
    """Messages with a text in front of the first one of the user.

    Raises:
        ApiError: 400: there is none.
    """
    for number, turn in enumerate(turns):
        if turn.role == "user":
            opened = replace(turn, text=text + turn.text)
            return (*turns[:number], opened, *turns[number + 1 :])
    raise invalid_request(
        "Contexts stand in front of the first message of the user, but there is none: send one.",
        "contexts",
    )
