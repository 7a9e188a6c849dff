"""Planner: scores, budget and compensation of a policy, from an observation to a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from larder.core.errors import BudgetError, ScoreError
from larder.core.memory_budget import count_of_tokens
from larder.core.observation import (
    Calibration,
    Entries,
    LayerScores,
    Lexicon,
    Observation,
    Phase,
    ScoredLayers,
    ScoreScale,
)
from larder.core.part import Ledger, PolicyPart
from larder.core.plan import LayerPlans, LayerQuotas, Plan, StepRule
from larder.core.registry import Family, public_name
from larder.core.spelling import spell
from larder.core.types import Packed, PackedMask
from larder.policy.attention_reduction import AttentionReduction, NoAggregation, NoHeadRule
from larder.policy.budgets.base import Budget
from larder.policy.compensation.base import Compensation
from larder.policy.layer_calibration import mean_per_kv_head, split_by_layer
from larder.policy.protect import Protect
from larder.policy.providers.base import (
    ActivationProvider,
    GradientProvider,
    Provider,
    SoftEntryProvider,
    SoftPromptProvider,
    TokenProvider,
    select_providers,
)
from larder.policy.scorers.base import ReducedScorer, Scorer
from larder.policy.storage.base import Storage
from larder.policy.storage.exact import Exact
from larder.policy.timing.base import Timing
from larder.policy.timing.prefill_only import PrefillOnly
from larder.policy.units.base import Unit
from larder.policy.units.token import Token
from larder.policy.values.base import Selection, ValueRule
from larder.policy.values.keys_alone import KeysAlone

if TYPE_CHECKING:  # the family loads those that parts name
    from larder.policy.tallies.base import Tally

TALLIES = Family("tally", "larder.policy.tallies")


@dataclass(frozen=True)
class Planner:
    """Parts of a policy that decide on entries, bound to a model's calibration.

    Args:
        reduction: reduction over queries and heads, for attention scorers.
        recall: part that finds offloaded entries again; None without offload.
        calibration: measurements of each managed layer, by layer index.
        weights: budget weights of the heads of each managed layer, by layer index.
        lexicon: sets of token ids that the parts need.
        weight_inputs: tensors of weight providers by layer index, then by name.
        watermark: true position below which entries are not judged again: every plan keeps them.
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
    recall: PolicyPart | None = None
    calibration: Mapping[int, Calibration] = field(default_factory=dict[int, Calibration])
    weights: Mapping[int, tuple[float, ...]] = field(default_factory=dict[int, tuple[float, ...]])
    lexicon: Lexicon = field(default_factory=dict[str, frozenset[int]])
    weight_inputs: Mapping[int, Mapping[str, Tensor]] = field(
        default_factory=dict[int, Mapping[str, Tensor]], compare=False
    )
    watermark: int = 0

    @cached_property
    def prefill_parts(self) -> tuple[PolicyPart, ...]:
        """Parts that read inputs in prefill."""
        parts = (self.scorer, self.reduction.heads, self.values, self.unit, self.budget)
        parts += (self.compensation, self.storage, self.timing)
        return parts if self.recall is None else (*parts, self.recall)

    @cached_property
    def parts(self) -> tuple[PolicyPart, ...]:
        """All parts that read inputs, those of the decode phase alone included."""
        return (*self.prefill_parts, *self.timing.parts)

    @cached_property
    def providers(self) -> frozenset[str]:
        """Names of the providers that parts and tallies need."""
        return _union(part.required_providers() for part in (*self.parts, *self._tallies))

    @cached_property
    def token_providers(self) -> Mapping[str, TokenProvider]:
        """Providers of a number per token from the model's logits, by name."""
        return select_providers(self.providers, TokenProvider)

    @cached_property
    def activation_providers(self) -> Mapping[str, ActivationProvider]:
        """Providers that capture activations of a pass, by name: those of prefill, and those with
        a column."""
        readers = (*self.prefill_parts, *self._tallies)
        in_prefill = _union(part.required_providers() for part in readers)
        found = select_providers(self.providers, ActivationProvider).items()
        return {name: each for name, each in found if name in in_prefill or each.has_column}

    @cached_property
    def gradient_providers(self) -> Mapping[str, GradientProvider]:
        """Providers of numbers from gradients of a scratch pass, by name."""
        return select_providers(self.providers, GradientProvider)

    @cached_property
    def soft_prompt_providers(self) -> Mapping[str, SoftPromptProvider]:
        """Providers of learned tokens of scratch passes, by name."""
        return select_providers(self.providers, SoftPromptProvider)

    @cached_property
    def soft_entry_providers(self) -> Mapping[str, SoftEntryProvider]:
        """Providers of learned tokens whose entries parts read, by name."""
        return select_providers(self.providers, SoftEntryProvider)

    @cached_property
    def calibrations(self) -> frozenset[str]:
        """Names of the measurements of a model that parts look up."""
        return _union(part.required_calibrations() for part in self.parts)

    @cached_property
    def ledger(self) -> Ledger:
        """State that the cache holds for the parts."""
        kept = select_providers(self.providers, Provider).items()
        columns = tuple(name for name, provider in kept if provider.has_column)
        return Ledger.union(
            [
                Ledger(columns),
                *(part.required_ledger() for part in self.parts),
                *(Ledger(tally.columns) for tally in self._tallies),
            ]
        )

    @cached_property
    def _tallies(self) -> tuple[Tally, ...]:
        named = _union(part.required_tallies() for part in self.parts)
        return tuple(TALLIES.load(name)() for name in sorted(named))

    @property
    def has_tallies(self) -> bool:
        """True if tallies or latest queries are updated on every pass, even without a plan."""
        return bool(self._tallies or self.ledger.queries)

    @cached_property
    def observes_whole_text(self) -> bool:
        """True if a part of prefill needs the queries of a whole context in one pass."""
        return any(part.observes_whole_text() for part in self.prefill_parts)

    @property
    def has_state(self) -> bool:
        """True if every token read changes what the cache holds for the parts."""
        return self.has_tallies or bool(self.token_providers)

    def _scoring(self, phase: Phase) -> ReducedScorer:
        """Scorer and reduction of a phase."""
        scoring = self.timing.scoring if phase is Phase.DECODE else None
        return scoring or ReducedScorer(self.scorer, self.reduction)

    def tally(self, observation: Observation) -> dict[str, Float[Tensor, " C"]]:
        """New values of all tally columns, after an appending pass."""
        updates = [tally.update(observation) for tally in self._tallies]
        return {name: column for update in updates for name, column in update.items()}

    def with_calibration(
        self,
        calibration: Calibration,
        layers: tuple[int, ...],
        lexicon: Lexicon = MappingProxyType({}),
    ) -> Planner:
        """Copy that is bound to a model's calibration.

        Args:
            layers: indices of the managed layers.

        Raises:
            ModelError: a calibration does not divide over the layers.
        """
        by_head = {"weights": self.budget.head_weights(calibration)}
        split = split_by_layer(by_head, layers)
        weights = {index: numbers["weights"] for index, numbers in split.items()}
        return replace(
            self, calibration=split_by_layer(calibration, layers), weights=weights, lexicon=lexicon
        )

    def needs_logits(self, is_due: bool) -> bool:
        """True if attention logits of the newest token are needed.

        Args:
            is_due: whether a plan, and so scores, will be made.
        """
        scorer = self._scoring(Phase.DECODE).scorer
        uses_attention = self.storage.rerotates_keys or scorer.default_reduction() is not None
        return bool(self._tallies) or (is_due and uses_attention)

    @cached_property
    def sums_weights(self) -> bool:
        """True if a tally adds up the attention that entries receive from a block."""
        return any(tally.sums_weights for tally in self._tallies)

    @cached_property
    def step_rule(self) -> StepRule | None:
        """Eviction of a decode step as a kernel can carry it out; None if parts do more."""
        scoring, ledger = self.scorer.step_scoring(self.reduction), self.ledger
        if scoring is None or not self.compensation.is_step_rule:
            return None
        is_plain = (
            all(tally.step_columns for tally in self._tallies)
            and not (ledger.queries or self.providers or self.timing.extends_protection)
            and self.timing.scoring is None
            and isinstance(self.values, KeysAlone)
            and self.unit == Token()
            and self.storage == Exact()
            and self.recall is None
        )
        if not is_plain:
            return None
        pairs = [zip(tally.step_columns, tally.columns, strict=True) for tally in self._tallies]
        columns = {column: name for pair in pairs for column, name in pair}
        return StepRule(scoring, self.compensation.step_merging, columns)

    def with_model_inputs(self, observation: Observation) -> Observation:
        """Observation with calibration, lexicon and weight inputs of its layer."""
        measured = self.calibration.get(observation.layer.index, {})
        if not (
            measured
            or self.lexicon
            or observation.calibration
            or observation.lexicon
            or self.weight_inputs
        ):
            return observation
        inputs = {**observation.inputs, **self.weight_inputs.get(observation.layer.index, {})}
        return replace(observation, calibration=measured, lexicon=self.lexicon, inputs=inputs)

    def quotas(
        self, tokens: int, context: int, layers: tuple[int, ...], calibration: Calibration
    ) -> dict[int, int]:
        """Entries per kv head of each managed layer, by layer index.

        Args:
            tokens: average over layers.
            context: tokens to be read, the most that a layer can hold.

        Raises:
            BudgetError: the tokens that protection and scorer always keep do not fit.
        """
        least = self.protect.least(tokens).union(self.scorer.protected_tokens())
        if least.tokens > tokens:
            raise BudgetError(
                f"The budget of {count_of_tokens(tokens)} is smaller than the {least.tokens} that "
                f"{spell(self.protect)} and {spell(self.scorer)} always keep ({least.first} at the "
                f"start, {least.last} at the end): raise the budget, or give either of them less."
            )
        if not layers:  # every layer slides its own window
            return {}
        floor = self.smallest_budget(tokens) if self.budget.protects_own_share else least.tokens
        shares = self.budget.layer_tokens(tokens, len(layers), floor, context, calibration)
        return dict(zip(layers, shares, strict=True))

    def smallest_budget(self, tokens: int) -> int:
        """Fewest entries per kv head, at most `tokens`, that hold what is protected of them."""
        always = self.scorer.protected_tokens()
        sizes = (
            size for size in range(tokens) if self.protect.ends(size).union(always).tokens <= size
        )
        return next(sizes, tokens)

    def score(
        self, observation: Observation, quota: int = 0, tokens: int = 0, start: int = 0
    ) -> Packed:
        """Float32 score of every entry of a layer, after value rule and unit.

        Args:
            quota: capacity of the layer in entries per kv head; 0 without a selection by values.
            tokens, start: as in `with_protection`.

        Raises:
            ScoreError: the scorer did not return one number per entry.
        """
        scoring = self._scoring(observation.phase)
        scores = scoring.scorer.score_with(observation, scoring.reduction)
        self._check(scores, scoring.scorer, observation)
        selection = Selection(quota)
        if quota and self.values.selects:
            weights = scoring.scorer.weights(observation) if self.values.wants_weights else None
            selection = Selection(quota, self._protection(observation, start)(tokens), weights)
        weighed = self.values.weigh(scores.to(torch.float32), observation, selection)
        return self.unit.pool(weighed, observation)

    def _check(self, scores: Tensor, scorer: Scorer, observation: Observation) -> None:
        count, name = sum(observation.entries.lengths), public_name(type(scorer))
        layer = observation.layer.index
        if tuple(scores.shape) != (count,):
            raise ScoreError(
                f"{name} returned scores of shape {tuple(scores.shape)} for layer {layer}, which "
                f"holds ({count},) entries (T, over all its kv heads): return one score per entry, "
                "head by head."
            )
        if not scores.is_floating_point():
            raise ScoreError(
                f"{name} returned {scores.dtype} scores for layer {layer}: return float32."
            )
        if len(scores) and math.isnan(float(scores.amin())):  # amin propagates NaN
            raise ScoreError(
                f"{name} returned {int(scores.isnan().sum())} NaN among {count} scores for "
                f"layer {layer}, which cannot be ranked: return numbers or infinities."
            )

    def with_protection(
        self, observation: Observation, scores: Packed, tokens: int, start: int = 0
    ) -> LayerScores:
        """Scores of a layer together with its protected entries and statistics.

        Args:
            tokens: M, the budget that protected shares are relative to.
            start: true position of the first generated token; unused in prefill.
        """
        entries, protection = observation.entries, self._protection(observation, start)
        protected = protection(tokens)
        weights = mean_per_kv_head(
            self.weights.get(observation.layer.index, ()), len(entries.lengths)
        )
        return LayerScores(
            scores,
            protected,
            entries.lengths,
            measure=self.budget.inspect(observation, scores, protected),
            scalars=entries.scalars,
            phase=observation.phase,
            storage_statistics=self.storage.inspect(observation),
            weights=weights,
            protection=protection,
            learned=self._learned(observation),
            scale=self._scale(observation.phase),
        )

    def _scale(self, phase: Phase) -> ScoreScale:
        """Scale of the scores of a phase; a rule for values makes weights of logarithms."""
        is_own = isinstance(self.values, KeysAlone)
        return self._scoring(phase).scorer.scale if is_own else ScoreScale.WEIGHTS

    def _learned(self, observation: Observation) -> dict[str, Tensor]:
        """Inputs of the providers that the compensation needs."""
        wanted = self.compensation.required_providers()
        return {
            name: own for name, own in observation.inputs.items() if name.split(".")[0] in wanted
        }

    def _protection(self, observation: Observation, start: int) -> Callable[[int], PackedMask]:
        """Mask of protected entries as a function of the entries per head that a layer keeps.

        It holds no queries, since layers keep it until all of them are scored.
        """
        positions = observation.entries.packed_positions()
        return partial(self._protected, positions, observation.length, observation.phase, start)

    def _protected(
        self, positions: Int[Tensor, " T"], length: int, phase: Phase, start: int, tokens: int
    ) -> PackedMask:
        protected = self.protect.mask(positions, length, tokens) | (positions < self.watermark)
        if phase is Phase.DECODE and self.timing.extends_protection:
            return self.timing.generation_protection(protected, positions, start, length, tokens)
        return protected

    def plan(
        self, ready: ScoredLayers, quotas: LayerQuotas, entries: Callable[[int], Entries]
    ) -> LayerPlans:
        """Plans for the layers that can be decided now; the others wait for more layers.

        Args:
            ready: scored layers without a plan, by layer index.
            entries: callable: layer index to entries.
        """
        if self.storage.compares_layers and len(ready) < len(quotas):
            return {}
        shares = self.storage.compare([scored.storage_statistics for scored in ready.values()])
        share_of = dict(zip(ready, shares, strict=True))
        plans: dict[int, Plan] = {}
        for index, plan in self._chosen(ready, quotas).items():
            plans[index] = self._finish_plan(
                plan, entries(index), ready[index], quotas[index], share_of[index]
            )
        return self.storage.allocate(plans, entries)

    def _chosen(self, ready: ScoredLayers, quotas: LayerQuotas) -> LayerPlans:
        """Plans of the budget; layers on several devices are compared on that of the first."""
        devices = {index: scored.scores.device for index, scored in ready.items()}
        if len(set(devices.values())) <= 1:
            return self.budget.choose(ready, quotas)
        first = next(iter(devices.values()))
        together = {index: scored.on(first) for index, scored in ready.items()}
        chosen = self.budget.choose(together, quotas)
        return {index: plan.on(devices[index]) for index, plan in chosen.items()}

    def _finish_plan(
        self, plan: Plan, entries: Entries, scored: LayerScores, quota: int, share: float
    ) -> Plan:
        """Plan with compensation and grades; a method, so that one copy of entries lives at a
        time.
        """
        compensated = self.compensation.compensate(plan, entries, scored)
        return self.storage.grade(compensated, entries, scored, quota, share)


def _union(names: Iterable[frozenset[str]]) -> frozenset[str]:
    return frozenset[str]().union(*names)
