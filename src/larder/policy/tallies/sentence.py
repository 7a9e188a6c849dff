"""Tally of the sentence that a token belongs to (SentenceKV).

Zhu et al., "SentenceKV: Efficient LLM Inference via Sentence-Level Semantic KV Caching" (2025),
arXiv:2504.00970, cuts texts at punctuation tokens. The column holds the true position of the
sentence's first token, plus 1, and below 0 where the token ends the sentence. A pass knows its own
tokens only: its first sentence goes on with what stood before, in every head that still holds the
very last token, and starts new in the others.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.observation import Observation
from larder.policy.tallies.base import Tally

ENDS = "sentence_ends"


class SentenceTally(Tally):
    """Column `sentence`."""

    columns = ("sentence",)
    needs = frozenset({ENDS})

    def update(self, observation: Observation) -> dict[str, Float[Tensor, " C"]]:
        (name,), (ending,) = self.columns, self.needs
        entries, positions = observation.entries, observation.query_positions
        column, count, first = entries.columns[name].clone(), len(positions), int(positions[0])
        ends = observation.lexicon.get(ending, frozenset())
        ends_sentence = torch.tensor(
            [token in ends for token in observation.ids] or [False] * count
        )
        ends_sentence = ends_sentence.to(column.device)
        is_first = torch.zeros_like(ends_sentence)
        is_first[1:] = ends_sentence[:-1]
        opened = torch.where(is_first, positions + 1, 0).cummax(0).values  # 0 before any was opened
        stops = torch.tensor(entries.starts) + torch.tensor(entries.lengths)
        before = (stops - count - 1).clamp(min=0).to(column.device)
        is_longer = (torch.tensor(entries.lengths) > count).to(column.device)
        continues = is_longer & (entries.positions[before] == first - 1) & (column[before] > 0)
        current = torch.where(continues, column[before], float(first + 1))[:, None]  # [K, 1]
        numbers = torch.where(opened > 0, opened.to(column.dtype), current)  # [K, Q]
        rows = (stops - count)[:, None] + torch.arange(count)
        column[rows.to(column.device)] = torch.where(ends_sentence, -numbers, numbers)
        return {name: column}


Part = SentenceTally
