"""Scales of key channels and levels of keys and values, for the storage `kvquant`.

Hooper et al., "KVQuant: Towards 10 Million Context Length LLM Inference with KV Cache Quantization"
(2024), arXiv:2401.18079, sections 3.1 to 3.4. Of the keys before rotation a channel's offset and
scale are such that 99 % of its numbers lie in [-1, 1]; values are normalized one by one, one
outlier of a hundred numbers aside. The levels of a layer are those of k-means on its normalized
numbers, weighed by the square of the gradient of the log-likelihood by each number.

The released code takes the loss of the text for the gradient; here it is that of tokens drawn from
the model's own distribution, as for the costs of noise of `transform`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from larder.cache.transform_tables import KEYS, TransformTables, levels_name, state_of
from larder.core.codec import LEVEL_BITS
from larder.core.errors import BadParameter
from larder.core.spec import LayerSpec
from larder.models.decoder import Decoder
from larder.models.measurements._noise_costs import GradedNumbers, graded_numbers
from larder.models.measurements.base import Granularity, SampleText, TableMeasurement
from larder.models.measurements.transform import check_layers
from larder.ops.level_coder import inner_ranges, outlier_channels, value_outliers

OUTLIERS = 0.01  # share of the numbers that levels need not reach
ROUNDS = 50  # of k-means
LEAST = 1e-6  # half range of a channel


@dataclass(frozen=True)
class KVQuantMeasurement(TableMeasurement):
    """Scales and levels on the bundled text, read in pieces.

    Args:
        tokens: length of the text.
        piece: tokens that are read together.
        sinks: first tokens of a piece that do not count.
    """

    tokens: int = 3072
    piece: int = 768
    sinks: int = 1
    granularity = Granularity.LAYER
    file_name = "kvquant.safetensors"

    def __post_init__(self) -> None:
        if not 0 <= self.sinks < self.piece <= self.tokens:
            raise BadParameter(f"kvquant needs 0 <= sinks < piece <= tokens, got {self}.")

    def measure_tables(self, decoder: Decoder, sample: SampleText) -> dict[str, Tensor]:
        check_layers(decoder.spec.managed)
        ids = sample.ids(self.tokens)
        starts = range(0, len(ids) - self.sinks, self.piece)
        texts = [ids[start : start + self.piece] for start in starts]
        read = [graded_numbers(decoder, own, self.sinks, seed) for seed, own in enumerate(texts)]
        tables = dict[int, TransformTables]()
        levels = dict[str, Tensor]()
        for layer in decoder.spec.managed:
            own = GradedNumbers.concat([text.pop(layer.index) for text in read])
            tables[layer.index] = scaled_tables(layer, own.numbers[KEYS])
            for bits in LEVEL_BITS:
                name = f"{layer.index}.{levels_name(bits)}"
                levels[name] = layer_levels(tables[layer.index], own, bits)
        return state_of(tables) | levels

    def summary(self, tables: dict[str, Tensor]) -> tuple[float, ...]:
        layers = sorted(int(n.partition(".")[0]) for n in tables if n.endswith(".forward"))
        scales = (tables[f"{layer}.forward"][KEYS].diagonal(dim1=1, dim2=2) for layer in layers)
        return tuple(float((1 / scale).mean()) for scale in scales)


def scaled_tables(layer: LayerSpec, keys: Float[Tensor, "K N D"]) -> TransformTables:
    """Tables whose components are the keys normalized by channel, and the values as they are."""
    shares = torch.tensor([OUTLIERS / 2, 1 - OUTLIERS / 2], dtype=keys.dtype)
    low, high = keys.quantile(shares, dim=1)
    half = ((high - low) / 2).clamp(min=LEAST)
    plain = torch.eye(layer.head_dim).expand(layer.kv_heads, -1, -1)
    mean = torch.stack([(high + low) / 2, torch.zeros_like(low)])
    forward = torch.stack([(1 / half).diag_embed(), plain])
    return TransformTables(forward, mean, torch.ones_like(mean), layer.radians or ())


def layer_levels(tables: TransformTables, own: GradedNumbers, bits: int) -> Float[Tensor, "2 M"]:
    """Levels of the keys and of the values of a layer."""
    (keys, values), (key_weights, value_weights) = own.numbers, own.weights
    scales = tables.forward[KEYS].diagonal(dim1=1, dim2=2)[:, None]
    normalized = ((keys - tables.mean[KEYS][:, None]) * scales).numpy()
    inner, is_inner = normalized_values(values.flatten(0, 1).numpy())
    lies_in = np.abs(normalized) <= 1
    pairs = [
        (normalized[lies_in], key_weights.numpy()[lies_in]),
        (inner[is_inner], value_weights.flatten(0, 1).numpy()[is_inner]),
    ]
    found = [weighted_levels(numbers, weights, 1 << bits) for numbers, weights in pairs]
    return torch.from_numpy(np.stack(found)).float()


def normalized_values(values: Float[ndarray, "N D"]) -> tuple[Float[ndarray, "N D"], ndarray]:
    """Values in [-1, 1], and the mask of their numbers that are no outliers."""
    channels = outlier_channels(values, value_outliers(OUTLIERS, values.shape[1]))
    middles, halves = inner_ranges(values, channels).astype(np.float32).T[..., None]
    is_inner = np.ones_like(values, dtype=bool)
    np.put_along_axis(is_inner, channels, False, 1)
    return (values - middles) / np.maximum(halves, LEAST), is_inner


def weighted_levels(
    numbers: Float[ndarray, " N"], weights: Float[ndarray, " N"], count: int
) -> Float[ndarray, " M"]:
    """Ascending centers of k-means of weighted numbers, from evenly spaced quantiles on."""
    order = np.argsort(numbers, kind="stable")
    ordered, costs = numbers[order].astype(np.float64), weights[order].astype(np.float64)
    mass, moment = (np.append(0.0, part.cumsum()) for part in (costs, costs * ordered))
    targets = (np.arange(count) + 0.5) / count * len(ordered)
    levels = ordered[targets.astype(int)]
    for _ in range(ROUNDS):
        cuts = np.searchsorted(ordered, (levels[1:] + levels[:-1]) / 2)
        edges = np.concatenate([[0], cuts, [len(ordered)]])
        masses, sums = np.diff(mass[edges]), np.diff(moment[edges])
        levels = np.sort(np.divide(sums, masses, out=levels.copy(), where=masses > 0))
    return levels


Part = KVQuantMeasurement
