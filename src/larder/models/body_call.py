"""Call of a model's body as transformers makes it: ids or embeddings, padding, images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from larder.core.errors import CacheError, ModelError
from larder.core.images import ImageSpans, spans_of
from larder.models.attention_backend import NewTokenMask

M_ROPE_AXES = 3  # time, height and width

# Arguments that are read here, follow from true positions, or are not for layers: generate() hands
# on the tokenizer of its stop strings. Other tensors are refused.
READ_ARGUMENTS = frozenset(
    {
        "input_ids",
        "inputs_embeds",
        "attention_mask",
        "position_ids",
        "cache_position",
        "past_key_values",
        "use_cache",
        "logits_to_keep",
        "tokenizer",
        "assistant_tokenizer",
    }
)
RECORDED_OUTPUTS = ("output_attentions", "output_hidden_states")


@dataclass(frozen=True)
class OuterCall:
    """Call of the model around the body: what images are merged into; None where it has none.

    Args:
        ids: token ids.
        padding: mask of two dimensions that marks padding.
    """

    ids: Int[Tensor, "B Q"] | None = None
    padding: Tensor | None = None


NO_OUTER_CALL = OuterCall()


@dataclass(frozen=True)
class NewTokenMasks:
    """Masks of a call of the body.

    Args:
        padding: mask that marks padding, as given.
        sees_next: tokens that attend to the one behind them; None for a causal call.
    """

    padding: Any
    sees_next: Bool[Tensor, "B Q_1"] | None = None

    @staticmethod
    def of(attention_mask: Any, outer: OuterCall) -> NewTokenMasks:
        """Masks from `attention_mask`: one, or one per kind of layer, as some models make them."""
        if not isinstance(attention_mask, dict):
            return NewTokenMasks(attention_mask)
        made = [mask for mask in attention_mask.values() if mask is not None]
        other = [mask for mask in made if not isinstance(mask, NewTokenMask)]
        if other:
            return NewTokenMasks(other[0])
        sees_next = [mask.sees_next for mask in made]
        return NewTokenMasks(outer.padding, sees_next[0] if sees_next else None)


@dataclass(frozen=True)
class BodyCall:
    """Arguments of one call of a model's body, for B rows of Q columns.

    Args:
        ids: token ids by row, without padding; zeros where embeddings alone are known.
        has_ids: whether the ids are known.
        embeddings: input embeddings [B, Q, hidden]; an empty tensor where ids are given.
        columns: columns that hold tokens, by row, in order; the others are padding.
        num_columns: Q.
        mask_columns: columns of the mask that was given, those of earlier calls included; 0 for
            none.
        logits_to_keep: number of last columns whose logits are asked for; 0 for all.
        positions: true positions as transformers counts them, by row, like `ids`; empty if they
            were not given.
        model_positions: positions [A, n] of the tokens by row, where RoPE counts several per
            token; empty where it does not.
        images: images by row, as spans of tokens.
        options: further keyword arguments of the body.
    """

    ids: tuple[tuple[int, ...], ...]
    has_ids: bool
    embeddings: Float[Tensor, "_ _ _"]
    columns: tuple[tuple[int, ...], ...]
    num_columns: int
    mask_columns: int
    logits_to_keep: int
    positions: tuple[tuple[int, ...], ...]
    model_positions: tuple[Int[Tensor, "A _"], ...]
    images: tuple[ImageSpans, ...]
    options: Mapping[str, Any]

    @staticmethod
    def of(
        named: Mapping[str, Any], logits_to_keep: object, outer: OuterCall, table: nn.Module
    ) -> BodyCall:
        """Call from the keyword arguments of the body.

        Args:
            outer: call of the model around the body, which merged images into the embeddings.
            table: input embeddings of the model.

        Raises:
            CacheError: the call has no tokens.
            ModelError: an argument is not supported.
        """
        options = {name: value for name, value in named.items() if name not in READ_ARGUMENTS}
        _check_options(options)
        tokens = InputTokens.of(named.get("input_ids"), named.get("inputs_embeds"), outer, table)
        batch, num_columns = tokens.ids.shape
        if not num_columns:
            raise CacheError(
                "The call has no tokens that the cache has not read: the prompt is empty, or not "
                "longer than what was read. Give generate() the whole text so far and new text "
                "behind it, or call reset() for another text."
            )
        masks = NewTokenMasks.of(named.get("attention_mask"), outer)
        columns = _token_columns(masks.padding, batch, num_columns)
        keep = logits_to_keep if isinstance(logits_to_keep, int) else 0
        _check_last_columns(columns, num_columns, keep)
        positions = RowPositions.of(named.get("position_ids"), batch)
        return BodyCall(
            _selected(tokens.ids, columns),
            tokens.has_ids,
            tokens.embeddings,
            columns,
            num_columns,
            0 if masks.padding is None else masks.padding.shape[1],
            min(keep, num_columns),
            _selected(positions.true, columns) if len(positions.true) else (),
            positions.model_positions(columns),
            _images(tokens.is_image, masks.sees_next, columns),
            options,
        )

    @property
    def has_embeddings(self) -> bool:
        """True if embeddings were given in place of ids."""
        return len(self.embeddings) > 0

    def is_same_row(self, row: int, other: int) -> bool:
        """True if two rows have the same tokens, images included."""
        if self.ids[row] != self.ids[other]:
            return False
        if not self.has_embeddings:
            return True
        ours, theirs = (self.embeddings[n, list(self.columns[n])] for n in (row, other))
        return torch.equal(ours, theirs)


def _selected(
    numbers: Int[Tensor, "B Q"], columns: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, ...], ...]:
    """Numbers at the columns of each row."""
    rows = zip(numbers.tolist(), columns, strict=True)
    return tuple(tuple(row[column] for column in own) for row, own in rows)


@dataclass(frozen=True)
class InputTokens:
    """Tokens that a call was given, by row and column, padding included.

    Args:
        ids: token ids; zeros where embeddings alone are known, and for ids outside the vocabulary.
        has_ids: whether the ids are known.
        embeddings: input embeddings; an empty tensor where ids were given.
        is_image: tokens whose embeddings are not those of their ids.
    """

    ids: Int[Tensor, "B Q"]
    has_ids: bool
    embeddings: Float[Tensor, "_ _ _"]
    is_image: Bool[Tensor, "B Q"]

    @staticmethod
    def of(
        ids: Tensor | None, embeddings: Tensor | None, outer: OuterCall, table: nn.Module
    ) -> InputTokens:
        """Tokens from `input_ids` or `inputs_embeds`, and the ids that images were merged into."""
        if ids is not None:
            return InputTokens(ids, True, torch.empty(0, 0, 0), torch.zeros_like(ids).bool())
        assert embeddings is not None  # generate and every forward of transformers check it
        if outer.ids is None:
            none = torch.zeros(embeddings.shape[:2], dtype=torch.long)
            return InputTokens(none, False, embeddings, none.bool())
        vocabulary = len(table.get_parameter("weight"))
        text_ids = outer.ids.masked_fill(outer.ids >= vocabulary, 0)
        return InputTokens(text_ids, True, embeddings, (table(text_ids) != embeddings).any(-1))


@dataclass(frozen=True)
class RowPositions:
    """Positions that a call was given, by row and column; empty tensors for those that it lacks.

    Args:
        true: true positions.
        several: positions of M-RoPE, in A numbers each.
    """

    true: Int[Tensor, "_ _"]
    several: Int[Tensor, "A _ _"]

    def model_positions(
        self, columns: tuple[tuple[int, ...], ...]
    ) -> tuple[Int[Tensor, "A _"], ...]:
        """Positions of M-RoPE at the columns of each row; empty without them."""
        if not len(self.several):
            return ()
        return tuple(self.several[:, row, list(column)] for row, column in enumerate(columns))

    @staticmethod
    def of(position_ids: Tensor | None, batch: int) -> RowPositions:
        """Positions from `position_ids`.

        Two dimensions may be given once for all rows. Of four rows of M-RoPE, the first has the
        true positions; one row stands for three that are equal.
        """
        none = torch.zeros(0, 0, 0, dtype=torch.long)
        if position_ids is None:
            return RowPositions(none.flatten(1), none)
        if position_ids.dim() == 2:
            return RowPositions(position_ids.expand(batch, -1), none)
        several = (
            position_ids if position_ids.shape[0] > 1 else position_ids.expand(M_ROPE_AXES, -1, -1)
        )
        if position_ids.shape[0] <= M_ROPE_AXES:
            return RowPositions(none.flatten(1), several)
        return RowPositions(position_ids[0], position_ids[1:])


def _images(
    is_image: Bool[Tensor, "B Q"],
    sees_next: Bool[Tensor, "B Q_1"] | None,
    columns: tuple[tuple[int, ...], ...],
) -> tuple[ImageSpans, ...]:
    """Images by row: tokens whose embeddings are not those of their ids, or that see later ones."""
    rows = list[ImageSpans]()
    for number, (own, flags) in enumerate(zip(columns, is_image.tolist(), strict=True)):
        sees = [] if sees_next is None else sees_next[number].tolist()
        joined = [b == a + 1 and a < len(sees) and sees[a] for a, b in pairwise(own)]
        both = tuple((start, stop + 1) for start, stop in spans_of(joined))
        seen = {index for start, stop in both for index in range(start, stop)}
        marked = [flags[column] or index in seen for index, column in enumerate(own)]
        rows.append(ImageSpans(spans_of(marked), both))
    return tuple(rows)


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
    rows, width = mask.shape
    if rows != batch or width < num_columns:
        raise ModelError(
            f"The attention mask has {rows} rows of {width} columns, but the call has {batch} rows "
            f"of {num_columns} tokens: give a mask of the tokens of the call, or of all so far."
        )
    flags = mask[:, -num_columns:].bool().tolist()
    return tuple(tuple(c for c, is_token in enumerate(row) if is_token) for row in flags)


def _check_last_columns(
    columns: tuple[tuple[int, ...], ...], num_columns: int, logits_to_keep: int
) -> None:
    """Check that rows end with a token where the logits of the last column alone are asked for."""
    for row, column in enumerate(columns):
        if logits_to_keep == 1 and column and column[-1] < num_columns - 1:
            raise ModelError(
                f"Row {row} ends with {num_columns - 1 - column[-1]} columns of padding, behind "
                "which no token can be generated: pad on the left, with padding_side='left' of the "
                "tokenizer."
            )


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
