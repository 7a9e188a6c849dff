"""Compact layer: keys rotated to their cache positions instead of their text positions.

Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2023), arXiv:2309.17453,
section 3.2: keys are stored before rotation, and rotated to 0, 1, 2, ... by their order in their
head whenever they are read; new tokens follow. So distances never exceed the number of entries,
however long the text. With nothing evicted, cache positions are true positions.

Queries and keys arrive rotated to true positions and are unrotated first. Heads with different
numbers of entries give a new token different positions. A text with a `shift` is shifted by as much
in cache positions, but never before 0. Merges use the rotated keys.

After `record_logits`, the keys rotated for the next decode step are kept for the next `entries`,
so that a scored step rotates them once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from larder.cache.forms._composite import CompositeLayer
from larder.cache.forms.base import AttentionCall
from larder.cache.merged_entries import MergedEntries, merge_entries
from larder.cache.new_tokens import NewTokens
from larder.cache.spec import LayerOptions
from larder.cache.validation import check_counts
from larder.core.errors import CacheError
from larder.core.observation import Entries
from larder.core.part import LOG_COUNT
from larder.core.plan import Folds, Plan
from larder.core.spec import POSITION_BYTES, LayerSpec
from larder.core.types import Keys, Positions, Values
from larder.ops.attention import ragged_attention
from larder.ops.packing import starts_of, storage_rows
from larder.ops.rope import rerotate_per_head, rotate

ROTATION_CHUNK = 1 << 14  # keys rotated at once, in float32


class CompactLayer(CompositeLayer):
    """Per-head lengths, positions without gaps. Reading entries copies the keys.

    Raises:
        CacheError: the layer's rotary embedding is unknown.
    """

    rerotates_keys = True

    def __init__(self, layer: LayerSpec, options: LayerOptions) -> None:
        if layer.radians is None:
            raise CacheError(
                f"Layer {layer.index} has a rotary embedding unknown to Larder, so its keys "
                "cannot be unrotated: use a cache form that keeps true positions."
            )
        super().__init__(layer, options)
        self._keeps_entries = False
        self._kept: tuple[Tensor, ...] = ()  # rotated keys and their positions, of all rows

    def record_logits(self) -> None:
        self._keeps_entries = True

    def append(self, keys: Keys, values: Values, positions: Positions) -> None:
        self._keep()
        back = rotate(keys, -positions, self._radians(keys))
        super().append(back, values, positions)

    def apply(self, plan: Plan) -> None:
        self._carry_out(plan, self._ragged.apply)

    def evict(self, plan: Plan) -> None:
        self._carry_out(plan, self._ragged.evict)

    def write_columns(self, columns: Mapping[str, Float[Tensor, " C"]]) -> None:
        self._ragged.write_columns(columns)

    def allocate(self, room: int) -> None:
        self._keep()
        super().allocate(room)

    def compact(self) -> None:
        self._keep()
        super().compact()

    def truncate(self, length: int) -> None:
        self._keep()
        self._ragged.truncate(length)

    def entries(self) -> Entries:
        held = self._ragged.entries()
        rotated, compacted = self._kept or self._turned(held)
        self._keep()
        return replace(held, keys=rotated, rope_positions=compacted)

    @property
    def entries_copy_bytes(self) -> int:
        keys = self._ragged.entries().keys
        return keys.nbytes + len(keys) * POSITION_BYTES

    @property
    def attention_copy_bytes(self) -> int:
        return self.entries_copy_bytes

    def state(self) -> dict[str, Tensor]:
        return self._ragged.state()

    @classmethod
    def adopt(cls, layer: LayerSpec, state: dict[str, Tensor]) -> CompactLayer:
        store = cls(layer, LayerOptions.of_state(state))
        store._adopt_ragged(state)
        return store

    def _copy_tensors(self) -> None:
        """No effect: all entries are in the ragged part."""

    def own_tensors(self) -> tuple[Tensor, ...]:
        return self._kept

    @property
    def lengths(self) -> tuple[int, ...]:
        return self._ragged.lengths

    def _keep(self, *rotated: Tensor) -> None:
        """Keep rotated keys and their positions for the next `entries`, or none."""
        if rotated or self._kept:
            self._kept = rotated
            self._count_bytes()

    def _radians(self, like: Tensor) -> Float[Tensor, " half"]:
        return torch.tensor(self.layer.radians, dtype=torch.float32, device=like.device)

    def _turned(self, entries: Entries) -> tuple[Tensor, ...]:
        """Keys of all storage rows rotated to their cache positions, and these positions."""
        compacted, rotated = _compact_positions(entries), torch.empty_like(entries.keys)
        radians = self._radians(rotated)
        parts = (tensor.split(ROTATION_CHUNK) for tensor in (rotated, entries.keys, compacted))
        for into, keys, at in zip(*parts, strict=True):
            into.copy_(rotate(keys[None], at, radians)[0])
        return rotated, compacted

    def attention_calls(self, new: NewTokens) -> list[AttentionCall]:
        held, queries, positions = self.entries(), new.queries, new.positions
        if new.is_step and self._keeps_entries:
            self._keeps_entries = False
            self._keep(held.keys, held.rope_positions)
        lengths = torch.tensor(held.lengths)
        layout = (torch.tensor(held.starts), lengths, self.layer.scaling)
        first = (lengths + new.offset).clamp(min=0).to(positions.device)
        compacted = first[:, None] + positions - positions[0]
        rotated = rerotate_per_head(queries, positions, compacted, self._radians(queries))
        bias = held.columns.get(LOG_COUNT)
        call = partial(ragged_attention, rotated, held.keys, held.values, *layout, bias)
        return [partial(call, softcap=self.layer.softcap)]

    def _carry_out(self, plan: Plan, carry: Callable[[Plan], None]) -> None:
        check_counts(plan, self.layer.kv_heads)
        self._keep()
        merged = merge_entries(plan, self.entries()) if len(plan.folds) else None
        lengths = torch.tensor(self.lengths)
        carry(replace(plan, folds=Folds.none(plan.kept.device)))
        self.replaced_bytes = self._ragged.replaced_bytes
        if merged is not None:
            self._write(plan, merged, lengths)

    def _write(self, plan: Plan, merged: MergedEntries, lengths: Int[Tensor, " K"]) -> None:
        """Write merged entries at their targets, unrotated from the targets' former positions.

        Args:
            lengths: of the heads when the entries were merged.
        """
        held, targets = self._ragged.entries(), merged.targets.cpu()
        heads = torch.searchsorted(lengths.cumsum(0), targets, right=True)
        compacted = (targets - starts_of(lengths)[heads]).to(held.keys.device)
        layout = torch.tensor(held.starts), torch.tensor(held.lengths)
        rows = storage_rows(torch.searchsorted(plan.kept.cpu(), targets), *layout).to(
            compacted.device
        )
        back = rotate(merged.keys[None], -compacted, self._radians(held.keys))[0]
        held.keys[rows] = back.to(held.keys.dtype)
        held.values[rows] = merged.values.to(held.values.dtype)


def _compact_positions(entries: Entries) -> Int[Tensor, " C"]:
    """Cache position of each storage row: its offset from the first row of its head."""
    edges = torch.tensor(
        [0, *entries.starts[1:], len(entries.keys)]
    )  # slack may lie before the first
    first = torch.tensor(entries.starts).repeat_interleave(edges.diff())
    return (torch.arange(len(entries.keys)) - first).to(entries.positions)


Part = CompactLayer
