"""Requests, reports and errors of the server: frozen values, independent of HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, runtime_checkable

from larder.core.errors import LarderError
from larder.engine.constraint import Constraint
from larder.engine.sampler import SamplingParams
from larder.server.answer_form import PLAIN_FORM, AnswerForm
from larder.server.context_order import ContextOrder


@dataclass(frozen=True)
class ChatMessage:
    """A message of a conversation.

    Args:
        role: `system`, `user`, `assistant`, or any other that the model's chat template supports;
            `template` for variables of the template, as JSON.
    """

    role: str
    text: str


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token at its position, by the model's own logits.

    Args:
        token: its id.
        text: text of the token alone; `data` its bytes.
        logprob: natural logarithm; None for the first token of a text.
        top: the most likely tokens at its position, best first.
    """

    token: int
    text: str
    data: bytes
    logprob: float | None
    top: tuple[TokenLogprob, ...] = ()


class CachedUse(Enum):
    """Use of similar questions that were answered before."""

    ANSWER = "answer"
    EXAMPLES = "examples"


@dataclass(frozen=True)
class CachedResponse:
    """Options of a request for the response cache.

    Args:
        category: name of a category of the server.
        key: text that is compared in place of the last message; empty for the message.
        is_sampled: answers may be kept and given again although they are sampled.
        is_kept: question and answer may be kept for later requests.
    """

    category: str
    use: CachedUse = CachedUse.ANSWER
    key: str = ""
    is_sampled: bool = False
    is_kept: bool = True


@dataclass(frozen=True)
class Request:
    """A request to generate text.

    Args:
        tenant: owner; sessions of other tenants are invisible to it.
        turns: messages of the whole conversation; with `follows`, only the new ones. Empty with
            `raw_prompt`.
        session: name that the client gave its conversation. A hint: reuse is decided by comparing
            messages and tokens.
        stop: strings that end the answer.
        exact: answer from a lossless cache only.
        follows: name of a session whose newest state `turns` continues.
        raw_prompt: text to continue without a chat template.
        routing_tag: part of a generated session name.
        steps: workflow steps until each session is used again, by session name; "" means this
            request's session.
        logprobs: number of the most likely tokens to report beside each token of the answer; None
            for no log-probabilities. A repeated request that wants them is answered again, since
            they are not stored.
        prompt_logprobs: report the tokens of `raw_prompt`, too, and the token that ends the answer.
            The prompt is read into a full cache, without those of other requests, and no session
            stays.
        raw_ids: token ids of `raw_prompt`, read as they are; empty to encode the text.
        constraint: what the answer must match; None for any text.
        choice: number of this answer among those to one prompt. All but 0 continue on a copy of
            what answer 0 of their `choice_group` has read, if it is known here, and leave no
            session.
        choice_group: what the answers to one prompt have in common; empty for a single one.
        images: files of the images that `turns` have marks of, by SHA-256.
        contexts: texts in front of the first user message, or ids of texts that were sent before.
            Under a policy that reads contexts apart no session stays.
        message_contexts: the same for other messages of the user, by number of the turn; they are
            text of their message under every policy.
        context_order: order in which contexts are read where they are text of the message.
        answer_form: what the answer is parsed as where it is sent back in another spelling.
        model: first name of the model that answers; empty for the first one.
        program: name of the agent run that the request is a part of; empty for its session.
        tool: tool that the client runs after the answer; empty for what the answer calls.
        cached_response: what it wants of the response cache; None for nothing.
        priority: requests of a lower number come first, as in vLLM; among equal ones tenants share
            by the tokens that they were served.
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
    logprobs: int | None = None
    prompt_logprobs: bool = False
    raw_ids: tuple[int, ...] = ()
    constraint: Constraint | None = None
    choice: int = 0
    choice_group: str = ""
    images: Mapping[str, bytes] = field(default_factory=dict)
    answer_form: AnswerForm = PLAIN_FORM
    model: str = ""
    contexts: tuple[str, ...] = ()
    message_contexts: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    context_order: ContextOrder = ContextOrder.GIVEN
    priority: int = 0
    program: str = ""
    tool: str = ""
    cached_response: CachedResponse | None = None

    @property
    def is_ephemeral(self) -> bool:
        """True if no session stays behind the answer."""
        return self.choice > 0 or self.prompt_logprobs or bool(self.contexts)

    @property
    def has_contexts(self) -> bool:
        """True if contexts stand beside its messages."""
        return bool(self.contexts or self.message_contexts)

    @property
    def is_nameless(self) -> bool:
        """True if only the messages identify the session."""
        return not (self.session or self.follows or self.raw_prompt is not None)


@dataclass(frozen=True)
class Report:
    """Measurements of one answer.

    Args:
        session: the session that holds the turn; a new one if the messages diverged from the named
            session.
        prompt_tokens: tokens before the answer.
        cached_tokens: those that did not have to be computed.
        restored_tokens: cached tokens that came from a slower tier.
        recomputed_tokens: computed again although they had been computed before.
        new_tokens: generated tokens.
        evicted_tokens: entries evicted by the policy so far, per kv head on average.
        merged_tokens: entries merged into others so far, per kv head on average.
        lossless: true if the cache holds everything that was read.
        tier: tier of the cache when the request was admitted: `none`, `device`, `host` or `disk`.
        reason: `stop`, `length` or `cancelled`.
        wait_seconds: from arrival to admission.
        first_seconds: from arrival to the first token.
        seconds: from arrival to the end.
        durable: true if the store has the turn; None if the end of an answer does not wait for it,
            or without a store.
        matched_stop: the stop string that ended the answer; None if none did, or if the answer to
            a repeated request was stored.
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
    matched_stop: str | None = None


