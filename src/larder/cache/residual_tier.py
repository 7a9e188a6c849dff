"""Coded tokens of a layer: vector codes of what a prediction from the layer below leaves (AQUA-KV).

    keys of layer n      from  keys of layer n - 1
    values of layer n    from  keys of layer n, values of layer n - 1

Keys are taken before rotation. The first layer has means alone. All kv heads hold the same tokens,
so a token has one position, and one scale per transform. A tier is immutable: a change makes a new
one, so a change that fails has changed nothing.

Predictions are one file of tensors per model, under `$LARDER_HOME/<fingerprint>/`, that `larder
train aqua` writes; its bytes are counted apart from the caches that it codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from larder.cache.predictive import SIDES, Inputs, LinearPrediction
from larder.cache.table_file import read_trained, tables_path, tensors_digest
from larder.core.errors import CacheError, MissingWeights
from larder.core.spec import LayerSpec
from larder.core.types import TensorShapes
from larder.ops.vector_quantization import VectorCodes, VectorQuantizer

TIER_KEYS = ("residual.keys", "residual.key_scales", "residual.values", "residual.value_scales")
POSITIONS_KEY, COLUMNS_KEY = "residual.positions", "residual.columns"
Numbers = Float[Tensor, "N W"]
DecodedTokens = tuple[Numbers, Numbers]  # keys before rotation, and values; kv heads side by side
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
    def shapes(layer: LayerSpec, below: int) -> TensorShapes:
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


@dataclass(frozen=True)
class ResidualTier:
    """Coded tokens of one layer, in order of position.

    Args:
        positions: true positions.
        columns: ledger columns of each kv head.
    """

    keys: VectorCodes
    values: VectorCodes
    positions: Int32[Tensor, " N"]
    columns: Float[Tensor, "n K N"]

    def __len__(self) -> int:
        return len(self.positions)

    def select(self, rows: Int64[Tensor, " M"]) -> ResidualTier:
        """Tier with some of its tokens, bit for bit."""
        return ResidualTier(
            self.keys.select(rows),
            self.values.select(rows),
            self.positions[rows],
            self.columns[:, :, rows],
        )

    def joined(self, other: ResidualTier) -> ResidualTier:
        """Tier with later tokens behind its own."""
        return ResidualTier(
            self.keys.joined(other.keys),
            self.values.joined(other.values),
            torch.cat([self.positions, other.positions]),
            torch.cat([self.columns, other.columns], 2),
        )

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        codes = (self.keys.packed, self.keys.scales, self.values.packed, self.values.scales)
        named = dict(zip(TIER_KEYS, codes, strict=True))
        return named | {POSITIONS_KEY: self.positions, COLUMNS_KEY: self.columns}

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> ResidualTier:
        """Tier of tensors by name."""
        keys, key_scales, values, value_scales = (tensors[name] for name in TIER_KEYS)
        codes = VectorCodes(keys, key_scales), VectorCodes(values, value_scales)
        return ResidualTier(*codes, tensors[POSITIONS_KEY], tensors[COLUMNS_KEY])


@dataclass(frozen=True)
class ResidualCoder:
    """Encoder and decoder of the tokens of one layer.

    Args:
        predictions: of the layer.
        quantizer: of its residuals.
    """

    predictions: AquaPredictions
    quantizer: VectorQuantizer

    def encode(
        self,
        tokens: DecodedTokens,
        below: Inputs,
        positions: Int32[Tensor, " N"],
        columns: Float[Tensor, "n K N"],
    ) -> ResidualTier:
        """Codes of tokens.

        Args:
            below: decoded keys and values of the same tokens in the layer below; empty in the
                first one.

        Raises:
            CacheError: a number is not finite.
        """
        if not all(bool(side.isfinite().all()) for side in tokens):
            raise CacheError(
                "Keys and values must be finite to be quantized: run the model in bfloat16 or "
                "float32, or take exact()."
            )
        count = len(positions)
        predicted = self.predictions.keys.predicted(below[:1], count)
        keys = self.quantizer.encode(tokens[0] - predicted)
        decoded = predicted + self.quantizer.decode(keys)
        predicted = self.predictions.values.predicted(_value_inputs(decoded, below), count)
        values = self.quantizer.encode(tokens[1] - predicted)
        return ResidualTier(keys, values, positions, columns)

    def decode(self, tier: ResidualTier, below: Inputs) -> DecodedTokens:
        """Numbers of coded tokens.

        Args:
            below: as in `encode`.
        """
        count = len(tier)
        keys = self.predictions.keys.predicted(below[:1], count) + self.quantizer.decode(tier.keys)
        predicted = self.predictions.values.predicted(_value_inputs(keys, below), count)
        return keys, predicted + self.quantizer.decode(tier.values)

    def nothing(self, columns: Float[Tensor, "n K 0"]) -> ResidualTier:
        """Tier of no token."""
        codes = self.quantizer.nothing(columns.device)
        return ResidualTier(codes, codes, columns.new_zeros(0, dtype=torch.int32), columns)


def _value_inputs(keys: Numbers, below: Inputs) -> Inputs:
    return (keys, *below[1:]) if below else ()
