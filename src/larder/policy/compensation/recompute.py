"""Recomputation of rejected entries from residuals or token ids (KV-Direct).

Qasim et al., "The Residual Stream Is All You Need: On the Redundancy of the KV Cache in
Transformer Inference" (2026), arXiv:2603.19664: KV-Direct holds the residual stream of every token,
and keys and values of those that a budget has room for; the others are computed again whenever they
are attended to, so that answers are those of the full cache at every budget. The paper's figures do
not keep two ways apart:

every  A residual per token and layer, from which each layer projects its own. Under grouped queries
       that is more than the keys and values take (hidden size against 2 K D numbers).
one    One residual per token, before layer `depth`, from which the model runs over all of the text
       again at every step; the layers before hold all their entries. The paper's 5 KB a token.
ids    The same from the first layer, which needs the token ids and 4 bytes each.

What differs: the paper chooses the latest tokens for the budget; here any scorer may.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.core.observation import Entries, LayerScores
from larder.core.plan import Plan
from larder.core.spec import RecomputeSource, RecomputeSpec
from larder.policy.compensation.base import Compensation


@dataclass(frozen=True)
class Recompute(Compensation):
    """Recomputation of rejected entries whenever they are attended to.

    Args:
        held: stored source: `every` layer's residual, `one` residual, or `ids`.
        depth: layer whose input is stored, for `one`.
    """

    held: RecomputeSource = RecomputeSource.EVERY
    depth: int = 1
    folds = False
    cache_form = "rebuilt"

    def __post_init__(self) -> None:
        _ = self.rebuilding

    @property
    def rebuilding(self) -> RecomputeSpec:
        return RecomputeSpec(self.held, self.depth)

    def compensate(self, plan: Plan, entries: Entries, scored: LayerScores) -> Plan:
        return plan


Part = Recompute
