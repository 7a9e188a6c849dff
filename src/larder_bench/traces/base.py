"""A trace: who reads and writes which cached states when, in the sizes of a real model.

A turn of a session reads the newest state of it that is held, computes the rest of its prompt and
its answer, and leaves a state behind. What a store keeps of that is one of two forms:

WHOLE   Each state is complete in itself and replaces the one before: what a session with a
        compressed cache leaves behind. Any older state serves for the part that it covers.
PARTS   Each turn adds a part that continues the one before: lossless chunks of a prefix, of which a
        read needs all from the first one on. They begin with the system prompt, which is shared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from larder.core.errors import BadParameter
from larder.core.family import Family
from larder.core.spelling import name_of
from larder.models.kv_cost import GEMMA_3_4B, LLAMA_3_1_8B, QWEN_3_0_6B, KVSource, ModelShape

TRACES = Family("trace", "larder_bench.traces")
NONE = -1


class StateForm(Enum):
    """Unit that a store keeps of a session: its whole state, or the part that each turn adds."""

    WHOLE = "whole"
    PARTS = "parts"


class TraceModel(Enum):
    """In whose shape tokens have bytes and take operations."""

    GEMMA_3_4B = "gemma-3-4b"
    LLAMA_3_1_8B = "llama-3.1-8b"
    QWEN_3_0_6B = "qwen3-0.6b"

    @property
    def shape(self) -> ModelShape:
        return {
            TraceModel.GEMMA_3_4B: GEMMA_3_4B,
            TraceModel.LLAMA_3_1_8B: LLAMA_3_1_8B,
            TraceModel.QWEN_3_0_6B: QWEN_3_0_6B,
        }[self]


@dataclass(frozen=True, slots=True)
class CachedObject:
    """One thing that a store may hold.

    Args:
        session: whose it is; `NONE` for a system prompt, which is everybody's.
        tokens: from the start of the text to its end.
        bytes: of its own: all of a state, the new ones of a part.
        seconds: to compute it where what it continues is there.
        before: the piece that covers the next shorter text, `NONE` for none.
        parent: the one that it continues and is useless without; `NONE` for none.
        replaces: the state that nobody needs any more once this one is held; `NONE` for none.
    """

    session: int
    tokens: int
    bytes: int
    seconds: float
    before: int = NONE
    parent: int = NONE
    replaces: int = NONE


class ReplayTier(ABC):
    """Session that holds objects, and the events on them."""

    @abstractmethod
    def read(self, event: ReadEvent) -> None: ...

    @abstractmethod
    def write(self, event: WriteEvent) -> None: ...

    @abstractmethod
    def hint(self, event: HintEvent) -> None: ...

    @abstractmethod
    def pin(self, event: PinEvent) -> None: ...


# Events know how to be `moved` behind so many pieces and sessions of another trace.
@dataclass(frozen=True, slots=True)
class ReadEvent:
    """A prompt of so many tokens comes, all but the last of which `piece` would cover."""

    time: float
    session: int
    piece: int
    tokens: int

    def play(self, tier: ReplayTier) -> None:
        tier.read(self)

    def moved(self, pieces: int, sessions: int) -> ReadEvent:
        return ReadEvent(self.time, self.session + sessions, self.piece + pieces, self.tokens)


@dataclass(frozen=True, slots=True)
class WriteEvent:
    """A turn is over. The session then waits for what `tool` names: a tool, or a person."""

    time: float
    session: int
    piece: int
    tool: str

    def play(self, tier: ReplayTier) -> None:
        tier.write(self)

    def moved(self, pieces: int, sessions: int) -> WriteEvent:
        return WriteEvent(self.time, self.session + sessions, self.piece + pieces, self.tool)


@dataclass(frozen=True, slots=True)
class HintEvent:
    """Somebody knows that a session is needed in so many steps."""

    time: float
    session: int
    steps: float

    def play(self, tier: ReplayTier) -> None:
        tier.hint(self)

    def moved(self, pieces: int, sessions: int) -> HintEvent:
        del pieces
        return HintEvent(self.time, self.session + sessions, self.steps)


@dataclass(frozen=True, slots=True)
class PinEvent:
    """Somebody wants a session to be kept until then."""

    time: float
    session: int
    until: float

    def play(self, tier: ReplayTier) -> None:
        tier.pin(self)

    def moved(self, pieces: int, sessions: int) -> PinEvent:
        del pieces
        return PinEvent(self.time, self.session + sessions, self.until)


TraceEvent = ReadEvent | WriteEvent | HintEvent | PinEvent


@dataclass(frozen=True)
class Trace:
    """Events of a workload, in order of time.

    Args:
        pieces: what events name by its place here.
        prefill_seconds: of computing a text, by its tokens.
    """

    pieces: Sequence[CachedObject]
    events: Sequence[TraceEvent]
    shape: ModelShape
    operations_per_second: float

    def seconds_of(self, tokens: int) -> float:
        """To compute a text of so many tokens from its start."""
        return prefill_seconds(self.shape, tokens, self.operations_per_second)

    @cached_property
    def reads(self) -> tuple[ReadEvent, ...]:
        return tuple(event for event in self.events if isinstance(event, ReadEvent))

    @cached_property
    def total_bytes(self) -> int:
        """Of all that nothing replaces: what a tier has to hold to never compute anything again."""
        replaced = {piece.replaces for piece in self.pieces}
        return sum(p.bytes for place, p in enumerate(self.pieces) if place not in replaced)


@dataclass(frozen=True)
class Workload(ABC):
    """People or programs that use a store. Equal seeds make equal traces.

    Args:
        model: whose shape tokens have.
        form: what a store keeps.
        kept: of the bytes of a full cache; what a state takes where states are whole.
        operations_per_second: that the device computes.
    """

    model: TraceModel = TraceModel.LLAMA_3_1_8B
    form: StateForm = StateForm.WHOLE
    kept: float = 0.25
    operations_per_second: float = 2e14

    def __post_init__(self) -> None:
        if not 0 < self.kept <= 1:
            raise BadParameter(
                f"{name_of(type(self))}.kept must be above 0 and at most 1, got {self.kept}."
            )
        if not self.operations_per_second > 0:
            raise BadParameter(
                f"{name_of(type(self))}.operations_per_second must be more than 0, "
                f"got {self.operations_per_second}."
            )

    @abstractmethod
    def make(self, seed: int, events: int) -> Trace:
        """The trace of a seed, of about so many events."""


def prefill_seconds(shape: ModelShape, tokens: int, operations_per_second: float) -> float:
    """To compute a text of so many tokens from its start."""
    return tokens * shape.operations_per_token(KVSource.IDS, tokens) / operations_per_second
