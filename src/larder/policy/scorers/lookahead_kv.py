"""Scorer by attention from learned tokens that stand for the model's answer (LookaheadKV).

Ahn et al., "LookaheadKV: Fast and Accurate KV Cache Eviction by Glimpsing into the Future without
Generation" (2026), arXiv:2603.10899. 32 learned tokens (provider `lookahead_kv`, trained by
`larder train lookahead_kv`) are read behind the context and discarded; an entry's score is the mean
weight that they give it, over them and the query heads of its group. Nothing is generated. Where
the context ends with the question, they look for its answer; elsewhere for whatever comes.

Read block by block, they look behind each block. Only the abstract and second-hand notes of the
paper were at hand.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from larder.core.observation import Observation, Prompts, ScratchPrompt
from larder.core.types import Packed, TokenIds
from larder.policy.attention_reduction import ObservationWindow
from larder.policy.providers.lookahead_kv import SOFT_TOKENS
from larder.policy.scorers.base import AttentionScorer, whole_pass_window, without_pass_keys

PLACEHOLDER = 0  # token whose embedding a learned vector replaces


@dataclass(frozen=True)
class LookaheadKV(AttentionScorer):
    """Mean weight that learned tokens give an entry."""

    needs = frozenset({"lookahead_kv"})

    def scratch(self, block: TokenIds, start: int, prompts: Prompts) -> tuple[ScratchPrompt, ...]:
        return (ScratchPrompt((PLACEHOLDER,) * SOFT_TOKENS, (0, start + len(block))),)

    def default_reduction(self) -> tuple[str, str]:
        return "mean", "group_mean"

    def observation_window(self, observation: Observation) -> ObservationWindow:
        return whole_pass_window(observation)

    def finish(self, observation: Observation, heads: list[Tensor]) -> Packed:
        return without_pass_keys(observation, heads)


Part = LookaheadKV
