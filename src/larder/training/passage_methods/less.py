"""LESS: features of keys and queries that stand for evicted entries, one layer at a time.

Dong, Yang, Zhang, Wang, Chi, Chen, "Get More with LESS: Synthesizing Recurrence with KV Cache
Compression for Efficient LLM Inference" (2024), arXiv:2402.09398. Layers are trained alone, on the
squared error of their output behind the output projection, where the rest of the model sees full
attention.

Smaller than the released training: hidden size 64 in place of 512, 10 epochs at 4e-3 in place of
40 at 1e-3, and tens of passages in place of 512 sequences of C4. There every token attends under a
moving eviction; here a passage is cut once, and the tokens behind the cut attend to what was kept
of those before it. The scale of the features of keys starts where they have as much attention as
what was evicted (there, at 1e-4), and is trained by its logarithm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.cache.forms.low_rank import LowRankMaps
from larder.core.errors import BadParameter
from larder.core.spec import LayerSpec
from larder.core.types import NamedTensors, TensorShapes
from larder.models.learned_weights import LayerTensors
from larder.ops.attention import merge_attention, ragged_attention
from larder.ops.low_rank_attention import RANK, low_rank_attention, low_rank_state
from larder.policy.compensation.less import Less
from larder.training.eviction_samples import (
    SHARES,
    Attended,
    EvictionMethod,
    EvictionSample,
    EvictionSamples,
)

FLOAT_BYTES = 4  # of a number of an entry where the state takes 4 of them


@dataclass(frozen=True)
class LessTraining(EvictionMethod):
    """Adam on the squared errors of each layer, a passage at a time.

    Args:
        inner: hidden size of the perceptrons.
        rate: highest learning rate.
        queries: number of queries of a passage in a training step, drawn at random.
    """

    inner: int = 64
    epochs: int = 10
    rate: float = 4e-3
    queries: int = 64

    def __post_init__(self) -> None:
        if min(self.inner, self.epochs, self.queries) < 1 or not self.rate > 0:
            raise BadParameter(f"less needs numbers above 0, got {self}.")

    def error_ratio(self, samples: EvictionSamples, tensors: LayerTensors, share: float) -> float:
        return compared_errors(samples, tensors, share)

    def shapes(self, layer: LayerSpec, width: int, tensors: NamedTensors) -> TensorShapes:
        return LowRankMaps.shapes(layer, tensors["query_hidden"].shape[-1])

    def fit_layer(
        self, layer: LayerSpec, samples: EvictionSamples, source: torch.Generator
    ) -> dict[str, Tensor]:
        cases = [EvictedSample.of(sample, share) for sample in samples.samples for share in SHARES]
        tensors = first_maps(layer, self.inner, source)
        tensors["key_scale"] = matched_scale(cases, tensors, layer).log()
        for tensor in tensors.values():
            tensor.requires_grad_()
        with torch.enable_grad():
            self._descend(samples, cases, tensors, source)
        return maps_of({name: tensor.detach() for name, tensor in tensors.items()}).tensors()

    def _descend(
        self,
        samples: EvictionSamples,
        cases: Sequence[EvictedSample],
        tensors: NamedTensors,
        source: torch.Generator,
    ) -> None:
        """Train tensors in place."""
        optimizer = torch.optim.Adam(tensors.values(), self.rate)
        steps = self.epochs * len(cases)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        size = sum(float(samples.error(case.kept[0], case.target)) for case in cases) / len(cases)
        order = Random(int(torch.randint(1 << 30, (), generator=source)))
        for _ in range(self.epochs):
            for case in order.sample(cases, len(cases)):
                optimizer.zero_grad()
                rows = torch.randperm(case.queries.shape[1], generator=source)[: self.queries]
                part = case.of_queries(rows)
                (samples.error(part.output(maps_of(tensors)), part.target) / size).backward()
                optimizer.step()
                schedule.step()


@dataclass(frozen=True)
class EvictedSample:
    """Sample in which some entries are evicted.

    Args:
        kept: attention of the new tokens to what is kept and to each other.
        keys, values: evicted.
    """

    queries: Float[Tensor, "H Q D"]
    kept: Attended
    keys: Float[Tensor, "K n D"]
    values: Float[Tensor, "K n D"]
    target: Float[Tensor, "H Q D"]
    scaling: float

    @staticmethod
    def of(sample: EvictionSample, share: float) -> EvictedSample:
        """Sample with a share of its entries kept."""
        kept = sample.kept_mask(max(round(share * sample.context), 1))
        evicted = sample.selected(~kept)
        return EvictedSample(
            sample.queries,
            sample.attended(*sample.selected(kept)),
            *evicted,
            sample.target,
            sample.layer.scaling,
        )

    def of_queries(self, rows: Int64[Tensor, " P"]) -> EvictedSample:
        """Sample with some of the queries."""
        return replace(
            self,
            queries=self.queries[:, rows],
            kept=(self.kept[0][:, rows], self.kept[1][:, rows]),
            target=self.target[:, rows],
        )

    def output(self, maps: LowRankMaps) -> Float[Tensor, "H Q D"]:
        """Output of attention with a low-rank state of the evicted entries."""
        out, lse = self.state_attention(maps)
        return merge_attention([self.kept[0], out], [self.kept[1], lse])[0]

    def state_attention(self, maps: LowRankMaps) -> Attended:
        """Attention to the state alone."""
        state = low_rank_state(maps.keys(self.keys), self.values)
        return low_rank_attention(maps.queries(self.queries), state)

    def evicted_lse(self) -> Float[Tensor, "H Q"]:
        """Log-sum-exp of attention to the evicted entries."""
        heads, count = self.keys.shape[:2]
        flat = self.keys.flatten(0, 1), self.values.flatten(0, 1)
        starts = torch.arange(heads) * count
        lengths = torch.full((heads,), count)
        return ragged_attention(self.queries, *flat, starts, lengths, self.scaling)[1]


def first_maps(layer: LayerSpec, inner: int, source: torch.Generator) -> dict[str, Tensor]:
    """Random perceptrons, uniform as in the released code, and no interaction."""
    tensors = dict[str, Tensor]()
    for name, shape in LowRankMaps.shapes(layer, inner).items():
        most = math.sqrt(6 / (shape[-2] + shape[-1]))
        tensors[name] = most * (2 * torch.rand(shape, generator=source) - 1)
    tensors["interaction"].zero_()
    tensors["key_scale"].fill_(1.0)
    return tensors


def maps_of(tensors: NamedTensors) -> LowRankMaps:
    """Maps of tensors in training, which hold the logarithm of the scale."""
    return LowRankMaps(**{**tensors, "key_scale": tensors["key_scale"].exp()})


def matched_scale(
    cases: Sequence[EvictedSample], tensors: NamedTensors, layer: LayerSpec
) -> Float[Tensor, "K 1 rank"]:
    """Scale with which the state has as much attention as the evicted entries, in the mean."""
    maps = LowRankMaps(**tensors)
    gaps = [
        (case.evicted_lse() - case.state_attention(maps)[1]).unflatten(0, (layer.kv_heads, -1))
        for case in cases
    ]
    mean = torch.stack([gap.mean((1, 2)) for gap in gaps]).mean(0)
    return mean.exp()[:, None, None].expand(-1, 1, RANK).clone()


@torch.no_grad()
def compared_errors(samples: EvictionSamples, tensors: LayerTensors, share: float) -> float:
    """Error of a layer over that of eviction with as many more entries as the state takes."""
    maps, errors, bare = LowRankMaps(**tensors), 0.0, 0.0
    for sample in samples.samples:
        case = EvictedSample.of(sample, share)
        errors += float(samples.error(case.output(maps), case.target))
        more = Less().state_entries(sample.layer, FLOAT_BYTES)
        kept = sample.kept_mask(round(share * sample.context) + more)
        bare += float(samples.error(sample.attended(*sample.selected(kept))[0], case.target))
    return errors / bare


Part = LessTraining
