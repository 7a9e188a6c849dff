"""Scorer by kinds of entries, the cheapest to keep first (FastGen).

Ge et al., "Model Tells You What to Discard: Adaptive KV Cache Compression for LLMs" (2024),
arXiv:2310.01801: special tokens, then punctuation, then the entries with most attention, then the
latest, then all. The kinds stand in the whole number of a score, from 4 down to 0, and the mean
attention weight in its fraction, so that `recovery` can keep whole kinds, head by head. The most
attended are a share of a head's entries, the latest too; an entry of several kinds is of the first.

Kinds of tokens come from the tokenizer: punctuation are signs alone. Weights are the mean over the
last queries of the pass (inferred; the paper profiles with the whole prompt), and over the query
heads of a kv head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.arguments import require
from larder.core.errors import BadParameter
from larder.core.observation import Observation
from larder.core.types import Packed
from larder.policy.attention_reduction import ObservationWindow
from larder.policy.scorers.base import AttentionScorer
from larder.policy.tallies.token_kind import PUNCTUATION_KIND, SPECIAL_KIND

SPECIAL, PUNCTUATION, ATTENDED, LATEST = 4.0, 3.0, 2.0, 1.0
BELOW_ONE = 1 - 1e-6  # of a mean weight, so that it stays a fraction


@dataclass(frozen=True)
class Fastgen(AttentionScorer):
    """Kind of an entry, and its mean attention weight.

    Args:
        attended, latest: share of a head's entries that are most attended, and latest, in [0, 1].
        window: last queries whose attention is averaged, in tokens.
    """

    attended: float = 0.3
    latest: float = 0.3
    window: int = 256

    tallies = frozenset({"token_kind"})

    def __post_init__(self) -> None:
        for name in ("attended", "latest"):
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise BadParameter(f"fastgen.{name} must be a share in [0, 1], got {value}.")
        require(self.window >= 1, "fastgen.window", "at least 1 token", self.window)

    def default_reduction(self) -> tuple[str, str]:
        return ("mean", "group_mean")

    def observation_window(self, observation: Observation) -> ObservationWindow:
        voters = observation.query_positions[-self.window :]
        return ObservationWindow(
            observation.queries[:, -self.window :], observation.entries, voters
        )

    def finish(self, observation: Observation, heads: list[Float[Tensor, " _"]]) -> Packed:
        entries = observation.entries
        kinds = torch.split(entries.column("token_kind").round(), list(entries.lengths))
        scored: list[Tensor] = []
        for weights, kind in zip(heads, kinds, strict=True):
            levels = torch.zeros_like(weights)
            count = len(weights)
            levels[count - int(self.latest * count) :] = LATEST
            best = torch.argsort(weights, descending=True, stable=True)
            levels[best[: int(self.attended * count)]] = ATTENDED
            levels[kind == PUNCTUATION_KIND] = PUNCTUATION
            levels[kind == SPECIAL_KIND] = SPECIAL
            scored.append(levels + weights.clamp(0, 1) * BELOW_ONE)
        return torch.cat(scored)


Part = Fastgen
