"""Base class of the cache forms: the storage contract of one layer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from larder.cache.memory_usage import DivisibleStorage, TensorOwner
from larder.cache.new_tokens import NewTokens
from larder.cache.spec import CacheSpec, LayerOptions
from larder.core.errors import CacheError
from larder.core.observation import Entries
from larder.core.plan import LayerPlans, Plan, StepRule
from larder.core.spec import LayerSpec, ModelSpec
from larder.core.types import Keys, Mode, Positions, Queries, Values
from larder.ops.attention import (
    apply_sinks,
    causal_attention,
    chunk_sections,
    lookahead_attention,
    masked_attention,
    merge_attention,
    sink_logits,
)
from larder.ops.block_attention import FEWEST_QUERIES
from larder.ops.cpu.decode_attention import EvictionStorage, StepStorage

if TYPE_CHECKING:
    from larder.cache.page_lease import PageLease
    from larder.cache.row_updates import PlannedEviction
    from larder.cache.step_tables import StepTables

AttentionState = tuple[Float[Tensor, "H Q D"], Float[Tensor, "H Q"]]  # output and log-sum-exp
AttentionCall = Callable[[], AttentionState]  # call of a kernel, with its arguments


@dataclass(frozen=True)
class PendingBlock:
    """Block that is appended once the layers that read the same entries have attended.

    Args:
        readers: number of these layers that have not attended yet.
    """

    keys: Keys
    values: Values
    positions: Positions
    readers: int


class CacheLayer(DivisibleStorage, TensorOwner):
    """Cached entries of one layer of one sequence.

    The layer owns its tensors; `entries` returns views that are valid until the next change.
    Entries of a head are in order of their true positions. Not thread-safe.
    A change that fails for lack of memory leaves the layer as it was.
    """

    # Options of a `CacheSpec` that the form supports, and those that it requires.
    supports: ClassVar[frozenset[str]] = frozenset({"ledger"})
    requires: ClassVar[frozenset[str]] = frozenset()
    # Whether a policy may name the form; if not, another form or a prefill schedule creates it.
    has_public_name: ClassVar[bool] = True
    # Whether keys are rotated to cache positions at every read.
    rerotates_keys: ClassVar[bool] = False
    # Prefixes of the names in a state whose tensors belong to a slow tier, in host memory.
    slow_state: ClassVar[tuple[str, ...]] = ()

    # Whether other layers of the model may attend to the entries.
    can_be_shared: ClassVar[bool] = True

    # Whether a slow tier in host memory holds some of the entries.
    has_slow_tier: ClassVar[bool] = False

    # Whether a layer of a model with an arena of pages holds its entries there instead.
    can_page: ClassVar[bool] = False

    spans_layers: ClassVar[bool] = False  # layers hold numbers together, on one device
    holds_latents: ClassVar[bool] = False  # holds latents (MLA), as keys and values at once

    num_readers: int = 0  # layers that attend to the entries of this one
    pending: PendingBlock | None = None
    replaced_bytes: int = 0  # old storage held beside the new one during the last change

    def __init__(self, layer: LayerSpec, options: LayerOptions | None = None) -> None:
        del options  # for forms that create tensors
        super().__init__()
        self.layer = layer

    @classmethod
    def layer_class(cls, spec: CacheSpec) -> type[CacheLayer]:
        """Class of the layers that `create` makes: this one, or that of the form which codes."""
        return cls

    @classmethod
    def create(cls, layer: LayerSpec, model: ModelSpec, spec: CacheSpec) -> CacheLayer:
        """Empty layer of this form, or of the form that `spec` needs instead."""
        return cls(layer, LayerOptions(model.dtype, model.device, spec))

    @classmethod
    def check_spec(cls, spec: CacheSpec, model: ModelSpec) -> None:
        """Check the options of a cache, and whether the form supports the model's layers.

        Raises: CacheError: it does not support one of them.
        """
        spec.check_options(cls.supports, cls.requires)
        shared = [layer for layer in model.layers if layer.kv_source is not None]
        if shared and not cls.can_be_shared:
            raise CacheError(
                f"Layer {shared[0].index} of the model attends to the keys and values of layer "
                f"{shared[0].kv_source}, which a {spec.form} cache cannot share: take a policy "
                "that drops what it rejects, with drop()."
            )

        latent = [layer for layer in model.layers if layer.latent_rank]
        if latent and (spec.codecs or not cls.holds_latents):
            kind = "quantized" if spec.codecs else spec.form
            raise CacheError(
                f"Layer {latent[0].index} of the model caches latents (MLA), which a {kind} cache "
                "cannot hold: take a policy whose entries stay exact, with exact() and drop()."
            )

    @classmethod
    def num_dense_layers(cls, spec: CacheSpec) -> int:
        """Number of first layers that hold all of their entries."""
        return 0

    @classmethod
    def link_layers(cls, layers: Sequence[CacheLayer], spec: CacheSpec) -> None:
        """Link the layers of a sequence that depend on each other."""
        del layers, spec

    @classmethod
    def fit_plans(cls, layers: Sequence[CacheLayer], plans: Mapping[int, Plan]) -> LayerPlans:
        """Plans of several layers with what must be found for all of them together.

        Args:
            layers: all layers of the sequence.
            plans: by layer index.
        """
        return dict(plans)

    def attend(self, new: NewTokens) -> Queries:
        """Attention of new tokens to the cache and causally among themselves.

        A decode step sees every entry and its own, so that it is appended first and needs no
        attention beside that to the entries; if that fails, the caller takes it back with
        `truncate`.
        """
        is_step = new.is_step
        if is_step:
            self.append(new.keys, new.values, new.positions)
        states: list[AttentionState] = []
        for call in self.attention_calls(new) if is_step else self._block_calls(new):
            states.append(call())
        state = merge_attention([out for out, _ in states], [lse for _, lse in states])
        return self.finish_attention(new, state)

    def finish_attention(self, new: NewTokens, state: AttentionState) -> Queries:
        """Output of new tokens that were attended to; appends them unless they are a step."""
        if new.mode is Mode.APPEND:
            if not new.is_step:
                sides = new.keys, new.values, new.positions
                self._append_block(PendingBlock(*sides, self.num_readers))
            self.observe(new, state)
        return self.output(state, new.queries.dtype)

    def _block_calls(self, new: NewTokens) -> Iterator[AttentionCall]:
        """Kernel calls whose merged results are the attention of tokens that are no entries yet."""
        is_plain = len(new.section_lengths) == 1 and not new.bidirectional
        if is_plain and (block := self.block_call(new)) is not None:
            yield block
            return
        if not self._is_empty:
            yield from self.attention_calls(new)
        yield self.causal_call(new)
        if new.bidirectional:
            sides, layer = (new.queries, new.keys, new.values), self.layer
            spans = new.bidirectional
            yield partial(lookahead_attention, *sides, layer.scaling, spans, layer.softcap)

    def block_call(self, new: NewTokens) -> AttentionCall | None:
        """Attention of one section of new tokens to the entries and causally among themselves.

        None where the two are attended to by calls of their own.
        """
        del new

    def attends_blocks(self, new: NewTokens) -> bool:
        """True if entries and new tokens are masked by their order alone."""
        layer = self.layer
        is_plain = layer.softcap is None and layer.sliding_window is None and layer.chunk is None
        return is_plain and not layer.latent_rank and len(new) >= FEWEST_QUERIES

    def causal_call(self, new: NewTokens) -> AttentionCall:
        """Causal attention of tokens among themselves, within each section."""
        layer, sides, positions = self.layer, (new.queries, new.keys, new.values), new.positions
        if layer.sliding_window is not None and new.has_gaps:
            # Offsets are no distances: true positions decide what is in the window.
            is_seen = positions <= positions[:, None]
            is_seen &= positions >= layer.first_visible(positions)[:, None]
            return partial(masked_attention, *sides, layer.scaling, is_seen, layer.softcap)
        sections = new.section_lengths
        if layer.chunk is not None:
            firsts = [sum(sections[:index]) for index in range(len(sections))]
            starts = positions[firsts].tolist()
            sections = chunk_sections(sections, starts, layer.chunk)
        return partial(
            causal_attention,
            *sides,
            layer.scaling,
            sections,
            window=layer.sliding_window,
            softcap=layer.softcap,
        )

    def output(self, state: AttentionState, dtype: torch.dtype) -> Queries:
        """Output of attention once all parts are merged, under the sinks of the layer."""
        out, lse = state
        return apply_sinks(out, lse, sink_logits(self.layer, out)).to(dtype)

    @abstractmethod
    def attention_calls(self, new: NewTokens) -> Iterable[AttentionCall]:
        """Kernel calls whose merged results are the attention of queries to all entries.

        Each call is made before the next one is asked for, so that copies need not coexist.
        """

    @abstractmethod
    def append(self, keys: Keys, values: Values, positions: Positions) -> None:
        """Append new entries to every head."""

    def step_storage(self) -> StepStorage | None:
        """Storage with room for one more entry, for a decode step in one call with others.

        `count_step` counts the entry once it is written. None where the layer attends alone.
        """
        return None

    def count_step(self, position: int) -> None:
        """Count the entry that was written behind each head of `step_storage`."""
        del position

    # Whether there are always tables where `can_lay_out`; they end at steps of layers one by one.
    always_has_tables: ClassVar[bool] = False

    @property
    def can_lay_out(self) -> bool:
        """True if decode steps over several layers may go by tables that stay between steps."""
        return False

    def step_tables(self, layers: Sequence[CacheLayer], position: int) -> StepTables | None:
        """Tables of all layers of a sequence, which `can_lay_out`; None where they have none now.

        Args:
            position: true position of the next token.
        """
        del layers, position

    @property
    def page_lease(self) -> PageLease | None:
        """Pages of the entries, for a decode step in one call with others; None without pages."""
        return None

    @property
    def pages(self) -> tuple[int, int]:
        """Pages recalled so far, and how many of them had to be moved."""
        return 0, 0

    @property
    def recompute_cost(self) -> tuple[int, int]:
        """Tokens recomputed so far, and the operations this took."""
        return 0, 0

    def eviction_storage(self, rule: StepRule) -> EvictionStorage | None:
        """Storage with recorded logits, for an eviction in one call with other layers.

        `count_eviction` counts what is left. None where the layer evicts by plans.
        """
        return None

    def count_eviction(self, room: int) -> None:
        """Count the entries that the call left, with `room` rows of slack behind each head."""
        del room

    def ledger_scalars(self) -> Mapping[str, Float[Tensor, " K"]]:
        """Ledger scalars by name, as views."""
        return self.entries().scalars

    def finish_reader(self) -> None:
        """Count a layer that has attended to the entries; behind the last, append the block."""
        if self.pending is not None:
            self._append_block(replace(self.pending, readers=self.pending.readers - 1))

    def _append_block(self, block: PendingBlock) -> None:
        """Append a block, or hold it back until its readers have attended."""
        self.pending = block if block.readers else None
        if not block.readers:
            self.append(block.keys, block.values, block.positions)

    def observe(self, new: NewTokens, state: AttentionState) -> None:
        """Record the attention of appended tokens, in forms that use it later.

        Args:
            state: over the entries alone, without sinks.
        """
        del new, state

    def attend_replayed(
        self, replayed: NewTokens, answer: Callable[[], Queries]
    ) -> Float[Tensor, "H N D"]:
        """Attention of tokens that the cache read before, followed by that of new tokens.

        Args:
            replayed: the first tokens of the text.
            answer: computes the attention of the new tokens, and appends them if required.
        """
        dtype = replayed.queries.dtype
        return torch.cat([self.output(self.causal_call(replayed)(), dtype), answer()], 1)

    @property
    def _is_empty(self) -> bool:
        """True if there is no entry to attend to."""
        return not any(self.lengths)

    def record_logits(self) -> None:
        """Record the attention of the next decode step, in forms that support it.

        Recorded are the logits, for `take_logits`, or a copy of the entries that `entries` returns
        once.
        """
        return

    def take_logits(self) -> Float[Tensor, "R C"] | None:
        """Recorded logits of the newest entry's query before softmax, with biases; returned once.

        Row r holds query head r of the kv head that owns the storage row; slack is undefined. None
        if `record_logits` was not called or the entries changed since.
        """
        return None

    def record_weight_sums(self) -> None:
        """Record the attention that entries receive from the next block, where it is supported."""
        return

    def take_weight_sums(self) -> Float[Tensor, " T"] | None:
        """Recorded weights of each entry, head by head, after softmax; returned once.

        Summed over the queries of the block and the query heads that share a kv head. None if they
        were not recorded.
        """
        return None

    @abstractmethod
    def apply(self, plan: Plan) -> None:
        """Apply a plan: keep its entries; free the rest, and all slack, at once.

        Raises:
            CacheError: the plan does not fit the entries, or this form does not support it;
                nothing has changed.
        """

    @abstractmethod
    def evict(self, plan: Plan) -> None:
        """Apply a plan; rejected entries become slack for the next tokens.

        For decoding, where each new entry replaces one: no storage is reallocated.

        Raises:
            CacheError: see `apply`.
        """

    def plan_eviction(self, plan: Plan) -> PlannedEviction | None:
        """Eviction by a plan, for one call with other layers; None where `evict` has to.

        `finish_eviction` follows the call. Raises: CacheError: see `apply`.
        """
        del plan
        return None

    def finish_eviction(self, eviction: PlannedEviction, room: int) -> None:
        """Count what the call left, with `room` rows of slack behind each head, and write the
        numbers of the plan."""
        raise NotImplementedError  # forms that plan evictions have it

    def write_columns(self, columns: Mapping[str, Float[Tensor, " C"]]) -> None:
        """Replace ledger columns, given one number per row of the storage.

        Views that `entries` returned before show the new numbers.

        Raises:
            CacheError: the layer has no such column; nothing is written.
        """
        if columns:
            raise CacheError(
                f"{type(self).__name__} holds no columns, but {', '.join(columns)} was written: "
                "only managed layers of a ragged cache do."
            )

    @abstractmethod
    def allocate(self, room: int) -> None:
        """Reserve storage for at least `room` more tokens per head."""

    def reserve(self, room: int) -> None:
        """Reserve storage for `room` more tokens per head that `truncate` may take back."""
        self.allocate(room)

    @abstractmethod
    def compact(self) -> None:
        """Free all slack."""

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Drop the entries at true positions `length` and later."""

    def drop_range(self, start: int, stop: int) -> None:
        """Drop the entries at true positions [start, stop); memory is freed as in `apply`."""
        held = self.entries()
        positions = held.packed_positions()
        stays = (positions < start) | (positions >= stop)
        self.apply(Plan.from_mask(stays, held.lengths))

    @abstractmethod
    def entries(self) -> Entries:
        """All entries: views, or a copy where they are quantized."""

    @property
    def entries_copy_bytes(self) -> int:
        """Bytes that `entries` copies; 0 where it returns views."""
        return 0

    @property
    def attention_copy_bytes(self) -> int:
        """Bytes that attention copies; 0 where it reads the storage in place."""
        return 0

    @property
    def shared_nbytes(self) -> int:
        """Bytes of `nbytes` that forks of this layer, or the one it was forked from, hold too."""
        return 0

    def fork(self) -> CacheLayer:
        """Independent layer with the same entries; it may share storage, copied on write."""
        return self.adopt(self.layer, self.state())

    def separate(self) -> None:
        """Copy the entries that forks hold too into own storage without slack.

        A slow tier stays shared, and so do pages of an arena: what each layer counts as its own is
        never less than what it keeps from being freed.
        """

    @classmethod
    def is_slow_state(cls, name: str) -> bool:
        """True for tensors of a state that belong to a slow tier, which stays in host memory."""
        return name.startswith(cls.slow_state)

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Contiguous copies of all tensors needed to restore the layer, without slack."""

    @classmethod
    def restore(cls, layer: LayerSpec, state: dict[str, Tensor]) -> CacheLayer:
        """Restored layer on tensors of its own; `state` can be used again."""
        return cls.adopt(layer, {name: tensor.clone() for name, tensor in state.items()})

    @classmethod
    @abstractmethod
    def adopt(cls, layer: LayerSpec, state: dict[str, Tensor]) -> CacheLayer:
        """Restored layer that takes ownership of the tensors of `state`."""

    def restored(self, state: dict[str, Tensor]) -> CacheLayer:
        """Layer like this one from a state, which can be used again."""
        return self.restore(self.layer, state)

    def adopted(self, state: dict[str, Tensor]) -> CacheLayer:
        """Layer like this one that takes ownership of the tensors of a state."""
        return self.adopt(self.layer, state)

    @property
    def device_nbytes(self) -> int:
        """Bytes in the model's memory, without slower tiers."""
        return self.usage.device_nbytes

    @property
    @abstractmethod
    def lengths(self) -> tuple[int, ...]:
        """Entries of each kv head."""

    @property
    def full_precision_lengths(self) -> tuple[int, ...]:
        """Full-precision entries of each kv head."""
        return self.lengths
