"""Call of a model's body as transformers makes it: ids or embeddings, and which are padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from larder.core.errors import ModelError

# Arguments that are read here or follow from true positions. Other tensors are refused.
READ_ARGUMENTS = frozenset(
    {
        "input_ids",
        "inputs_embeds",
        "attention_mask",
        "position_ids",
        "cache_position",
        "past_key_values",
        "use_cache",
    }
)
RECORDED_OUTPUTS = ("output_attentions", "output_hidden_states")


@dataclass(frozen=True)
class BodyCall:
    """Arguments of one call of a model's body, for B rows of Q columns.

    Args:
        ids: token ids by row, without padding; zeros where embeddings are given.
        embeddings: input embeddings [B, Q, hidden]; an empty tensor where ids are given.
        columns: columns that hold tokens, by row, in order; the others are padding.
        num_columns: Q.
        logits_to_keep: number of last columns whose logits are asked for; 0 for all.
        positions: true positions as transformers counts them, by row, like `ids`; empty if they
            were not given.
        options: further keyword arguments of the body.
    """

    ids: tuple[tuple[int, ...], ...]
    embeddings: Float[Tensor, "_ _ _"]
    columns: tuple[tuple[int, ...], ...]
    num_columns: int
    logits_to_keep: int
    positions: tuple[tuple[int, ...], ...]
    options: Mapping[str, Any]

    @staticmethod
    def of(named: Mapping[str, Any], logits_to_keep: object) -> BodyCall:
        """Call from the keyword arguments of the body.

        Raises:
            ModelError: an argument is not supported.
        """
        options = {name: value for name, value in named.items() if name not in READ_ARGUMENTS}
        _check_options(options)
        ids, embeddings = named.get("input_ids"), named.get("inputs_embeds")
        given = ids if ids is not None else embeddings
        assert given is not None  # generate and every forward of transformers check it
        batch, num_columns = given.shape[:2]
        columns = _token_columns(named.get("attention_mask"), batch, num_columns)
        numbers = ids if ids is not None else torch.zeros(batch, num_columns, dtype=torch.long)
        keep = logits_to_keep if isinstance(logits_to_keep, int) else 0
        positions = named.get("position_ids")
        return BodyCall(
            _selected(numbers, columns),
            torch.empty(0, 0, 0) if embeddings is None else embeddings,
            columns,
            num_columns,
            min(keep, num_columns),
            () if positions is None else _selected(_rows(positions, batch), columns),
            options,
        )

    @property
    def has_embeddings(self) -> bool:
        """True if embeddings were given in place of ids."""
        return len(self.embeddings) > 0


def _selected(
    numbers: Int[Tensor, "B Q"], columns: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, ...], ...]:
    """Numbers at the columns of each row."""
    rows = zip(numbers.tolist(), columns, strict=True)
    return tuple(tuple(row[column] for column in own) for row, own in rows)


def _rows(positions: Tensor, batch: int) -> Int[Tensor, "B Q"]:
    """Positions by row; they may be given once for all rows."""
    if positions.dim() != 2:
        raise ModelError(
            f"The model counts positions in {positions.dim() - 1} numbers per token, as models "
            "with images do: Larder supports one, choose a model of text."
        )
    return positions.expand(batch, -1)


def _token_columns(mask: Any, batch: int, num_columns: int) -> tuple[tuple[int, ...], ...]:
    """Columns of the call that are not padding, by row."""
    if mask is None:
        return (tuple(range(num_columns)),) * batch
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        shape = f"{mask.dim()} dimensions" if isinstance(mask, Tensor) else type(mask).__name__
        raise ModelError(
            f"The model was given an attention mask of {shape}, but Larder masks by true "
            "positions: give a mask of two dimensions that marks padding, or none."
        )
    flags = mask[:, -num_columns:].bool().tolist()
    return tuple(tuple(c for c, is_token in enumerate(row) if is_token) for row in flags)


def _check_options(options: Mapping[str, Any]) -> None:
    for name in RECORDED_OUTPUTS:
        if options.get(name):
            raise ModelError(
                f"{name}=True was asked of a call over a LarderCache, which reads packed tokens in "
                "blocks and records neither attentions nor hidden states: leave it out."
            )
    for name, value in options.items():
        if isinstance(value, Tensor):
            raise ModelError(
                f"The model's layers take the tensor {name!r}, which Larder does not support "
                "inside generate(): leave it out, or choose a model of text."
            )
