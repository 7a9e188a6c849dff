"""Traces: reads and writes of cached states over time, in the sizes of a real model.

A turn of a session reads the newest cached state, computes the rest of its prompt and its answer,
and writes a new state. A store keeps one of two forms:

WHOLE   Each state is complete and replaces the one before, as for a session with a compressed
        cache. Any older state serves for the part that it covers.
PARTS   Each turn adds a part that continues the one before: lossless chunks of a prefix, of which a
        read needs all from the first one on. They begin with the system prompt, which is shared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from larder.core import BadParameter, Family, public_name
from larder.models import GEMMA_3_4B, LLAMA_3_1_8B, QWEN_3_0_6B, KVSource, ModelShape

TRACES = Family("trace", "larder_bench.traces")
NONE = -1


class StateForm(Enum):
    """Unit that a store keeps of a session: its whole state, or the part that each turn adds."""

    WHOLE = "whole"
    PARTS = "parts"


class TraceModel(Enum):
    """Model whose shape determines bytes and operations per token."""

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
    """Object that a store may hold.

    Args:
        session: session that owns it; `NONE` for a shared system prompt.
        tokens: length of the text up to its end.
        bytes: its own bytes: all of a state, the new ones of a part.
        seconds: time to compute it if its parent is cached.
        before: object of the next shorter text; `NONE` for none.
        parent: object that it continues and is useless without; `NONE` for none.
        replaces: state that is no longer needed once this one is cached; `NONE` for none.
    """

    session: int
    tokens: int
    bytes: int
    seconds: float
    before: int = NONE
    parent: int = NONE
    replaces: int = NONE


class ReplayTier(ABC):
    """Simulated tier that handles the events of a trace."""

    @abstractmethod
    def read(self, event: ReadEvent) -> None: ...

    @abstractmethod
    def write(self, event: WriteEvent) -> None: ...

    @abstractmethod
    def hint(self, event: HintEvent) -> None: ...

    @abstractmethod
    def pin(self, event: PinEvent) -> None: ...


# `moved` shifts the ids of an event behind the objects and sessions of another trace.
@dataclass(frozen=True, slots=True)
class ReadEvent:
    """Read of a prompt of `tokens` tokens; the cached object would cover all but the last ones."""

    time: float
    session: int
    object_id: int
    tokens: int

    def play(self, tier: ReplayTier) -> None:
        tier.read(self)

    def moved(self, objects: int, sessions: int) -> ReadEvent:
        return ReadEvent(self.time, self.session + sessions, self.object_id + objects, self.tokens)


@dataclass(frozen=True, slots=True)
class WriteEvent:
    """End of a turn. The session then waits for `tool`, which is a tool or a person."""

    time: float
    session: int
    object_id: int
    tool: str

    def play(self, tier: ReplayTier) -> None:
        tier.write(self)

    def moved(self, objects: int, sessions: int) -> WriteEvent:
        return WriteEvent(self.time, self.session + sessions, self.object_id + objects, self.tool)


@dataclass(frozen=True, slots=True)
class HintEvent:
    """Hint that a session is needed in `steps` steps."""

    time: float
    session: int
    steps: float

    def play(self, tier: ReplayTier) -> None:
        tier.hint(self)

    def moved(self, objects: int, sessions: int) -> HintEvent:
        return HintEvent(self.time, self.session + sessions, self.steps)


@dataclass(frozen=True, slots=True)
class PinEvent:
    """Request to keep a session until a time."""

    time: float
    session: int
    until: float

    def play(self, tier: ReplayTier) -> None:
        tier.pin(self)

    def moved(self, objects: int, sessions: int) -> PinEvent:
        return PinEvent(self.time, self.session + sessions, self.until)


TraceEvent = ReadEvent | WriteEvent | HintEvent | PinEvent


@dataclass(frozen=True)
class Trace:
    """Events of a workload, in order of time.

    Args:
        objects: cached objects; events refer to them by index.
        shape: model shape that determines bytes and seconds.
        operations_per_second: speed of the device.
    """

    objects: Sequence[CachedObject]
    events: Sequence[TraceEvent]
    shape: ModelShape
    operations_per_second: float

    def seconds_of(self, tokens: int) -> float:
        """Prefill seconds of a text of `tokens` tokens."""
        return prefill_seconds(self.shape, tokens, self.operations_per_second)

    @cached_property
    def reads(self) -> tuple[ReadEvent, ...]:
        return tuple(event for event in self.events if isinstance(event, ReadEvent))


@dataclass(frozen=True)
class Workload(ABC):
    """Generator of traces of people or programs. Equal seeds give equal traces.

    Args:
        model: model whose shape determines bytes and seconds.
        form: form in which a store keeps states.
        kept: share of a full cache's bytes that a whole state takes.
        operations_per_second: speed of the device.
    """

    model: TraceModel = TraceModel.LLAMA_3_1_8B
    form: StateForm = StateForm.WHOLE
    kept: float = 0.25
    operations_per_second: float = 2e14

    def __post_init__(self) -> None:
        if not 0 < self.kept <= 1:
            raise BadParameter(
                f"{public_name(type(self))}.kept must be above 0 and at most 1, got {self.kept}."
            )
        if not self.operations_per_second > 0:
            raise BadParameter(
                f"{public_name(type(self))}.operations_per_second must be more than 0, "
                f"got {self.operations_per_second}."
            )

    @abstractmethod
    def make(self, seed: int, events: int) -> Trace:
        """Trace of a seed, of about `events` events."""


def prefill_seconds(shape: ModelShape, tokens: int, operations_per_second: float) -> float:
    """Prefill seconds of a text of `tokens` tokens."""
    return tokens * shape.operations_per_token(KVSource.IDS, tokens) / operations_per_second
