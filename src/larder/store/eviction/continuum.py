"""Time to live while the tool that a session waits for is likely to return.

Li et al., "Continuum: Efficient and Robust Multi-Turn LLM Agent Scheduling with KV Cache
Time-to-Live" (2025), arXiv:2511.02230: a state gets the time to live t that makes most of

    P(pause <= t) * (eta * seconds in the queue + seconds to have it again) - t

over the pauses observed after such calls. Until then other candidates are evicted first.

What differs: by default t is weighed by `load` times the candidate's share of the memory, which a
session with a small cache may keep for longer; `variant="paper"` is the sum above. The meaning of
eta is inferred. If all candidates are within their time to live, the paper evicts the program that
came last, this policy the candidate that gains the least per byte by the sum. Candidates without a
time to live, or past it, are evicted by their last use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from larder.core.arguments import require_at_least
from larder.core.types import Variant
from larder.store.eviction.base import CandidateColumns, EvictionPolicy, FloatColumn, IntColumn

PAUSES_PER_TOOL = 64  # latest pauses of each tool
MAX_TOOLS = 256  # tools with pauses of their own, the least recently recorded leave
MIN_PAUSES = 8  # with fewer pauses of a tool those of all tools are taken


@dataclass(frozen=True)
class Continuum(EvictionPolicy):
    """Time to live from observed pauses.

    Args:
        load: seconds of computation that the whole tier saves per second.
        eta: weight of the seconds in the queue.
        variant: `larder` weighs time by memory, `paper` does not.
    """

    load: float = 1.0
    eta: float = 1.0
    variant: Variant = Variant.LARDER

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(0, "continuum", load=self.load, eta=self.eta)

    def worth(self, candidates: CandidateColumns, now: float) -> FloatColumn:
        worth = candidates.last_used - now  # at most 0
        longest = candidates.pauses[:, -1]
        known = np.flatnonzero((now < candidates.last_used + longest) & np.isfinite(longest))
        if not len(known):
            return worth
        gains = self.gains(candidates, known)
        best = gains.argmax(1)[:, None]
        gain = np.take_along_axis(gains, best, 1)[:, 0]
        until = (
            candidates.last_used[known]
            + np.take_along_axis(candidates.pauses[known], best, 1)[:, 0]
        )
        lives = (gain > 0) & (now < until)
        worth[known[lives]] = gain[lives] / candidates.bytes[known[lives]]
        return worth

    def gains(self, candidates: CandidateColumns, rows: IntColumn) -> FloatColumn:
        """Seconds that each time to live of these rows gains; the times are `candidates.pauses`."""
        saved = candidates.seconds[rows] + self.eta * candidates.wait_seconds[rows]
        rent = np.ones(len(rows))
        if self.variant is not Variant.PAPER:
            rent = self.load * candidates.bytes[rows] / candidates.bytes.sum()
        return (
            candidates.pause_shares[rows] * saved[:, None] - candidates.pauses[rows] * rent[:, None]
        )


@dataclass(frozen=True)
class PauseForecast:
    """Knowledge of the pause of a session when it begins.

    Args:
        tool: tool that runs meanwhile; empty for none.
        pauses: seconds that such pauses took; empty to take those of the session itself.
        wait_seconds: mean wait of the tenant's requests in the queue.
    """

    tool: str = ""
    pauses: tuple[float, ...] = ()
    wait_seconds: float = 0.0


class ToolPauses:
    """Durations of tool calls; pauses of all tools are used for a tool with few."""

    def __init__(self) -> None:
        self._pauses: dict[str, deque[float]] = {}
        self._all = deque[float](maxlen=PAUSES_PER_TOOL)

    def record(self, tool: str, seconds: float) -> None:
        """Add the pause of a tool call."""
        own = self._pauses.pop(tool, None) or deque[float](maxlen=PAUSES_PER_TOOL)
        own.append(seconds)
        self._all.append(seconds)
        self._pauses[tool] = own
        if len(self._pauses) > MAX_TOOLS:
            del self._pauses[next(iter(self._pauses))]

    def after(self, tool: str) -> Sequence[float]:
        """Observed pauses that predict the next one after a call of this tool."""
        own = self._pauses.get(tool, ())
        return tuple(own if len(own) >= MIN_PAUSES else self._all)


Part = Continuum
