"""The heart of a policy: from what a layer saw to a plan for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType

import torch
from jaxtyping import Float, Int
from torch import Tensor

from larder.core.errors import BudgetError, ScoreError
from larder.core.family import Family
from larder.core.ledger import Ledger
from larder.core.observation import (
    Calibration,
    Entries,
    LayerScores,
    Lexicon,
    Need,
    Observation,
    Phase,
)
from larder.core.plan import Plan
from larder.core.spelling import name_of, spell
from larder.core.types import Packed, PackedMask
from larder.policy.attention_reduction import AttentionReduction, NoAggregation, NoHeadRule
from larder.policy.budgets.base import Budget
from larder.policy.compensation.base import Compensation
from larder.policy.layer_calibration import mean_per_kv_head, split_by_layer
from larder.policy.protect import Protect
from larder.policy.scorers.base import Scorer
from larder.policy.scoring import Scoring
from larder.policy.storage.base import Storage
from larder.policy.storage.exact import Exact
from larder.policy.tallies.base import Tally
from larder.policy.timing.base import Timing
from larder.policy.timing.prefill_only import PrefillOnly
from larder.policy.units.base import Unit
from larder.policy.units.token import Token
from larder.policy.values.base import Selection, ValueRule
from larder.policy.values.keys_alone import KeysAlone

TALLIES = Family("tally", "larder.policy.tallies")


@dataclass(frozen=True)
class Planner:
    """What is protected, what scores, how many stay, what becomes of the rest.

    Args:
        reduction: how queries and heads are joined, for scorers by attention.
        facts: what was measured of each managed layer, by layer index.
        weights: what the budget makes of that, a number per head of each layer.
        lexicon: sets of token ids that the parts ask for.
        projections: output projections by layer index, where values are looked at behind them.
        recalled: names of tallies whose columns are looked up to find parked entries.
    """

    protect: Protect
    scorer: Scorer
    budget: Budget
    compensation: Compensation
    reduction: AttentionReduction = AttentionReduction(NoAggregation(), NoHeadRule())
    values: ValueRule = KeysAlone()
    unit: Unit = Token()
    timing: Timing = PrefillOnly()
    storage: Storage = Exact()
    recalled: frozenset[str] = frozenset()
    facts: Mapping[int, Calibration] = field(default_factory=dict[int, Calibration])
    weights: Mapping[int, tuple[float, ...]] = field(default_factory=dict[int, tuple[float, ...]])
    lexicon: Lexicon = field(default_factory=dict[str, frozenset[int]])
    projections: Mapping[int, Tensor] = field(default_factory=dict[int, Tensor], compare=False)

    @property
    def needs(self) -> frozenset[Need]:
        """What its parts have to see beside queries, keys and entries."""
        return self.scorer.needs() | self.budget.needs()

    @property
    def ledger(self) -> Ledger:
        """What the parts have the cache remember."""
        own = [scorer.ledger for scorer in self._scorers]
        own += [self.compensation.remembered(), self.budget.ledger]
        own.append(Ledger(queries=self.queries))
        return Ledger.union([*own, *(Ledger(tally.columns) for tally in self._tallies)])

    @cached_property
    def _tallies(self) -> tuple[Tally, ...]:
        named = self.budget.tallies | self.compensation.required_tallies()
        named = named.union(*(scorer.tallies for scorer in self._scorers))
        named |= self.unit.tallies | self.recalled
        return tuple(TALLIES.load(name)() for name in sorted(named))

    @property
    def has_tallies(self) -> bool:
        """Whether anything is counted of every pass, judged or not."""
        return bool(self._tallies or self.queries)

    @property
    def queries(self) -> int:
        """How many of the latest queries of each layer are held."""
        return max(scorer.queries() for scorer in self._scorers)

    @property
    def _scorers(self) -> tuple[Scorer, ...]:
        """The one that judges what is read, and another for what is generated, if there is one."""
        return (self.scorer, *self.timing.scorers)

    def _scoring(self, stage: Phase) -> Scoring:
        """What judges a layer."""
        other = self.timing.scoring if stage is Phase.DECODE else None
        return other or Scoring(self.scorer, self.reduction)

    def tally(self, seen: Observation) -> dict[str, Float[Tensor, " C"]]:
        """New values of all columns, after a pass that appended."""
        updates = [tally.update(seen) for tally in self._tallies]
        return {name: column for update in updates for name, column in update.items()}

    def with_calibration(
        self, facts: Calibration, layers: tuple[int, ...], lexicon: Lexicon = MappingProxyType({})
    ) -> Planner:
        """The same, knowing what was measured of the model.

        Args:
            layers: indices of the managed layers.

        Raises:
            ModelError: a measurement does not fit as many layers.
        """
        told = {"weights": self.budget.head_weights(facts)}
        weights = {index: own["weights"] for index, own in split_by_layer(told, layers).items()}
        return replace(self, facts=split_by_layer(facts, layers), weights=weights, lexicon=lexicon)

    def needs_logits(self, is_due: bool) -> bool:
        """Whether anything will look at what attention makes of the newest token.

        Args:
            is_due: whether scores are asked for.
        """
        scorer = self._scoring(Phase.DECODE).scorer
        looks = self.storage.turns or scorer.default_reduction() is not None
        return bool(self._tallies) or (is_due and looks)

    def with_model_facts(self, seen: Observation) -> Observation:
        """What a layer saw, with what is known beforehand."""
        own = self.facts.get(seen.layer.index, {})
        if not (own or self.lexicon or seen.facts or seen.lexicon or self.projections):
            return seen
        behind = self.projections.get(seen.layer.index)
        return replace(seen, facts=own, lexicon=self.lexicon, projection=behind)

    def quotas(
        self, tokens: int, context: int, layers: tuple[int, ...], facts: Calibration
    ) -> dict[int, int]:
        """Entries per kv head of each managed layer, by layer index.

        Args:
            tokens: the average over layers.
            context: tokens to be read; no layer can fill more.

        Raises:
            BudgetError: what is protected and what the scorer always keeps do not fit together.
        """
        least = self.protect.least(tokens).union(self.scorer.least())
        if least.tokens > tokens:
            raise BudgetError(
                f"The budget of {tokens} tokens is smaller than the {least.tokens} that "
                f"{spell(self.protect)} and {spell(self.scorer)} always keep ({least.first} at the "
                f"start, {least.last} at the end): raise --budget, or give either of them less."
            )
        if not layers:  # every layer slides its own window
            return {}
        floor = self._own_floor(tokens) if self.budget.protects_own_share else least.tokens
        shares = self.budget.layer_tokens(tokens, len(layers), floor, context, facts)
        return dict(zip(layers, shares, strict=True))

    def _own_floor(self, tokens: int) -> int:
        """The fewest entries of a layer that hold what is protected of so many."""
        always = self.scorer.least()
        sizes = (
            own for own in range(tokens) if self.protect.ends(own).union(always).tokens <= own
        )
        return next(sizes, tokens)

    def score(self, seen: Observation, quota: int = 0, tokens: int = 0, start: int = 0) -> Packed:
        """The scorer's float32 score of every entry of a layer.

        Args:
            quota: entries per kv head that the layer may keep; 0 where values choose no first part.
            tokens, start: as in `judge`.

        Raises:
            ScoreError: it is not one number per entry.
        """
        own = self._scoring(seen.stage)
        scores = own.scorer.judge(seen, own.reduction)
        self._check(scores, own.scorer, seen)
        selection = Selection(quota)
        if quota and self.values.selects:
            weights = own.scorer.weights(seen) if self.values.wants_weights else None
            selection = Selection(quota, self._protection(seen, start)(tokens), weights)
        weighed = self.values.weigh(scores.to(torch.float32), seen, selection)
        return self.unit.pool(weighed, seen)

    def _check(self, scores: Tensor, scorer: Scorer, seen: Observation) -> None:
        wanted, whose = sum(seen.entries.lengths), name_of(type(scorer))
        if tuple(scores.shape) != (wanted,):
            raise ScoreError(
                f"{whose} returned scores of shape {tuple(scores.shape)} for layer "
                f"{seen.layer.index}, which holds ({wanted},) entries (T, over all its kv heads): "
                "return one score per entry, head by head."
            )
        if not scores.is_floating_point():
            raise ScoreError(
                f"{whose} returned {scores.dtype} scores for layer {seen.layer.index}: return "
                "float32."
            )
        if len(scores) and math.isnan(float(scores.amin())):  # the least of anything and NaN is NaN
            raise ScoreError(
                f"{whose} returned {int(scores.isnan().sum())} NaN among {wanted} scores for "
                f"layer {seen.layer.index}, which cannot be ranked: return numbers or infinities."
            )

    def with_protection(self, seen: Observation, scores: Packed, tokens: int, start: int = 0) -> LayerScores:
        """A layer's scores together with what is protected.

        Args:
            start: true position where generating began; unused while reading.
        """
        entries, protection = seen.entries, self._protection(seen, start)
        protected = protection(tokens)
        measure = self.budget.measure(seen, scores)
        inspected = self.storage.inspect(seen)
        weights = mean_per_kv_head(self.weights.get(seen.layer.index, ()), len(entries.lengths))
        told = (measure, entries.scalars, seen.stage, inspected, weights)
        return LayerScores(scores, protected, entries.lengths, *told, protection=protection)

    def _protection(self, seen: Observation, start: int) -> Callable[[int], PackedMask]:
        """Which entries stay whatever their scores, where a layer keeps so many per head.

        It holds no queries: layers wait with it until all are judged.
        """
        told = seen.entries.packed_positions(), seen.length, seen.stage, start
        return partial(self._protected, *told)

    def _protected(
        self, positions: Int[Tensor, " T"], length: int, stage: Phase, start: int, tokens: int
    ) -> PackedMask:
        protected = self.protect.mask(positions, length, tokens)
        if stage is Phase.DECODE and self.timing.extends_protection:
            return self.timing.generation_protection(protected, positions, start, length, tokens)
        return protected

    def plan(
        self,
        ready: Mapping[int, LayerScores],
        quotas: Mapping[int, int],
        entries: Callable[[int], Entries],
    ) -> dict[int, Plan]:
        """Plans for the layers that can be decided now; the others wait for more layers.

        Args:
            ready: judged layers that have no plan yet, by layer index.
            entries: what a layer holds.
        """
        if self.storage.compares_layers and len(ready) < len(quotas):
            return {}
        shares = self.storage.compare([scored.storage_statistics for scored in ready.values()])
        share_of = dict(zip(ready, shares, strict=True))
        plans: dict[int, Plan] = {}
        for index, plan in self.budget.choose(ready, quotas).items():
            told = ready[index], quotas[index], share_of[index]
            plans[index] = self._finish_plan(plan, entries(index), *told)
        return plans

    def _finish_plan(
        self, plan: Plan, held: Entries, scored: LayerScores, quota: int, share: float
    ) -> Plan:
        """By itself, so that of copies of what layers hold there is one at a time."""
        settled = self.compensation.settle(plan, held, scored)
        return self.storage.grade(settled, held, scored, quota, share)
