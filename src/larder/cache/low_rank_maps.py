"""Learned features of a model's keys and queries (LESS), kept by fingerprint.

One file of tensors per model, under `$LARDER_HOME/<fingerprint>/`, that `larder train less` writes.
Caches share what is read from it; their own bytes do not include it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache, cached_property
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from larder.cache.table_file import read_trained, tables_path, tensors_digest
from larder.core.errors import CacheError, MissingWeights
from larder.core.spec import LayerSpec
from larder.ops.low_rank_attention import RANK, key_features, query_features


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
    def shapes(layer: LayerSpec, inner: int) -> dict[str, tuple[int, ...]]:
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
