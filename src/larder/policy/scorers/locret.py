"""Scorer by a prediction of the highest logit that later tokens give an entry (Locret).

Huang et al., "Locret: Enhancing Eviction in Long-Context LLM Inference with Trained Retaining Heads
on Consumer-Grade Devices" (2024), arXiv:2410.01805. `larder train locret` fits the retaining heads.
Chunks are read and cut one after the other, as `blockwise` does, and every head keeps its best.
The paper exempts its newest 2,500 tokens ("stabilizers") until the last chunk, and answers a
question in the training data; here `protect(recent=...)` exempts tokens throughout, and labels are
those of a copy of the context.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.core.observation import Observation
from larder.core.types import Packed
from larder.policy.scorers.base import Scorer


@dataclass(frozen=True)
class Locret(Scorer):
    """Predicted highest logit before the softmax."""

    needs = frozenset({"locret"})

    def score(self, observation: Observation) -> Packed:
        return observation.entries.column("locret")


Part = Locret
