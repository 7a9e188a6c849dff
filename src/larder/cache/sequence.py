"""KV cache of one sequence: one `CacheLayer` per layer, and the true position of the next token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from larder.cache.entry_columns import LatestActivations
from larder.cache.forms.base import CacheLayer
from larder.cache.memory_usage import MemoryUsage
from larder.cache.model_positions import ModelPositions
from larder.cache.new_tokens import NewTokens
from larder.cache.recurrent_state import NO_STATE, CacheCheckpoint, RecurrentState
from larder.cache.spec import CacheSpec, create_layer, form_of
from larder.cache.state_dict import move_state, restore_layers, state_dict
from larder.core.codec import Codec, ResidualSpec, TransformSpec
from larder.core.errors import BudgetError, CacheError, MissingWeights
from larder.core.observation import Entries
from larder.core.part import Ledger
from larder.core.plan import LayerPlans, Plan, StepRule
from larder.core.recall import OffloadSpec
from larder.core.spec import LayerPairing, LayerSpec, ModelSpec, RecomputeSpec
from larder.core.types import Mode, Positions, Queries
from larder.ops.cpu.decode_attention import EvictionStorage

if TYPE_CHECKING:  # modules of arenas, slow tiers and tables are loaded where there are any
    from larder.cache.forms.tiered import TieredLayer
    from larder.cache.page_lease import PageLease
    from larder.cache.step_tables import StepTables


class SequenceCache:
    """Keys and values of one sequence, for all layers.

    `next_position` counts the tokens that were read, whatever was evicted. If a forward pass fails
    halfway, `truncate(next_position)` restores every layer, unless a plan was already applied:
    rejected entries are freed at once. Such a cache must be `invalidate`d and is unusable. A cache
    is not thread-safe; storage that forks share is never written.
    `watermark` is the true position below which entries are not judged again (`freeze`).
    `plans` counts the changes so far that cannot be undone: plans, and columns written.
    `latest` holds activations of the newest tokens, if the ledger asks for queries; `recurrent` the
    state of the model's layers without attention, a value that forks share; `model_positions` what
    the model's RoPE counts, where that is not the true position.

    Args:
        form, ..., residual: see `CacheSpec`.

    Raises:
        UnknownName: no cache form has that name.
        CacheError: the form does not support an option, or lacks one.
    """

    def __init__(
        self,
        spec: ModelSpec,
        form: str,
        ledger: Ledger = Ledger(),  # noqa: B008, frozen and empty
        codecs: Sequence[Codec] = (),
        pairing: LayerPairing | None = None,
        parking: OffloadSpec | None = None,
        rebuilding: RecomputeSpec | None = None,
        transform: TransformSpec | None = None,
        residual: ResidualSpec | None = None,
    ) -> None:
        self.spec = spec
        pairs, own = pairing or LayerPairing(), tuple(codecs)
        self.cache_spec = CacheSpec(
            form, ledger, own, pairs, parking, rebuilding, transform, residual
        )
        self.next_position = self.plans = self.watermark = 0
        self.latest = LatestActivations(ledger.queries)
        self.recurrent = NO_STATE
        self.model_positions = ModelPositions()
        self._is_spoiled = False
        self._layout: StepTables | None = None
        form_of(self.cache_spec).check_spec(self.cache_spec, spec)
        self.cache_spec.check_model(spec)
        self._layers = [create_layer(layer, spec, self.cache_spec) for layer in spec.layers]
        self._link_layers()

    def attend(self, layer: int, new: NewTokens, num_replayed: int = 0) -> Queries:
        """Attention of one layer, in one of three modes.

        Args:
            num_replayed: first tokens that the cache read before (`CacheLayer.attend_replayed`).

        Raises: CacheError: more than one section to append, or the cache is invalid.
        """
        self._check()
        target = self._layers[layer]
        if num_replayed:
            replayed, rest = new.split(num_replayed)
            return target.attend_replayed(replayed, partial(self.attend, layer, rest))
        if new.mode is Mode.PROBE:
            return torch.zeros_like(new.queries)
        if new.mode is Mode.APPEND and len(new.section_lengths) != 1:
            raise CacheError(f"Cannot append {len(new.sections)} sections at once: append one.")
        return target.attend(new)

    def step_layer(self, layer: int) -> CacheLayer:
        """Layer that a decode step of several caches appends to. Raises: CacheError: invalid."""
        self._check()
        return self._layers[layer]

    @property
    def always_has_tables(self) -> bool:
        """True if `step_layout` is None for another type of numbers alone."""
        return self._can_lay_out and self._layers[0].always_has_tables

    def step_layout(self, dtype: torch.dtype) -> StepTables | None:
        """Tables for a decode step over keys and values of that type.

        None where layers are asked one by one: in forms without tables, and in ragged ones where
        others hold the storage of a layer. Raises: CacheError: invalid.
        """
        self._check()
        if not self._can_lay_out:
            return None
        if self._layout is None or not self._layout.is_current:
            self._layout = self._layers[0].step_tables(self._layers, self.next_position)
        return self._layout if self._layout and self._layout.dtype is dtype else None

    def count_step(self, position: int) -> None:
        """Count a token that was appended to the pages of every layer. Raises: CacheError."""
        self._check()
        for each in self._layers:
            each.count_step(position)

    def page_leases(self) -> list[PageLease]:
        """Pages of the layers that have them, in model order. Raises: CacheError: invalid."""
        self._check()
        return [lease for each in self._layers if (lease := each.page_lease) is not None]

    def record_logits(self, layers: Iterable[int]) -> None:
        """Record the logits of the next decode step in some layers."""
        for layer in layers:
            self._layers[layer].record_logits()

    def record_weight_sums(self, layers: Iterable[int]) -> None:
        """Record the attention that entries receive from the next block in some layers."""
        for layer in layers:
            self._layers[layer].record_weight_sums()

    def advance(self, tokens: int, recurrent: RecurrentState = NO_STATE) -> None:
        """Count tokens as read, after every layer has appended them.

        Args:
            recurrent: state of the layers without attention behind the tokens.
        """
        self.next_position += tokens
        self.recurrent = recurrent

    def fit_plans(self, plans: Mapping[int, Plan]) -> LayerPlans:
        """Plans with what must be found for their layers together; nothing changes."""
        spanning = [layer for layer in plans if self._layers[layer].spans_layers]
        if not spanning:
            return dict(plans)
        return self._layers[spanning[0]].fit_plans(self._layers, plans)

    def apply(self, layer: int, plan: Plan) -> None:
        """Apply a plan to one layer; rejected entries are freed at once."""
        with self._changing():
            self._layers[layer].apply(plan)
            self._append_added(layer, plan)

    def evict(self, layer: int, plan: Plan) -> None:
        """Apply a plan to one layer; rejected entries become slack for the next tokens."""
        with self._changing():
            self._layers[layer].evict(plan)
            self._append_added(layer, plan)

    def _append_added(self, layer: int, plan: Plan) -> None:
        """Append the entries that a plan adds, which count as no tokens, without slack."""
        if plan.added is not None:
            added, target = plan.added, self._layers[layer]
            replaced = target.replaced_bytes  # by the plan itself
            target.append(added.keys, added.values, added.positions)
            target.compact()
            target.replaced_bytes = max(replaced, target.replaced_bytes)

    def evict_step(self, layers: Mapping[int, EvictionStorage], rule: StepRule) -> list[int]:
        """Evict from several layers in one call, and return those that are done.

        The others have not changed. Each layer is its own `eviction_storage`.
        """
        from larder.ops.cpu.decode_eviction import evict_step  # few policies evict so
        from larder.ops.removal import MIN_ROAMING_SLACK

        with self._changing():
            rooms = evict_step(tuple(layers.values()), MIN_ROAMING_SLACK, rule)
            done = [(n, room) for n, room in zip(layers, rooms, strict=True) if room is not None]
            for layer, room in done:
                self._layers[layer].count_eviction(room)
        return [layer for layer, _ in done]

    def count_eviction(self) -> None:
        """Count an eviction before a kernel carries it out."""
        self._check()
        self.plans += 1

    def discount_eviction(self) -> None:
        """Take back the count of an eviction that was undone."""
        self.plans -= 1

    def write_columns(self, layer: int, columns: Mapping[str, Tensor]) -> None:
        """Replace ledger columns of one layer, one number per row of its storage."""
        with self._changing():
            self._layers[layer].write_columns(columns)

    def write_token_columns(self, layer: int, numbers: Mapping[str, Tensor], start: int) -> None:
        """Record numbers of consecutive tokens in the ledger columns of one layer.

        Args:
            numbers: float32 by column, [N] for all kv heads or [N, K]; names without a column are
                left out.
            start: true position of the first token.
        """
        device = self.spec.device_of(layer)
        named = {n: numbers[n].to(device) for n in numbers if n in self.cache_spec.ledger.columns}
        if not named or not self.is_budgeted(self._layers[layer].layer):
            return
        entries = self.entries(layer)
        offsets = entries.positions.long() - start
        count = len(next(iter(named.values())))
        is_new, rows = (offsets >= 0) & (offsets < count), offsets.clamp(0, count - 1)
        self.write_columns(
            layer,
            {
                n: torch.where(is_new, entries.spread(own, rows), entries.columns[n])
                for n, own in named.items()
            },
        )

    def record_queries(self, layer: int, queries: Queries, positions: Positions) -> None:
        """Record the post-RoPE queries of a pass among the latest of a layer, if any are held."""
        if not self.cache_spec.ledger.queries:
            return
        with self._changing():
            self.latest.record_queries(layer, queries, positions)

    def drop_range(self, start: int, stop: int) -> None:
        """Drop the entries of managed layers at true positions [start, stop)."""
        with self._changing():
            for layer in self.spec.managed:
                self._layers[layer.index].drop_range(start, stop)

    def invalidate(self) -> None:
        """Mark the cache unusable, after a pass that failed when some plans had been applied."""
        self._is_spoiled = True

    def allocate(self, room: int) -> None:
        """Reserve storage for at least `room` more tokens per head, to be kept."""
        for each in self._layers:
            each.allocate(room)

    def reserve(self, room: int) -> None:
        """Reserve storage for `room` tokens that `truncate` may take back, windows included."""
        for each in self._layers:
            each.reserve(room)

    def compact(self) -> None:
        """Free all slack."""
        for each in self._layers:
            each.compact()

    def checkpoint(self) -> CacheCheckpoint:
        """Present position, for `roll_back`. Its recurrent state stays in memory while held."""
        return CacheCheckpoint(self.next_position, self.recurrent)

    def roll_back(self, checkpoint: CacheCheckpoint) -> None:
        """Return to an earlier position, of this cache or of the one that it was forked from."""
        self.recurrent = checkpoint.recurrent
        self._truncate(checkpoint.position)

    def truncate(self, length: int) -> None:
        """Drop everything at true positions `length` and later.

        Raises:
            CacheError: the model has recurrent layers, whose state is not that of `length`.
        """
        if self.recurrent.tensors and length < self.next_position:
            raise CacheError(
                f"The cache cannot be cut from {self.next_position} tokens to {length}, because "
                "recurrent layers hold a state of all of them: return to a checkpoint with "
                "roll_back(), or read the text again into a new cache."
            )
        self._truncate(length)

    def _truncate(self, length: int) -> None:
        for each in self._layers:
            each.pending = None
            each.truncate(length)
        self.model_positions = self.model_positions.truncated(length)
        if length < self.next_position:
            self.next_position = length
            self.watermark = min(self.watermark, length)
            self.latest.truncate(length)

    def fork(self) -> SequenceCache:
        """Independent cache with the same entries, which shares storage until one of both changes
        it.
        """
        self._check()
        copy = SequenceCache(self.spec, **vars(self.cache_spec))
        copy._layers = [each.fork() for each in self._layers]
        copy._link_layers()
        copy.next_position, copy.latest = self.next_position, self.latest.fork()
        copy.watermark = self.watermark
        copy.recurrent, copy.model_positions = self.recurrent, self.model_positions
        return copy

    def separate(self) -> None:
        """Copy the entries in the model's memory that forks hold too, so that each owner of such a
        cache can free it, and its bytes are those of its own entries. Pages stay shared.
        """
        for each in self._layers:
            each.separate()

    def entries(self, layer: int) -> Entries:
        """Entries of a layer: views, or a copy where they are quantized."""
        self._check()
        return self._layers[layer].entries()

    def lengths(self) -> tuple[tuple[int, ...], ...]:
        """Entries of each kv head of each layer."""
        return tuple(each.lengths for each in self._layers)

    def full_precision_lengths(self) -> tuple[tuple[int, ...], ...]:
        """Full-precision entries of each kv head of each layer."""
        return tuple(each.full_precision_lengths for each in self._layers)

    @property
    def managed_entries(self) -> int:
        """Entries over all heads of the budgeted layers."""
        return self._budgeted.entries

    @property
    def layers(self) -> tuple[CacheLayer, ...]:
        """Layers of the cache, in model order."""
        return tuple(self._layers)

    @property
    def tiers(self) -> list[TieredLayer]:
        """Layers that have a slow tier."""
        return [cast("TieredLayer", layer) for layer in self._layers if layer.has_slow_tier]

    @property
    def pages(self) -> tuple[int, int]:
        """Pages recalled so far, and how many of them had to be moved."""
        counts = [layer.pages for layer in self._layers]
        return sum(asked for asked, _ in counts), sum(moved for _, moved in counts)

    @property
    def recompute_cost(self) -> tuple[int, int]:
        """Tokens recomputed so far, over layers, and the operations this took."""
        costs = [layer.recompute_cost for layer in self._layers]
        return sum(tokens for tokens, _ in costs), sum(operations for _, operations in costs)

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor held, slack and metadata included."""
        return self._budgeted.nbytes + self._unbudgeted.nbytes + self.fixed_nbytes

    @property
    def idle_nbytes(self) -> int:
        """Bytes between two turns, without slack: at least those of the state."""
        return sum(each.idle_nbytes for each in self._layers) + self.fixed_nbytes

    @property
    def device_nbytes(self) -> int:
        """Bytes in the model's memory, without the slow tiers."""
        layers = self._budgeted.device_nbytes + self._unbudgeted.device_nbytes
        return layers + self.fixed_nbytes

    @property
    def fixed_nbytes(self) -> int:
        """Bytes of what is no entry."""
        return self.latest.nbytes + self.recurrent.nbytes + self.model_positions.nbytes

    @property
    def shared_nbytes(self) -> int:
        """Bytes of `nbytes` that forks of this cache, or the one it was forked from, hold too."""
        return sum(each.shared_nbytes for each in self._layers)

    @property
    def shared_device_nbytes(self) -> int:
        """Bytes of `shared_nbytes` in the model's memory."""
        return self.shared_nbytes - sum(each.shared_host_nbytes for each in self.tiers)

    @property
    def largest_layer_bytes(self) -> int:
        """Bytes of the largest layer, slack included."""
        return max(each.nbytes for each in self._layers)

    def state(self) -> dict[str, Tensor]:
        """All tensors by name, without slack."""
        self._check()
        own = state_dict(self._layers) | self.latest.state()
        return own | self.recurrent.state() | self.model_positions.state()

    def release_state(self, device: torch.device) -> dict[str, Tensor]:
        """All tensors, moved layer by layer to `device`; the cache is empty afterwards."""
        self._check()
        try:
            moved = move_state(self._layers, self.cache_spec, self.spec, device)
        finally:
            self._link_layers()
        recurrent, self.recurrent = self.recurrent.to(device), NO_STATE
        rotated = {n: tensor.to(device) for n, tensor in self.model_positions.state().items()}
        return moved | self.latest.release_state(device) | recurrent.state() | rotated

    def _link_layers(self) -> None:
        """Link the layers with each other, and count their memory for the sequence."""
        form_of(self.cache_spec).link_layers(self._layers, self.cache_spec)
        if any(each.layer.kv_source is not None for each in self._layers):
            from larder.cache.forms.shared_kv import link_shared_layers

            link_shared_layers(self._layers)
        self._layout = None
        self._can_lay_out = all(
            each.can_lay_out
            and type(each) is type(self._layers[0])
            and each.layer.kv_heads == self._layers[0].layer.kv_heads
            for each in self._layers
        )
        self._budgeted, self._unbudgeted = MemoryUsage(), MemoryUsage()
        for each in self._layers:
            is_budgeted = self.is_budgeted(each.layer)
            each.usage.join(self._budgeted if is_budgeted else self._unbudgeted)

    def is_budgeted(self, layer: LayerSpec) -> bool:
        """True for layers under a budget: full attention, and not among the first, dense ones."""
        dense = form_of(self.cache_spec).num_dense_layers(self.cache_spec)
        return layer.is_managed and layer.index >= dense

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Count a change that cannot be undone, even one that is interrupted halfway."""
        self._check()
        self.plans += 1
        try:
            yield
        except (BudgetError, CacheError, MissingWeights):  # refused: nothing has changed
            self.plans -= 1
            raise

    def _check(self) -> None:
        if self._is_spoiled:
            raise CacheError(
                "A forward pass over this cache failed after some layers had evicted entries, so "
                "it cannot be used: read the text again into a new cache."
            )

    def meta(self) -> dict[str, str]:
        """Text metadata that `restore` needs beside the tensors."""
        fields = self.cache_spec.meta() | {"next_position": str(self.next_position)}
        return fields | ({"watermark": str(self.watermark)} if self.watermark else {})

    @classmethod
    def restore(
        cls, spec: ModelSpec, state: Mapping[str, Tensor], meta: Mapping[str, str]
    ) -> SequenceCache:
        """Cache restored from `state` and `meta`, on tensors of its own.

        Raises: CacheError: layers of the state do not match the model or the ledger of `meta`.
        """
        return cls._rebuilt(spec, state, meta, lambda layer, state: layer.restored(state))

    @classmethod
    def adopt(
        cls, spec: ModelSpec, state: Mapping[str, Tensor], meta: Mapping[str, str]
    ) -> SequenceCache:
        """Cache restored without copying tensors that are on the right device.

        `state` must not be used afterwards: the cache writes into it.
        """
        return cls._rebuilt(spec, state, meta, lambda layer, state: layer.adopted(state))

    @classmethod
    def _rebuilt(
        cls,
        spec: ModelSpec,
        state: Mapping[str, Tensor],
        meta: Mapping[str, str],
        fill: Callable[[CacheLayer, dict[str, Tensor]], CacheLayer],
    ) -> SequenceCache:
        cache = SequenceCache(spec, **vars(CacheSpec.of(meta)))
        cache._layers = restore_layers(cache._layers, cache.cache_spec, spec, state, fill)
        cache._link_layers()
        cache.next_position = int(meta["next_position"])
        cache.watermark = int(meta.get("watermark", "0"))
        cache.recurrent = RecurrentState.restore(state, spec, cache.next_position)
        cache.latest = LatestActivations.restore(state, cache.cache_spec.ledger.queries, spec)
        cache.model_positions = ModelPositions.restore(state, spec.device)
        return cache
