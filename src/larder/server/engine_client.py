"""The face behind which conversations are held: what HTTP, tests and replicas talk to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from larder.server.request import ChatMessage, Listener, Request, Ticket


@dataclass(frozen=True)
class SessionInfo:
    """One conversation as its owner sees it.

    Args:
        name: as the client gave it, or as it was given.
        state: `running`, `waiting` or `idle`.
        tokens: of everything said.
        tier_bytes: of its cache, by tier: `device`, `host`, `disk`.
        tier: the fastest that holds the whole cache; `none` where only the tokens are known.
        kept_tokens: entries that can be attended to, per kv head on average: those that are parked
            until a query asks for them as well.
        held_tokens: entries that the fullest cache holds on the budget, per kv head on average.
        budget_tokens: that it may hold; None without a limit.
        evicted_tokens, merged_tokens, lossless: as in `Report`.
        epoch: turns committed so far.
        made, last_used: seconds since 1970.
        durable: whether the store has all turns.
    """

    name: str
    state: str
    turns: int
    tokens: int
    tier: str
    tier_bytes: Mapping[str, int]
    kept_tokens: int
    evicted_tokens: int
    merged_tokens: int
    lossless: bool
    pinned: bool
    epoch: int
    made: float
    last_used: float
    durable: bool = True
    held_tokens: int = 0
    budget_tokens: int | None = None


@dataclass(frozen=True)
class SessionTranscript:
    """A session with what was said in it.

    Args:
        spans: tokens [start, stop) of each turn.
    """

    view: SessionInfo
    turns: tuple[ChatMessage, ...]
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class EpisodeInfo:
    """One of the caches of a conversation.

    Args:
        kept_tokens: entries that it holds, per kv head on average.
        segments: pieces of the conversation that are filed under it.
        about: the pieces that stand for it.
        tier: where it is.
    """

    number: int
    is_active: bool
    kept_tokens: int
    segments: int
    about: tuple[str, ...]
    tier: str
    nbytes: int


@dataclass(frozen=True)
class CachedPositions:
    """What is left of a text, for a map of it.

    Args:
        tokens: that were read.
        layers: positions in the text in ascending order, by layer and kv head; of the cache that
            answered last, where there are several.
        texts: of everything that was said, token by token; none where nothing is held.
        parked: the same of what is in slower memory until it is asked for; empty where nothing is.
        episodes: all caches, where each is for a topic.
        tier: where the cache is, as in `SessionInfo`; in some no more is known of it than that.
    """

    tokens: int
    layers: tuple[tuple[tuple[int, ...], ...], ...]
    texts: tuple[str, ...] = ()
    parked: tuple[tuple[tuple[int, ...], ...], ...] = ()
    episodes: tuple[EpisodeInfo, ...] = ()
    tier: str = "none"


@dataclass(frozen=True)
class ServedModel:
    """A model that answers.

    Args:
        context_tokens: the longest text that it was made for; None where nothing says so.
        policy: the canonical sentence.
        made: seconds since 1970.
        budget_tokens: M, entries per kv head of one cache; None without a limit.
        beyond_budget: what is held beside it, a clause each.
    """

    name: str
    policy: str
    context_tokens: int | None
    made: float
    budget_tokens: int | None = None
    beyond_budget: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServerStats:
    """Every number of the server, since it started or as it is now.

    Args:
        sessions: how many are in each state.
        tier_bytes: held or on their way, by tier.
        budget_bytes: that may be held, by tier; a tier without a limit is missing.
        peak_bytes: the highest of `tier_bytes` so far.
        budget_violations: times that more was held than may be; 0 unless something is broken.
        running, waiting: requests.
        done: requests by how they ended: `stop`, `length`, `cancelled`, `error`.
        refused: requests by code.
        passed_over: sessions that may have been meant and could not be had, by code.
        begun_again: sessions whose saved text is damaged, gone on with from that of a request.
        steps: passes through the model that generate; `blocks` those that read.
        prompt_tokens, ..., merged_tokens: sums over the reports of all requests.
        parked, restored: caches that were moved to and from slower tiers, by tier.
        rejected: saved sessions and caches that were not taken back, by reason.
        unwritten: turns, caches and pins that the store has not taken, by reason.
        written_bytes: to disk.
        turns_not_durable: turns that the store did not take when they were complete, by reason.
        sessions_not_durable: sessions with turns now that only memory has.
    """

    sessions: Mapping[str, int] = field(default_factory=dict)
    tier_bytes: Mapping[str, int] = field(default_factory=dict)
    budget_bytes: Mapping[str, int] = field(default_factory=dict)
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    budget_violations: int = 0
    running: int = 0
    waiting: int = 0
    done: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[str, int] = field(default_factory=dict)
    passed_over: Mapping[str, int] = field(default_factory=dict)
    begun_again: Mapping[str, int] = field(default_factory=dict)
    steps: int = 0
    blocks: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    restored_tokens: int = 0
    recomputed_tokens: int = 0
    new_tokens: int = 0
    evicted_tokens: int = 0
    merged_tokens: int = 0
    parked: Mapping[str, int] = field(default_factory=dict)
    restored: Mapping[str, int] = field(default_factory=dict)
    rejected: Mapping[str, int] = field(default_factory=dict)
    unwritten: Mapping[str, int] = field(default_factory=dict)
    written_bytes: int = 0
    turns_not_durable: Mapping[str, int] = field(default_factory=dict)
    sessions_not_durable: int = 0


class EngineClient(ABC):
    """Conversations of many tenants over one model. Safe from any thread.

    A session of another tenant is as unknown as one that never was. Where a method names a
    session, it raises `Refusal` 404 `session_not_found` if there is none, and 409 `session_busy`
    if it would change one that is answering.
    """

    @abstractmethod
    def submit(self, request: Request, listener: Listener) -> Ticket:
        """Have a text continued; everything after that is told to the listener.

        Raises:
            Refusal: it cannot be served: 400 `kv_budget_exceeded`, 400 `context_length_exceeded`,
                400 `invalid_request`, 404 `session_not_found` for `follows`, 409 `session_busy`,
                429 `too_many_requests`, 503 `overloaded`.
        """

    @abstractmethod
    def models(self) -> tuple[ServedModel, ...]:
        """What answers."""

    @abstractmethod
    def tokenize(self, text: str) -> tuple[int, ...]:
        """Token ids of a bare text."""

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids.

        Raises:
            Refusal: 400 `invalid_request`, where an id is outside the vocabulary.
        """

    @abstractmethod
    def sessions(self, tenant: str) -> tuple[SessionInfo, ...]:
        """A tenant's conversations, the one that was used last first."""

    @abstractmethod
    def session(self, tenant: str, name: str) -> SessionTranscript:
        """One of them, with what was said."""

    @abstractmethod
    def open(self, tenant: str, name: str, turns: Sequence[ChatMessage] = ()) -> SessionInfo:
        """Make a session that begins with these turns; nothing is read before it is asked.

        Raises:
            Refusal: 409 `session_exists`.
        """

    @abstractmethod
    def pin(self, tenant: str, name: str) -> SessionInfo:
        """Have it leave every tier after all that are not pinned, also after a restart."""

    @abstractmethod
    def unpin(self, tenant: str, name: str) -> SessionInfo:
        """Take that back."""

    @abstractmethod
    def release(self, tenant: str, name: str) -> SessionInfo:
        """It is not needed for a while: its device and host memory go, the conversation stays."""

    @abstractmethod
    def prefetch(self, tenant: str, name: str) -> SessionInfo:
        """It is needed soon: bring its cache to the device, if there is room."""

    @abstractmethod
    def fork(self, tenant: str, name: str, new_name: str | None = None) -> SessionInfo:
        """Another session in the same state.

        Raises:
            Refusal: 409 `session_exists`.
        """

    @abstractmethod
    def compact(self, tenant: str, name: str) -> SessionInfo:
        """Bring its cache to the device, within the policy's budget, and give all slack back."""

    @abstractmethod
    def export(self, tenant: str, name: str) -> bytes:
        """The session as one file, for `import_`."""

    @abstractmethod
    def import_(self, tenant: str, name: str, data: bytes) -> SessionInfo:
        """A session that was exported.

        Raises:
            Refusal: 400 `invalid_request` where the file is damaged or another model's, 409
                `session_exists`.
        """

    @abstractmethod
    def remove(self, tenant: str, name: str, branches: bool = False) -> tuple[str, ...]:
        """Forget it, in every tier; the names of its branches that stay.

        A branch is what requests made that began as the session does and went on otherwise, under
        its name with a number.

        Args:
            branches: whether they are forgotten, too.

        Raises:
            Refusal: 409 `session_busy` where it, or a branch that is to go, is answering; nothing
                has changed.
        """

    @abstractmethod
    def kept(self, tenant: str, name: str) -> CachedPositions:
        """What its cache holds, as far as that can be told without moving it."""

    @abstractmethod
    def stats(self) -> ServerStats:
        """Every number there is."""

    @abstractmethod
    def is_healthy(self) -> bool:
        """Whether the model's thread is alive and takes requests."""

    @abstractmethod
    def problems(self) -> tuple[str, ...]:
        """What is wrong while requests are taken, one word each: `turns_not_durable` where the
        store lacks turns that were answered, or has refused one lately."""

    @abstractmethod
    def close(self) -> None:
        """Take no more requests, end those on their way as cancelled, and give everything back."""
