"""Scorer by a prediction of KVzip's score from hidden states, by low-rank gates (Fast KVzip).

Kim et al., "Fast KVzip: Efficient and Accurate LLM Inference with Gated KV Eviction" (2026),
arXiv:2601.17668. `larder train fast_kvzip` fits the gates to KVzip's scores; a score is made when
its token is written. The paper keeps 4 sinks and a window of 2 percent of the context, and cuts
once over all layers and heads, as `global` does.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.core.observation import Observation
from larder.core.types import Packed
from larder.policy.scorers.base import Scorer


@dataclass(frozen=True)
class FastKVzip(Scorer):
    """Predicted score of KVzip, in (0, 1)."""

    needs = frozenset({"fast_kvzip"})

    def score(self, observation: Observation) -> Packed:
        return observation.entries.column("fast_kvzip")


Part = FastKVzip
