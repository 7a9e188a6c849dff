"""Scorer by a learned decision which tokens a head keeps (Attention-Gate).

Zeng et al., "In-context KV-Cache Eviction for LLMs via Attention-Gate" (2024), arXiv:2410.12876.
`larder train attention_gate` makes the gates. The decision is `fixed_threshold(score=0.5)`; with a
size, that budget keeps the best of what passes: `whole() > attention_gate() >
fixed_threshold(score=0.5)`. The paper's prefill attends to kept keys alone; here
a token that is dropped is still seen in the pass, or block, that reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.core.observation import Observation
from larder.core.types import Packed
from larder.policy.scorers.base import Scorer


@dataclass(frozen=True)
class GateProbability(Scorer):
    """Number of the gate, in (0, 1)."""

    needs = frozenset({"attention_gate"})

    def score(self, observation: Observation) -> Packed:
        return observation.entries.column("attention_gate")


Part = GateProbability
