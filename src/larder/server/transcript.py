"""Transcript of a session: completed turns with their messages, token ids and places in its caches.

The transcript has the generated token ids of each answer: tokenizing its text again could give
other ids, and nothing after them could be reused.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from larder.engine.sampler import SamplingParams
from larder.server.request import ChatMessage, Request
from larder.store.ledger import Reservation

TOKEN_TYPECODE = "i"  # of arrays: four bytes per token id
MAX_TOKEN_ID = (1 << 31) - 1
OVERHEAD_BYTES = 1024  # of a session in memory, without its texts and tokens
ASSISTANT = "assistant"


@dataclass(frozen=True)
class GenerationParams:
    """Parameters by which a repeated request is recognized: sampling, length limit, constraint."""

    sampling: SamplingParams
    max_new_tokens: int
    stop: tuple[str, ...]
    constraint: str = ""

    @staticmethod
    def of(request: Request) -> GenerationParams:
        constraint = "" if request.constraint is None else request.constraint.digest
        sampling, stop = request.sampling, request.stop
        return GenerationParams(sampling, request.max_new_tokens, stop, constraint)


@dataclass(frozen=True)
class CompletedTurn:
    """A completed turn: messages and their answer.

    Args:
        messages: those before the answer.
        prompt_ids: their tokens.
        text: of the answer.
        answer_ids: tokens of the answer, end of turn included.
        unread_tokens: last tokens that the model had not read when the answer was complete.
        params: of the request.
        reason: as in `Report`.
    """

    messages: tuple[ChatMessage, ...]
    prompt_ids: array
    text: str
    answer_ids: array
    unread_tokens: int
    params: GenerationParams
    reason: str

    @property
    def tokens(self) -> int:
        return len(self.prompt_ids) + len(self.answer_ids)

    @property
    def nbytes(self) -> int:
        """Approximate bytes in memory."""
        texts = sum(len(message.text) for message in self.messages) + len(self.text)
        return texts + (self.tokens * self.prompt_ids.itemsize)


def num_tokens(turns: Iterable[CompletedTurn]) -> int:
    """Tokens of several turns."""
    return sum(each.tokens for each in turns)


@dataclass
class Transcript:
    """Text of a session, from which everything else can be recomputed.

    Args:
        opening_messages: messages before the first request.
        turns: completed turns.
        epoch: turns committed so far, those of former states included.
        reservation: host memory that the transcript is charged to.
    """

    opening_messages: tuple[ChatMessage, ...] = ()
    turns: list[CompletedTurn] = field(default_factory=list)
    epoch: int = 0
    reservation: Reservation | None = None

    @property
    def ids(self) -> array:
        """All tokens."""
        ids = array(TOKEN_TYPECODE)
        for each in self.turns:
            ids += each.prompt_ids
            ids += each.answer_ids
        return ids

    @property
    def tokens(self) -> int:
        return num_tokens(self.turns)

    @property
    def num_messages(self) -> int:
        """Number of messages, answers included."""
        return len(self.opening_messages) + sum(len(each.messages) + 1 for each in self.turns)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return OVERHEAD_BYTES + sum(each.nbytes for each in self.turns)


def common_prefix_len(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix of two token sequences."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if tuple(first[low:middle]) == tuple(second[low:middle]):
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True)
class PositionMap:
    """Map from cache positions to transcript positions, piecewise contiguous.

    Args:
        starts: ascending cache positions at which a contiguous segment starts.
        texts: transcript positions of the same segment starts.
    """

    starts: tuple[int, ...] = (0,)
    texts: tuple[int, ...] = (0,)

    def transcript_positions(self, positions: Iterable[int]) -> tuple[int, ...]:
        """Transcript positions of cache positions."""
        found = list[int]()
        for position in positions:
            part = bisect_right(self.starts, position) - 1
            found.append(self.texts[part] + position - self.starts[part])
        return tuple(found)

    def with_segment(self, start: int, text: int) -> PositionMap:
        """The map after a turn was read at cache position `start`, transcript position `text`."""
        kept = sum(each < start for each in self.starts)
        return PositionMap((*self.starts[:kept], start), (*self.texts[:kept], text))


@dataclass
class PositionMaps:
    """Position maps of all caches of a session, by cache number."""

    maps: dict[int, PositionMap] = field(default_factory=dict)

    def of(self, number: int) -> PositionMap:
        """Map of one cache; the identity if nothing is recorded."""
        return self.maps.get(number, PositionMap())

    def file(self, source: int, target: int, start: int, text: int) -> None:
        """Record a turn that was read at `start` over cache `source`, and is in cache `target`."""
        self.maps[target] = self.of(source).with_segment(start, text)

    def refresh(self, positions: Sequence[int], text: int) -> None:
        """Reset the maps of caches rebuilt from the whole text: their length equals its length."""
        for index, position in enumerate(positions):
            if position == text:
                self.maps[index] = PositionMap()
