"""State of one session: identity, transcript, residency of its caches, durability, usage."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from larder.cache.sequence import SequenceCache
from larder.core.session_name import root_name
from larder.server.resident_caches import COPIES, ResidentCaches
from larder.server.serving_policy import CacheOccupancy, ServingPolicy
from larder.server.transcript import (
    TOKEN_TYPECODE,
    CompletedTurn,
    PositionMaps,
    Transcript,
    common_prefix_len,
)
from larder.session.caches import SessionCaches
from larder.session.chat_cache import ChatCache
from larder.store.eviction.continuum import PauseForecast
from larder.store.ledger import Reservation

MAX_THINK_TIMES = 16


@dataclass(frozen=True)
class SavedCache:
    """Description of a session's cache in the store.

    Args:
        tokens: number of tokens that it has read, a prefix of the transcript.
        settled_tokens: as in `Residency`.
        entries: over all managed layers and heads.
        nbytes: size in the store.
        cache_bytes: size in memory.
        bytes_at_once: of the size in the store, what is in memory at once while it is loaded.
        is_coded: a lossy codec was applied.
        is_lossless: the loaded cache holds everything that was read, bit for bit.
        caches: number of caches.
    """

    tokens: int
    settled_tokens: int
    entries: int
    nbytes: int
    cache_bytes: int
    bytes_at_once: int
    is_coded: bool
    is_lossless: bool
    caches: int = 1

    @property
    def load_bytes(self) -> int:
        """Host memory that loading takes."""
        return self.bytes_at_once + COPIES * self.cache_bytes


@dataclass(frozen=True)
class SessionIdentity:
    """Names of a session.

    Args:
        key: unique number.
        created: seconds since 1970.
    """

    key: int
    tenant: str
    name: str
    created: float

    @property
    def root(self) -> str:
        """Name of the session that the family's branches were forked from."""
        return root_name(self.name)


@dataclass
class Residency:
    """Caches of a session, and the tier that they are on.

    Args:
        resident_caches: caches in memory, in the form of the session's backend; None if there are
            none.
        episode: number of the cache that answered last.
        rebuilt_turns: completed turns when the chat caches were last rebuilt.
        position_maps: transcript positions of the entries of chat caches.
        chat_occupancy: occupancy of the chat cache that answered last.
        cached_ids: tokens that the cache has read.
        settled_tokens: length of the prefix of them that cannot be truncated.
        is_lossless: the cache holds everything that it has read, bit for bit.
        is_coded: the cache came from a lossy codec.
        origin: session that it was forked from, until it has a cache of its own.
        source_name: of the session whose stored cache this one began with; empty for none.
        saved_cache: cache in the store, of this state or an earlier one.
        failed_write_tokens: length of the cache that the store did not accept; -1 if the last write
            succeeded.
        is_saving: the cache is being written, and its tensors must not change.
        reservation: host memory of the caches.
    """

    resident_caches: ResidentCaches | None = None
    episode: int = 0
    rebuilt_turns: int = 0
    position_maps: PositionMaps = field(default_factory=PositionMaps)
    chat_occupancy: CacheOccupancy = CacheOccupancy()
    cached_ids: array = field(default_factory=lambda: array(TOKEN_TYPECODE))
    settled_tokens: int = 0
    is_lossless: bool = True
    is_coded: bool = False
    origin: SessionState | None = None
    source_name: str = ""
    saved_cache: SavedCache | None = None
    failed_write_tokens: int = -1
    is_saving: bool = False
    reservation: Reservation | None = None

    @property
    def caches(self) -> SessionCaches | None:
        """All caches in memory; None if they were dropped."""
        return None if self.resident_caches is None else self.resident_caches.caches

    @property
    def chat_cache(self) -> ChatCache | None:
        """Caches of the chat backend in memory."""
        return None if self.resident_caches is None else self.resident_caches.chat_cache

    @property
    def rebuild_bytes(self) -> int:
        """Peak of live bytes on the device while chat caches were rebuilt."""
        return 0 if self.resident_caches is None else self.resident_caches.rebuild_bytes

    def note_source(self, source: SessionState) -> None:
        """Note that these caches are those of another session, or a beginning of them."""
        theirs = source.residency
        if theirs is not self:
            is_stored = theirs.saved_cache is not None
            self.source_name = source.name if is_stored else theirs.source_name or source.name

    def contains(self, turns: int) -> bool:
        """True if the caches in memory are those after this number of completed turns."""
        return self.resident_caches is not None and self.resident_caches.contains(turns)

    @property
    def tier(self) -> str:
        """Tier of the cache."""
        if self.caches is not None:
            return "host" if self.active is None else "device"
        return "none" if self.saved_cache is None else "disk"

    @property
    def is_resident(self) -> bool:
        """True if the cache is on the device or in host memory."""
        return self.caches is not None

    @property
    def is_saved(self) -> bool:
        """True if the store has the present cache."""
        return self.saved_cache is not None and self.saved_cache.tokens == len(self.cached_ids)

    @property
    def active(self) -> SequenceCache | None:
        """The cache that answers, if it is on the device."""
        return None if self.caches is None else self.caches.active_cache

    @property
    def device_bytes(self) -> int:
        """Bytes of the caches on the device."""
        return 0 if self.active is None else self.active.device_nbytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the caches in host memory."""
        return self.nbytes - self.device_bytes if self.is_resident else 0

    @property
    def reserved_bytes(self) -> int:
        """Host memory that is reserved for the caches."""
        return 0 if self.reservation is None else self.reservation.bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the caches, on any tier."""
        if self.caches is not None:
            return self.caches.nbytes
        return 0 if self.saved_cache is None else self.saved_cache.cache_bytes

    @property
    def occupancy(self) -> CacheOccupancy:
        """Occupancy of the cache, on any tier."""
        if self.resident_caches is not None:
            return self.resident_caches.occupancy(self.chat_occupancy)
        return (
            CacheOccupancy()
            if self.saved_cache is None
            else CacheOccupancy(self.saved_cache.entries, self.saved_cache.tokens)
        )

    @property
    def idle_bytes(self) -> int:
        """Bytes of the caches between two turns, without slack."""
        return 0 if self.resident_caches is None else self.resident_caches.idle_bytes

    @property
    def write_bytes(self) -> int:
        """Host memory that writing the caches to the store takes, in addition to them."""
        return 0 if self.resident_caches is None else self.resident_caches.write_bytes

    def clear(self) -> None:
        """Drop the caches from memory; the store keeps its own."""
        self.resident_caches = None
        self.cached_ids = array(TOKEN_TYPECODE)
        self.settled_tokens = 0
        self.is_coded = False
        self.is_lossless = self.saved_cache is None or self.saved_cache.is_lossless


