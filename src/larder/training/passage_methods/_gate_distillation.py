"""Training of gates under an attention that they change, by the model's own answers.

Gates read hidden states of mean 0 and variance 1, by a sample of the texts; both are taken into
their first maps afterwards, so that they read hidden states as they are.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.errors import BadParameter
from larder.core.registry import public_name
from larder.core.spec import LayerSpec, ModelSpec
from larder.core.types import NamedTensors, TensorShapes
from larder.models.attention_backend import CausalAttention
from larder.models.decoder import Decoder
from larder.models.learned_weights import LayerTensors
from larder.models.lm_head import LMHead
from larder.policy.providers._layer_gates import FIRST
from larder.policy.providers.base import PROVIDERS, GateProvider
from larder.prefill.base import Progress
from larder.training.corpus import Passage
from larder.training.gated_attention import (
    DecayedAttention,
    GatedAttention,
    LayerGate,
    layer_inputs,
)
from larder.training.methods._perceptron import Standardization
from larder.training.passage_method import (
    PassageMethod,
    differentiable_states,
    distillation_loss,
    frozen,
)

SAMPLED_WINDOWS = 8  # that give mean and variance of the hidden states
WARM_UP = 0.1  # share of the steps in which the learning rate rises
COMPARED_EVERY = 2  # one next token of so many is compared with the model's own
Attention = TypeVar("Attention", bound=GatedAttention)


@dataclass(frozen=True)
class GateDistillation(PassageMethod, Generic[Attention]):
    """Base of methods that train a gate of each layer.

    Args:
        inner: inner size of a gate.
        window: most tokens of a step; a longer passage is cut, and less than half of it left out.
        epochs: readings of every passage.
        rate: highest learning rate of AdamW, which rises over a tenth of the steps and falls to 0
            as a cosine.
    """

    inner: int = 72
    window: int = 256
    epochs: int = 1
    rate: float = 1e-2

    first_maps: ClassVar[tuple[str, ...]]  # linear maps that read hidden states, by their names

    def __post_init__(self) -> None:
        if min(self.inner, self.epochs, self.window) < 1 or not self.rate > 0:
            raise BadParameter(f"{public_name(type(self))} needs numbers above 0, got {self}.")

    @abstractmethod
    def first_layers(self, spec: ModelSpec, seed: int) -> list[dict[str, Tensor]]:
        """Tensors before training; a tensor that layers share is one object."""

    @abstractmethod
    def attention(self, decoder: Decoder, gate: LayerGate) -> Attention:
        """Attention of a pass under gates."""

    @abstractmethod
    def penalty(self, attention: Attention, tokens: int) -> Float[Tensor, ""]:
        """Loss beside that of distillation, of what a pass over some tokens left."""

    @abstractmethod
    def measures(self, attention: Attention, tokens: int) -> dict[str, float]:
        """Metrics of a pass, by name."""

    @property
    def provider(self) -> GateProvider:
        """Provider that takes the weights."""
        return PROVIDERS.load(public_name(type(self)))()

    def shapes(self, layer: LayerSpec, width: int, tensors: NamedTensors) -> TensorShapes:
        return self.provider.shapes(layer, width, tensors)

    def fit(
        self, decoder: Decoder, passages: Sequence[Passage], seed: int, progress: Progress
    ) -> list[LayerTensors]:
        windows = token_windows(passages, self.window)
        inputs = input_scalings(decoder, windows[:SAMPLED_WINDOWS])
        device = decoder.spec.device
        layers = _on_device(self.first_layers(decoder.spec, seed), device)
        trained = list({id(each): each for layer in layers for each in layer.values()}.values())
        order = [*_shuffled(windows, self.epochs, seed)]
        optimizer = torch.optim.AdamW(trained, lr=self.rate)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.rate, total_steps=len(order) + 1, pct_start=WARM_UP
        )

        def gate(index: int, states: Tensor) -> Tensor:
            return self.provider.gate(inputs[index].apply(states.float()), layers[index])

        with frozen(decoder.module), torch.enable_grad():
            for done, ids in enumerate(order, start=1):
                optimizer.zero_grad()
                attention = self.attention(decoder, gate)
                loss = distilled(decoder, attention, ids)
                (loss + self.penalty(attention, len(ids))).backward()
                torch.nn.utils.clip_grad_norm_(trained, 1.0)
                optimizer.step()
                schedule.step()
                progress(done, len(order))
        return [
            self._with_raw_inputs({k: each.detach().clone() for k, each in layer.items()}, scaling)
            for layer, scaling in zip(layers, inputs, strict=True)
        ]

    def test(
        self, decoder: Decoder, layers: Sequence[LayerTensors], passages: Sequence[Passage]
    ) -> dict[str, float]:
        found = list[dict[str, float]]()
        moved = [{name: each.to(decoder.spec.device) for name, each in o.items()} for o in layers]
        with frozen(decoder.module):
            for ids in token_windows(passages, self.window):
                attention = self.attention(
                    decoder, lambda index, states: self.provider.gate(states, moved[index])
                )
                loss = float(distilled(decoder, attention, ids).detach())
                found.append({"kl": loss, **self.measures(attention, len(ids))})
        return {name: sum(scores[name] for scores in found) / len(found) for name in found[0]}

    def _with_raw_inputs(self, tensors: LayerTensors, inputs: Standardization) -> LayerTensors:
        """Tensors that read hidden states as they are."""
        read = dict(tensors)
        for name in self.first_maps:
            weight, bias = f"{name}.weight", f"{name}.bias"
            read[weight] = tensors[weight] / inputs.spread
            if bias in tensors:
                read[bias] = tensors[bias] - read[weight] @ inputs.mean
        return read


def distilled(decoder: Decoder, attention: GatedAttention, ids: Sequence[int]) -> Float[Tensor, ""]:
    """Mean divergence of the model's next tokens under an attention from those under its own."""
    head, plain = LMHead(decoder.module), CausalAttention(lambda inputs: None)
    teacher, student = (
        head.logits(states[COMPARED_EVERY - 1 :: COMPARED_EVERY])
        for states in (differentiable_states(decoder, ids, plain), attention.hidden_states(ids))
    )
    return distillation_loss(teacher.detach(), student)


