"""Coded tokens of a layer: vector codes of what a prediction from the layer below leaves.

All kv heads hold the same tokens, so a token has one position, and one scale per transform. A tier
is immutable: a change makes a new one, so a change that fails has changed nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from larder.cache.aqua_tables import AquaPredictions
from larder.cache.predictive import Inputs
from larder.core.errors import CacheError
from larder.ops.vector_quantization import VectorCodes, VectorQuantizer

TIER_KEYS = ("residual.keys", "residual.key_scales", "residual.values", "residual.value_scales")
POSITIONS_KEY, COLUMNS_KEY = "residual.positions", "residual.columns"

Numbers = Float[Tensor, "N W"]
DecodedTokens = tuple[Numbers, Numbers]  # keys before rotation, and values; kv heads side by side


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
