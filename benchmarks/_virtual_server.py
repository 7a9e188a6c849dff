"""Engine core whose clock counts computed tokens: traces of requests give the same figures on every
machine."""

from __future__ import annotations

from dataclasses import dataclass

from larder.engine import Engine
from larder.server import (
    ChatMessage,
    DiskTier,
    EngineOptions,
    HostMoveRates,
    Listener,
    Report,
    Request,
    SchedulingPolicy,
    SessionPersistence,
    TokenLogprob,
)
from larder.store import ByteBudgets
from larder_bench.profiling.loading_core import LoadingCore
from larder_bench.random_models import open_model

MODEL = "random:qwen3-tiny"  # answers mean nothing, and nothing depends on them
BLOCK_TOKENS = 64
PROMPT_SECONDS = 0.002  # of a prompt's token
STEP_SECONDS = 0.03  # of a decode step


class Answer(Listener):
    """Answer with its report, once it is complete."""

    def __init__(self) -> None:
        self.text, self.report = "", None

    text: str
    report: Report | None

    def on_text(self, text: str) -> None:
        self.text += text

    def on_logprobs(self, logprobs: tuple[TokenLogprob, ...]) -> None:
        del logprobs

    def on_done(self, report: Report) -> None:
        self.report = report

    def on_error(self, error: Exception) -> None:
        raise error


@dataclass
class VirtualClock:
    """Seconds of virtual time."""

    now: float = 1e9

    def __call__(self) -> float:
        return self.now


class PrefillTimes(DiskTier):
    """No disk, but prefill times of the virtual clock."""

    def seconds_to_read(self, tokens: int) -> float:
        return tokens * PROMPT_SECONDS


class SlowHostRates(HostMoveRates):
    """Moves to host memory that always take longer than reading again."""

    def is_slower(self, count: int, seconds: float) -> bool:
        del count, seconds
        return True


class VirtualServer:
    """Engine core under a virtual clock.

    Args:
        budgets: capacity of device and host memory.
        eviction, scheduling: as in `EngineOptions`.
        persistence, disk: as in `LocalEngineClient`.
    """

    def __init__(
        self,
        budgets: ByteBudgets,
        eviction: str,
        scheduling: SchedulingPolicy = SchedulingPolicy.PRIORITY,
        persistence: SessionPersistence | None = None,
        disk: DiskTier | None = None,
        engine: Engine | None = None,
    ) -> None:
        self.clock = VirtualClock()
        self.core = LoadingCore(
            engine or Engine(open_model(MODEL), policy="full"),
            EngineOptions(
                budgets,
                eviction,
                prefill_chunk=BLOCK_TOKENS,
                scheduling=scheduling,
                clock=self.clock,
            ),
            persistence or SessionPersistence(),
            disk or PrefillTimes(),
            lambda: None,
        )

    def submit(self, request: Request) -> Answer:
        """Queue a request."""
        answer = Answer()
        self.core.submit(request, answer, self.clock.now)
        return answer

    def step(self) -> bool:
        """One step of the scheduler, in the virtual time that it takes."""
        scheduler = self.core.scheduler
        blocks, steps = scheduler.blocks, scheduler.steps
        goes_on = self.core.step()
        self.clock.now += (scheduler.blocks - blocks) * BLOCK_TOKENS * PROMPT_SECONDS
        self.clock.now += (scheduler.steps - steps) * STEP_SECONDS
        return goes_on


def text_of(name: str, words: int) -> str:
    """Text of about `words` words that no other name has."""
    return " ".join(f"{name} {number}" for number in range(words // 2))


def user(text: str) -> ChatMessage:
    return ChatMessage("user", text)
