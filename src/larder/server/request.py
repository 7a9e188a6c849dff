"""What a client asks of the server, and what it is told: frozen values, without HTTP."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from larder.core.errors import LarderError
from larder.engine.sampler import SamplingParams


@dataclass(frozen=True)
class ChatMessage:
    """One message.

    Args:
        role: `system`, `user`, `assistant`, or any other that the model's template knows.
    """

    role: str
    text: str


@dataclass(frozen=True)
class Request:
    """A text to continue.

    Args:
        tenant: whose it is; sessions of others do not exist for it.
        turns: the whole conversation so far; with `follows`, only what is new. Empty where
            `raw_prompt` is given.
        session: the name that the client gave its conversation, if any. A hint: what is reused is
            decided by comparing messages and tokens.
        stop: strings that end the answer.
        exact: answer from a cache that holds everything, or not at all.
        follows: the session whose newest state is continued by `turns`.
        raw_prompt: a text without a chat template, to be continued as it is.
        routing_tag: a word that the name of a session holds which has none of the client's.
        steps: of a workflow until a session is asked again, by its name; by "" that of the request.
    """

    tenant: str
    turns: tuple[ChatMessage, ...] = ()
    session: str | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    exact: bool = False
    follows: str | None = None
    raw_prompt: str | None = None
    routing_tag: str = ""
    steps: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_nameless(self) -> bool:
        """Whether what was said alone tells which session it belongs to."""
        return not (self.session or self.follows or self.raw_prompt is not None)


@dataclass(frozen=True)
class Report:
    """What an answer took.

    Args:
        session: the one that holds the turn; a new one where the text diverged from the one named.
        prompt_tokens: of the whole text in front of the answer.
        cached_tokens: those of them that were not read for this answer.
        restored_tokens: those of the cached ones whose cache came back from a slower tier.
        recomputed_tokens: read again although they had been read before.
        new_tokens: that were generated.
        evicted_tokens: entries that a policy has dropped, per kv head on average, so far.
        merged_tokens: the same of those that went into others.
        lossless: whether the cache held everything that was read.
        tier: where the cache was when the request came: `none`, `device`, `host` or `disk`.
        reason: `stop`, `length` or `cancelled`.
        wait_seconds: from the request to its first pass.
        first_seconds: from the request to the first token.
        seconds: from the request to the end.
        durable: whether the store has the turn; None where the end of an answer does not wait for
            that, or there is no store.
    """

    session: str
    prompt_tokens: int
    cached_tokens: int
    restored_tokens: int
    recomputed_tokens: int
    new_tokens: int
    evicted_tokens: int
    merged_tokens: int
    lossless: bool
    tier: str
    reason: str
    wait_seconds: float
    first_seconds: float
    seconds: float
    durable: bool | None = None


@runtime_checkable
class Listener(Protocol):
    """Who hears an answer. Called from the model's thread: it must neither block nor raise.

    After `on_done` or `on_error` nothing more comes; one of the two always comes.
    """

    def on_text(self, text: str) -> None:
        """The next piece."""
        ...

    def on_done(self, report: Report) -> None:
        """The answer is complete, and its turn is kept as the report says."""
        ...

    def on_error(self, error: Exception) -> None:
        """There is no answer; the session is as it was before."""
        ...


class Ticket(ABC):
    """A request on its way."""

    @abstractmethod
    def cancel(self) -> None:
        """Nobody waits any more: within a step its memory is freed, and the session as before.

        The listener is told `on_done` with reason `cancelled`. Safe from any thread, and harmless
        once the answer is complete.
        """


class ApiError(LarderError):
    """A request that is not served.

    Args:
        status: of HTTP. 4xx where trying again unchanged is of no use; 409, 429 and 503 where it
            is.
        code: in one word, for programs.
        param: the field of the request that is to blame.
        retry_after: seconds until trying again makes sense; None where it never does.
    """

    def __init__(
        self,
        message: str,
        status: int,
        code: str,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code = status, code
        self.param, self.retry_after = param, retry_after


class SessionUnreadableError(ApiError):
    """What the store has of a session is damaged: only who sends its text can go on with it."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"Session {name!r} cannot be read back, for what the store has of it is damaged: send "
            "the whole conversation, and it goes on from that, or delete the session.",
            503,
            "session_unreadable",
        )
