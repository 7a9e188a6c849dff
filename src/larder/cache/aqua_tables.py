"""Predictions of AQUA-KV: keys and values of a layer from those of the layer below, per model.

    keys of layer n      from  keys of layer n - 1
    values of layer n    from  keys of layer n, values of layer n - 1

Keys are taken before rotation. The first layer has means alone. One file of tensors per model,
under `$LARDER_HOME/<fingerprint>/`, that `larder train aqua` writes; its bytes are counted apart
from the caches that it codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import torch
from torch import Tensor

from larder.cache.predictive import SIDES, LinearPrediction
from larder.cache.table_file import read_trained, tables_path, tensors_digest
from larder.core.errors import CacheError, MissingWeights
from larder.core.spec import LayerSpec

PARTS = ("weight", "bias")


@dataclass(frozen=True, eq=False)
class AquaPredictions:
    """Predictions of the keys and values of one layer."""

    keys: LinearPrediction
    values: LinearPrediction

    @cached_property
    def digest(self) -> str:
        """Short digest of the numbers, which identifies a training."""
        return tensors_digest(self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Tensors by name."""
        sides = zip(SIDES, (self.keys, self.values), strict=True)
        named = [(side, (maps.weights, maps.bias)) for side, maps in sides]
        return {
            f"{side}.{part}": tensor
            for side, pair in named
            for part, tensor in zip(PARTS, pair, strict=True)
        }

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> AquaPredictions:
        """Predictions from tensors by name.

        Raises:
            KeyError: one is missing.
        """
        sides = [LinearPrediction(*(tensors[f"{s}.{part}"] for part in PARTS)) for s in SIDES]
        return AquaPredictions(*sides)

    @staticmethod
    def shapes(layer: LayerSpec, below: int) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor of a layer.

        Args:
            below: numbers of the keys of a token in the layer below; 0 in the first layer.
        """
        width = layer.kv_heads * layer.head_dim
        rows = below, below + width if below else 0
        weights = {f"{s}.weight": (row, width) for s, row in zip(SIDES, rows, strict=True)}
        return weights | {f"{side}.bias": (width,) for side in SIDES}

    @staticmethod
    def load(
        layer: LayerSpec, index: int, fingerprint: str, device: torch.device
    ) -> AquaPredictions:
        """Predictions of a layer of a trained model; caches of a model on a device share them.

        Args:
            index: of the layer among the managed ones.

        Raises:
            MissingWeights: there are none.
            CacheError: they have other shapes, or the rotary embedding is unknown.
            ModelError: they are of another model.
        """
        if layer.radians is None or layer.latent_rank:
            raise CacheError(
                f"Layer {layer.index} has latents, or a rotary embedding unknown to Larder, so its "
                "keys cannot be unrotated: use a storage other than aqua()."
            )
        path = tables_path(fingerprint, "aqua")
        try:
            found = _read(path, path.stat().st_mtime_ns, index, fingerprint, device)
        except (OSError, KeyError):
            raise MissingWeights(
                f"{path} has no predictions of layer {layer.index}: make them with "
                "`larder train aqua`, or choose another storage."
            ) from None
        shapes = {name: tuple(tensor.shape) for name, tensor in found.tensors().items()}
        below = sum(shapes["keys.weight"][:1]) or layer.kv_heads * layer.head_dim
        wanted = AquaPredictions.shapes(layer, below if index else 0)
        if shapes != wanted:
            raise CacheError(
                f"The predictions of layer {layer.index} in {path} have shapes {shapes}, but this "
                f"model needs {wanted}: make them with `larder train aqua`."
            )
        return found


@cache
def _read(
    path: Path, modified: int, index: int, fingerprint: str, device: torch.device
) -> AquaPredictions:
    """Predictions of one layer from a file as it was at a time.

    Raises:
        KeyError: the file has no such layer.
    """
    names = [f"{side}.{part}" for side in SIDES for part in PARTS]
    found = read_trained(path, fingerprint, [f"layers.{index}.{name}" for name in names])
    tensors = [tensor.float().to(device) for tensor in found.values()]
    return AquaPredictions.of(dict(zip(names, tensors, strict=True)))
