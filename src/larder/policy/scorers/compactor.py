"""Scorer by leverage of keys and attention without a causal mask together (Compactor).

Chari and Van Durme, "Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate
Leverage Scores" (2025), arXiv:2507.08143: the parts `leverage` and `non_causal`, each in standard
deviations from the mean of its layer, added with a weight on the leverage. As in the code that the
authors gave to NVIDIA/kvpress, the weight is by default the share of the text that is dropped, the
first and last tokens always stay and do not count, and both are as described at these parts: one
sketch for all layers, a ridge relative to the keys, no padding among the keys. As in that code, the
tokens between are scored as if the first and last ones were not there; with `ends="among"` these
are among the keys and queries. Scores that differ by less than a twentieth of their mean do so by
rounding: a layer's spread counts as at least that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.arguments import require, require_at_least
from larder.core.errors import BadParameter
from larder.core.observation import Observation
from larder.core.types import Packed
from larder.policy.protect import ProtectedTokens
from larder.policy.scorers.base import Scorer
from larder.policy.scorers.leverage import Leverage
from larder.policy.scorers.non_causal import NonCausal

LEAST_SPREAD = 0.05  # standard deviation of scores that are nearly alike, in means of a layer


class CompactorEnds(Enum):
    """First and last tokens while the others are scored: among keys and queries, or left out."""

    AMONG = "among"
    LEFT_OUT = "left_out"


@dataclass(frozen=True)
class Compactor(Scorer):
    """Leverage and chunked attention in standard deviations, added.

    Args:
        blend: weight of the leverage; left open, the share of the text that is dropped.
        sketch: dimensions of the sketch, as of `leverage`.
        chunk: positions of a chunk, as of `non_causal`.
        sinks, recent: first and last tokens that always stay and do not count.
        tokens: the budget, in entries per kv head; left open, the policy's.
        ends: whether the first and last tokens are `left_out` while the others are scored, as in
            the released code, or `among` the keys and queries.
    """

    blend: float | None = None
    sketch: int = 48
    chunk: int = 256
    sinks: int = 8
    recent: int = 4
    tokens: int | None = None
    ends: CompactorEnds = CompactorEnds.LEFT_OUT

    def __post_init__(self) -> None:
        require(self.blend is None or self.blend >= 0, "compactor.blend", "0 or more", self.blend)
        require_at_least(0, "compactor", sinks=self.sinks, recent=self.recent)
        if self.tokens is not None and self.tokens < 1:
            raise BadParameter(f"compactor.tokens must be at least 1, got {self.tokens}.")
        Leverage(self.sketch)
        NonCausal(self.chunk)

    def observes_whole_text(self) -> bool:
        return True

    def with_budget(self, tokens: int) -> Compactor:
        return self if self.tokens is not None else replace(self, tokens=tokens)

    def protected_tokens(self) -> ProtectedTokens:
        """First and last tokens that do not count."""
        return ProtectedTokens(self.sinks, self.recent)

    def score(self, observation: Observation) -> Packed:
        positions = observation.entries.packed_positions()
        counts = (positions >= self.sinks) & (positions < observation.length - self.recent)
        if not bool(counts.any()):
            return torch.full_like(positions, torch.inf, dtype=torch.float32)
        if self.ends is CompactorEnds.LEFT_OUT:
            observation, inner = self._between(observation), counts[counts]
            scores = torch.full_like(positions, torch.inf, dtype=torch.float32)
            scores[counts] = self._blended(observation, inner, self.sinks)
            return scores
        return self._blended(observation, counts, 0).masked_fill(~counts, torch.inf)

    def _between(self, observation: Observation) -> Observation:
        """Observation without the first and last tokens."""
        stop = observation.length - self.recent
        positions = observation.query_positions
        inner = (positions >= self.sinks) & (positions < stop)
        return replace(
            observation,
            entries=observation.entries.position_range(self.sinks, stop),
            queries=observation.queries[:, inner],
            query_positions=positions[inner],
            keys=observation.keys[:, inner],
        )

    def _blended(self, observation: Observation, counts: Tensor, first: int) -> Packed:
        """Sum of both scores.

        Args:
            first: position at which the first chunk begins.
        """
        leverage = _standard(Leverage(self.sketch).score(observation), counts)
        attention = _standard(NonCausal(self.chunk, first=first).score(observation), counts)
        return self._weight(observation) * leverage + attention

    def _weight(self, observation: Observation) -> float:
        """Weight of the leverage."""
        if self.blend is not None:
            return self.blend
        return max(0.0, 1 - (self.tokens or observation.length) / max(observation.length, 1))


def _standard(scores: Packed, counts: Tensor) -> Float[Tensor, " T"]:
    """Scores in standard deviations from the mean of those that count."""
    counted = scores[counts]
    spread = counted.std() if len(counted) > 1 else counted.new_zeros(())
    least = LEAST_SPREAD * counted.mean().abs().clamp_min(torch.finfo(torch.float32).tiny ** 0.5)
    return (scores - counted.mean()) / torch.maximum(spread, least)


Part = Compactor
