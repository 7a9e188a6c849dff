"""Scorers that judge by what some queries look at."""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.observation import Observation
from larder.core.types import Packed
from larder.policy.attention_reduction import AttentionReduction, ObservationWindow
from larder.policy.scorers.base import Scorer


class AttentionScorer(Scorer):
    """A scorer by attention: it says which queries look, and what it makes of their weights.

    How queries and heads are joined is the policy's word (slots `aggregation` and `heads`); left
    out, it is the paper's.
    """

    @abstractmethod
    def published(self) -> tuple[str, str]:
        """Names of the aggregation and of the head rule that its paper takes."""

    @abstractmethod
    def look(self, seen: Observation) -> ObservationWindow:
        """The queries that vote, and the entries that they vote on."""

    def finish(self, seen: Observation, heads: list[Float[Tensor, " _"]]) -> Packed:
        """Scores of all entries from the joined weights of those looked at; end to end here."""
        del seen
        return torch.cat(heads)

    def score(self, seen: Observation) -> Packed:
        return self.judge(seen, self._own_joining)

    def judge(self, seen: Observation, joining: AttentionReduction) -> Packed:
        return self.finish(seen, joining.join(self.look(seen), seen))

    def weights(self, seen: Observation) -> Packed:
        return torch.cat(self._plain_joining.join(self.look(seen), seen))

    @cached_property
    def _plain_joining(self) -> AttentionReduction:
        return AttentionReduction.named("mean", "group_mean")

    @cached_property
    def _own_joining(self) -> AttentionReduction:
        return AttentionReduction.named(*self.published())
