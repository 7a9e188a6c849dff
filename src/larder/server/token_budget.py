"""Token budget of prefill: prompt tokens between two tokens of running answers, for a latency.

Of Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve" (2024),
arXiv:2403.02310, section 4: chunks of a prompt are read beside decode steps, as long as the latency
between tokens allows. What differs: the paper profiles a model for one budget in advance; here the
seconds of steps and chunks are measured while serving, so that chunks become shorter as the prompt
before them, and the attention to it, grows. Where chunks take more or less than such an estimate,
as beside other work of the machine, they are sized for the slow ones among the latest. And where a
chunk still takes too long, or a policy reads whole blocks, decode steps run between its layers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from time import perf_counter

import numpy as np

from larder.core.errors import BadParameter

MIN_CHUNK_TOKENS = 16  # however slow the machine is
PROMPT_SHARE = 0.25  # of the target at least is for prompts, however slow a decode step is
MAX_SAMPLES = 32  # chunks that an estimate is made from
SLOW_SHARE = 0.9  # quantile of chunks, by what they took beside the estimate, that is in time
SMOOTHING = 0.3  # weight of the latest decode step
GROWTH = 2  # a chunk is at most so much longer than those before it
TOKENS, CACHED = 512.0, 4096.0  # units of the estimate


class PrefillTokenBudget:
    """Most tokens of the next chunk of a prompt. For the model's thread.

    Args:
        target_seconds: wanted between two tokens of an answer; None for no budget.
        clock: seconds that never go back.

    Raises:
        BadParameter: the target is not a positive number.
    """

    def __init__(
        self, target_seconds: float | None = None, clock: Callable[[], float] = perf_counter
    ) -> None:
        if target_seconds is not None and not 0 < target_seconds < inf:
            raise BadParameter(
                f"inter_token_seconds must be more than 0 and finite, got {target_seconds}: give "
                "None for no target."
            )
        self._target, self._clock = target_seconds, clock
        self._step_seconds = 0.0
        self._step_ended = 0.0
        self.interrupted_seconds = 0.0  # of decode steps between the layers of chunks, in all
        self._chunks = deque[tuple[int, int, float]](maxlen=MAX_SAMPLES)
        self.has_answers = False  # running ones, which wait for each chunk

    @property
    def has_target(self) -> bool:
        """True if chunks are sized."""
        return self._target is not None

    @contextmanager
    def measured_step(self, tails: Sequence[bool] = ()) -> Iterator[None]:
        """Context of a decode step, which is measured unless it reads ends of prompts as well.

        Args:
            tails: whether each of its requests reads one.
        """
        started = self._now()
        yield
        self._step_ended = self._now()
        if not any(tails):
            weight = SMOOTHING if self._step_seconds else 1.0
            self._step_seconds += weight * (self._step_ended - started - self._step_seconds)

    @contextmanager
    def interruption(self) -> Iterator[None]:
        """Context of what runs between the layers of a chunk, and is no part of its seconds."""
        started = self._now()
        yield
        self.interrupted_seconds += self._now() - started

    @property
    def is_step_due(self) -> bool:
        """True if the answers have waited for a decode step so long that one must start now."""
        if self._target is None:
            return False
        return self._now() - self._step_ended >= self._prompt_seconds(self._target)

    def _prompt_seconds(self, target: float) -> float:
        """Seconds between two decode steps that are for prompts."""
        return max(target - self._step_seconds, PROMPT_SHARE * target)

    @contextmanager
    def measured_chunk(self, cached: int) -> Iterator[list[int]]:
        """Context of a chunk of a prompt, which is measured; the numbers of tokens that are read
        are added to the list.

        Args:
            cached: tokens before it.
        """
        started, counts = self._now() - self.interrupted_seconds, list[int]()
        yield counts
        if sum(counts):
            seconds = self._now() - self.interrupted_seconds - started
            self._chunks.append((sum(counts), cached, seconds))

    def _now(self) -> float:
        return self._clock() if self.has_target else 0.0

    def limit(self, cached: int, most: int) -> int:
        """Tokens of the next chunk, at most `most`.

        Args:
            cached: tokens before it.
        """
        if self._target is None or not self.has_answers:
            return most
        if not self._chunks:
            return min(most, MIN_CHUNK_TOKENS)
        seconds = self._prompt_seconds(self._target)
        constant, per_token, per_pair = self._costs()
        rate = per_token / TOKENS + per_pair * cached / (TOKENS * CACHED)
        seconds /= self._slowness(constant, per_token, per_pair)
        longest = GROWTH * max(tokens for tokens, _, _ in self._chunks)
        wanted = longest if rate <= 0 else max(0.0, seconds - constant) / rate
        return min(most, max(MIN_CHUNK_TOKENS, int(min(wanted, longest))))

    def _slowness(self, constant: float, per_token: float, per_pair: float) -> float:
        """Duration of slow chunks relative to its estimate; 1 at least."""
        tokens, cached, seconds = np.array(self._chunks, dtype=np.float64).T
        tokens = tokens / TOKENS
        estimates = constant + tokens * (per_token + per_pair * cached / CACHED)
        if not estimates.all():
            return 1.0
        return max(1.0, float(np.quantile(seconds / estimates, SLOW_SHARE)))

    def _costs(self) -> list[float]:
        """Seconds of a chunk, of its tokens, and of their pairs with those before; by least
        squares, none negative.
        """
        tokens, cached, seconds = np.array(self._chunks, dtype=np.float64).T
        tokens = tokens / TOKENS
        features = np.stack([np.ones_like(tokens), tokens, tokens * cached / CACHED], 1)
        used, costs = [0, 1, 2], np.zeros(3)
        while used:
            found = np.linalg.lstsq(features[:, used], seconds, rcond=None)[0]
            if (found >= 0).all():
                costs[used] = found
                break
            del used[int(found.argmin())]
        return costs.tolist()
