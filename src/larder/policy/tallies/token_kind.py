"""Tally of the kind of a token: special, punctuation, or neither (FastGen).

Ge et al., "Model Tells You What to Discard: Adaptive KV Cache Compression for LLMs" (2024),
arXiv:2310.01801, distinguishes these kinds. The column holds 3 for a special token, 2 for
punctuation, and 1 for any other.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.observation import Observation
from larder.policy.tallies.base import Tally

SPECIAL, PUNCTUATION = "special_tokens", "punctuation"
SPECIAL_KIND, PUNCTUATION_KIND, PLAIN_KIND = 3.0, 2.0, 1.0


class TokenKindTally(Tally):
    """Column `token_kind`."""

    columns = ("token_kind",)
    needs = frozenset({SPECIAL, PUNCTUATION})

    def update(self, observation: Observation) -> dict[str, Float[Tensor, " C"]]:
        entries, count = observation.entries, len(observation.query_positions)
        column = entries.columns["token_kind"].clone()
        special = observation.lexicon.get(SPECIAL, frozenset())
        signs = observation.lexicon.get(PUNCTUATION, frozenset())
        kinds = [PLAIN_KIND] * count
        for index, token in enumerate(observation.ids):
            if token in special or token in signs:
                kinds[index] = SPECIAL_KIND if token in special else PUNCTUATION_KIND
        stops = torch.tensor(entries.starts) + torch.tensor(entries.lengths)
        rows = (stops - count)[:, None] + torch.arange(count)
        column[rows.to(column.device)] = column.new_tensor(kinds)
        return {"token_kind": column}


Part = TokenKindTally