def token_windows(passages: Sequence[Passage], size: int) -> list[tuple[int, ...]]:
    """Successive tokens of passages, `size` or at least half of it; short passages as they are."""
    return [
        part
        for passage in passages
        for first in range(0, len(passage.ids), size)
        if len(part := passage.ids[first : first + size]) >= size // 2 or not first
    ]


def input_scalings(decoder: Decoder, texts: Sequence[tuple[int, ...]]) -> list[Standardization]:
    """Mean and spread of the input of each managed layer's attention."""
    seen: dict[int, list[Tensor]] = {layer.index: [] for layer in decoder.spec.managed}

    def record(index: int, states: Tensor) -> None:
        if index in seen:
            seen[index].append(states.detach().float())

    with frozen(decoder.module), layer_inputs(decoder, record):
        for ids in texts:
            differentiable_states(decoder, ids, CausalAttention(lambda inputs: None))
    return [Standardization.of(torch.cat(seen[layer.index])) for layer in decoder.spec.managed]


def _shuffled(
    texts: Sequence[tuple[int, ...]], epochs: int, seed: int
) -> Iterator[tuple[int, ...]]:
    source = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for index in torch.randperm(len(texts), generator=source).tolist():
            yield texts[index]


def _on_device(layers: Sequence[LayerTensors], device: torch.device) -> list[dict[str, Tensor]]:
    """Tensors on a device, as leaves of gradients; those that were one object still are."""
    moved = {
        id(each): each.to(device).detach().clone().requires_grad_()
        for layer in layers
        for each in layer.values()
    }
    return [{name: moved[id(each)] for name, each in layer.items()} for layer in layers]


@dataclass(frozen=True)
class RetentionGates(GateDistillation[DecayedAttention]):
    """Gates whose output is log beta.

    Args:
        bias: of a gate's logit before training.
        capacity: M, the entries that a head may hold, as a share of a passage.
        weight: of the hinge.
    """

    bias: float = 4.5
    capacity: float = 0.125
    weight: float = 2.0
    first_maps = (FIRST,)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.capacity <= 1 or self.weight < 0:
            name = public_name(type(self))
            raise BadParameter(
                f"{name} needs a capacity in (0, 1] and a weight of 0 or more, got {self}."
            )

    def attention(self, decoder: Decoder, gate: LayerGate) -> DecayedAttention:
        return DecayedAttention(decoder, gate)

    def measures(self, attention: DecayedAttention, tokens: int) -> dict[str, float]:
        """Share of a passage that is held at its end, mean over heads."""
        last = torch.cat([held[:, -1] for held in attention.held.values()])
        return {"held": float(last.mean().detach()) / tokens}


def excess(occupancy: Float[Tensor, "*N Q"], most: float) -> Float[Tensor, ""]:
    """Mean over heads and queries of what is held beyond a capacity, as a share of the tokens."""
    tokens = torch.arange(1, occupancy.shape[-1] + 1, device=occupancy.device)
    return ((occupancy - most).clamp(min=0) / tokens).mean()
