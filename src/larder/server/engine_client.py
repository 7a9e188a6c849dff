"""Interface of the inference engine to HTTP, tests and cluster replicas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from larder.server.request import ChatMessage, Listener, Request, Ticket


@dataclass(frozen=True)
class SessionInfo:
    """Summary of a session for its owner.

    Args:
        name: given by the client, or generated.
        state: `running`, `waiting` or `idle`.
        tokens: of the whole transcript.
        tier_bytes: bytes of its cache by tier: `device`, `host`, `disk`.
        tier: the fastest tier that has the whole cache; `none` if only the tokens are stored.
        kept_tokens: entries that can be attended to, offloaded ones included; per kv head on
            average.
        held_tokens: entries of the largest cache that count against the budget; per kv head on
            average.
        budget_tokens: limit of `held_tokens`; None without a limit.
        evicted_tokens, merged_tokens, lossless: as in `Report`.
        epoch: turns committed so far.
        made, last_used: seconds since 1970.
        durable: true if the store has all turns.
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
    """Messages of a session.

    Args:
        spans: token range [start, stop) of each message.
    """

    view: SessionInfo
    turns: tuple[ChatMessage, ...]
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class EpisodeInfo:
    """One of the caches of a session with episodes.

    Args:
        kept_tokens: entries in the cache, per kv head on average.
        segments: segments of the conversation assigned to the episode.
        about: its representative segments.
        tier: where the cache is.
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
    """Positions of the text that are still in the cache, by layer and kv head.

    Args:
        tokens: tokens that were read.
        layers: ascending text positions by layer and kv head; of the cache that answered last, if
            there are several.
        texts: the text of each token of the transcript; empty if there is no cache.
        parked: offloaded positions in the form of `layers`; empty if there are none.
        episodes: all caches of a session with episodes.
        tier: tier of the cache, as in `SessionInfo`; on some tiers nothing else is known.
    """

    tokens: int
    layers: tuple[tuple[tuple[int, ...], ...], ...]
    texts: tuple[str, ...] = ()
    parked: tuple[tuple[tuple[int, ...], ...], ...] = ()
    episodes: tuple[EpisodeInfo, ...] = ()
    tier: str = "none"


@dataclass(frozen=True)
class ServedModel:
    """A model that the server offers.

    Args:
        context_tokens: longest supported text; None if unknown.
        policy: canonical spelling of the policy.
        made: seconds since 1970.
        budget_tokens: M, entries per kv head of one cache; None without a limit.
        beyond_budget: what is stored in addition to the budget, one clause each.
    """

    name: str
    policy: str
    context_tokens: int | None
    made: float
    budget_tokens: int | None = None
    beyond_budget: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServerStats:
    """Counters since the start of the server, and gauges of its present state.

    Args:
        sessions: number of sessions by state.
        tier_bytes: bytes in use or reserved, by tier.
        budget_bytes: capacity by tier; tiers without a limit are missing.
        peak_bytes: highest value of `tier_bytes` so far.
        budget_violations: times that a cache exceeded its reservation; 0 unless there is a bug.
        running, waiting: requests.
        done: finished requests by reason: `stop`, `length`, `cancelled`, `error`.
        refused: rejected requests by error code.
        passed_over: sessions that might match a request but could not be loaded, by error code.
        begun_again: sessions with a damaged stored transcript, restarted from the text of a
            request.
        steps: decode steps.
        blocks: prefill blocks.
        prompt_tokens, cached_tokens, restored_tokens, recomputed_tokens, new_tokens,
            evicted_tokens, merged_tokens: sums over the reports of all requests.
        parked, restored: caches moved to and from slower tiers, by tier.
        rejected: stored sessions and caches that could not be used, by reason.
        unwritten: turns, caches and pins that the store did not accept, by reason.
        written_bytes: bytes written to disk.
        turns_not_durable: completed turns that the store did not accept, by reason.
        sessions_not_durable: sessions with turns that only memory has at present.
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
    """Sessions of many tenants over one model. Safe from any thread.

    Sessions of other tenants are treated as unknown. A method that names a session raises
    `ApiError` 404 `session_not_found` if there is none, and 409 `session_busy` if it would change a
    session that is answering.
    """

    @abstractmethod
    def submit(self, request: Request, listener: Listener) -> Ticket:
        """Queue a request; text, report and errors go to the listener.

        Raises:
            ApiError: 400 `kv_budget_exceeded`, `context_length_exceeded` or `invalid_request`; 404
                `session_not_found` for `follows`; 409 `session_busy`; 429 `too_many_requests`; 503
                `overloaded`.
        """

    @abstractmethod
    def models(self) -> tuple[ServedModel, ...]:
        """Served models."""

    @abstractmethod
    def tokenize(self, text: str) -> tuple[int, ...]:
        """Token ids of a text, without a chat template."""

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of token ids.

        Raises:
            ApiError: 400 `invalid_request`, an id is outside the vocabulary.
        """

    @abstractmethod
    def sessions(self, tenant: str) -> tuple[SessionInfo, ...]:
        """Sessions of a tenant, most recently used first."""

    @abstractmethod
    def session(self, tenant: str, name: str) -> SessionTranscript:
        """A session with its messages."""

    @abstractmethod
    def open(self, tenant: str, name: str, turns: Sequence[ChatMessage] = ()) -> SessionInfo:
        """Create a session that begins with these messages; nothing is computed before its first
        request.

        Raises:
            ApiError: 409 `session_exists`.
        """

    @abstractmethod
    def pin(self, tenant: str, name: str) -> SessionInfo:
        """Evict the session from each tier only after all unpinned ones; survives a restart."""

    @abstractmethod
    def unpin(self, tenant: str, name: str) -> SessionInfo:
        """Undo `pin`."""

    @abstractmethod
    def release(self, tenant: str, name: str) -> SessionInfo:
        """Free the session's device and host memory; the transcript stays."""

    @abstractmethod
    def prefetch(self, tenant: str, name: str) -> SessionInfo:
        """Bring the session's cache to the device, if there is room."""

    @abstractmethod
    def fork(self, tenant: str, name: str, new_name: str | None = None) -> SessionInfo:
        """Create a session in the same state.

        Raises:
            ApiError: 409 `session_exists`.
        """

    @abstractmethod
    def compact(self, tenant: str, name: str) -> SessionInfo:
        """Bring the session's cache to the device, within the policy's budget, and release its
        slack."""

    @abstractmethod
    def export(self, tenant: str, name: str) -> bytes:
        """The session as a file, for `import_`."""

    @abstractmethod
    def import_(self, tenant: str, name: str, data: bytes) -> SessionInfo:
        """Create a session from an exported file.

        Raises:
            ApiError: 400 `invalid_request`, the file is damaged or of another model; 409
                `session_exists`.
        """

    @abstractmethod
    def remove(self, tenant: str, name: str, branches: bool = False) -> tuple[str, ...]:
        """Delete a session from every tier.

        A branch is a session that was forked automatically: a request began like this session and
        diverged. It is named after it, with a number.

        Args:
            branches: delete the branches, too.

        Returns:
            names of the branches that remain.

        Raises:
            ApiError: 409 `session_busy`, the session or a branch to delete is answering; nothing
                has changed.
        """

    @abstractmethod
    def kept(self, tenant: str, name: str) -> CachedPositions:
        """Positions in the session's cache, as far as they are known without moving it."""

    @abstractmethod
    def stats(self) -> ServerStats:
        """Statistics of the server."""

    @abstractmethod
    def is_healthy(self) -> bool:
        """True if the model's thread is alive and accepts requests."""

    @abstractmethod
    def problems(self) -> tuple[str, ...]:
        """Present problems, one word each: `turns_not_durable` if the store lacks answered turns,
        or has rejected one lately."""

    @abstractmethod
    def close(self) -> None:
        """Stop accepting requests, cancel those in progress, and release all resources."""