@runtime_checkable
class Listener(Protocol):
    """Receiver of an answer. Called from the model's thread: must neither block nor raise.

    Exactly one of `on_done` and `on_error` is called, and nothing after it.
    """

    def on_text(self, text: str) -> None:
        """Receive the next text delta."""
        ...

    def on_logprobs(self, logprobs: tuple[TokenLogprob, ...]) -> None:
        """Receive the log-probabilities of tokens whose text comes next, if the request wants
        them."""
        ...

    def on_done(self, report: Report) -> None:
        """The answer is complete; `report` says whether its turn is durable."""
        ...

    def on_error(self, error: Exception) -> None:
        """The request failed; the session is as it was before."""
        ...


class Arrival:
    """Announcement of a request before it is submitted, from `EngineClient.arrival`; this one
    announces nothing.

    Context manager, which ends it.
    """

    def end(self) -> None:
        """Withdraw it, as the request was submitted or will not be. Calls after the first one do
        nothing."""

    def __enter__(self) -> Arrival:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()


class Ticket:
    """Contract of the handle of a submitted request; this class is that of a complete answer."""

    def cancel(self) -> None:
        """Cancel the request: within a step its memory is freed, and the session is as it was
        before.

        The listener receives `on_done` with reason `cancelled`. Safe from any thread; no effect
        once the answer is complete.
        """


class ApiError(LarderError):
    """Error of a request, with its HTTP status.

    Args:
        status: HTTP status; 409, 429 and 503 may succeed unchanged if retried, other 4xx never do.
        code: machine-readable reason, one word.
        param: request field at fault.
        retry_after: seconds until a retry is useful; None if it never is.
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

    def __reduce__(self) -> tuple[type[ApiError], tuple[object, ...]]:
        return ApiError, (str(self), self.status, self.code, self.param, self.retry_after)


class SessionUnreadableError(ApiError):
    """503 `session_unreadable`: the stored transcript is damaged; the whole conversation is needed
    to continue."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"Session {name!r} cannot be loaded, its stored transcript is damaged: send the whole "
            "conversation to continue from it, or delete the session.",
            503,
            "session_unreadable",
        )
