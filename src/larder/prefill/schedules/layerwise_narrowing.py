"""Prefill in which every layer lets fewer tokens go deeper than reached it (PyramidInfer).

Yang et al., "PyramidInfer: Pyramid KV Cache Compression for High-throughput LLM Inference" (2024),
arXiv:2405.12532, section 4. A layer holds all tokens that reach it. Behind layer l of L the recent
tokens are selected, and of those before them the share that scores highest; the hidden states of
the others leave, at no cost in deeper layers. As in the released code, the share falls from 1
behind the first layer to `share` along half a cosine, and it is a share of what reached the layer:
with 0.9 a fifth of the text before the recent tokens is left behind 32 layers. At least 64 of them
are selected (in the code all of them where it would be 64 or fewer).

Here the recent tokens are those that the policy protects, the score is that of its scorer, and the
share, left open, is the largest with which what the layers hold fits the budget; `global()` leaves
such layers as they are. Below about two fifths of a text no share is small enough: there the cosine
falls to 0 and is raised to a power (ours). Layers with a sliding window select every token.
What is generated is up to the timing: the paper's rule is `context_refresh()`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from larder.core.arguments import require
from larder.core.errors import BadParameter
from larder.core.types import TokenIds
from larder.policy.budgets.base import WITHOUT_LIMIT
from larder.prefill.reader import PrefillReader, PrefillSequence
from larder.prefill.schedules._token_choice import (
    NarrowingSchedule,
    TokenChoice,
    recent_tokens,
    scoring_of,
    scoring_reader,
)

PAPER_SHARE = 0.9  # where neither a share nor a budget is given
BISECTIONS = 40
STEEPEST = 1000.0  # power of the cosine
ROUNDING = 1e-9  # 100 * 0.29 is a little less than 29


@dataclass(frozen=True)
class LayerwiseNarrowing(NarrowingSchedule):
    """Prefill with one plan, in which ever fewer tokens go through deeper layers.

    Args:
        share: share of the tokens before the recent ones that is left behind the last layer, in
            (0, 1]; behind earlier layers it is larger. Left open, what the budget allows, and 0.9
            without one.
        least: fewest selected tokens before the recent ones.
        scorer: what chooses, with an aggregation and a head rule behind it if its paper's are not
            wanted; left open, the scorer of the policy.
    """

    share: float | None = None
    least: int = 64
    scorer: str | None = None

    def __post_init__(self) -> None:
        if self.share is not None and not 0 < self.share <= 1:
            raise BadParameter(
                f"layerwise_narrowing.share must be a fraction in (0, 1], got {self.share}."
            )
        require(self.least >= 0, "layerwise_narrowing.least", "0 or more", self.least)
        scoring_of("layerwise_narrowing", self.scorer)

    def read_steps(
        self, reader: PrefillReader, sequence: PrefillSequence, ids: TokenIds
    ) -> Iterator[None]:
        spec, reader = reader.decoder.spec, scoring_reader(reader)
        managed = tuple(layer.index for layer in spec.managed)
        recents = recent_tokens(reader, self.scoring)
        shape = NarrowingShape(len(spec.layers), managed, recents, self.least)
        fall = self._fall(shape, len(ids), reader.tokens)
        choice = TokenChoice(
            reader.planner,
            reader.tokens,
            frozenset(managed),
            lambda layer, reached: shape.count(layer, reached, fall),
            self.scoring,
        )
        yield from reader.read_narrowing_steps(sequence, ids, choice.before, choice.observe)

    def _fall(self, shape: NarrowingShape, num_tokens: int, budget: int) -> float:
        if num_tokens <= budget < WITHOUT_LIMIT:
            return 0.0
        if self.share is not None or budget == WITHOUT_LIMIT:
            return 1 - (PAPER_SHARE if self.share is None else self.share)
        return shape.least_fall(num_tokens, budget)


@dataclass(frozen=True)
class NarrowingShape:
    """Tokens that reach each layer of a model, as a function of how far shares fall with depth.

    A fall of up to 1 is 1 less the share that is left behind the last layer; a larger one is the
    power of a cosine that falls to 0.

    Args:
        layers: layers of the model.
        managed: indices of those behind which tokens are chosen, and that a budget covers.
        recents: latest tokens, which are always selected.
        least: as in `LayerwiseNarrowing`.
    """

    layers: int
    managed: tuple[int, ...]
    recents: int
    least: int

    def count(self, layer: int, reached: int, fall: float) -> int:
        """Tokens that are selected behind a layer that `reached` tokens reached."""
        share = max(0.0, 1 - fall)
        own = (1 - share) * (math.cos(math.pi * layer / self.layers) + 1) / 2 + share
        own **= max(1.0, fall)
        context = max(0, reached - self.recents)
        kept = max(int(context * own + ROUNDING), min(self.least, context))
        return kept + reached - context

    def lengths(self, num_tokens: int, fall: float) -> list[int]:
        """Tokens that reach each managed layer."""
        found: list[int] = []
        for layer in range(self.layers):
            if layer in self.managed:
                found.append(num_tokens)
                num_tokens = self.count(layer, num_tokens, fall)
        return found

    def least_fall(self, num_tokens: int, budget: int) -> float:
        """Least fall under which managed layers hold `budget` tokens or fewer on average.

        The steepest one where none does: then the budget drops the rest.
        """
        room, low, high = budget * len(self.managed), 0.0, STEEPEST
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            fits = sum(self.lengths(num_tokens, middle)) <= room
            low, high = (low, middle) if fits else (middle, high)
        return high


Part = LayerwiseNarrowing
