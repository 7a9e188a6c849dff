"""Policy: one part in each slot, in a fixed order.

session    schedule    protect   scorer    aggregation  heads       values       unit
episodes > blockwise > protect > patched > max        > group_max > keys_alone > token >

    budget        compensation   recall   storage   timing
    sensitivity > park         > dci    > exact   > prefill_only

Aggregation and heads reduce attention over queries and query heads for scorers by attention; by
default as in the paper of the scorer. Other scorers have neither. Only offloaded entries can be
recalled.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from larder.core.arguments import check_type
from larder.core.errors import BudgetError, SpellingError
from larder.core.memory_budget import count_of_tokens
from larder.core.recall import OffloadSpec, RecallPart
from larder.core.spec import RecomputeSpec
from larder.core.spelling import Call, build, spell, spell_briefly
from larder.policy.aggregation.base import Aggregation
from larder.policy.attention_reduction import AttentionReduction, NoAggregation, NoHeadRule
from larder.policy.budgets.base import Budget
from larder.policy.compensation.base import Compensation
from larder.policy.heads.base import HeadRule
from larder.policy.planner import Planner
from larder.policy.protect import Protect
from larder.policy.providers.base import VocabularyProvider, select_providers
from larder.policy.scorers.base import REDUCTION_SLOTS, Scorer, reduction_parts
from larder.policy.storage.base import Storage
from larder.policy.storage.exact import Exact
from larder.policy.timing.base import Timing
from larder.policy.units.base import Unit
from larder.policy.units.token import Token
from larder.policy.values.base import ValueRule
from larder.policy.values.keys_alone import KeysAlone
from larder.prefill.base import Schedule, TurnRule
from larder.session.arrangements.base import Arrangement
from larder.session.policy_validation import (
    check_added,
    check_cache_form,
    check_correction,
    check_gapless,
    check_heads,
    check_narrowing,
    check_query_positions,
    check_recompute,
    check_single_cut,
    check_state,
    check_timing,
    check_turn_rule,
    check_unit,
    check_weights,
    with_block_size,
)
from larder.session.sentence import FAMILIES, SLOTS, parts_by_slot

DEFERRED_SLOTS = (*REDUCTION_SLOTS, "recall")
NULL_PARTS = (
    NoAggregation(),
    NoHeadRule(),
    KeysAlone(),
    Token(),
    Exact(),
)  # not part of a spelling
DEFAULTS = {
    "session": "single",
    "schedule": "whole",
    "scorer": "sinks_and_window",
    "values": "keys_alone",
    "unit": "token",
    "budget": "pooled",
    "compensation": "drop",
    "recall": "dci",
    "storage": "exact",
    "timing": "prefill_only",
}


@dataclass(frozen=True)
class Policy:
    """Cache policy of a conversation, one part per slot. `str()` is its canonical spelling.

    Policies are made by `Policy.parse`; `larder policy list` prints presets and parts.

    Args:
        session: division of a conversation among caches: `single()`, or `episodes(...)`.
        schedule: when plans are made while a text is read: after it, or after every block.
        protect: first and last entries that no plan evicts.
        scorer: score of every entry.
        aggregation: reduction of attention over queries, for scorers by attention.
        heads: reduction of attention over the query heads of a kv head, for the same scorers.
        values: weighting of scores by the values of entries.
        unit: grouping whose entries get one score, such as `token()` or `chunk()`.
        budget: division of the budget among layers and heads.
        compensation: fate of the entries that are not kept: dropped, offloaded, merged, recomputed.
        recall: index over offloaded entries; None without offload.
        storage: representation of kept entries, such as `exact()` or `quantized(bits=4)`.
        timing: when plans are made while text is generated.
        unnamed: parameters of the storage that the sentence does not name and that may be measured
            of a model, whose numbers then take their place (`larder.session.for_model`).

    Examples:
        >>> policy = Policy.parse("protect(sinks=4) > keydiff() > pooled(tokens=512)")
        >>> policy.budget.tokens
        512
    """

    session: Arrangement
    schedule: Schedule
    protect: Protect
    scorer: Scorer
    aggregation: Aggregation
    heads: HeadRule
    values: ValueRule
    unit: Unit
    budget: Budget
    compensation: Compensation
    recall: RecallPart | None
    storage: Storage
    timing: Timing
    unnamed: frozenset[str] = field(default=frozenset(), compare=False)

    @staticmethod
    def parse(sentence: str) -> Policy:
        """Parse the name of a preset or a spelling of parts; omitted slots take defaults.

        A first name without parentheses is a preset's, if there is one of that name; with
        parentheses it is a part's. A part behind a preset replaces the one that the preset has in
        its slot, or changes the parameters that it names if it is the same part.

        Args:
            sentence: name of a preset such as `"kvzip"`; the name of one with parts behind it,
                `"kvzip > quantized(bits=4)"`, or a variant that tables name, `"kvzip:int4"`; or
                parts joined by `>` in slot order.

        Returns:
            Policy whose sizes are open where the sentence names none.

        Raises:
            SpellingError: the spelling does not parse, or parts are out of order.
            UnknownName: a preset, part or parameter does not exist.
            BadParameter: a value is out of range.

        Examples:
            >>> Policy.parse("kvzip") == Policy.parse(str(Policy.parse("kvzip")))
            True
            >>> Policy.parse("kvzip > quantized(bits=8)").short
            'whole() > reconstruct() > global() > quantized(bits=8)'
            >>> Policy.parse("kvzip:int4") == Policy.parse("kvzip > quantized(bits=4)")
            True
        """
        given = parts_by_slot(sentence)
        chosen = {
            slot: _build_part(slot, given.get(slot)) for slot in SLOTS if slot not in DEFERRED_SLOTS
        }
        check_timing(chosen["scorer"], chosen["timing"])
        for scorer in (chosen["scorer"], *chosen["timing"].scorers):
            check_weights(scorer, chosen["values"])
            check_query_positions(scorer, chosen["storage"])
        check_single_cut(chosen["schedule"], chosen["compensation"])
        check_unit(chosen["schedule"], chosen["unit"])
        check_turn_rule(chosen["schedule"], chosen)
        check_heads(chosen["budget"], chosen["compensation"])
        check_recompute(chosen["compensation"], chosen["storage"])
        check_state(chosen["compensation"], chosen["storage"])
        check_added(chosen["scorer"], chosen["compensation"], chosen["storage"])
        check_cache_form(chosen["storage"])
        recall = _recall_part(chosen["compensation"], chosen["storage"], given.get("recall"))
        check_correction(chosen["protect"], recall)
        check_gapless(chosen["storage"], recall)
        policy = Policy(
            **chosen,
            recall=recall,
            **reduction_parts(chosen["scorer"], given),
            unnamed=_unnamed(chosen["storage"], given.get("storage"), recall),
        )
        check_narrowing(policy.schedule, policy.planner, policy.compensation, recall)
        return policy

    def __str__(self) -> str:
        """Canonical spelling: every part except null parts, with all its parameters."""
        parts = [getattr(self, slot) for slot in SLOTS]
        return " > ".join(
            spell(part) for part in parts if part is not None and part not in NULL_PARTS
        )

    def __repr__(self) -> str:
        return f"Policy({self.short!r})"

    @property
    def short(self) -> str:
        """Short spelling, without what is so by default; parses to the same policy.

        Examples:
            >>> Policy.parse("snapkv").short
            'whole() > snapkv() > uniform()'
        """
        reduction = self.scorer.default_reduction()
        implied = {slot: _build_part(slot, None) for slot in ("session", "protect", "compensation")}
        implied |= {
            slot: _build_part(slot, None) for slot in ("values", "unit", "storage", "timing")
        }
        implied |= reduction_parts(self.scorer, {}) if reduction is not None else {}
        parts = {slot: getattr(self, slot) for slot in SLOTS}
        return " > ".join(
            spell_briefly(part)
            for slot, part in parts.items()
            if part not in (None, implied.get(slot), *NULL_PARTS)
        )

    @property
    def planner(self) -> Planner:
        """Planner of the policy, which scores entries and makes plans."""
        return self._planner

    @cached_property
    def _planner(self) -> Planner:
        return Planner(
            self.protect,
            self.scorer,
            self.budget,
            self.compensation,
            AttentionReduction(self.aggregation, self.heads),
            self.values,
            self.unit,
            self.timing,
            self.resident_storage,
            self.recall,
        )

    @property
    def resident_storage(self) -> Storage:
        """Storage of the fast tier; offloaded entries may be quantized further."""
        return self.storage if self.recall is None else Exact()

    @property
    def calibrations(self) -> frozenset[str]:
        """Names of the calibration data that its parts require."""
        own = frozenset[str]() if self.recall is None else self.storage.required_calibrations()
        return self.planner.calibrations | own

    @property
    def lexicon(self) -> frozenset[str]:
        """Names of the sets of token ids that its parts require."""
        return frozenset(select_providers(self.planner.providers, VocabularyProvider))

    def with_sizes(self, tokens: int, block: int | None, context: int | None = None) -> Policy:
        """Policy with its open sizes filled in.

        Args:
            tokens: entries per kv head, for an open budget.
            block: M_block, for an open schedule; None takes the smaller of 512 and `tokens`.
            context: tokens of the text that is to be read; None where that is not known.

        Returns:
            Policy without open sizes.

        Raises:
            UsageError: the block contradicts the spelling, or exceeds the budget.
            BudgetError: no page fits in the budget beside the protected entries.
            BadParameter: more tokens are corrected than are protected.

        Examples:
            >>> Policy.parse("streaming_llm").with_sizes(256, 64).budget.tokens
            256
        """
        budget, schedule, scorer = self.budget, self.schedule, self.scorer.with_budget(tokens)
        if budget.tokens is None:
            budget = replace(budget, tokens=tokens, kept=None)  # pyright: ignore
        schedule = with_block_size(schedule.with_budget(tokens, context), tokens, block)
        compensation, recall = self.compensation.with_budget(tokens), self._sized_recall(tokens)
        if recall is not None:
            resident = (budget.tokens or tokens) - (recall.tokens or 0) - self.lag
            check_correction(self.protect, recall, max(0, resident))
        return replace(
            self,
            budget=budget,
            schedule=schedule,
            scorer=scorer,
            recall=recall,
            unit=self.unit.with_budget(tokens),
            compensation=compensation,
            timing=self.timing.with_budget(tokens),
        )

    def _sized_recall(self, tokens: int) -> RecallPart | None:
        """Recall part with its size filled in."""
        if self.recall is None or self.recall.tokens is not None:
            return self.recall
        least = max(1, self.protect.least(tokens).union(self.scorer.protected_tokens()).tokens)
        fitting = (tokens - least - self.lag) // self.recall.page * self.recall.page
        if fitting < 1:
            raise BudgetError(
                f"The budget of {count_of_tokens(tokens)} has no room for a page of "
                f"{self.recall.page} "
                f"beside the {least} that {spell(self.protect)} and {spell(self.scorer)} always "
                f"keep and the {self.lag} that {spell(self.timing)} lets pile up: raise the "
                "budget, protect fewer, lag less, or take smaller pages."
            )
        return replace(self.recall, tokens=fitting)

    @property
    def lag(self) -> int:
        """Entries per kv head that accumulate between two plans, the newest token included.

        A policy with recall reserves them inside its budget; 0 for all others.
        """
        excess = self.timing.excess()
        return 0 if self.recall is None or excess is None else excess + 1

    @property
    def turn_rule(self) -> TurnRule:
        """Changes to entries at the end of a turn of a conversation."""
        return self.schedule.turn_rule.protecting(self.protect.sinks)

    @property
    def rebuilding(self) -> RecomputeSpec | None:
        """Recomputation of rejected entries; None without one."""
        return self.compensation.rebuilding

    @property
    def parking(self) -> OffloadSpec | None:
        """Offload of rejected entries; None without one."""
        if self.recall is None:
            return None
        host_mib = getattr(self.compensation, "host_mib", None)
        is_gapless = self.storage.rerotates_keys
        return OffloadSpec(self.recall, host_mib, self.storage.parked, is_gapless)


def with_searched_recall(policy: Policy) -> Policy:
    """Policy whose recall searches at every step, whatever is faster: the method of its paper."""
    if policy.recall is None:
        return policy
    return replace(policy, recall=replace(policy.recall, exact=0))


def parsed_policy(policy: str | Policy) -> Policy:
    """Policy by name, spelling, or as it is."""
    expected = "a preset's name, a spelling of parts or a Policy"
    press = " (a press of kvpress goes to larder.applied(model, kvpress=press))"
    check_type("policy", policy, (str, Policy), expected + press)
    return policy if isinstance(policy, Policy) else Policy.parse(policy)


def _recall_part(
    compensation: Compensation, storage: Storage, recall: Call | None
) -> RecallPart | None:
    """Recall part, or the default one for an open slot; None without offload.

    Raises:
        SpellingError: no entry is offloaded for the recall part, or the storage has no slow
            tier.
    """
    if not compensation.offloads:
        if recall is not None:
            raise SpellingError(
                f"{recall.name}() recalls offloaded entries, but {spell(compensation)} offloads "
                "none: write park() before it."
            )
        return None
    if storage != Exact() and storage.parked is None and not storage.rerotates_keys:
        raise SpellingError(
            f"{spell(storage)} has no slow tier to park entries in: leave it out, take drop(), "
            "quantized() or transform() to hold offloaded entries in few bits, or compact() to "
            "attend to them at positions without gaps."
        )
    return _build_part("recall", recall)


def _unnamed(storage: Storage, call: Call | None, recall: RecallPart | None) -> frozenset[str]:
    """Measured parameters of a resident storage that a sentence does not name."""
    named = frozenset(() if call is None else call.parameters)
    return frozenset() if recall else frozenset(storage.measured_parameters) - named


def _build_part(slot: str, call: Call | None) -> Any:
    if slot == "protect":
        return build(Protect, {} if call is None else call.parameters)
    call = call or Call(DEFAULTS[slot])
    return build(FAMILIES[slot].load(call.name), call.parameters)
