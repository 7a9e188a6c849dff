"""One conversation on the server: what was said, token for token, and where its cache is.

The tokens of an answer are those that were generated: written anew from its text they might come
out as others, and nothing behind them could be reused.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from larder.cache.sequence import SequenceCache
from larder.core.session_name import root_name
from larder.engine.sampler import SamplingParams
from larder.server.request import ChatMessage, Request
from larder.server.serving_policy import CacheOccupancy, ServingPolicy
from larder.session.caches import OffloadedCache
from larder.session.chat_cache import ChatCache
from larder.store.ledger import Reservation


@dataclass(frozen=True)
class PositionMap:
    """The way from places in a cache to places in the text.

    Args:
        starts: places in the cache, ascending, from each of which on the text goes on without a
            gap; `texts` are the places in the text that they are.
    """

    starts: tuple[int, ...] = (0,)
    texts: tuple[int, ...] = (0,)

    def placed(self, positions: Iterable[int]) -> tuple[int, ...]:
        """Places in the text."""
        found = list[int]()
        for position in positions:
            part = bisect_right(self.starts, position) - 1
            found.append(self.texts[part] + position - self.starts[part])
        return tuple(found)

    def going_on(self, start: int, text: int) -> PositionMap:
        """The same, where a turn was read at place `start` that stands at `text` in the text."""
        kept = sum(each < start for each in self.starts)
        return PositionMap((*self.starts[:kept], start), (*self.texts[:kept], text))


@dataclass
class PositionMaps:
    """Those of every cache of a conversation, by number."""

    own: dict[int, PositionMap] = field(default_factory=dict)

    def of(self, number: int) -> PositionMap:
        """Those of one cache."""
        return self.own.get(number, PositionMap())

    def file(self, drawn: int, filed: int, start: int, text: int) -> None:
        """A turn was read at `start` over cache `drawn`, and is in cache `filed`."""
        self.own[filed] = self.of(drawn).going_on(start, text)

    def refresh(self, positions: Sequence[int], text: int) -> None:
        """Caches that have read as many tokens as the text has were built of all of it."""
        for number, position in enumerate(positions):
            if position == text:
                self.own[number] = PositionMap()


TOKEN_TYPECODE = "i"  # of an array: a token id takes four bytes
MAX_PAUSES = 16
OVERHEAD_BYTES = 1024  # of a session in memory, beside its texts and tokens
ASSISTANT = "assistant"


@dataclass(frozen=True)
class GenerationParams:
    """How an answer was asked for: the same question asked alike is the same request again."""

    sampling: SamplingParams
    max_new_tokens: int
    stop: tuple[str, ...]

    @staticmethod
    def of(request: Request) -> GenerationParams:
        return GenerationParams(request.sampling, request.max_new_tokens, request.stop)


@dataclass(frozen=True)
class CompletedTurn:
    """A finished exchange.

    Args:
        turns: what was said before the answer.
        prompt: the tokens that it came to.
        text: of the answer.
        answer: its tokens, with the end of its turn.
        unread: how many of the last tokens the model had not read when the answer was complete.
        reason: as in `Report`.
    """

    turns: tuple[ChatMessage, ...]
    prompt: array
    text: str
    answer: array
    unread: int
    asked: GenerationParams
    reason: str

    @property
    def tokens(self) -> int:
        return len(self.prompt) + len(self.answer)

    @property
    def nbytes(self) -> int:
        """In memory, roughly."""
        texts = sum(len(turn.text) for turn in self.turns) + len(self.text)
        return texts + (self.tokens * self.prompt.itemsize)


@dataclass(frozen=True)
class SavedCache:
    """What the store has of a session's cache.

    Args:
        tokens: that it has read; the session's text begins with them.
        settled_tokens: as in `SessionState`.
        entries: over all managed layers and heads.
        nbytes: that it takes in the store.
        cache_bytes: that it takes in memory.
        is_coded: whether a codec has lost something of it.
        is_lossless: whether it comes back as a cache that holds all that it has read to the bit.
        caches: how many there are.
    """

    tokens: int
    settled_tokens: int
    entries: int
    nbytes: int
    cache_bytes: int
    is_coded: bool
    is_lossless: bool
    caches: int = 1


@dataclass
class SessionState:
    """A session. For the model's thread.

    Args:
        key: no other sitting has it.
        opening: turns that were said before the first request.
        said: the log, which everything can be computed from again.
        cache, parked: the cache, in one of two places or in none.
        chat_cache: the caches, where the session is held as a chat; then the former two are none.
        episode: the number of the cache that answered last.
        base: exchanges that were said when the caches of a chat were last built anew.
        spots: where in the text the caches of a chat hold what they hold.
        found: what the cache of a chat that answered last gives access to.
        read: the tokens that the cache has read.
        settled_tokens: how many of them stand in it for good: what came later can be taken back.
        origin: the session that it was forked from, until it has a cache of its own.
        kept: what the store has of its cache, of this state or of an earlier one.
        is_coded: the cache came back from a codec that loses something.
        failed_write_tokens: how many tokens the cache had read that the store did not take; -1
            where it did.
        is_saving: its cache is being written, and nobody may write into those tensors.
        pending_writes: what is on its way to the store.
        durable_turns: how many exchanges are written there.
        written: the epoch under which it outlives the process; 0 where it does not.
        write_mark: the mark of states behind that one which may have been written unheard; or
            nothing.
        is_provisional: a request has made it, and nothing was said in it yet: it goes with the
            request.
        is_superseded: somebody else has gone on with it: what is here is not used any more.
        is_answering: a request is waiting for it, or running.
        is_running: its cache is in use and stays on the device.
        pauses: seconds between the latest answers and what followed them.
        answered: when the last answer was complete; 0 where there was none.
        steps: of a workflow until it is asked again; infinite where nobody has said.
        clock: of the tier that it is in, when it was last used; for rules of eviction that age.
    """

    key: int
    tenant: str
    name: str
    rule: ServingPolicy
    made: float
    opening: tuple[ChatMessage, ...] = ()
    said: list[CompletedTurn] = field(default_factory=list)
    cache: SequenceCache | None = None
    parked: OffloadedCache | None = None
    chat_cache: ChatCache | None = None
    episode: int = 0
    base: int = 0
    spots: PositionMaps = field(default_factory=PositionMaps)
    found: CacheOccupancy = CacheOccupancy()
    read: array = field(default_factory=lambda: array(TOKEN_TYPECODE))
    settled_tokens: int = 0
    is_lossless: bool = True
    origin: SessionState | None = None
    kept: SavedCache | None = None
    is_coded: bool = False
    failed_write_tokens: int = -1
    is_saving: bool = False
    pending_writes: int = 0
    durable_turns: int = 0
    clock: float = 0.0
    pauses: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_PAUSES))
    answered: float = 0.0
    steps: float = math.inf
    is_provisional: bool = False
    is_superseded: bool = False
    is_answering: bool = False
    is_running: bool = False
    is_pinned: bool = False
    last_used: float = 0.0
    uses: int = 0
    epoch: int = 0
    written: int = 0
    write_mark: str = ""
    host: Reservation | None = None
    log: Reservation | None = None

    @property
    def root(self) -> str:
        """The name that the client gave; branches of the session have the same."""
        return root_name(self.name)

    @property
    def ids(self) -> array:
        """Every token that was said."""
        ids = array(TOKEN_TYPECODE)
        for each in self.said:
            ids += each.prompt
            ids += each.answer
        return ids

    @property
    def tokens(self) -> int:
        return sum(each.tokens for each in self.said)

    @property
    def tier(self) -> str:
        """Where its cache is."""
        if self.active is not None:
            return "device"
        if self.parked is not None or self.chat_cache is not None:
            return "host"
        return "none" if self.kept is None else "disk"

    @property
    def has_resident_cache(self) -> bool:
        """Whether its cache is on the device or in host memory."""
        return any(each is not None for each in (self.cache, self.parked, self.chat_cache))

    @property
    def is_saved(self) -> bool:
        """Whether the store has its cache as it is now."""
        return self.kept is not None and self.kept.tokens == len(self.read)

    @property
    def can_leave_memory(self) -> bool:
        """Whether nothing is lost if it leaves memory: all that was said is in the store."""
        is_idle = not (
            self.is_answering or self.is_running or self.is_saving or self.pending_writes
        )
        return is_idle and self.written > 0 and self.durable_turns == len(self.said) > 0

    @property
    def active(self) -> SequenceCache | None:
        """Its cache that answers, if it is on the device."""
        return self.cache if self.chat_cache is None else self.chat_cache.caches.active_cache

    @property
    def device_bytes(self) -> int:
        """Of its caches, on the device."""
        return 0 if self.active is None else self.active.device_nbytes

    @property
    def host_bytes(self) -> int:
        """Of its caches, in host memory."""
        return self.nbytes - self.device_bytes

    @property
    def transcript_bytes(self) -> int:
        """What it takes in memory beside its cache."""
        return OVERHEAD_BYTES + sum(each.nbytes for each in self.said)

    @property
    def held(self) -> CacheOccupancy:
        """What its cache holds, wherever it is."""
        if self.chat_cache is not None:
            return self.found
        if self.cache is not None:
            return CacheOccupancy(self.cache.managed_entries, self.cache.next_position)
        if self.parked is not None:
            return CacheOccupancy(self.parked.entries, self.parked.next_position)
        return (
            CacheOccupancy()
            if self.kept is None
            else CacheOccupancy(self.kept.entries, self.kept.tokens)
        )

    def usable(self, wanted: Sequence[int]) -> int:
        """How many tokens of a text its cache can answer for; the last is always read anew."""
        if self.rule.is_chat:  # it goes on by turns, not by tokens
            return 0
        read, settled = self.read, self.settled_tokens
        if not self.has_resident_cache:
            if self.kept is None:
                return 0
            read, settled = self.ids[: self.kept.tokens], self.kept.settled_tokens
        common = min(common_prefix_len(read, wanted), len(wanted) - 1)
        if common == len(read):
            return common
        return common if self.rule.can_truncate and common >= settled else 0

    def pause(self, asked: float) -> None:
        """A turn was asked for at that time."""
        if self.answered:
            self.pauses.append(max(0.0, asked - self.answered))

    def note(self) -> None:
        """Remember what the cache has become; call it after every turn."""
        cache = self.active
        assert cache is not None
        self.is_lossless = not self.is_coded and self.rule.is_lossless(cache)
        self.found = self.rule.found(cache)

    @property
    def nbytes(self) -> int:
        """Of its caches, wherever they are."""
        if self.chat_cache is not None:
            return self.chat_cache.caches.nbytes
        if self.cache is not None:
            return self.cache.nbytes
        if self.parked is not None:
            return self.parked.nbytes
        return 0 if self.kept is None else self.kept.cache_bytes


def common_prefix_len(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two texts have in common from their beginning on."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if tuple(first[low:middle]) == tuple(second[low:middle]):
            low = middle
        else:
            high = middle - 1
    return low
