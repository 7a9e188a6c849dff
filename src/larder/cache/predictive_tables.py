"""Prediction of a layer's keys and values from the layer below, per model, kept by fingerprint.

    keys of layer n      from  keys and values of layer n - 1
    values of layer n    from  keys of layer n, keys and values of layer n - 1
    residual             x forward  ->  components, of all kv heads together

Keys are taken before rotation. One file of tensors per model, under `$LARDER_HOME/<fingerprint>/`,
that `larder train predictive` writes. Its bytes are counted apart from the caches that it codes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from larder.cache.table_file import TrainedTables

SIDES = ("keys", "values")
PARTS = ("weights", "bias", "forward", "deviation")
STORED_DTYPE = torch.bfloat16  # of weights and transforms

Numbers = Float[Tensor, "N W"]
Inputs = Sequence[Float[Tensor, "N _"]]  # decoded, that a prediction is made from


@dataclass(frozen=True, eq=False)
class LinearPrediction:
    """Linear prediction of the keys or values of one layer, all kv heads side by side.

    Args:
        weights, bias: as in `SidePrediction`.
    """

    weights: Float[Tensor, "I W"]
    bias: Float[Tensor, " W"]

    def predicted(self, inputs: Inputs, count: int) -> Numbers:
        """Prediction of `count` tokens from decoded inputs."""
        found = self.bias.expand(count, -1)
        first = 0
        for part in inputs:
            found = torch.addmm(found, part, self.weights[first : first + part.shape[1]])
            first += part.shape[1]
        return found


@dataclass(frozen=True, eq=False)
class SidePrediction:
    """Prediction of the keys or values of one layer, all kv heads side by side.

    Args:
        weights: of the inputs, which are laid side by side; no rows where nothing is below.
        forward: columns are the directions of the residual's components.
        deviation: of each component on the training text.
    """

    weights: Float[Tensor, "I W"]
    bias: Float[Tensor, " W"]
    forward: Float[Tensor, "W W"]
    deviation: Float[Tensor, " W"]

    @cached_property
    def inverse(self) -> Float[Tensor, "W W"]:
        """Matrix that turns components back."""
        return torch.linalg.inv(self.forward.double()).float().contiguous()

    def predicted(self, inputs: Inputs, count: int) -> Numbers:
        """Prediction of `count` tokens from decoded inputs."""
        return LinearPrediction(self.weights, self.bias).predicted(inputs, count)

    def components(self, numbers: Numbers, predicted: Numbers) -> Numbers:
        """Components of what the prediction leaves."""
        return (numbers - predicted) @ self.forward

    def restored(self, components: Numbers, predicted: Numbers) -> Numbers:
        """Numbers of dequantized components."""
        return torch.addmm(predicted, components, self.inverse)


@dataclass(frozen=True, eq=False)
class PredictiveTables(TrainedTables):
    """Predictions of all managed layers of a model, in order.

    Args:
        layers: of keys and values.
        radians: RoPE frequencies of each layer.
    """

    layers: tuple[tuple[SidePrediction, SidePrediction], ...]
    radians: tuple[Float[Tensor, " half"], ...]
    method: ClassVar[str] = "predictive"
    content: ClassVar[str] = "predictions"

    @property
    def nbytes(self) -> int:
        """Bytes of the file's tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of the file, by name."""
        found = dict[str, Tensor]()
        for place, (pair, radians) in enumerate(zip(self.layers, self.radians, strict=True)):
            found[f"{place}.radians"] = radians.float().clone()  # may be shared by layers
            for side, own in zip(SIDES, pair, strict=True):
                for part in PARTS:
                    number = getattr(own, part)
                    number = number if part == "deviation" else number.to(STORED_DTYPE)
                    found[f"{place}.{side}.{part}"] = number.contiguous()
        return found

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> PredictiveTables:
        count = sum(name.endswith(".radians") for name in tensors)
        pairs = [
            [
                SidePrediction(*(tensors[f"{place}.{side}.{part}"].float() for part in PARTS))
                for side in SIDES
            ]
            for place in range(count)
        ]
        radians = tuple(tensors[f"{place}.radians"] for place in range(count))
        return cls(tuple((keys, values) for keys, values in pairs), radians)
