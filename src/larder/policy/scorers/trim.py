"""Scorer by a learned rate at which entries lose their worth (TRIM-KV).

Bui et al., "Cache What Lasts: Token Retention for Memory-Bounded KV Cache in LLMs" (2025),
arXiv:2512.03324, section 4.3. `larder train trim` makes the gates. An entry of age a has the worth
beta^a, of which the logarithm is compared. Every head keeps its best (`uniform`); while text is
generated, the released code evicts every 128 tokens: `blockwise(tokens=128) > trim() > uniform() >
lagged()`. It protects neither sinks nor recent tokens (`protect(sinks=0, recent=0)`), since both
are learned; gates that were trained for a short while need the usual protection.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.policy.scorers.global_retention import RetentionScorer


@dataclass(frozen=True)
class Trim(RetentionScorer):
    """Age times log beta."""

    needs = frozenset({"trim"})
    column = "trim"


Part = Trim
