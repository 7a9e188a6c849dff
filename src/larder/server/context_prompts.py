"""Prompts with contexts: texts in front of the first user message that are read apart.

A context may be named by its id in place of its text, once the tenant has sent the text: `chunk-`
and the SHA-256 of the text. Under a policy that reads contexts apart (`cacheblend`, `ape`) the
entries of each are kept in host memory, for the tenant that sent it; under other policies contexts
are text of the message, and reused like every prefix.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass, replace
from hashlib import sha256

from larder.cache.chunk_entries import ChunkEntries
from larder.cache.sequence import SequenceCache
from larder.core.errors import BudgetError
from larder.core.spec import ModelSpec
from larder.prefill.base import ContextText
from larder.prefill.contexts import ChunkSource
from larder.server.api_errors import invalid_request
from larder.server.image_prompts import rendered_prompt
from larder.server.request import ApiError, ChatMessage, Request
from larder.session.files.loader import SEPARATOR
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter
from larder.store.ledger import ByteLedger, Reservation, Tier

CHUNK_ID = re.compile(r"chunk-[0-9a-f]{64}")
MOST_TEXTS = 4096  # texts of one tenant that ids stand for
HOST_SHARE = 0.25  # of host memory that chunks of all tenants take, at most
MARK = "0context0"  # stands for the contexts while a prompt is rendered; no template changes it

ChunkKey = tuple[tuple[int, ...], tuple[int, ...]]


def chunk_id(text: str) -> str:
    """Id of a context."""
    return f"chunk-{sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}"


@dataclass(frozen=True)
class HeldChunk:
    """Entries of a chunk in host memory, and its reservation there."""

    entries: ChunkEntries
    reservation: Reservation


class TenantChunks(ChunkSource):
    """Chunks of one tenant in host memory; the least recently used ones leave.

    For the model's thread.
    """

    def __init__(self, ledger: ByteLedger, tenant: str) -> None:
        self._ledger, self._tenant = ledger, tenant
        self._held = OrderedDict[ChunkKey, HeldChunk]()

    def find(
        self, spec: ModelSpec, prefix: tuple[int, ...], ids: tuple[int, ...]
    ) -> ChunkEntries | None:
        held = self._held.get((prefix, ids))
        if held is None:
            return None
        self._held.move_to_end((prefix, ids))
        return held.entries.to(spec.device)

    def add(self, prefix: tuple[int, ...], ids: tuple[int, ...], cache: SequenceCache) -> None:
        stop = cache.next_position
        count = cache.spec.full_bytes(stop - len(prefix))
        reservation = self._reserved(count)
        if reservation is not None:
            entries = ChunkEntries.of(cache, len(prefix), stop).to("cpu")
            self._held[prefix, ids] = HeldChunk(entries, reservation)

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return sum(held.reservation.bytes for held in self._held.values())

    def drop_oldest(self) -> None:
        """Drop the least recently used chunk, if there is one."""
        if self._held:
            _, held = self._held.popitem(last=False)
            held.reservation.release()

    def _reserved(self, count: int) -> Reservation | None:
        """Host memory for a chunk; None if there is no room, even without the other chunks."""
        limit = HOST_SHARE * self._ledger.limit(Tier.HOST)
        while count <= limit:
            if self.nbytes + count <= limit:
                try:
                    return self._ledger.reserve(Tier.HOST, self._tenant, count)
                except BudgetError:
                    pass
            if not self._held:
                return None
            self.drop_oldest()
        return None


class ContextPrompts:
    """Contexts of requests: their texts by id, their tokens, and their chunks, by tenant.

    For the model's thread.
    """

    def __init__(self, tokenizer: TokenizerAdapter, ledger: ByteLedger) -> None:
        self._tokenizer, self._ledger = tokenizer, ledger
        self._texts: dict[str, OrderedDict[str, str]] = {}
        self._chunks: dict[str, TenantChunks] = {}

    def source(self, tenant: str) -> TenantChunks:
        """Chunks of a tenant."""
        return self._chunks.setdefault(tenant, TenantChunks(self._ledger, tenant))

    def resolved(self, request: Request) -> Request:
        """Request with the texts of its contexts in place of ids.

        Raises:
            ApiError: 404 `context_not_found`, or 400 for an empty context.
        """
        known = self._texts.setdefault(request.tenant, OrderedDict())
        texts = tuple(_text(given, known) for given in request.contexts)
        for text in texts:
            known[chunk_id(text)] = text
            known.move_to_end(chunk_id(text))
        while len(known) > MOST_TEXTS:
            known.popitem(last=False)
        return replace(request, contexts=texts)

    def as_message(self, request: Request) -> Request:
        """Request with its contexts in front of the text of its first user message."""
        whole = "".join(map(_separated, request.contexts))
        return replace(request, turns=_with_opening(request.turns, whole), contexts=())

    def prompt(self, request: Request) -> ContextText:
        """Tokens of a request whose contexts are read apart.

        Raises:
            ApiError: 400: there is no message of the user, or nothing behind the contexts.
        """
        turns = _with_opening(request.turns, MARK)
        before, _, after = rendered_prompt(self._tokenizer, (), turns).text.partition(MARK)
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


def _text(given: str, known: OrderedDict[str, str]) -> str:
    """Text of a context that is given as such, or by its id."""
    if not given.strip():
        raise invalid_request("A context is empty: send a text, or leave it out.", "contexts")
    if CHUNK_ID.fullmatch(given) is None:
        return given
    if given not in known:
        raise ApiError(
            f"The context {given} is not known here: send its text.",
            404,
            "context_not_found",
            "contexts",
        )
    return known[given]


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
