"""LarderCache: `past_key_values` of a transformers model, under a policy of Larder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache, DynamicCache

from larder.cache.sequence import SequenceCache
from larder.core.errors import CacheError, ModelError, UsageError
from larder.interop.attachment import AttachedCache, Attachment, HiddenCapture, attached
from larder.interop.body_call import BodyCall
from larder.interop.dynamic_cache import check_dynamic_cache, dynamic_cache_of, filled_cache
from larder.interop.packed_call import EmptyCall, PackedCall
from larder.interop.press_policy import DEFAULT_POLICY, chosen_policy
from larder.interop.sequence import (
    EndTokens,
    GeneratedSequence,
    observer_of,
    sequence_factory,
)
from larder.models.decoder import AppendCall
from larder.models.rope_frequencies import ORIGINAL_LENGTH
from larder.session.policy import Policy, parsed_policy
from larder.session.prefill import SizeOptions


class LarderCache(AttachedCache):
    """Cache of a transformers model under a policy, for `model.generate(past_key_values=cache)`.

    Each row of a batch is a sequence of its own: its entries are freed head by head as the policy
    evicts them, padding is neither computed nor cached, and tokens keep their true positions. A
    prompt is read by the policy's prefill schedule, in blocks where it names blocks; generated
    tokens follow its timing. The cache holds a conversation over several calls of `generate`, each
    of which is given the whole text so far, or with a full attention mask the new part of it.
    Until the first call it is empty; `budget` and the block are filled in by the prompt of each
    row, and stay.

    The model's own attention is used in every call without such a cache. Not thread-safe.

    Args:
        model: a causal `PreTrainedModel` in eval mode, or a PEFT model of one.
        policy: name of a preset, spelling of parts, or a `Policy`, without episodes.
        budget: 512 (tokens per kv head, averaged over layers), `"25%"` of the prompt, `"64MiB"`;
            None takes that of the policy, else 20% of the prompt.
        block: tokens read between two plans; None takes that of the policy.
        tokenizer: tokenizer of the model, for policies that score with prompts or look at words.
        kvpress: press of NVIDIA/kvpress that chooses the entries of the first prompt of each row,
            in place of a policy and a budget.

    Raises:
        LarderError: the policy or a size is invalid, needs a tokenizer, or the press does more
            than choose entries.
        ModelError: the model is not supported, compiled, training, or held by `Engine.load`.

    Examples:
        >>> cache = larder.LarderCache(model, policy="keydiff", budget="25%")
        >>> ids = model.generate(**inputs, past_key_values=cache, max_new_tokens=8)
        >>> len(cache.lengths())  # rows
        1
    """

    def __init__(
        self,
        model: Any,
        policy: str | Policy = DEFAULT_POLICY,
        budget: str | int | float | None = None,
        *,
        block: int | None = None,
        tokenizer: Any = None,
        kvpress: Any = None,
    ) -> None:
        super().__init__(layers=[])
        sizes = SizeOptions(budget, block)
        self.attachment = attached(model)
        chosen = parsed_policy(chosen_policy(self.attachment, policy, sizes, kvpress))
        self._factory = sequence_factory(self.attachment.decoder, chosen, sizes, tokenizer)
        self._sequences: list[GeneratedSequence] = []
        self._num_columns, self._records_past = 0, False
        # Whether the columns before the last whose logits are asked for are candidates.
        self.takes_candidates = False
        self._end = EndTokens.of(self.attachment.module.generation_config)

    @property
    def policy(self) -> Policy:
        """Policy, with the sizes of the first row once a prompt has been read."""
        return self._sequences[0].policy if self._sequences else self._factory.policy

    @property
    def sequences(self) -> tuple[SequenceCache, ...]:
        """Cache of each row; empty before the first call."""
        return tuple(sequence.cache for sequence in self._sequences)

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor held, slack and metadata included."""
        return sum(cache.nbytes for cache in self.sequences)

    @property
    def peak_nbytes(self) -> int:
        """Most bytes that a row held while a prompt was read, summed over rows."""
        return max(self.nbytes, sum(each.peak_bytes for each in self._sequences))

    def lengths(self) -> list[tuple[tuple[int, ...], ...]]:
        """Entries of each kv head of each layer of each row.

        Returns:
            B rows, each with L layers of K counts.

        Examples:
            >>> most = max(max(layer) for row in cache.lengths() for layer in row)
        """
        return [cache.lengths() for cache in self.sequences]

    @contextmanager
    def run(self, call: BodyCall) -> Iterator[PackedCall]:
        """Context of a call of the body: texts are read before it, other tokens by it.

        Args:
            call: tokens, positions and columns of the call, by row.

        Yields:
            Attention of the call's new tokens.
        """
        with self._undone_on_failure():
            num_read = self._num_text_columns(call)
            states = self._read_texts(call, num_read)
            with self._appended(call, num_read) as (rows, append):
                yield PackedCall(call, states, rows, append)
            self._num_columns += call.num_columns

    # What transformers asks of a cache, beside `crop` and the selection of rows.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns that were given so far, padding included; the same for every layer."""
        del layer_idx
        return self._num_columns

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Columns in front of those of a new call."""
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Columns that a mask would have, and the first of them."""
        del layer_idx
        return self._num_columns + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: no limit."""
        del layer_idx
        return -1

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> NoReturn:
        """Refuse keys of a model that the cache is not attached to.

        Raises:
            ModelError: always.
        """
        del key_states, value_states, layer_idx, args, kwargs
        raise ModelError(
            "The LarderCache was given to a model that it was not made for (it was made for a "
            f"{type(self.attachment.module).__name__}): make one for this model."
        )

    def __bool__(self) -> bool:
        """False for Phi-3, whose `generate` drops a true cache where its frequencies change."""
        return not hasattr(self.attachment.module.config, ORIGINAL_LENGTH)

    def __len__(self) -> int:
        return len(self.attachment.decoder.spec.layers)

    def __repr__(self) -> str:
        return f"LarderCache({self.policy}, rows={len(self._sequences)}, nbytes={self.nbytes})"

    @property
    def batch_size(self) -> int:
        """Rows; -1 before the first call."""
        return len(self._sequences) or -1

    @property
    def is_compileable(self) -> bool:
        """False: transformers then compiles no decode step."""
        return False

    @property
    def is_initialized(self) -> bool:
        """True once a prompt has been read."""
        return bool(self._sequences)

    @property
    def is_croppable(self) -> bool:
        """True if generated tokens can be taken back: the policy evicts none between prompts, and
        no layer is recurrent.
        """
        is_recurrent = bool(self.attachment.decoder.spec.recurrent)
        return not is_recurrent and self._factory.policy.timing.excess() is None

    def activate_past_recording(self) -> None:
        """Expect candidate tokens that may be taken back, as in assisted decoding.

        Raises:
            UsageError: the policy evicts at every step.
        """
        self._check_croppable()
        self._records_past = self.takes_candidates = True

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` columns, which were generated.

        Args:
            tokens_to_remove: minus the number of columns.

        Raises:
            CacheError: the number is positive, or not all were generated since the last plan.
        """
        if tokens_to_remove > 0:
            raise CacheError(
                f"crop() takes back -n columns, got {tokens_to_remove}: a LarderCache cannot be "
                "cut to a length, because evicted entries are freed."
            )
        for sequence in self._sequences:
            sequence.check_truncation(-tokens_to_remove)
        for sequence in self._sequences:
            sequence.truncate(-tokens_to_remove)
        self._num_columns += tokens_to_remove

    def reorder_cache(self, beam_idx: Int[Tensor, " B"]) -> None:
        """Take rows in a new order, as beam search does; a row taken twice is copied.

        Args:
            beam_idx: former row of each new row.

        Shape:
            beam_idx: [B]
        """
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Take some of the rows.

        Args:
            indices: the rows by number, or a mask of all rows.

        Shape:
            indices: [B]
        """
        self._select(torch.arange(len(self._sequences))[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times.

        Args:
            repeats: copies of a row, itself included.
        """
        self._select([row for row in range(len(self._sequences)) for _ in range(repeats)])

    def reset(self) -> None:
        """Empty the cache."""
        self._sequences, self._num_columns, self._records_past = [], 0, False

    def to_dynamic_cache(self) -> DynamicCache:
        """DynamicCache of transformers with copies of all entries.

        It continues with the model's own attention, in `generate` too, where it is given the whole
        text so far; new tokens get their true positions. No policy acts on it.

        Returns:
            DynamicCache whose keys and values are [B K S D] in every layer.

        Raises:
            CacheError: heads, layers or rows hold different numbers of entries, or entries are
                quantized, offloaded or merged.

        Examples:
            >>> cache = larder.LarderCache(model, policy="streaming_llm", budget=64)
            >>> ids = model.generate(**inputs, past_key_values=cache, max_new_tokens=8)
            >>> exported = cache.to_dynamic_cache()
        """
        return dynamic_cache_of(self.sequences, self.attachment.module.config)

    @classmethod
    def from_dynamic_cache(
        cls,
        model: Any,
        cache: Cache,
        policy: str | Policy = DEFAULT_POLICY,
        budget: str | int | float | None = None,
        *,
        block: int | None = None,
        tokenizer: Any = None,
    ) -> LarderCache:
        """Cache with copies of the entries of a DynamicCache, all of which it keeps at first.

        The next text is read behind them by the policy, which then brings all within the budget.
        Entries of a DynamicCache that `to_dynamic_cache` did not make are taken to be those of
        tokens 0, 1, 2, ..., without padding.

        Args:
            model: as for `LarderCache`.
            cache: the DynamicCache, filled by this model.
            policy: as for `LarderCache`.
            budget: as for `LarderCache`; shares are of the tokens that the cache has read.
            block: as for `LarderCache`.
            tokenizer: as for `LarderCache`.

        Returns:
            Cache with a row for every row of `cache`.

        Raises:
            CacheError: the cache is of another kind or model, or the policy keeps more of an entry
                than key, value and position.

        Examples:
            >>> cache = larder.LarderCache.from_dynamic_cache(model, exported, "keydiff", 64)
        """
        own = cls(model, policy, budget, block=block, tokenizer=tokenizer)
        rows, length = check_dynamic_cache(cache, own.attachment.decoder.spec)
        for row in range(rows):
            sequence = own._factory.create(length)
            sequence.resume(filled_cache(sequence.cache, cache, row, length))
            own._sequences.append(sequence)
        own._num_columns = length
        return own

    def fork(self) -> LarderCache:
        """Independent copy, for several continuations of one prompt.

        Returns:
            Cache that shares no entry that either may change.

        Examples:
            >>> other = cache.fork()
        """
        other = object.__new__(LarderCache)
        vars(other).update(vars(self))
        other._sequences = [sequence.fork() for sequence in self._sequences]
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> LarderCache:
        del memo
        return self.fork()

    def _select(self, order: Sequence[int]) -> None:
        rows, taken = list[GeneratedSequence](), set[int]()
        for row in order:
            rows.append(self._sequences[row].fork() if row in taken else self._sequences[row])
            taken.add(row)
        self._sequences = rows

    def _num_text_columns(self, call: BodyCall) -> int:
        """First columns that are a text to read; the others are appended without a plan.

        Candidates of assisted decoding are no text: they may be taken back.
        """
        num_settled = call.num_columns
        if self.takes_candidates and call.logits_to_keep > 1:
            self._check_croppable()
            num_settled -= call.logits_to_keep - 1
        longest = max(sum(c < num_settled for c in own) for own in call.columns)
        return num_settled if longest > 1 or not self._sequences else 0

    def _read_texts(self, call: BodyCall, num_read: int) -> list[Float[Tensor, "_ hidden"]]:
        """Read the first columns of each row; the states of their last tokens, by row."""
        if not num_read:
            return [_no_states(self.attachment) for _ in call.ids]
        texts = [
            own[: sum(c < num_read for c in columns)]
            for own, columns in zip(call.ids, call.columns, strict=True)
        ]
        if self._sequences:
            self._check_rows(call)
            rows = self._sequences
            return [self._read(n, row, texts[n], call) for n, row in enumerate(rows)]
        _check_positions(call)
        rows, states = list[GeneratedSequence](), list[Tensor]()
        for number, text in enumerate(texts):
            # Rows of the same text, as beams and several sequences start with, are read once.
            known = next((n for n in range(number) if call.is_same_row(n, number)), number)
            if known < number:
                rows.append(rows[known].fork())
                states.append(states[known])
                continue
            rows.append(self._factory.create(len(text)))
            states.append(self._read(number, rows[-1], text, call))
        self._sequences = rows
        return states

    def _read(
        self, number: int, sequence: GeneratedSequence, text: tuple[int, ...], call: BodyCall
    ) -> Float[Tensor, "_ hidden"]:
        """Read the text of a row; the states of its last tokens."""
        if not text:
            return _no_states(self.attachment)
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
    def _appended(
        self, call: BodyCall, num_read: int
    ) -> Iterator[tuple[list[int], AppendCall | EmptyCall]]:
        """Context of the call for the columns from `num_read` on, and the rows that have any."""
        self._check_rows(call)
        rest = [
            own[sum(c < num_read for c in columns) :]
            for own, columns in zip(call.ids, call.columns, strict=True)
        ]
        rows = [
            number
            for number, (sequence, ids) in enumerate(zip(self._sequences, rest, strict=True))
            if ids and not self._end.is_padding(sequence, ids)
        ]
        if not rows:
            yield rows, EmptyCall(self.attachment.decoder.spec.device)
            return
        steps = list[Any]()
        for number in rows:
            sequence, ids = self._sequences[number], rest[number]
            if call.model_positions:
                sequence.place(call.model_positions[number][:, -len(ids) :])
            sequence.has_ended = ids[-1] in self._end.stop_ids
            if self._records_past or len(ids) > 1:
                sequence.reserve(len(ids))
            steps.append(sequence.step(ids))
        segments = [segment for segment, _ in steps]
        observer = observer_of([own for _, own in steps])
        with self.attachment.decoder.append_call(segments, observer) as append:
            yield rows, append

    def _check_croppable(self) -> None:
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

    def _check_rows(self, call: BodyCall) -> None:
        if len(call.ids) != len(self._sequences):
            raise CacheError(
                f"The cache holds {len(self._sequences)} rows, but the call has {len(call.ids)}: "
                "continue with the batch that the cache was filled with, or make a new cache."
            )

    @contextmanager
    def _undone_on_failure(self) -> Iterator[None]:
        """Roll every row back if the block fails."""
        rows = list(self._sequences)
        states = [row.state() for row in rows]
        try:
            yield
        except BaseException:
            self._sequences = rows
            for row, state in zip(rows, states, strict=True):
                row.roll_back(state)
            raise


def _no_states(attachment: Attachment) -> Float[Tensor, "_ hidden"]:
    table = attachment.decoder.embedding_table()
    return table.new_empty(0, table.shape[1])


def _check_positions(call: BodyCall) -> None:
    """Check that the positions given for a first text are those of its tokens."""
    for own in call.positions:
        if own != tuple(range(len(own))):
            raise ModelError(
                f"position_ids start with {list(own[:4])}, but the tokens of a first text are at "
                "0, 1, 2, ...: leave position_ids out."
            )
