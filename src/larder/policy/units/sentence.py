"""Sentences, kept or evicted together (SentenceKV).

Zhu et al., "SentenceKV: Efficient LLM Inference via Sentence-Level Semantic KV Caching" (2025),
arXiv:2504.00970, cuts a text at punctuation tokens and fetches whole sentences from a slow memory,
by the likeness of their mean keys to the query. Taken from it is the unit alone: an entry is worth
the mean score of what is left of its sentence. Budgets count entries, so the last sentence that
fits may stay in part, its earliest entries. Which tokens end a sentence is read off the tokenizer;
special tokens do. Where a block of text begins, a sentence goes on only in heads that still hold
the token before it, as they do where recent tokens are protected.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.core.observation import Observation
from larder.core.types import Packed
from larder.policy.units.base import Unit, pool_groups


@dataclass(frozen=True)
class Sentence(Unit):
    """Mean score of a sentence."""

    tallies = frozenset({"sentence"})

    def pool(self, scores: Packed, observation: Observation) -> Packed:
        labels = observation.entries.column("sentence").abs().long()
        return pool_groups(scores, labels, observation.entries.lengths, len(scores))


Part = Sentence
