"""Engine client without a model: echoes the prompt and obeys directives in the last message."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from larder.server import (
    ApiError,
    CachedPositions,
    ChatMessage,
    EngineClient,
    Listener,
    Operation,
    Report,
    Request,
    ServedModel,
    ServerStats,
    SessionInfo,
    SessionTranscript,
    Ticket,
    TokenLogprob,
)

NAME = "fake/model"


class FakeTicket(Ticket):
    """Remembers that it was cancelled."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()


@dataclass
class FakeHub(EngineClient):
    """Answers `a b` with `You said: a b`, word by word.

    The last message may say otherwise: `wait` answers once it is cancelled, `break` fails in the
    middle, `crash` fails with an error that is none of ours, `refuse CODE STATUS` is refused,
    `long` is cut by its length, `fork` is answered in a session beside the one named, `busy` is
    refused wherever a session is named.
    """

    asked: list[Request] = field(default_factory=list)
    tickets: list[FakeTicket] = field(default_factory=list)
    held: dict[tuple[str, str], list[ChatMessage]] = field(default_factory=dict)
    pinned: set[tuple[str, str]] = field(default_factory=set)
    is_closed: bool = False

    def submit(self, request: Request, listener: Listener) -> Ticket:
        self.asked.append(request)
        last = request.turns[-1].text if request.turns else str(request.raw_prompt)
        words = last.split()
        if words[:1] == ["refuse"]:
            raise ApiError(f"Refused: {last}.", int(words[2]), words[1], None, None)
        if words == ["busy"] and request.session is not None:
            raise ApiError("The session is busy: wait.", 409, "session_busy", None, 2.0)
        ticket = FakeTicket()
        self.tickets.append(ticket)
        result = (request, last, listener, ticket)
        threading.Thread(target=self._answer, args=result, daemon=True).start()
        return ticket

    def _answer(self, request: Request, last: str, listener: Listener, ticket: FakeTicket) -> None:
        reason = "stop"
        if last == "wait":
            ticket.cancelled.wait(20)
            reason = "cancelled"
        words = [f"{word} " for word in f"You said: {last}".split()]
        for place, word in enumerate(words):
            if request.logprobs is not None:
                listener.on_logprobs((_logprob(word, request.logprobs),))
            listener.on_text(word)
            if last == "break" and place == 1:
                listener.on_error(ApiError("It broke.", 503, "overloaded", None, 1.0))
                return
            if last == "crash":
                listener.on_error(ZeroDivisionError("a secret of the inside"))
                return
        name = request.session or f"session-{len(self.held)}"
        if last == "fork":
            name = f"{name} forked"
        turns = [*request.turns, ChatMessage("assistant", "".join(words))]
        known = len(self.held.get((request.tenant, name), ()))
        self.held[request.tenant, name] = turns
        listener.on_done(_report(name, known, len(words), "length" if last == "long" else reason))

    def call(self, operation: Operation[..., Any], *args: Any, **kwargs: Any) -> Any:
        return getattr(self, operation.name)(*args, **kwargs)

    def models(self) -> tuple[ServedModel, ...]:
        return (ServedModel(NAME, "whole()", 4096, 1.0),)

    def tokenize(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode("utf-8", "replace"))

    def count_prompt(self, turns: Sequence[ChatMessage], images: dict[str, bytes]) -> int:
        return sum(len(turn.text) for turn in turns)

    def tokenizer_info(self) -> dict[str, str | None]:
        return {"eos_token": "<eos>", "bos_token": None, "pad_token": None, "chat_template": None}

    def detokenize(self, ids: Sequence[int]) -> str:
        if any(not 0 <= each <= 255 for each in ids):
            raise ApiError("No such token.", 400, "invalid_request", "tokens")
        return bytes(ids).decode("latin-1")

    def sessions(self, tenant: str) -> tuple[SessionInfo, ...]:
        return tuple(self._view(*key) for key in self.held if key[0] == tenant)

    def session(self, tenant: str, name: str) -> SessionTranscript:
        turns = tuple(self._turns(tenant, name))
        spans = tuple((4 * place, 4 * place + 4) for place in range(len(turns)))
        return SessionTranscript(self._view(tenant, name), turns, spans)

    def open(self, tenant: str, name: str, turns: Sequence[ChatMessage] = ()) -> SessionInfo:
        self._vacant(tenant, name)
        self.held[tenant, name] = list(turns)
        return self._view(tenant, name)

    def pin(self, tenant: str, name: str) -> SessionInfo:
        self._turns(tenant, name)
        self.pinned.add((tenant, name))
        return self._view(tenant, name)

    def unpin(self, tenant: str, name: str) -> SessionInfo:
        self.pinned.discard((tenant, name))
        return self._view(tenant, name)

    def release(self, tenant: str, name: str) -> SessionInfo:
        return replace(self._view(tenant, name), tier="disk")

    def prefetch(self, tenant: str, name: str) -> SessionInfo:
        return self._view(tenant, name)

    def fork(self, tenant: str, name: str, new_name: str | None = None) -> SessionInfo:
        return self.open(tenant, new_name or f"{name} again", self._turns(tenant, name))

    def compact(self, tenant: str, name: str) -> SessionInfo:
        return self._view(tenant, name)

    def export(self, tenant: str, name: str) -> bytes:
        return json.dumps([vars(turn) for turn in self._turns(tenant, name)]).encode()

    def import_(self, tenant: str, name: str, data: bytes) -> SessionInfo:
        try:
            turns = [ChatMessage(**each) for each in json.loads(data)]
        except (ValueError, TypeError, AttributeError) as error:
            raise ApiError("No exported session.", 400, "invalid_request") from error
        return self.open(tenant, name, turns)

    def remove(self, tenant: str, name: str, branches: bool = False) -> tuple[str, ...]:
        self._turns(tenant, name)
        del self.held[tenant, name]
        own = [each for whose, each in self.held if whose == tenant and each.startswith(f"{name}~")]
        for each in own if branches else ():
            del self.held[tenant, each]
        return () if branches else tuple(own)

    def kept(self, tenant: str, name: str) -> CachedPositions:
        turns = self._turns(tenant, name)
        tokens = 4 * len(turns)
        every, some = tuple(range(tokens)), (0, 1, *range(tokens - 2, tokens))
        texts = [piece for turn in turns for piece in ("<", turn.text[:3], turn.text[3:], ">")]
        spans = self.session(tenant, name).spans
        layers = ((every, some), (some, every))
        return CachedPositions(tokens, layers, tuple(texts), turns=tuple(turns), spans=spans)

    def stats(self) -> ServerStats:
        tiers = {"device": 10, "host": 0}
        return ServerStats(
            tier_bytes=tiers, budget_bytes={"device": 40}, done={"stop": len(self.asked)}
        )

    def is_healthy(self) -> bool:
        return not self.is_closed

    def problems(self) -> tuple[str, ...]:
        return ()

    def close(self) -> None:
        self.is_closed = True
        for ticket in self.tickets:
            ticket.cancel()

    def _turns(self, tenant: str, name: str) -> list[ChatMessage]:
        if (tenant, name) not in self.held:
            raise ApiError("There is no such session.", 404, "session_not_found")
        return self.held[tenant, name]

    def _vacant(self, tenant: str, name: str) -> None:
        if (tenant, name) in self.held:
            raise ApiError("There is such a session.", 409, "session_exists")

    def _view(self, tenant: str, name: str) -> SessionInfo:
        turns = len(self._turns(tenant, name))
        tiers = {"device": 1 << 20, "host": 0, "disk": 3 << 20}
        is_pinned = (tenant, name) in self.pinned
        numbers = (turns, 4 * turns, "device", tiers, 3 * turns, turns, 0, False)
        held = {"held_tokens": 3 * turns, "budget_tokens": 4 * turns}
        return SessionInfo(name, "idle", *numbers, is_pinned, turns, 1.0, time.time(), **held)


def _logprob(word: str, num_top: int) -> TokenLogprob:
    top = tuple(
        TokenLogprob(place, f"{word}{place}", b"", -2.0 - place) for place in range(num_top)
    )
    return TokenLogprob(7, word, word.encode(), -1.0, top)


def _report(name: str, known: int, words: int, reason: str) -> Report:
    return Report(
        session=name,
        prompt_tokens=9 + 4 * known,
        cached_tokens=4 * known,
        restored_tokens=0,
        recomputed_tokens=0,
        new_tokens=words,
        evicted_tokens=2,
        merged_tokens=1,
        lossless=False,
        tier="device",
        reason=reason,
        wait_seconds=0.0,
        first_seconds=0.01,
        seconds=0.02,
    )
