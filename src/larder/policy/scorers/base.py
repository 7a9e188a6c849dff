"""Base classes of scorers: one float32 score per cached entry; and a scorer together with its
reduction over queries and heads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.errors import SpellingError
from larder.core.observation import (
    Calibration,
    Entries,
    Observation,
    Prompts,
    ScoreScale,
    ScratchPrompt,
)
from larder.core.part import PolicyPart
from larder.core.plan import StepScoring
from larder.core.registry import Family
from larder.core.spelling import Call, build, parse, spell
from larder.core.types import Packed, PackedMask, TokenIds
from larder.policy.attention_reduction import (
    AGGREGATIONS,
    HEAD_RULES,
    AttentionReduction,
    NoAggregation,
    NoHeadRule,
    ObservationWindow,
)
from larder.policy.protect import ProtectedTokens

SCORERS = Family("scorer", "larder.policy.scorers")
REDUCTION_SLOTS: Mapping[str, Family] = {"aggregation": AGGREGATIONS, "heads": HEAD_RULES}


class Scorer(PolicyPart, ABC):
    """Importance score of cached entries; higher scores stay longer.

    A scorer is a frozen dataclass. It scores one layer at a time and has no state.
    """

    # Names of the prompts that must be given before prefill.
    prompts: ClassVar[frozenset[str]] = frozenset()
    # Of the scores, as storages read it; weights once a rule for values has changed them.
    scale: ClassVar[ScoreScale] = ScoreScale.WEIGHTS

    @abstractmethod
    def score(self, observation: Observation) -> Packed:
        """Float32 score of every cached entry, packed over heads; higher stays longer."""

    def score_with(self, observation: Observation, reduction: AttentionReduction) -> Tensor:
        """Score under the reduction of the policy, for attention scorers; else as `score`."""
        return self.score(observation)

    def weights(self, observation: Observation) -> Packed:
        """Mean attention weight of each entry, for attention scorers.

        The mean is over the observed queries and the query heads of a group; entries that are
        scored by position, such as a window of the latest, are included.

        Raises:
            NotImplementedError: the scorer does not use attention.
        """
        raise NotImplementedError(f"{type(self).__name__} does not use attention.")

    def default_reduction(self) -> tuple[str, str] | None:
        """Names of the aggregation and head rule of its paper; None if it does not use
        attention.
        """
        return None

    def scratch(self, block: TokenIds, start: int, prompts: Prompts) -> tuple[ScratchPrompt, ...]:
        """Scratch prompts to read behind the cache after a block, before scoring.

        Empty by default: the block's own pass is scored.

        Args:
            block: token ids just read.
            start: true position of the first of them.
            prompts: prompts by name, as token ids.
        """
        return ()

    def scored_layers(self, calibration: Mapping[int, Calibration]) -> frozenset[int] | None:
        """Layers whose scores distinguish entries, by measurement; None for all.

        Args:
            calibration: measurements of each layer, by its index.
        """
        del calibration

    def step_scoring(self, reduction: AttentionReduction) -> StepScoring | None:
        """Score of a decode step as a kernel can compute it; None if it cannot."""
        del reduction

    def with_budget(self, tokens: int) -> Scorer:
        """Copy with open parameters filled in for a budget of `tokens` entries per kv head."""
        return self

    def protected_tokens(self) -> ProtectedTokens:
        """Tokens that this scorer always keeps, such as its own window.

        A budget that cannot hold them beside the protected tokens is rejected. A scorer that
        observes the latest tokens observes at most these.
        """
        return ProtectedTokens()

    def required_prompts(self) -> frozenset[str]:
        """Names of the prompts that these parameters need."""
        return self.prompts


class AttentionScorer(Scorer):
    """Base of attention scorers: an observation window, and scores from its reduced weights.

    The policy chooses the reduction over queries and heads (slots `aggregation` and `heads`); the
    default is that of the paper.
    """

    @abstractmethod
    def default_reduction(self) -> tuple[str, str]:
        """Names of the aggregation and of the head rule of its paper."""

    @abstractmethod
    def observation_window(self, observation: Observation) -> ObservationWindow:
        """Observed queries, and the entries that they attend to."""

    def finish(self, observation: Observation, heads: list[Float[Tensor, " _"]]) -> Packed:
        """Scores of all entries from the reduced weights per kv head; concatenated by default."""
        return torch.cat(heads)

    def score(self, observation: Observation) -> Packed:
        return self.score_with(observation, self._default_reduction)

    def score_with(self, observation: Observation, reduction: AttentionReduction) -> Packed:
        return self.finish(
            observation, reduction.reduce(self.observation_window(observation), observation)
        )

    def weights(self, observation: Observation) -> Packed:
        return torch.cat(
            self._mean_reduction.reduce(self.observation_window(observation), observation)
        )

    @cached_property
    def _mean_reduction(self) -> AttentionReduction:
        return AttentionReduction.from_names("mean", "group_mean")

    @cached_property
    def _default_reduction(self) -> AttentionReduction:
        aggregation, heads = self.default_reduction()
        return AttentionReduction.from_names(aggregation, heads)


class PromptScorer(Scorer):
    """Base of scorers by a named prompt, which is read behind the cache and discarded."""

    prompt: str

    def required_prompts(self) -> frozenset[str]:
        return frozenset({self.prompt})

    def scratch(self, block: TokenIds, start: int, prompts: Prompts) -> tuple[ScratchPrompt, ...]:
        return (ScratchPrompt(tuple(prompts[self.prompt]), (0, start + len(block))),)


def whole_pass_window(observation: Observation) -> ObservationWindow:
    """Window of all queries of the pass, which see the entries and each other."""
    entries = with_pass_keys(observation, observation.entries)
    return ObservationWindow(observation.queries, entries, observation.query_positions)


def with_pass_keys(observation: Observation, entries: Entries) -> Entries:
    """Entries with the tokens of the pass appended to every head, as plain attention sees them.

    Values are zeros, and the ledger columns of appended tokens are 0.
    """
    heads = range(observation.layer.kv_heads)
    pass_keys = list(torch.unbind(observation.keys.to(entries.keys.dtype)))
    ahead = observation.query_positions.to(entries.positions.dtype)
    fresh = torch.zeros(len(ahead), device=ahead.device)
    return _packed_entries(
        [torch.cat([entries.head_keys(h), pass_keys[h]]) for h in heads],
        [torch.cat([entries.head_positions(h), ahead]) for h in heads],
        {
            name: [torch.cat([column[entries.rows(h)], fresh]) for h in heads]
            for name, column in entries.columns.items()
        },
    )


def without_pass_keys(observation: Observation, heads: list[Float[Tensor, " _"]]) -> Packed:
    """Packed numbers of the cached entries, of those of `with_pass_keys`."""
    pairs = zip(heads, observation.entries.lengths, strict=True)
    return torch.cat([head[:length] for head, length in pairs])


def select_keys(observation: Observation, marked: PackedMask) -> Entries:
    """Entries that a packed mask marks, with zeros for values."""
    marks = torch.split(marked, list(observation.entries.lengths))
    heads = range(observation.layer.kv_heads)
    return _packed_entries(
        [observation.entries.head_keys(h)[marks[h]] for h in heads],
        [observation.entries.head_positions(h)[marks[h]] for h in heads],
        {
            name: [column[observation.entries.rows(h)][marks[h]] for h in heads]
            for name, column in observation.entries.columns.items()
        },
    )


def _packed_entries(
    keys: list[Tensor], positions: list[Tensor], columns: Mapping[str, list[Tensor]]
) -> Entries:
    lengths = tuple(len(head) for head in keys)
    starts = tuple(accumulate(lengths, initial=0))[:-1]
    packed_keys = torch.cat(keys)
    values = packed_keys.new_zeros(1, 1).expand(packed_keys.shape)
    packed_columns = {name: torch.cat(heads) for name, heads in columns.items()}
    return Entries(packed_keys, values, torch.cat(positions), starts, lengths, packed_columns)


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
