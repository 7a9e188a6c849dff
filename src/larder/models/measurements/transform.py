"""Transforms of keys and values: means, directions and deviations per layer and kv head.

For the storage `transform`. Keys are taken before rotation. The metric of keys is the second moment
of the queries of the group, before rotation, turned by the distances 0 to `reach`; that of values
is the sum of Wo Wo' over the group. Vectors are multiplied by the fourth root of the metric, scaled
to a mean of 1 on its diagonal, and rotated to the eigenvectors of their covariance. Last, the
components of keys and of values of each head are scaled so that noise in a component costs the same
divergence everywhere (`_noise_costs`): all have one step, and values of the first layers need a
finer one than those of the last by an order of magnitude.

Its numbers are one per layer, the mean deviation of the components; the transforms are in a file of
tensors beside them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from larder.cache.transform_tables import KEYS, VALUES, TransformTables, state_of
from larder.core.codec import RopeStage
from larder.core.errors import BadParameter, ModelError
from larder.core.spec import LayerSpec
from larder.core.types import TokenIds
from larder.models.attention_backend import AttentionInputs, CausalAttention
from larder.models.decoder import Decoder
from larder.models.introspection import weight_inputs
from larder.models.measurements.base import Granularity, SampleText, TableMeasurement
from larder.ops.rope import rotate

RIDGE = 1e-4  # share of the mean of a spectrum that is added to it
DISTANCES = 64  # distances that the metric of keys is averaged over
OUTPUT = "projection"


@dataclass(frozen=True)
class TransformMeasurement(TableMeasurement):
    """Transforms on the bundled text, read in pieces.

    Args:
        tokens: length of the text.
        piece: tokens that are read together.
        sinks: first tokens of a piece that do not count.
        reach: longest distance of a query.
        cost_tokens: of the text, that costs of noise are measured on; 0 leaves scales as they are.
        cost_piece: tokens that are read together for them.
    """

    tokens: int = 6144
    piece: int = 1024
    sinks: int = 4
    reach: int = 1024
    cost_tokens: int = 1536
    cost_piece: int = 768
    granularity = Granularity.LAYER
    file_name = "transform.safetensors"
    companions = ("transform_bits",)
    metric: ClassVar[float] = 0.5  # power of the metrics
    rope: ClassVar[RopeStage] = RopeStage.BEFORE  # keys that are transformed

    def __post_init__(self) -> None:
        is_fit = 0 <= self.sinks < min(self.piece, self.cost_piece) and self.piece <= self.tokens
        if not is_fit or self.reach < 1 or not 0 <= self.cost_tokens <= self.tokens:
            raise BadParameter(
                "transform needs 0 <= sinks < piece <= tokens, sinks < cost_piece, "
                f"0 <= cost_tokens <= tokens and reach >= 1, got {self}."
            )

    def measure_tables(self, decoder: Decoder, sample: SampleText) -> dict[str, Tensor]:
        check_layers(decoder.spec.managed)
        layers = {layer.index: self._seen(layer) for layer in decoder.spec.managed}
        moments = {index: LayerMoments.nothing(layer) for index, layer in layers.items()}

        def show(inputs: AttentionInputs) -> None:
            if inputs.layer in moments:
                moments[inputs.layer].add(inputs, self.sinks)

        ids = sample.ids(self.tokens)
        for start in range(0, len(ids) - self.sinks, self.piece):
            decoder.forward_uncached(ids[start : start + self.piece], CausalAttention(show))
        outputs = weight_inputs(decoder.attentions, tuple(layers.values()), [OUTPUT])
        plain = {
            index: transforms(
                moments[index], outputs[index][OUTPUT].float(), self.reach, self.metric
            )
            for index in layers
        }
        return state_of(self._scaled(decoder, ids[: self.cost_tokens], plain))

    def _scaled(
        self, decoder: Decoder, ids: TokenIds, plain: dict[int, TransformTables]
    ) -> dict[int, TransformTables]:
        """Tables with components in which noise costs the same."""
        from larder.models.measurements._noise_costs import cost_weights, noise_costs

        starts = range(0, len(ids) - self.sinks, self.cost_piece)
        texts = [ids[start : start + self.cost_piece] for start in starts]
        if not texts:
            return plain
        weights = cost_weights(noise_costs(decoder, texts, plain, self.sinks))
        return {index: table.scaled(weights[index]) for index, table in plain.items()}

    def _seen(self, layer: LayerSpec) -> LayerSpec:
        """Layer whose keys need no turning back where rotated ones are transformed."""
        if self.rope is RopeStage.BEFORE:
            return layer
        return replace(layer, radians=(0.0,) * len(layer.radians or ()))

    def summary(self, tables: dict[str, Tensor]) -> tuple[float, ...]:
        names = sorted((n for n in tables if n.endswith(".deviation")), key=_layer_number)
        return tuple(float(tables[name].mean()) for name in names)


class RotatedTransform(TransformMeasurement):
    """Keys and queries behind their rotary embedding, for `transform(rope="after")`."""

    file_name = "transform_after_rope.safetensors"
    companions = ()
    rope = RopeStage.AFTER


class FullMetricTransform(TransformMeasurement):
    """Vectors weighed by the square root of the metric, for `transform(metric=1)`."""

    file_name = "transform_full_metric.safetensors"
    companions = ()
    metric = 1.0


class UnweightedTransform(TransformMeasurement):
    """Eigenvectors of plain covariances, for `transform(metric=0)`."""

    file_name = "transform_unweighted.safetensors"
    companions = ()
    metric = 0.0


def _layer_number(name: str) -> int:
    return int(name.partition(".")[0])


class LayerMoments:
    """First and second moments of queries, keys and values of a layer, before rotation.

    Args:
        sums: of keys and values, float64 [2, K, D].
        products: of queries, keys and values with themselves, float64 [3, K, D, D].

    Attributes:
        counts: tokens of queries times their group, and of the others.
    """

    def __init__(self, layer: LayerSpec, sums: Tensor, products: Tensor) -> None:
        self.layer, self.sums, self.products = layer, sums, products
        self.counts = [0, 0]

    @staticmethod
    def nothing(layer: LayerSpec) -> LayerMoments:
        """Moments of no token."""
        heads, size = layer.kv_heads, layer.head_dim
        sums = torch.zeros(2, heads, size, dtype=torch.float64)
        return LayerMoments(layer, sums, torch.zeros(3, heads, size, size, dtype=torch.float64))

    def add(self, inputs: AttentionInputs, sinks: int) -> None:
        """Add the tokens of one call, the first `sinks` left out."""
        positions = torch.arange(inputs.keys.shape[1], device=inputs.keys.device)
        radians = torch.tensor(self.layer.radians, device=positions.device)
        sides = [
            rotate(part.float(), -positions, radians) for part in (inputs.queries, inputs.keys)
        ]
        rows = [part[:, sinks:].double().cpu() for part in (*sides, inputs.values.float())]
        groups = rows[0].unflatten(0, (self.layer.kv_heads, -1)).flatten(1, 2)
        for index, part in enumerate((groups, rows[1], rows[2])):
            self.products[index] += part.transpose(1, 2) @ part
        self.sums[KEYS] += rows[1].sum(1)
        self.sums[VALUES] += rows[2].sum(1)
        self.counts[0] += groups.shape[1]
        self.counts[1] += rows[1].shape[1]

    def metrics(
        self, head: int, outputs: Float[Tensor, "H D N"], reach: int
    ) -> tuple[Float[Tensor, "D D"], Float[Tensor, "D D"]]:
        """Second moments that weigh errors of the keys and of the values of a head."""
        group = self.layer.group
        head_outputs = outputs[head * group : (head + 1) * group].double().cpu()
        queries = self.products[0, head] / self.counts[0]
        rotated = turned_moment(queries, self.layer.radians or (), reach)
        return rotated, (head_outputs @ head_outputs.transpose(1, 2)).sum(0)


def transforms(
    moments: LayerMoments, outputs: Float[Tensor, "H D N"], reach: int, power: float
) -> TransformTables:
    """Transforms of a layer from its moments and its output projection.

    Args:
        power: of the metrics.
    """
    layer, count = moments.layer, moments.counts[1]
    radians = layer.radians or ()
    forward, deviation = list[Tensor](), list[Tensor]()
    for head in range(layer.kv_heads):
        metrics = moments.metrics(head, outputs, reach)
        pairs = list[tuple[Tensor, Tensor]]()
        for side, metric in enumerate(metrics):
            mean = moments.sums[side, head] / count
            second = moments.products[side + 1, head] / count
            pairs.append(klt(second - mean.outer(mean), metric, power))
        forward.append(torch.stack([matrix for matrix, _ in pairs]))
        deviation.append(torch.stack([error for _, error in pairs]))
    return TransformTables(
        torch.stack(forward, 1).float(),
        (moments.sums / count).float(),
        torch.stack(deviation, 1).float(),
        radians,
    )


def klt(
    covariance: Float[Tensor, "D D"], metric: Float[Tensor, "D D"], power: float
) -> tuple[Float[Tensor, "D D"], Float[Tensor, " D"]]:
    """Matrix from vectors to components, and the deviation of each component."""
    return weighed_klt(covariance, metric_weight(metric, power))


def metric_weight(metric: Float[Tensor, "D D"], power: float = 0.5) -> Float[Tensor, "D D"]:
    """Matrix that weighs vectors by a power of a metric: its square is that power."""
    return symmetric_power(metric / metric.diagonal().mean().clamp(min=1e-12), power / 2)


def weighed_klt(
    covariance: Float[Tensor, "D D"], weight: Float[Tensor, "D D"]
) -> tuple[Float[Tensor, "D D"], Float[Tensor, " D"]]:
    """Matrix from vectors to components of weighed vectors, and the deviation of each component."""
    spread = weight @ covariance @ weight
    variances, directions = torch.linalg.eigh((spread + spread.T) / 2)
    least = variances.mean().clamp(min=1e-12) * RIDGE
    return weight @ directions.flip(1), variances.flip(0).clamp(min=least).sqrt()


def symmetric_power(matrix: Float[Tensor, "D D"], exponent: float) -> Float[Tensor, "D D"]:
    """Power of a positive matrix, with small eigenvalues raised to `RIDGE` of their mean."""
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    return (vectors * values.clamp(min=values.mean() * RIDGE).pow(exponent)) @ vectors.T


def turned_moment(
    moment: Float[Tensor, "D D"], radians: tuple[float, ...], reach: int
) -> Float[Tensor, "D D"]:
    """Second moment of queries as keys before rotation see them, at distances 0 to `reach`."""
    size, frequencies = moment.shape[0], torch.tensor(radians, dtype=torch.float32)
    total = torch.zeros_like(moment)
    distances = torch.linspace(0, reach - 1, DISTANCES).round().long()
    for distance in distances.tolist():
        positions = torch.full((size,), distance)
        turn = rotate(torch.eye(size)[None], positions, frequencies)[0].double()  # row i is R e_i
        total += turn.T @ moment @ turn
    return total / len(distances)


def check_layers(layers: object) -> None:
    """Raises: ModelError: a layer has latents, or a rotary embedding that is unknown."""
    for layer in layers:  # pyright: ignore
        if layer.radians is None or layer.latent_rank:
            raise ModelError(
                f"Layer {layer.index} has latents, or a rotary embedding unknown to Larder, so its "
                "keys cannot be unrotated: choose a storage other than transform() and aqua(), and "
                "a codec other than predictive and kvtc."
            )


Part = TransformMeasurement
