"""Batch of a LarderCache: a sequence per row, also a beam, which calls of the body append to.

The body is called once over the packed tokens of all rows; its output is by row and column.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.errors import BudgetError, CacheError, ModelError, UsageError
from larder.core.types import TokenIds
from larder.interop.attachment import Attachment, HiddenCapture
from larder.interop.sequence import EndTokens, GeneratedSequence, SequenceFactory, observer_of
from larder.models.attention_backend import CONTEXT_KEYWORD, AttentionProbe
from larder.models.body_call import BodyCall
from larder.models.decoder import AppendCall
from larder.models.in_memory import check_one_adapter
from larder.policy.budgets.base import WITHOUT_LIMIT
from larder.session.policy import Policy


class SequenceBatch:
    """Sequences of the rows of a batch, and the number of columns that they were given.

    Args:
        factory: makes the sequence of a row, at its first text.
    """

    def __init__(self, attachment: Attachment, factory: SequenceFactory) -> None:
        self.attachment = attachment
        self.rows: list[GeneratedSequence] = []
        self.num_columns = 0
        # Whether generated tokens may be taken back.
        self.records_past = False
        # Whether the columns before the last whose logits are asked for are candidates.
        self.takes_candidates = False
        # Texts that one generate() has read, with no generated token between.
        self.num_chunks = 0
        self._factory = factory

    @property
    def policy(self) -> Policy:
        """Policy, with the sizes of the first row once a prompt has been read."""
        return self.rows[0].policy if self.rows else self._factory.policy

    @property
    def is_croppable(self) -> bool:
        """True if the policy evicts nothing between prompts, and no layer is recurrent."""
        is_recurrent = bool(self.attachment.decoder.spec.recurrent)
        return not is_recurrent and self._factory.policy.timing.excess() is None

    def check_croppable(self) -> None:
        """Check that candidates can be taken back.

        Raises:
            UsageError: they cannot.
        """
        if self.attachment.decoder.spec.recurrent:
            raise UsageError(
                "Assisted decoding takes candidates back, but recurrent layers of the model hold "
                "a state of all tokens that cannot be cut: leave the assistant out."
            )
        if not self.is_croppable:
            raise UsageError(
                f"Assisted decoding takes candidates back, but the policy {self.policy} evicts "
                "while text is generated, for good: use one with prefill_only(), or leave the "
                "assistant out."
            )

    def create(self, num_tokens: int) -> GeneratedSequence:
        """Empty sequence for a first text of `num_tokens` tokens; it is in no row yet."""
        return self._factory.create(num_tokens)

    def fork(self) -> SequenceBatch:
        """Independent copy."""
        other = copy.copy(self)
        other.rows = [row.fork() for row in self.rows]
        return other

    def reset(self) -> None:
        """Remove all rows."""
        self.rows, self.num_columns, self.records_past, self.num_chunks = [], 0, False, 0

    def select(self, order: Sequence[int]) -> None:
        """Take rows in a new order; a row taken twice is copied."""
        rows, taken = list[GeneratedSequence](), set[int]()
        for row in order:
            rows.append(self.rows[row].fork() if row in taken else self.rows[row])
            taken.add(row)
        self.rows = rows

    def truncate(self, num_columns: int) -> None:
        """Take back the last columns of every row.

        Raises:
            CacheError: not all entries of them are held.
        """
        for row in self.rows:
            row.check_truncation(num_columns)
        for row in self.rows:
            row.truncate(num_columns)
        self.num_columns -= num_columns

    @contextmanager
    def run(self, call: BodyCall) -> Iterator[PackedCall]:
        """Context of a call of the body: texts are read before it, other tokens by it.

        A block that fails leaves the batch as it was.

        Yields:
            Attention of the call's new tokens.
        """
        with self._rollback_on_failure():
            self._check_call(call)
            num_read = self._num_text_columns(call)
            self._warn_of_chunks(call, num_read)
            states = self._read_texts(call, num_read)
            with self._append_call(call, num_read) as (rows, append):
                yield PackedCall(call, states, rows, append)
            self.num_columns += call.num_columns
            for index, row in enumerate(self.rows):
                has_tokens = index in rows or num_read
                row.extend_columns(call.columns[index] if has_tokens else (), call.num_columns)

    def _check_call(self, call: BodyCall) -> None:
        """Check that a call continues the rows, and that one adapter is for all of them."""
        if len(call.ids) > 1 and not self.rows:
            check_one_adapter(self.attachment.decoder.body)
        if self.rows and len(call.ids) != len(self.rows):
            raise CacheError(
                f"The cache holds {len(self.rows)} rows, but the call has {len(call.ids)}: "
                "continue with the batch that the cache was filled with, or make a new cache."
            )
        _check_mask(call, self.num_columns)
        if not self.rows:
            _check_first_positions(call)
            return
        for index, (row, positions) in enumerate(zip(self.rows, call.positions, strict=False)):
            read = row.cache.next_position
            # A mask may hide tokens that were read, so that transformers counts fewer.
            if positions and positions[0] < (min(read, 1) if call.mask_columns else read):
                raise CacheError(
                    f"The text of row {index} starts at position {positions[0]}, but the cache "
                    f"has read {read} tokens of the row: give generate() the whole text so far and "
                    "new text behind it, or call reset() for another text. Assisted decoding "
                    "reads every text whole: leave the assistant out of later turns."
                )

    def _num_text_columns(self, call: BodyCall) -> int:
        """First columns that are a text to read; the others are appended without a plan.

        Candidates of assisted decoding are no text: they may be taken back.
        """
        num_settled = call.num_columns
        if self.takes_candidates and call.logits_to_keep > 1:
            self.check_croppable()
            num_settled -= call.logits_to_keep - 1
        longest = max(sum(c < num_settled for c in column) for column in call.columns)
        return num_settled if longest > 1 or not self.rows else 0

    def _warn_of_chunks(self, call: BodyCall, num_read: int) -> None:
        """Warn once of a prompt in chunks, for which generate() asks of each the last logits."""
        is_chunk = bool(num_read) and call.logits_to_keep == 1
        if is_chunk and self.num_chunks == 1 and self.policy.budget.tokens != WITHOUT_LIMIT:
            warnings.warn(
                "The policy takes each chunk of a prompt for a text of its own, and a share is "
                "of the first one: leave prefill_chunk_size out, and let the policy read in "
                "blocks, as with block=512.",
                UserWarning,
                stacklevel=2,
            )
        self.num_chunks = self.num_chunks + 1 if is_chunk else 0

    def _read_texts(self, call: BodyCall, num_read: int) -> list[Float[Tensor, "_ hidden"]]:
        """Read the first columns of each row; the states of their last tokens, by row."""
        if not num_read:
            return [self.attachment.decoder.no_states() for _ in call.ids]
        texts = [
            row_ids[: sum(c < num_read for c in columns)]
            for row_ids, columns in zip(call.ids, call.columns, strict=True)
        ]
        if self.rows:
            return [self._read(n, row, texts[n], call) for n, row in enumerate(self.rows)]
        rows, states = list[GeneratedSequence](), list[Tensor]()
        for index, text in enumerate(texts):
            # Rows of the same text, as beams and several sequences start with, are read once.
            known = next((n for n in range(index) if call.is_same_row(n, index)), index)
            if known < index:
                rows.append(rows[known].fork())
                states.append(states[known])
                continue
            try:
                rows.append(self.create(len(text)))
                states.append(self._read(index, rows[-1], text, call))
            except BudgetError as error:
                raise BudgetError(
                    f"Row {index}, whose first text has {len(text)} tokens (with "
                    f"prefill_chunk_size, its first chunk): {error}"
                ) from error
        self.rows = rows
        return states

    def _read(
        self, number: int, sequence: GeneratedSequence, text: TokenIds, call: BodyCall
    ) -> Float[Tensor, "_ hidden"]:
        """Read the text of a row; the states of its last tokens."""
        if not text:
            return self.attachment.decoder.no_states()
        embeddings, images = torch.empty(0, 0), call.images[number].within(0, len(text))
        if call.has_embeddings and not call.has_ids:
            sequence.check_embeddings(text)
        if images.spans:
            sequence.check_images(text, images)
        if call.has_embeddings:
            columns = list(call.columns[number][: len(text)])
            embeddings = call.embeddings[number, columns]
        if call.model_positions:
            sequence.place(call.model_positions[number][:, : len(text)])
        wanted = call.logits_to_keep or None
        capture = HiddenCapture(sequence.cache, wanted, embeddings, sequence.cache.next_position)
        with self.attachment.capture(capture):
            sequence.read(text, images)
        return capture.states()

    @contextmanager
    def _append_call(
        self, call: BodyCall, num_read: int
    ) -> Iterator[tuple[list[int], AppendCall | EmptyCall]]:
        """Context of the call for the columns from `num_read` on, and the rows that have any."""
        end = EndTokens.of(self.attachment.module.generation_config)
        rest = [
            row_ids[sum(c < num_read for c in columns) :]
            for row_ids, columns in zip(call.ids, call.columns, strict=True)
        ]
        rows = self._continued_rows(rest, end)
        if not rows:
            yield rows, EmptyCall(self.attachment.decoder.spec.device)
            return
        steps = list[Any]()
        for number in rows:
            sequence, ids = self.rows[number], rest[number]
            if call.model_positions:
                sequence.place(call.model_positions[number][:, -len(ids) :])
            sequence.has_ended = ids[-1] in end.stop_ids
            if self.records_past or len(ids) > 1:
                sequence.reserve(len(ids))
            steps.append(sequence.step(ids))
        segments = [segment for segment, _ in steps]
        observer = observer_of([own for _, own in steps])
        with self.attachment.decoder.append_call(segments, observer) as append:
            yield rows, append

    def _continued_rows(self, ids: Sequence[TokenIds], end: EndTokens) -> list[int]:
        """Rows with tokens to append: all that have any, but for padding behind their end.

        generate() stops once all rows have ended, so that the tokens of such rows are no padding:
        the call has other end tokens.
        """
        given = [index for index, row_ids in enumerate(ids) if row_ids]
        continuing = [n for n in given if not end.is_padding(self.rows[n], ids[n])]
        return continuing or given

    @contextmanager
    def _rollback_on_failure(self) -> Iterator[None]:
        """Roll every row back if the block fails."""
        rows = list(self.rows)
        states = [row.state() for row in rows]
        try:
            yield
        except BaseException:
            self.rows = rows
            for row, state in zip(rows, states, strict=True):
                row.roll_back(state)
            raise


def _check_mask(call: BodyCall, num_columns: int) -> None:
    """Check that the mask of a call behind `num_columns` columns is of its tokens, or of all."""
    known = {call.num_columns, num_columns + call.num_columns}
    if call.mask_columns and call.mask_columns not in known:
        raise CacheError(
            f"The attention mask has {call.mask_columns} columns, but the call has "
            f"{call.num_columns} behind {num_columns} in the cache: give generate() the whole text "
            "so far, or new text alone with a mask of all text so far."
        )


def _check_first_positions(call: BodyCall) -> None:
    """Check that the positions given for a first text are those of its tokens."""
    for positions in call.positions:
        if positions != tuple(range(len(positions))):
            raise ModelError(
                f"position_ids start with {list(positions[:4])}, but the tokens of a first text "
                "are at 0, 1, 2, ...: leave position_ids out."
            )


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
        """Empty: no hidden states are needed."""
        return []
