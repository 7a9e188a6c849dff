"""LarderCache: `past_key_values` of a transformers model, under a policy of Larder."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import Cache, DynamicCache

from larder.cache.prefix_forks import unique_nbytes
from larder.cache.sequence import SequenceCache
from larder.core.arguments import checked_call
from larder.core.errors import CacheError, ModelError, UsageError
from larder.interop.attachment import AttachedCache, attached
from larder.interop.batch import PackedCall, SequenceBatch
from larder.interop.dynamic_cache import check_dynamic_cache, dynamic_cache_of, filled_cache
from larder.interop.press_policy import chosen_policy
from larder.interop.sequence import sequence_factory
from larder.models.body_call import BodyCall
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
        policy: name of a preset, spelling of parts, or a `Policy`, without episodes; None takes
            `larder.default_policy("prompt")`, which is `snapkv`.
        budget: 512 (tokens per kv head, averaged over layers), `"25%"` of the prompt
            (`"25% min 64"`: 64 tokens at least, for short rows of a batch), `"64MiB"`;
            None takes that of the policy, else 20% of the prompt, at least 128 tokens.
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

    @checked_call
    def __init__(
        self,
        model: Any,
        policy: str | Policy | None = None,
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
        factory = sequence_factory(self.attachment.decoder, chosen, sizes, tokenizer)
        self.batch = SequenceBatch(self.attachment, factory)
        self._is_given = False

    @property
    def policy(self) -> Policy:
        """Policy, with the sizes of the first row once a prompt has been read."""
        return self.batch.policy

    @property
    def sequences(self) -> tuple[SequenceCache, ...]:
        """Cache of each row; empty before the first call."""
        return tuple(row.cache for row in self.batch.rows)

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor held, metadata included, and once tokens are generated the room
        for 64 more per head, which weighs in small caches.
        """
        return unique_nbytes(self.sequences)

    @property
    def full_nbytes(self) -> int:
        """Bytes that the DynamicCache of transformers would hold of the same tokens: of every row
        all columns so far, padding included, in sliding layers those of the window.

        Examples:
            >>> 0 < cache.nbytes <= cache.full_nbytes
            True
        """
        spec = self.attachment.decoder.spec
        return len(self.batch.rows) * spec.full_bytes(self.batch.num_columns)

    @property
    def peak_nbytes(self) -> int:
        """Most bytes that a row held while a prompt was read, summed over rows."""
        return max(self.nbytes, sum(row.peak_bytes for row in self.batch.rows))

    def lengths(self) -> list[tuple[tuple[int, ...], ...]]:
        """Entries of each kv head of each layer of each row.

        Returns:
            B rows, each with L layers of K counts.

        Examples:
            >>> most = max(max(layer) for row in cache.lengths() for layer in row)
        """
        return [cache.lengths() for cache in self.sequences]

    def run(self, call: BodyCall) -> AbstractContextManager[PackedCall]:
        """Context of a call of the body: texts are read before it, other tokens by it.

        Args:
            call: tokens, positions and columns of the call, by row.

        Returns:
            Context whose value is the attention of the call's new tokens.
        """
        return self.batch.run(call)

    # What transformers asks of a cache, beside `crop` and the selection of rows.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns that were given so far, padding included; the same for every layer."""
        return self.batch.num_columns

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Columns in front of those of a new call."""
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Columns that a mask would have, and the first of them."""
        return self.batch.num_columns + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: no limit."""
        return -1

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> NoReturn:
        """Refuse keys of a model that the cache is not attached to.

        Raises:
            ModelError: always.
        """
        raise ModelError(
            "The LarderCache was given to a model that it was not made for (it was made for a "
            f"{type(self.attachment.module).__name__}): make one for this model."
        )

    @property
    def _is_user_defined(self) -> bool:
        """Mark that `generate` sets on the cache that it is given, before its first call."""
        return self._is_given

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        self._is_given, self.batch.num_chunks = value, 0

    def __bool__(self) -> bool:
        """False for Phi-3, whose `generate` drops a true cache where its frequencies change."""
        return not hasattr(self.attachment.module.config, ORIGINAL_LENGTH)

    def __len__(self) -> int:
        return len(self.attachment.decoder.spec.layers)

    def __repr__(self) -> str:
        counts = [count for row in self.lengths() for layer in row for count in layer]
        mean = round(sum(counts) / len(counts)) if counts else 0
        return (
            f"LarderCache({self.policy.short!r}, rows={len(self.sequences)}, "
            f"columns={self.batch.num_columns}, entries_per_head={mean}, nbytes={self.nbytes}, "
            f"full_nbytes={self.full_nbytes})"
        )

    def __copy__(self) -> LarderCache:
        return self.fork()

    def __getstate__(self) -> NoReturn:
        raise UsageError(
            "A LarderCache cannot be pickled or saved by torch.save, since it belongs to a model: "
            "save the entries of to_dynamic_cache(), or let larder.Chat keep a conversation."
        )

    @property
    def batch_size(self) -> int:
        """Rows; -1 before the first call."""
        return len(self.batch.rows) or -1

    @property
    def is_compileable(self) -> bool:
        """False: transformers then compiles no decode step."""
        return False

    @property
    def is_initialized(self) -> bool:
        """True once a prompt has been read."""
        return bool(self.batch.rows)

    @property
    def is_croppable(self) -> bool:
        """True if generated tokens can be taken back: the policy evicts none between prompts, and
        no layer is recurrent.
        """
        return self.batch.is_croppable

    def activate_past_recording(self) -> None:
        """Expect candidate tokens that may be taken back, as in assisted decoding.

        Raises:
            UsageError: the policy evicts at every step.
        """
        self.batch.check_croppable()
        self.batch.records_past = self.batch.takes_candidates = True

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` columns.

        Args:
            tokens_to_remove: minus the number of columns.

        Raises:
            CacheError: the number is positive, the policy evicts at every step, or a head has lost
                an entry of the columns.
        """
        if tokens_to_remove > 0:
            raise CacheError(
                f"crop() takes back -n columns, got {tokens_to_remove}: a LarderCache cannot be "
                "cut to a length, because evicted entries are freed."
            )
        self.batch.truncate(-tokens_to_remove)

    def reorder_cache(self, beam_idx: Int[Tensor, " B"]) -> None:
        """Take rows in a new order, as beam search does; a row taken twice is copied.

        Args:
            beam_idx: former row of each new row.

        Shape:
            beam_idx: [B]
        """
        self.batch.select(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Take some of the rows.

        Args:
            indices: the rows by number, or a mask of all rows.

        Shape:
            indices: [B]
        """
        self.batch.select(torch.arange(len(self.batch.rows))[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times.

        Args:
            repeats: copies of a row, itself included.
        """
        self.batch.select([row for row in range(len(self.batch.rows)) for _ in range(repeats)])

    def reset(self) -> None:
        """Empty the cache."""
        self.batch.reset()

    def to_dynamic_cache(self) -> DynamicCache:
        """DynamicCache of transformers with copies of all entries.

        It continues with the model's own attention, in `generate` too, where it is given the whole
        text so far without padding; new tokens get their true positions. No policy acts on it.

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
    @checked_call
    def from_dynamic_cache(
        cls,
        model: Any,
        cache: Cache,
        policy: str | Policy | None = None,
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
            sequence = own.batch.create(length)
            sequence.resume(filled_cache(sequence.cache, cache, row, length))
            own.batch.rows.append(sequence)
        own.batch.num_columns = length
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
        other.batch = self.batch.fork()
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> LarderCache:
        return self.fork()