@dataclass
class SessionDurability:
    """State of a session in the store.

    Args:
        turns: number of turns in the store.
        epoch: epoch of the newest state in the store; 0 if there is none.
        write_mark: mark of writes after that epoch whose outcome is unknown; or empty.
        pending_writes: number of writes in progress.
        is_superseded: another server has written a newer state; this one is not used any more.
    """

    turns: int = 0
    epoch: int = 0
    write_mark: str = ""
    pending_writes: int = 0
    is_superseded: bool = False


@dataclass
class SessionUsage:
    """Use of a session by requests: what it is busy with, and what eviction policies know of it.

    Args:
        is_provisional: created by a request and without a turn; removed if the request fails.
        is_answering: a request for it is waiting or running.
        is_running: its cache is in use and stays on the device.
        is_pinned: evicted after all that are not pinned.
        last_used: seconds since 1970.
        uses: requests so far.
        answered: time of the last answer; 0 if there was none.
        think_times: seconds between the latest answers and the requests after them.
        workflow_steps: until it is used again; infinite if unknown.
        clock: eviction clock of its tier at the last use, for eviction policies with aging.
        pause: what is known of the pause since the last answer.
    """

    is_provisional: bool = False
    is_answering: bool = False
    is_running: bool = False
    is_pinned: bool = False
    last_used: float = 0.0
    uses: int = 0
    answered: float = 0.0
    think_times: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_THINK_TIMES))
    workflow_steps: float = math.inf
    clock: float = 0.0
    pause: PauseForecast = PauseForecast()

    def record_think_time(self, requested_at: float) -> None:
        """Record the time since the last answer; `requested_at` is when a request arrived."""
        if self.answered:
            self.think_times.append(max(0.0, requested_at - self.answered))


@dataclass(eq=False)
class SessionState:
    """State of one session. For the model's thread.

    Args:
        serving: policy of its caches.
    """

    identity: SessionIdentity
    serving: ServingPolicy
    transcript: Transcript = field(default_factory=Transcript)
    residency: Residency = field(default_factory=Residency)
    durability: SessionDurability = field(default_factory=SessionDurability)
    usage: SessionUsage = field(default_factory=SessionUsage)

    @property
    def key(self) -> int:
        return self.identity.key

    @property
    def tenant(self) -> str:
        return self.identity.tenant

    @property
    def name(self) -> str:
        return self.identity.name

    @property
    def root(self) -> str:
        return self.identity.root

    @property
    def turns(self) -> list[CompletedTurn]:
        return self.transcript.turns

    @property
    def is_durable(self) -> bool:
        """True if the store has all its turns."""
        return self.durability.epoch > 0 and self.durability.turns == len(self.turns)

    @property
    def is_idle(self) -> bool:
        """True if no request and no write uses it."""
        usage = self.usage
        return not (usage.is_answering or usage.is_running or self.residency.is_saving)

    @property
    def can_leave_memory(self) -> bool:
        """True if it is idle and the store has all its turns."""
        is_written = self.is_durable and len(self.turns) > 0
        return self.is_idle and not self.durability.pending_writes and is_written

    def usable_prefix_len(self, wanted: Sequence[int]) -> int:
        """Tokens of a text that its cache can be used for; never the last one, which is always
        read."""
        if self.serving.is_chat:  # chat caches are extended by turns, not by tokens
            return 0
        residency = self.residency
        read, settled = residency.cached_ids, residency.settled_tokens
        if not residency.is_resident:
            saved = residency.saved_cache
            if saved is None:
                return 0
            read, settled = self.transcript.ids[: saved.tokens], saved.settled_tokens
        common = min(common_prefix_len(read, wanted), len(wanted) - 1)
        if common == len(read):
            return common
        return common if self.serving.can_truncate and common >= settled else 0

    def update_occupancy(self) -> None:
        """Record the cache's occupancy; after every turn."""
        residency, cache = self.residency, self.residency.active
        assert cache is not None
        residency.is_lossless = not residency.is_coded and self.serving.is_lossless(cache)
        residency.chat_occupancy = self.serving.occupancy(cache)
