"""Parallel layer: dense entries of a text, beside contexts that were read apart.

Yang et al., "APE: Faster and Longer Context-Augmented Generation via Adaptive Parallel Encoding"
(2025), arXiv:2502.05431, section 4. Contexts were read behind the same prefix, at the same
positions. A token behind them attends in two branches: to all contexts together, with logits
divided by a temperature T, and to the rest. The log-sum-exp of the first branch is multiplied by
S * T, with a scale S, before both are merged.

    contexts [ one | other | ... ]        prefix and later text [ prefix | gap | text, slack ]

One context under T = S = 1 is attention to the whole text. A layer without contexts is dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from larder.cache.forms.base import AttentionCall, AttentionState
from larder.cache.forms.dense import DenseLayer
from larder.cache.memory_usage import storage_bytes
from larder.cache.new_tokens import NewTokens
from larder.cache.shared_storage import StorageHolders
from larder.cache.spec import LayerOptions
from larder.core.errors import CacheError
from larder.core.observation import Entries
from larder.core.plan import Plan
from larder.core.spec import LayerSpec
from larder.core.types import Keys, Positions, Queries, Values
from larder.ops.attention import ragged_attention
from larder.ops.cpu.decode_attention import StepStorage

PREFIX = "context_"  # of the names of context tensors in a state


class ParallelLayer(DenseLayer):
    """Dense storage, with contexts whose attention is a branch of its own."""

    has_public_name = False
    holds_latents = False
    can_be_shared = False
    divides = False

    def __init__(self, layer: LayerSpec, options: LayerOptions) -> None:
        shape, device = (layer.kv_heads, 0, layer.head_dim), options.device
        self._context_keys = torch.empty(shape, dtype=options.dtype, device=device)
        self._context_values = torch.empty_like(self._context_keys)
        self._context_positions = torch.empty(0, dtype=torch.int32, device=device)
        self._factors = torch.ones(2)  # temperature and scale, on the host
        self._context_holders = StorageHolders()
        self._context_holders.join(self, ())
        super().__init__(layer, options)

    def hold_contexts(
        self,
        keys: Sequence[Keys],
        values: Sequence[Values],
        positions: Sequence[Positions],
        temperature: float,
        scale: float,
    ) -> None:
        """Hold copies of the entries of some contexts, in place of those held before.

        Args:
            temperature: T of the branch.
            scale: S of the branch.
        """
        self._context_keys = torch.cat(list(keys), 1)
        self._context_values = torch.cat(list(values), 1)
        self._context_positions = torch.cat(list(positions)).to(torch.int32)
        self._factors = torch.tensor([temperature, scale])
        self._renew_context_holders()
        self._count_bytes()
        self._set_length(self._length)

    def block_call(self, new: NewTokens) -> AttentionCall | None:
        """No calls: contexts are attended to by calls of their own."""
        del new

    def attention_calls(self, new: NewTokens) -> list[AttentionCall]:
        calls: list[AttentionCall] = []
        if any(super().lengths):
            calls = super().attention_calls(new)
        if self.num_context_entries:
            calls.append(partial(self._context_attention, new.queries))
        return calls

    def _context_attention(self, queries: Queries) -> AttentionState:
        """Attention to the contexts, with the log-sum-exp that the branch is merged by."""
        temperature, scale = self.factors
        heads = torch.arange(self.layer.kv_heads)
        layout = heads * self.num_context_entries, torch.full_like(heads, self.num_context_entries)
        rows = self._context_keys.flatten(0, 1), self._context_values.flatten(0, 1)
        scaling = self.layer.scaling / temperature
        out, lse = ragged_attention(queries, *rows, *layout, scaling, softcap=self.layer.softcap)
        return out, lse * (scale * temperature)

    def step_storage(self) -> StepStorage | None:
        return None if self.num_context_entries else super().step_storage()

    def apply(self, plan: Plan) -> None:
        self._refuse_plan()
        super().apply(plan)

    def evict(self, plan: Plan) -> None:
        self._refuse_plan()
        super().evict(plan)

    def truncate(self, length: int) -> None:
        super().truncate(length)
        kept = self._context_positions < length
        if not bool(kept.all()):
            self._context_keys = self._context_keys[:, kept]
            self._context_values = self._context_values[:, kept]
            self._context_positions = self._context_positions[kept]
            self._factors = self._factors.clone()
            self._renew_context_holders()
            self._count_bytes()
            self._set_length(self._length)

    def entries(self) -> Entries:
        held = super().entries()
        if not self.num_context_entries:
            return held
        text = self._read_storage()
        length = int(text.lengths[0])
        keys = torch.cat([self._context_keys, text.keys[:, :length]], 1)
        values = torch.cat([self._context_values, text.values[:, :length]], 1)
        positions = torch.cat([self._context_positions, text.positions[:length]])
        heads, count = self.layer.kv_heads, keys.shape[1]
        starts = tuple(range(0, heads * count, count))
        flat = keys.flatten(0, 1), values.flatten(0, 1)
        return Entries(*flat, positions.repeat(heads), starts, (count,) * heads)

    @property
    def entries_copy_bytes(self) -> int:
        if not self.num_context_entries:
            return 0
        row = 2 * self.layer.head_dim * self._keys.itemsize + self._positions.itemsize
        return sum(self.lengths) * row

    def state(self) -> dict[str, Tensor]:
        names = (f"{PREFIX}{name}" for name in ("keys", "values", "positions", "factors"))
        held = zip(names, self._context_tensors, strict=True)
        return super().state() | {name: tensor.clone() for name, tensor in held}

    @classmethod
    def adopt(cls, layer: LayerSpec, state: dict[str, Tensor]) -> ParallelLayer:
        plain = {name: tensor for name, tensor in state.items() if not name.startswith(PREFIX)}
        store = cls(layer, LayerOptions.of_state(state))
        store._keys, store._values, store._positions = (
            plain["keys"],
            plain["values"],
            plain["positions"],
        )
        store._context_keys = state[f"{PREFIX}keys"]
        store._context_values = state[f"{PREFIX}values"]
        store._context_positions = state[f"{PREFIX}positions"]
        store._factors = state[f"{PREFIX}factors"].cpu()
        store._count_bytes()
        store._set_length(len(store._positions))
        return store

    def own_tensors(self) -> tuple[Tensor, ...]:
        return *super().own_tensors(), *self._context_tensors

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(length + self.num_context_entries for length in super().lengths)

    @property
    def shared_nbytes(self) -> int:
        contexts = storage_bytes(self._context_tensors) if self._context_holders.are_many else 0
        return super().shared_nbytes + contexts

    @property
    def factors(self) -> tuple[float, float]:
        """Temperature and scale of the branch of contexts."""
        temperature, scale = self._factors.tolist()
        return temperature, scale

    @property
    def num_context_entries(self) -> int:
        """Entries of contexts in each head; they come first in `entries`."""
        return len(self._context_positions)

    def _refuse_plan(self) -> None:
        """Raise CacheError if contexts are held, whose entries have no order of positions."""
        if self.num_context_entries:
            raise CacheError(
                "A parallel cache that holds contexts cannot evict entries, because those of "
                "several contexts have the same positions: take unlimited() with parallel()."
            )

    def _set_length(self, length: int) -> None:
        self._length = length
        count = (length + self.num_context_entries) * self.layer.kv_heads
        self.usage.set_entries(count + self._segment_entries)

    @property
    def _context_tensors(self) -> tuple[Tensor, ...]:
        """Tensors of the contexts; they are replaced, never written, so that forks share them."""
        return self._context_keys, self._context_values, self._context_positions, self._factors

    def _renew_context_holders(self) -> None:
        """Become the only holder of the contexts."""
        self._context_holders.leave(self)
        self._context_holders = StorageHolders()
        self._context_holders.join(self, ())

    def _like(self) -> ParallelLayer:
        copy = ParallelLayer(self.layer, self.options)
        copy._context_keys, copy._context_values = self._context_keys, self._context_values
        copy._context_positions, copy._factors = self._context_positions, self._factors
        copy._context_holders = self._context_holders
        copy._context_holders.join(copy, ())
        return copy


Part = ParallelLayer
