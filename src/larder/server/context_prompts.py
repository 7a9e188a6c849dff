"""Prompts with contexts: texts in front of the first user message that are read apart.

A context may be named by its id in place of its text, once the tenant has sent the text: `chunk-`
and the SHA-256 of the text. Under a policy that reads contexts apart (`cacheblend`, `ape`) the
entries of each are kept in host memory, for the tenant that sent it; under other policies contexts
are text of the message, and reused like every prefix.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from os import urandom
from sys import getsizeof

from larder.core.errors import BudgetError
from larder.prefill.base import ContextText
from larder.prefill.contexts import ChunkSource
from larder.server.api_errors import invalid_request
from larder.server.context_order import (
    ContextOrder,
    ContextOrders,
    ContextReferences,
    ordered_texts,
)
from larder.server.host_chunks import HostChunks, TenantChunks
from larder.server.image_prompts import rendered_prompt
from larder.server.request import ApiError, ChatMessage, Request
from larder.session.files.loader import SEPARATOR
from larder.session.transcript.chat_template import image_digests
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter
from larder.store.ledger import ByteLedger, Reservation, Tier

CHUNK_ID = re.compile(r"chunk-[0-9a-f]{64}")
MOST_TEXTS = 4096  # texts of one tenant that ids stand for
TEXT_BYTES = 2**24  # of memory that they take, at most
TEXT_SHARE = 1 / 16  # of host memory that texts of all tenants take, at most
ENTRY_BYTES = 512  # of memory that a text takes beside its characters
# Chunks of a tenant with those that another model has read, from its own chunks.
ChunkTransfer = Callable[[ChunkSource, str], ChunkSource]
MARK_BYTES = 16  # of the mark that stands for the contexts while a prompt is rendered


def chunk_id(text: str) -> str:
    """Id of a context."""
    return f"chunk-{sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}"


@dataclass(frozen=True)
class HostText:
    """Text in host memory, and its reservation there."""

    text: str
    reservation: Reservation


class HostTexts:
    """Texts of all tenants by id, in host memory; the oldest are evicted, across tenants.

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
        ledger, reserved = self._ledger, self._bytes[tenant]
        limit = int(TEXT_SHARE * ledger.limit(Tier.HOST))
        most = ledger.limit(Tier.HOST) - ledger.used(Tier.HOST) + self.nbytes
        quota = ledger.tenant_limit(Tier.HOST, tenant) - ledger.used(Tier.HOST, tenant) + reserved
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
        self._transfer: ChunkTransfer | None = None

    def source(self, tenant: str) -> ChunkSource:
        """Chunks of a tenant; where they are taken from another model, those of both."""
        own = self.own_source(tenant)
        return own if self._transfer is None else self._transfer(own, tenant)

    def own_source(self, tenant: str) -> TenantChunks:
        """Chunks that this model has read for a tenant."""
        return TenantChunks(self._chunks, tenant)

    def share(self, layers: Iterable[int]) -> None:
        """Keep hidden states before some layers, beside those that are kept, for other models."""
        self._chunks.state_layers = tuple(sorted({*self._chunks.state_layers, *layers}))

    def take(self, transfer: ChunkTransfer) -> None:
        """Take contexts that this model has not read from another model."""
        self._transfer = transfer

    def resolved(self, request: Request) -> Request:
        """Request with the texts of its contexts in place of ids.

        Raises:
            ApiError: 404 `context_not_found`, or 400 for an empty context.
        """

        def texts(contexts: Iterable[str]) -> tuple[str, ...]:
            return tuple(_text(given, request.tenant, self._texts) for given in contexts)

        own = {number: texts(contexts) for number, contexts in request.message_contexts.items()}
        return replace(request, contexts=texts(request.contexts), message_contexts=own)

    def keep(self, request: Request) -> None:
        """Store the texts of a valid, resolved request under their ids."""
        for text in all_contexts(request):
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
        """Contexts without repeated ones, those that were read before first, and a line that
        states the given order."""
        texts = {chunk_id(text): text for text in request.contexts}
        sizes = {name: len(text) for name, text in texts.items()}
        order = self._orders.shared(request.tenant, sizes)
        self._orders.add(request.tenant, order)
        return ordered_texts(texts, order)

    def prompt(self, request: Request) -> ContextText:
        """Tokens of a request whose contexts are read apart.

        Raises:
            ApiError: 400: there is no message of the user, nothing behind the contexts, or
                an image.
        """
        if any(image_digests(turn.text) for turn in request.turns):
            raise invalid_request(
                "The messages have images, but contexts are read apart in front of text alone: ask "
                "with kv_policy 'exact', or send the contexts in a message.",
                "contexts",
            )
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


def all_contexts(request: Request) -> Iterator[str]:
    """Contexts of a request in the order of its messages."""
    yield from request.contexts
    for number in sorted(request.message_contexts):
        yield from request.message_contexts[number]


def with_message_contexts(request: Request) -> Request:
    """Request with the contexts of later messages as text of these messages; those of the first
    message of the user become contexts of the request.

    In shared order a context that stands above becomes a line that refers to it.
    """
    own, turns = dict(request.message_contexts), list(request.turns)
    first = next((number for number, turn in enumerate(turns) if turn.role == "user"), 0)
    contexts = (*request.contexts, *own.pop(first, ()))
    is_shared = request.context_order is ContextOrder.SHARED
    references = ContextReferences(contexts)
    for number in sorted(own):
        lines = references.next_message(own[number]) if is_shared else own[number]
        text = "".join(map(_separated, lines)) + turns[number].text
        turns[number] = replace(turns[number], text=text)
    return replace(request, turns=tuple(turns), contexts=contexts, message_contexts={})


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
    for index, turn in enumerate(turns):
        if turn.role == "user":
            opened = replace(turn, text=text + turn.text)
            return (*turns[:index], opened, *turns[index + 1 :])
    raise invalid_request(
        "Contexts stand in front of the first message of the user, but there is none: send one.",
        "contexts",
    )
