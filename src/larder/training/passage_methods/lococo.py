"""LoCoCo: convolutions that mix evicted entries into slots, one layer at a time.

Cai, Tian, Wang, Chen, "LoCoCo: Dropping In Convolutions for Long Context Compression" (2024),
arXiv:2406.05317. Much smaller than the released training, which learns from the language model's
loss over half a billion tokens with 21 taps: 64 slots and 5 taps, and the squared error of each
layer's output behind the output projection, on tens of passages that are cut once
(`EvictionSample`). Gamma starts at `first` and is kept in [0, 1]; the released code starts at 0.5,
with a convolution of standard deviation 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.core.errors import BadParameter
from larder.core.spec import LayerSpec
from larder.core.types import NamedTensors, TensorShapes
from larder.models.learned_weights import LayerTensors
from larder.policy.compensation.lococo import SLOT_SHARE, slot_weights
from larder.policy.providers.lococo import SlotConvolution
from larder.training.eviction_samples import SHARES, EvictionMethod, EvictionSample, EvictionSamples


@dataclass(frozen=True)
class LococoTraining(EvictionMethod):
    """Adam on the squared errors of each layer, a passage at a time.

    Args:
        slots: most entries of a kv head that are mixed.
        taps: of the convolution.
        rate: highest learning rate.
        first: gamma at first.
    """

    slots: int = 64
    taps: int = 5
    epochs: int = 4
    rate: float = 4e-3
    first: float = 0.1

    def __post_init__(self) -> None:
        if min(self.slots, self.taps, self.epochs) < 1 or not self.rate > 0:
            raise BadParameter(f"lococo needs numbers above 0, got {self}.")

    def error_ratio(self, samples: EvictionSamples, tensors: LayerTensors, share: float) -> float:
        return dropped_ratio(samples, tensors, share)

    def shapes(self, layer: LayerSpec, width: int, tensors: NamedTensors) -> TensorShapes:
        return SlotConvolution().shapes(layer, width, tensors)

    def fit_layer(
        self, layer: LayerSpec, samples: EvictionSamples, source: torch.Generator
    ) -> dict[str, Tensor]:
        cases = [
            SlotSample.of(sample, share, self.slots)
            for sample in samples.samples
            for share in SHARES
        ]
        shape = self.slots, 2 * layer.head_dim, self.taps
        spread = 1 / math.sqrt(shape[1] * shape[2])
        tensors = {
            "kernel": spread * torch.randn(shape, generator=source),
            "bias": torch.zeros(self.slots),
            "gamma": torch.tensor(self.first),
        }
        for tensor in tensors.values():
            tensor.requires_grad_()
        with torch.enable_grad():
            self._descend(samples, cases, tensors, source)
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def _descend(
        self,
        samples: EvictionSamples,
        cases: Sequence[SlotSample],
        tensors: NamedTensors,
        source: torch.Generator,
    ) -> None:
        """Train tensors in place."""
        optimizer = torch.optim.Adam(tensors.values(), self.rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs * len(cases))
        size = sum(float(samples.error(case.bare, case.sample.target)) for case in cases) / len(
            cases
        )
        order = Random(int(torch.randint(1 << 30, (), generator=source)))
        for _ in range(self.epochs):
            for case in order.sample(cases, len(cases)):
                optimizer.zero_grad()
                (samples.error(case.output(tensors), case.sample.target) / size).backward()
                optimizer.step()
                schedule.step()
                with torch.no_grad():
                    tensors["gamma"].clamp_(0.0, 1.0)


@dataclass(frozen=True)
class SlotSample:
    """Sample whose kept entries are heavy ones and slots.

    Args:
        heavy: keys and values that stay as they are.
        others: keys and values of slots and evicted entries.
        chosen: entries among `others` that slots were.
        bare: output of attention where slots stay as they are.
    """

    sample: EvictionSample
    heavy: tuple[Float[Tensor, "K h D"], Float[Tensor, "K h D"]]
    others: tuple[Float[Tensor, "K n D"], Float[Tensor, "K n D"]]
    chosen: Int64[Tensor, "K S"]
    bare: Float[Tensor, "H Q D"]

    @staticmethod
    def of(sample: EvictionSample, share: float, most: int) -> SlotSample:
        """Sample with a share of its entries kept, at most `most` of them as slots."""
        count = max(round(share * sample.context), 2)
        kept, latest = sample.kept_mask(count), sample.latest(count)
        slots = min(most, math.floor(SLOT_SHARE * count), count - latest)
        lowest = sample.mass.masked_fill(~kept, torch.inf)
        lowest[:, sample.context - latest :] = torch.inf
        picked = lowest.topk(slots, largest=False).indices
        is_slot = torch.zeros_like(kept).scatter(1, picked, True)
        others = ~kept | is_slot
        ranks = others.cumsum(1) - 1
        chosen = ranks[is_slot].view(len(kept), slots)
        bare = sample.attended(*sample.selected(kept))[0]
        heavy = sample.selected(kept & ~is_slot)
        return SlotSample(sample, heavy, sample.selected(others), chosen, bare)

    def output(self, tensors: LayerTensors) -> Float[Tensor, "H Q D"]:
        """Output of attention to heavy entries and mixed slots."""
        weights = slot_weights(*self.others, self.chosen, **tensors)
        mixed = [weights @ other.to(weights.dtype) for other in self.others]
        pairs = zip(self.heavy, mixed, strict=True)
        keys, values = (torch.cat([side.to(new.dtype), new], 1) for side, new in pairs)
        return self.sample.attended(keys, values)[0]


@torch.no_grad()
def dropped_ratio(samples: EvictionSamples, tensors: LayerTensors, share: float) -> float:
    """Error of a layer over that where the slots stay as they are and the rest is dropped."""
    errors, bare = 0.0, 0.0
    for sample in samples.samples:
        case = SlotSample.of(sample, share, len(tensors["bias"]))
        errors += float(samples.error(case.output(tensors), sample.target))
        bare += float(samples.error(case.bare, sample.target))
    return errors / bare


Part = LococoTraining
