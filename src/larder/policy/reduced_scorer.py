"""Scorer together with its reduction over queries and heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from larder.core.errors import SpellingError
from larder.core.family import Family
from larder.core.spelling import Call, build, parse, spell
from larder.policy.attention_reduction import (
    AGGREGATIONS,
    HEAD_RULES,
    AttentionReduction,
    NoAggregation,
    NoHeadRule,
)
from larder.policy.scorers.base import Scorer

SCORERS = Family("scorer", "larder.policy.scorers")
REDUCTION_SLOTS: Mapping[str, Family] = {"aggregation": AGGREGATIONS, "heads": HEAD_RULES}


@dataclass(frozen=True)
class ReducedScorer:
    """Scorer, and reduction over queries and heads."""

    scorer: Scorer
    reduction: AttentionReduction

    @staticmethod
    def parse(sentence: str) -> ReducedScorer:
        """Scorer from text, optionally followed by an aggregation and a head rule.

        Raises:
            SpellingError: the text does not parse, or has other parts.
            UnknownName: no such part or parameter.
            BadParameter: a value out of range.
        """
        first, *others = parse(sentence, "scorer")
        scorer = build(SCORERS.load(first.name), first.parameters)
        calls: dict[str, Call] = {}
        for call in others:
            slot = next(
                (s for s, family in REDUCTION_SLOTS.items() if call.name in family.names()), None
            )
            if slot is None or slot in calls or (slot == "aggregation" and "heads" in calls):
                raise SpellingError(
                    f"{call.name} has no place in the scorer {sentence!r}: write a scorer, then at "
                    "most an aggregation and a head rule."
                )
            calls[slot] = call
        parts = reduction_parts(scorer, calls)
        reduction = AttentionReduction(aggregation=parts["aggregation"], heads=parts["heads"])
        return ReducedScorer(scorer, reduction)


def reduction_parts(scorer: Scorer, calls: Mapping[str, Call]) -> dict[str, Any]:
    """Aggregation and head rule by slot: those given, else those of the scorer's paper.

    Raises:
        SpellingError: some are given, but the scorer does not use attention.
    """
    published = scorer.default_reduction()
    if published is None:
        wrong = [calls[slot].name for slot in REDUCTION_SLOTS if slot in calls]
        if wrong:
            raise SpellingError(
                f"{spell(scorer)} uses no attention, so {wrong[0]}() has nothing to reduce: "
                "leave it out, or take a scorer by attention such as snapkv."
            )
        return dict(zip(REDUCTION_SLOTS, (NoAggregation(), NoHeadRule()), strict=True))
    parts = [calls.get(s, Call(name)) for s, name in zip(REDUCTION_SLOTS, published, strict=True)]
    pairs = zip(REDUCTION_SLOTS.items(), parts, strict=True)
    return {slot: build(family.load(call.name), call.parameters) for (slot, family), call in pairs}
