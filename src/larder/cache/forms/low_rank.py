"""Low-rank layer: entries under a budget, and the sum of all that plans rejected.

    ragged   entries that a budget governs
    state    of each kv head, 8 (D + 1) numbers, whatever the number of rejected entries

Dong et al., "Get More with LESS: Synthesizing Recurrence with KV Cache Compression for Efficient
LLM Inference" (2024), arXiv:2402.09398: learned features of its key add a rejected entry to the
state. Attention to both parts is merged by log-sum-exp, in every pass. Entries that a plan merges
into others are not added. A sum cannot be taken apart: after `truncate` and `drop_range` the state
still has what was rejected before.

Learned features are one file of tensors per model, under `$LARDER_HOME/<fingerprint>/`, that
`larder train less` writes. Caches share what is read from it; their own bytes do not include it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache, cached_property, partial
from pathlib import Path

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.cache.forms._composite import RecoverableLayer
from larder.cache.forms.base import AttentionCall, AttentionState
from larder.cache.new_tokens import NewTokens
from larder.cache.offload.slow_tier import rejected_entries
from larder.cache.spec import CacheSpec, LayerOptions, text_of, text_tensor
from larder.cache.table_file import read_trained, tables_path, tensors_digest
from larder.cache.validation import check_kept
from larder.core.errors import CacheError, MissingWeights
from larder.core.observation import Entries
from larder.core.plan import Plan
from larder.core.spec import LayerSpec, ModelSpec
from larder.core.types import Queries, TensorShapes
from larder.ops.low_rank_attention import (
    RANK,
    STATE_DTYPE,
    key_features,
    low_rank_attention,
    low_rank_state,
    query_features,
)
from larder.ops.packing import heads_of_packed, starts_of, storage_rows

STATE_KEY, MAPS_KEY = "low_rank.state", "low_rank.maps"  # names in a state


@dataclass(frozen=True, eq=False)
class LowRankMaps:
    """Features of the keys and queries of one layer; keys and queries are rotated ones.

    Args:
        query_hidden, query_outer: perceptron of each query head.
        key_hidden, key_outer: perceptron of each kv head.
        key_scale: factor on each output for keys.
        interaction: share of every output for keys in every other.
    """

    query_hidden: Float[Tensor, "H D inner"]
    query_outer: Float[Tensor, "H inner rank"]
    key_hidden: Float[Tensor, "K D inner"]
    key_outer: Float[Tensor, "K inner rank"]
    key_scale: Float[Tensor, "K 1 rank"]
    interaction: Float[Tensor, "K rank rank"]

    def queries(self, queries: Float[Tensor, "H Q D"]) -> Float[Tensor, "H Q rank"]:
        """Features of queries."""
        return query_features(queries, self.query_hidden, self.query_outer)

    def keys(self, keys: Float[Tensor, "K N D"]) -> Float[Tensor, "K N rank"]:
        """Features of keys."""
        return key_features(keys, self.key_hidden, self.key_outer, self.key_scale, self.interaction)

    @cached_property
    def digest(self) -> str:
        """Short digest of the numbers, which identifies a training."""
        return tensors_digest(self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Tensors by name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def on(self, device: torch.device) -> LowRankMaps:
        """Copy of the maps on a device."""
        if self.query_hidden.device == device:
            return self
        return LowRankMaps(**{name: tensor.to(device) for name, tensor in self.tensors().items()})

    @staticmethod
    def shapes(layer: LayerSpec, inner: int) -> TensorShapes:
        """Shape of each tensor of a layer.

        Args:
            inner: hidden size of the perceptrons.
        """
        heads, kv_heads, size = layer.query_heads, layer.kv_heads, layer.head_dim
        return {
            "query_hidden": (heads, size, inner),
            "query_outer": (heads, inner, RANK),
            "key_hidden": (kv_heads, size, inner),
            "key_outer": (kv_heads, inner, RANK),
            "key_scale": (kv_heads, 1, RANK),
            "interaction": (kv_heads, RANK, RANK),
        }

    @staticmethod
    def load(layer: LayerSpec, index: int, fingerprint: str) -> LowRankMaps:
        """Maps of a layer, shared by all caches of the model.

        Args:
            index: number of the layer among the managed ones.

        Raises:
            MissingWeights: the model has none.
            CacheError: they have other shapes.
            ModelError: they are of another model.
        """
        path = tables_path(fingerprint, "less")
        try:
            maps = _read(path, path.stat().st_mtime_ns, index, fingerprint)
        except (OSError, KeyError):
            raise MissingWeights(
                f"{path} has no features of layer {layer.index}: make them with `larder train "
                "less`, on the device and dtype that the model runs in, or take drop()."
            ) from None
        wanted = LowRankMaps.shapes(layer, maps.query_hidden.shape[-1])
        shapes = {name: tuple(tensor.shape) for name, tensor in maps.tensors().items()}
        if shapes != wanted:
            raise CacheError(
                f"The features of layer {layer.index} in {path} have shapes {shapes}, but this "
                f"model needs {wanted}: make them with `larder train less`."
            )
        return maps


@cache
def _read(path: Path, modified: int, index: int, fingerprint: str) -> LowRankMaps:
    """Maps of one layer from a file as it was at a time.

    Raises:
        KeyError: the file has no such layer.
    """
    names = [f"layers.{index}.{each.name}" for each in fields(LowRankMaps)]
    return LowRankMaps(
        *(tensor.float() for tensor in read_trained(path, fingerprint, names).values())
    )


class LowRankLayer(RecoverableLayer):
    """Per-head lengths; rejected entries are added to a state of constant size.

    Args:
        maps: features of keys and queries.
        source: number of the layer among the managed ones, and fingerprint of the model, by which
            a saved layer finds its maps.
    """

    can_be_shared = False
    has_public_name = False

    def __init__(
        self,
        layer: LayerSpec,
        options: LayerOptions,
        maps: LowRankMaps,
        source: tuple[int, str] = (0, ""),
    ) -> None:
        super().__init__(layer, options)
        self._maps, self._source = maps.on(options.device), source
        shape = layer.kv_heads, RANK, layer.head_dim + 1
        self._state = torch.zeros(shape, dtype=STATE_DTYPE, device=options.device)
        self._has_state = False
        self._count_bytes()

    @classmethod
    def create(cls, layer: LayerSpec, model: ModelSpec, spec: CacheSpec) -> LowRankLayer:
        index = [each.index for each in model.managed].index(layer.index)
        maps = LowRankMaps.load(layer, index, model.fingerprint)
        source = index, model.fingerprint
        return cls(layer, LayerOptions(model.dtype, model.device, spec), maps, source)

    @property
    def low_rank_state(self) -> Float[Tensor, "K rank E"]:
        """Sums over the rejected entries of each kv head."""
        return self._state

    def truncate(self, length: int) -> None:
        self._ragged.truncate(length)

    def drop_range(self, start: int, stop: int) -> None:
        self._ragged.drop_range(start, stop)
        self.replaced_bytes = self._ragged.replaced_bytes

    def state(self) -> dict[str, Tensor]:
        index, fingerprint = self._source
        text = f"{index} {self._maps.digest} {fingerprint}"
        own = {STATE_KEY: self._state.clone(), MAPS_KEY: text_tensor(text)}
        return self._ragged.state() | own

    @classmethod
    def adopt(cls, layer: LayerSpec, state: dict[str, Tensor]) -> LowRankLayer:
        index, digest, fingerprint = text_of(state[MAPS_KEY]).split(" ", 2)
        source = int(index), fingerprint
        maps = LowRankMaps.load(layer, *source)
        if maps.digest != digest:
            raise CacheError(
                f"The state of layer {layer.index} was summed with features {digest}, but those "
                f"of the model are {maps.digest} now: build the cache again."
            )
        store = cls(layer, LayerOptions.of_state(state), maps, source)
        store._adopt_ragged(state)
        store._state = state[STATE_KEY]
        store._has_state = bool(store._state.any())
        store._count_bytes()
        return store

    def _like(self) -> LowRankLayer:
        copy = LowRankLayer(self.layer, self.options, self._maps, self._source)
        copy._state, copy._has_state = self._state, self._has_state
        return copy

    def _copy_tensors(self) -> None:
        self._state = self._state.clone()

    def own_tensors(self) -> tuple[Tensor, ...]:
        return (self._state,)

    @property
    def _is_empty(self) -> bool:
        return not any(self.lengths) and not self._has_state

    def attention_calls(self, new: NewTokens) -> list[AttentionCall]:
        [entries] = self._ragged.attention_calls(new)
        return [partial(self._attend_both, entries, new.queries)] if self._has_state else [entries]

    def _attend_both(self, entries: AttentionCall, queries: Queries) -> AttentionState:
        """Attention to entries and state, merged with fewer calls than any number of parts."""
        out, lse = entries()
        summed, weight = low_rank_attention(self._maps.queries(queries), self._state)
        share = torch.sigmoid(weight - lse).unsqueeze(-1)
        return out.lerp(summed, share), torch.logaddexp(lse, weight)

    def _carry_out(self, plan: Plan, change: Callable[[Plan], None]) -> None:
        check_kept(plan, self.lengths)
        held = self._ragged.entries()
        rejected = rejected_entries(plan, sum(held.lengths))
        if len(plan.folds):
            rejected = rejected[~torch.isin(rejected, plan.folds.sources.cpu())]
        added = self._state_of(rejected, held) if len(rejected) else None
        has_weight = self._has_state or (added is not None and bool(added.any()))
        # Forks share the former one.
        summed = self._state if added is None else self._state + added
        change(plan)  # the last that can fail
        self.replaced_bytes = self._ragged.replaced_bytes
        self._state, self._has_state = summed, has_weight

    def _state_of(self, packed: Int64[Tensor, " G"], entries: Entries) -> Float[Tensor, "K rank E"]:
        """State of some packed entries; heads with fewer of them are filled up with zeros."""
        heads = heads_of_packed(packed, entries.lengths)
        counts = torch.bincount(heads, minlength=len(entries.lengths))
        offsets = torch.arange(len(packed)) - starts_of(counts)[heads]
        rows = storage_rows(packed, *entries.layout).to(entries.keys.device)
        keys, values = (
            own.new_zeros(len(counts), int(counts.max()), own.shape[1]).index_put_(
                (heads, offsets), own[rows]
            )
            for own in (entries.keys, entries.values)
        )
        return low_rank_state(self._maps.keys(keys), values)


Part = LowRankLayer
