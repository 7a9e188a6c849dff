"""Recomputed layer: evicted entries are recomputed from residuals or token ids.

    fast     ragged part under a budget
    source   by position, one row per token read: a residual, an id, or nothing
    gone     per kv head, the positions that plans rejected

The decoder recomputes evicted entries for attention: it projects residuals, a block at a time, or
reads the text again and lends this layer the keys and values. Recomputed entries are not stored.
Attention to both parts is merged by log-sum-exp, so it covers every token. If the source of one
layer serves all layers, the others have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.cache.forms._composite import RecoverableLayer
from larder.cache.forms.base import AttentionCall, CacheLayer
from larder.cache.new_tokens import NewTokens
from larder.cache.offload.slow_tier import rejected_entries
from larder.cache.spec import CacheSpec, LayerOptions, saved_spec_text, text_tensor
from larder.cache.validation import check_kept, check_single_precision
from larder.core.errors import CacheError
from larder.core.plan import Plan
from larder.core.spec import LayerSpec, RecomputeSpec
from larder.core.types import Positions, Queries
from larder.ops.attention import ragged_attention
from larder.ops.packing import heads_of_packed, starts_of

BLOCK_TOKENS = 512  # tokens recomputed at once
SOURCE_KEY, EVICTED_KEY, LENGTHS_KEY, SPEC_KEY = (
    "source",
    "gone",
    "gone.lengths",
    "manner",
)  # names in a state

# Keys and values [K, N, D] of a layer from N source rows and their true positions.
RecomputedKV = Float[Tensor, "K B D"]
ProjectKV = Callable[[int, Tensor, Positions], tuple[RecomputedKV, RecomputedKV]]


class RecomputedLayer(RecoverableLayer):
    """Layer that loses no entry and stores few."""

    supports = frozenset({"ledger", "rebuilding"})
    requires = frozenset({"rebuilding"})
    can_be_shared = False
    spans_layers = True

    def __init__(self, layer: LayerSpec, options: LayerOptions) -> None:
        super().__init__(layer, options)
        assert options.spec.rebuilding is not None  # required
        self.rebuilding = options.spec.rebuilding
        self.project: ProjectKV | None = None  # while a model runs
        self.tokens = self.operations = 0  # recomputed tokens so far, and their operations
        self._source = torch.empty(0, 0, dtype=options.dtype, device=options.device)
        self._evicted = [torch.empty(0, dtype=torch.int64) for _ in range(layer.kv_heads)]
        self._replayed: tuple[RecomputedKV, RecomputedKV] | None = None
        self._count_bytes()

    @classmethod
    def num_dense_layers(cls, spec: CacheSpec) -> int:
        return 0 if spec.rebuilding is None else spec.rebuilding.depth

    @property
    def recompute_cost(self) -> tuple[int, int]:
        return self.tokens, self.operations

    def append_source(self, source: Tensor) -> None:
        """Append the source rows of the tokens read last."""
        self._source = torch.cat([self._source, source]) if len(self._source) else source.clone()
        self._count_bytes()

    def attend_replayed(
        self, replayed: NewTokens, answer: Callable[[], Queries]
    ) -> Float[Tensor, "H N D"]:
        """Attention of replayed tokens, whose keys and values are lent to the tokens after them."""
        self._replayed = replayed.keys, replayed.values
        self.tokens += len(replayed)
        before = torch.zeros_like(replayed.queries)
        if self.layer.index >= self.rebuilding.depth:  # outputs are unused before that layer
            before = self.output(self.causal_call(replayed)(), before.dtype)
        try:
            return torch.cat([before, answer()], 1)
        finally:
            self._replayed = None

    def truncate(self, length: int) -> None:
        self._ragged.truncate(length)
        self._source = self._source[:length].clone()
        self._evicted = [positions[positions < length] for positions in self._evicted]
        self._count_bytes()

    def drop_range(self, start: int, stop: int) -> None:
        """Drop entries at true positions [start, stop), evicted ones included.

        Raises:
            CacheError: the recomputation reads the whole text again, with these tokens.
        """
        if self.rebuilding.rereads:
            raise CacheError(
                f"Tokens [{start}, {stop}) cannot be dropped: held="
                f"{self.rebuilding.source.value!r} reads the text again with all tokens. Use "
                "recompute(held='every')."
            )
        self._ragged.drop_range(start, stop)
        self.replaced_bytes = self._ragged.replaced_bytes
        self._evicted = [
            positions[(positions < start) | (positions >= stop)] for positions in self._evicted
        ]
        self._count_bytes()

    @property
    def evicted(self) -> tuple[Int64[Tensor, " _"], ...]:
        """Positions of evicted entries per kv head."""
        return tuple(self._evicted)

    @property
    def reread_tokens(self) -> int:
        """Number of first tokens to read again for all evicted entries."""
        return max(
            (int(positions.max()) + 1 for positions in self._evicted if len(positions)), default=0
        )

    @property
    def source(self) -> Tensor:
        """Source row of each token, by position; empty if another layer holds them."""
        return self._source

    @property
    def attention_copy_bytes(self) -> int:
        block = min(BLOCK_TOKENS, self.reread_tokens)
        return 2 * self.layer.kv_heads * block * self.layer.head_dim * self.entries().keys.itemsize

    def state(self) -> dict[str, Tensor]:
        state = self._ragged.state() | {
            SOURCE_KEY: self._source.clone(),
            EVICTED_KEY: torch.cat(self._evicted),
        }
        state |= {LENGTHS_KEY: torch.tensor([len(positions) for positions in self._evicted])}
        return state | {SPEC_KEY: text_tensor(self.rebuilding.to_text())}

    @classmethod
    def adopt(cls, layer: LayerSpec, state: dict[str, Tensor]) -> RecomputedLayer:
        text = saved_spec_text(state, SPEC_KEY, layer, "recompute")
        spec = CacheSpec("rebuilt", rebuilding=RecomputeSpec.from_text(text))
        store = cls(layer, LayerOptions.of_state(state, spec))
        store._adopt_ragged(state)
        store._source = state[SOURCE_KEY]
        store._evicted = list(state[EVICTED_KEY].cpu().split(state[LENGTHS_KEY].tolist()))
        store._count_bytes()
        return store

    def _like(self) -> RecomputedLayer:
        copy = RecomputedLayer(self.layer, self.options)
        copy._source, copy._evicted = self._source, self._evicted
        copy._count_bytes()
        return copy

    def _copy_tensors(self) -> None:
        self._source, self._evicted = (
            self._source.clone(),
            [positions.clone() for positions in self._evicted],
        )
        self._count_bytes()

    def own_tensors(self) -> tuple[Tensor, ...]:
        return (self._source, *self._evicted)

    @property
    def _is_empty(self) -> bool:
        return not any(self.lengths) and not any(map(len, self._evicted))

    def attention_calls(self, new: NewTokens) -> Iterator[AttentionCall]:
        yield from self._ragged.attention_calls(new)
        for positions, keys, values in self._blocks():
            layout, numbers = self._evicted_rows(positions, keys, values)
            call = partial(ragged_attention, new.queries, *numbers, *layout, self.layer.scaling)
            yield partial(call, softcap=self.layer.softcap)

    def _blocks(self) -> Iterator[tuple[Int64[Tensor, " B"], RecomputedKV, RecomputedKV]]:
        """Blocks of recomputed keys and values of all evicted entries, with their positions."""
        wanted = torch.unique(torch.cat(self._evicted))
        if not len(wanted):
            return
        if self._replayed is not None:
            yield torch.arange(self._replayed[0].shape[1]), *self._replayed
            return
        if self.project is None or not len(self._source):
            raise CacheError(
                f"Layer {self.layer.index} must recompute {len(wanted)} evicted tokens, but has no "
                "model to do so: attend through a decoder."
            )
        for positions in wanted.split(BLOCK_TOKENS):
            there = positions.to(self._source.device)
            self.tokens += len(positions)
            yield positions, *self.project(self.layer.index, self._source[there], there)

    def _evicted_rows(
        self, positions: Int64[Tensor, " B"], keys: RecomputedKV, values: RecomputedKV
    ) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
        """Starts and lengths, keys and values of the tokens that are evicted from each kv head."""
        rows = [
            torch.nonzero(torch.isin(positions, evicted)).flatten() for evicted in self._evicted
        ]
        lengths = torch.tensor([len(row) for row in rows])
        flat = torch.cat([row + head * len(positions) for head, row in enumerate(rows)])
        flat = flat.to(keys.device)
        held = [part.flatten(0, 1)[flat].contiguous() for part in (keys, values)]
        return (starts_of(lengths), lengths), held

    def _carry_out(self, plan: Plan, change: Callable[[Plan], None]) -> None:
        """Record the positions that a plan rejects, then apply it to the ragged part."""
        check_single_precision(plan)
        if len(plan.folds):
            raise CacheError(
                f"A rebuilt cache recomputes rejected entries, but a plan merges {len(plan.folds)} "
                "of them: use a ragged cache for plans that merge."
            )
        check_kept(plan, self.lengths)
        held = self._ragged.entries()
        packed = rejected_entries(plan, sum(held.lengths))
        if len(packed) and self.layer.index < self.rebuilding.depth:
            raise CacheError(
                f"Layer {self.layer.index} lies before the residual of layer "
                f"{self.rebuilding.depth}, but a plan rejects {len(packed)} of its entries: leave "
                "such layers out of plans."
            )
        heads = heads_of_packed(packed, held.lengths)
        positions = held.packed_positions().cpu()[packed].long()
        rejected = [positions[heads == head] for head in range(len(held.lengths))]
        change(plan)
        self.replaced_bytes = self._ragged.replaced_bytes
        self._evicted = [torch.cat(pair) for pair in zip(self._evicted, rejected, strict=True)]
        self._count_bytes()


def recomputed_layers(layers: Sequence[CacheLayer]) -> list[RecomputedLayer]:
    """Layers with recomputed entries."""
    return [store for store in layers if isinstance(store, RecomputedLayer)]


Part = RecomputedLayer
