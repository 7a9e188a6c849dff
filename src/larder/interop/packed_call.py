"""Call of a model's body over the packed tokens of all rows, and its output by row and column."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from larder.models.attention_backend import CONTEXT_KEYWORD, AttentionProbe
from larder.models.body_call import BodyCall
from larder.models.decoder import AppendCall


@dataclass(frozen=True)
class PackedCall:
    """Call of the body over the packed tokens of all rows.

    Args:
        states: last hidden states of the texts read before it, by row.
        rows: rows with a segment in it.
    """

    call: BodyCall
    states: list[Float[Tensor, "_ hidden"]]
    rows: list[int]
    append: AppendCall | EmptyCall

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the body."""
        return self.append.arguments

    def hidden(self, packed: Float[Tensor, "1 N hidden"]) -> Float[Tensor, "B Q hidden"]:
        """States by row and column, for the columns whose logits are asked for.

        Zeros at padding, and in rows that have ended.
        """
        states = list(self.states)
        for row, own in zip(self.rows, self.append.parts_of(packed), strict=True):
            states[row] = torch.cat([states[row].to(own), own])
        first = self.call.num_columns - (self.call.logits_to_keep or self.call.num_columns)
        shape = len(states), self.call.num_columns - first, packed.shape[2]
        out = packed.new_zeros(shape)
        for row, own in enumerate(states):
            columns = self.call.columns[row]
            columns = [c - first for c in columns[len(columns) - len(own) :] if c >= first]
            if columns and len(own):
                out[row, columns] = own[len(own) - len(columns) :]
        return out


class EmptyCall:
    """Call of the body whose output is not used, where all tokens were read before.

    It takes one token, without attention, because models do not accept texts of no token.
    """

    def __init__(self, device: torch.device) -> None:
        token = torch.zeros(1, 1, dtype=torch.long, device=device)
        self.arguments: dict[str, Any] = {
            "input_ids": token,
            "position_ids": token,
            "use_cache": False,
            CONTEXT_KEYWORD: AttentionProbe(),
        }

    def parts_of(self, hidden: Float[Tensor, "1 N hidden"]) -> list[Tensor]:
        """No states."""
        return []
