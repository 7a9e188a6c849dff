"""The contract of a layer's storage: what every form of cache can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.errors import CacheError
from larder.core.observation import Entries
from larder.core.plan import Plan
from larder.core.spec import LayerSpec
from larder.core.types import Keys, Positions, Queries, Values
from larder.ops.attention import causal_attention, merge_attention

AttentionState = tuple[Float[Tensor, "H Q D"], Float[Tensor, "H Q"]]  # output and log-sum-exp


class CacheLayer(ABC):
    """The cached entries of one layer of one sequence.

    A store owns its tensors; what `entries` hands out are views, valid until the next change.
    Entries of a head are in order of their true positions. One thread at a time may use a store.
    A change that fails for want of memory leaves the store as it was.
    """

    layer: LayerSpec
    replaced_bytes: int = 0  # storage that stood beside its successor during the last change

    def attend(
        self,
        queries: Queries,
        keys: Keys,
        values: Values,
        positions: Positions,
        sections: tuple[int, ...],
        shift: int = 0,
    ) -> Queries:
        """Attention of new tokens to the cache and causally among themselves; leaves no trace.

        Args:
            queries, keys, values: of the new tokens, post-RoPE.
            positions: their true positions, later than all cached ones unless `shift` is below 0.
            sections: lengths that partition Q into sequences that do not see each other.
            shift: how much later than right behind the sequence `positions` begin; below 0 earlier.
        """
        window = self.layer.sliding_window
        among = causal_attention(queries, keys, values, self.layer.scaling, sections, window)
        if self._is_empty:
            return among[0].to(queries.dtype)
        cached = self._attention(queries, positions, 0, shift)
        return merge_attention((cached[0], among[0]), (cached[1], among[1]))[0].to(queries.dtype)

    @abstractmethod
    def append(self, keys: Keys, values: Values, positions: Positions) -> None:
        """Add new entries to every head."""

    def extend(self, queries: Queries, keys: Keys, values: Values, positions: Positions) -> Queries:
        """Attend and append: new tokens see the cache and, causally, one another.

        A single token sees everything including itself, so it is appended first and needs only one
        attention; if that fails, the caller takes it back with `truncate`.
        """
        if queries.shape[1] == 1:
            self.append(keys, values, positions)
            return self.attend_cached(queries, positions).to(queries.dtype)
        out = self.attend(queries, keys, values, positions, (queries.shape[1],))
        self.append(keys, values, positions)
        return out

    def again(
        self,
        queries: Queries,
        keys: Keys,
        values: Values,
        positions: Positions,
        answer: Callable[[], Queries],
    ) -> Float[Tensor, "H N D"]:
        """Attention of tokens that are read once more, and behind them of what is new.

        Args:
            queries, keys, values: of a text that was read before, from its first token on.
            positions: their true positions.
            answer: attends with what is new, and appends it where that is wanted.
        """
        told = self.layer.scaling, (len(positions),), self.layer.sliding_window
        before = causal_attention(queries, keys, values, *told)[0].to(queries.dtype)
        return torch.cat([before, answer()], 1)

    def attend_cached(self, queries: Queries, positions: Positions) -> Queries:
        """Attention of queries to everything held, themselves included, in float32."""
        return self._attention(queries, positions, queries.shape[1], 0)[0]

    @property
    def _is_empty(self) -> bool:
        """Whether there is nothing to attend to."""
        return not any(self.lengths)

    @abstractmethod
    def _attention(
        self, queries: Queries, positions: Positions, own: int, shift: int
    ) -> AttentionState:
        """Attention of queries to everything held, with its log-sum-exp.

        Args:
            own: how many entries of each head, the last ones, are the queries' own tokens.
            shift: as `attend`.
        """

    def record_logits(self) -> None:
        """Keep what attention makes of the next token for who looks at it, where this form can.

        Its logits, for `heard`; or a copy of the entries, for `entries`, which hands it out once.
        """
        return

    def heard(self) -> Float[Tensor, "R C"] | None:
        """What attention to the newest entry's query took, before the softmax, biases included.

        Row r of a stored row is query head r of its kv head; slack holds anything. None where
        nobody listened or the entries have changed since. It is handed out once.
        """
        return None

    @abstractmethod
    def apply(self, plan: Plan) -> None:
        """Keep what the plan keeps; free the rest, and all slack, at once.

        Raises:
            CacheError: the plan does not fit what is held, or asks for what this form cannot do;
                nothing has changed.
        """

    @abstractmethod
    def evict(self, plan: Plan) -> None:
        """Keep what the plan keeps; what is freed becomes room for the tokens that come next.

        For decoding, where one entry goes for each that comes: no storage is laid out anew.

        Raises:
            CacheError: as `apply`.
        """

    def note(self, columns: Mapping[str, Float[Tensor, " C"]]) -> None:
        """Replace columns of the ledger, given one number per row of the storage.

        Where `entries` hands out views, those handed out before show the new numbers.

        Raises:
            CacheError: the store has no such column; nothing is written.
        """
        if columns:
            raise CacheError(
                f"{type(self).__name__} holds no columns, but {', '.join(columns)} was written: "
                "only managed layers of a ragged cache do."
            )

    @abstractmethod
    def allocate(self, room: int) -> None:
        """Set storage aside for at least `room` more tokens per head."""

    def reserve(self, room: int) -> None:
        """Prepare for `room` more tokens per head that `truncate` may take back."""
        self.allocate(room)

    @abstractmethod
    def compact(self) -> None:
        """Give all slack back."""

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Forget the entries at true positions `length` and later."""

    def forget(self, start: int, stop: int) -> None:
        """Drop for good what is held at true positions [start, stop), as `apply` frees it."""
        held = self.entries()
        positions = held.packed_positions()
        stays = (positions < start) | (positions >= stop)
        self.apply(Plan.from_mask(stays, held.lengths))

    @abstractmethod
    def entries(self) -> Entries:
        """What is held, as views; a copy where entries are not stored as numbers."""

    @property
    def entries_copy_bytes(self) -> int:
        """Bytes that `entries` would copy; 0 where it hands out views."""
        return 0

    @property
    def attention_copy_bytes(self) -> int:
        """Bytes of what attention copies of what is held; 0 where it reads it as it is."""
        return 0

    def fork(self) -> CacheLayer:
        """An independent copy, without slack."""
        return self.adopt(self.layer, self.state())

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Everything needed to restore the store: contiguous copies of tensors, without slack."""

    @classmethod
    def restore(cls, layer: LayerSpec, state: dict[str, Tensor]) -> CacheLayer:
        """The store that `state` came from, on tensors of its own: `state` restores again."""
        return cls.adopt(layer, {name: tensor.clone() for name, tensor in state.items()})

    @classmethod
    @abstractmethod
    def adopt(cls, layer: LayerSpec, state: dict[str, Tensor]) -> CacheLayer:
        """As `restore`, but the tensors are taken over: nobody else may use them any more."""

    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor held, slack and metadata included."""

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor held, slack and metadata included."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors())

    @property
    def device_nbytes(self) -> int:
        """Bytes of them in the model's memory; the rest is in a slower one."""
        return self.nbytes

    @property
    @abstractmethod
    def lengths(self) -> tuple[int, ...]:
        """Entries of each kv head."""

    @property
    def full_precision_lengths(self) -> tuple[int, ...]:
        """Entries of each kv head that are held at full precision."""
        return self.lengths


def empty_rows(layer: LayerSpec, rows: int, like: Tensor) -> Tensor:
    """Uninitialised storage for `rows` keys or values of a layer."""
    return torch.empty(rows, layer.head_dim, dtype=like.dtype, device=like.device)
