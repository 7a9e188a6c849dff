"""Cost of noise in the transform components of keys and values, by layer and kv head.

To second order, noise of variance v in a number costs v / 2 times the Fisher information of the
number, in nats per text: the mean square of the gradient of the log-likelihood of tokens drawn from
the model's own distribution (Martens, "New Insights and Perspectives on the Natural Gradient
Method" (2020), arXiv:1412.1193, section 9.2). One draw per position is enough, since tokens and
components are averaged.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from larder.cache.transform_tables import KEYS, TransformTables
from larder.core.types import HiddenStates, Queries
from larder.models.attention_backend import AttentionInputs, CausalAttention, RenumberedAttention
from larder.models.decoder import Decoder
from larder.models.introspection import call_uncached
from larder.models.lm_head import LMHead
from larder.ops.rope import rotate

CHUNK_ROWS = 128  # hidden states whose logits are held at a time
RANGE = 6.0  # octaves that a weight is away from their mean, at most


class ShiftedAttention:
    """Plain causal attention with a shift of the keys and values of some layers.

    Attributes:
        shifts: of keys and of values, by layer: zeros that gradients reach.
        seen: keys and values, by layer.
    """

    def __init__(self, layers: Collection[int]) -> None:
        self.shifts = dict[int, tuple[Tensor, Tensor]]()
        self.seen = dict[int, tuple[Tensor, Tensor]]()
        self._layers = layers
        self._plain = CausalAttention(lambda inputs: None)

    def attend(self, inputs: AttentionInputs) -> Queries:
        """Attention output of one layer, as of `LayerAttention`."""
        if inputs.layer in self._layers:
            keys, values = (
                torch.zeros_like(side, dtype=torch.float32).requires_grad_()
                for side in (inputs.keys, inputs.values)
            )
            self.shifts[inputs.layer] = keys, values
            self.seen[inputs.layer] = inputs.keys.detach(), inputs.values.detach()
            inputs = replace(
                inputs,
                keys=(inputs.keys + keys).to(inputs.keys.dtype),
                values=(inputs.values + values).to(inputs.values.dtype),
            )
        return self._plain.attend(inputs)


def noise_costs(
    decoder: Decoder,
    texts: Sequence[Sequence[int]],
    tables: Mapping[int, TransformTables],
    sinks: int,
) -> dict[int, Float[Tensor, "2 K"]]:
    """Mean square of the gradient by a component, of keys (0) and values (1), by layer.

    Args:
        texts: token ids of each text.
        sinks: first tokens of a text that do not count.
    """
    source = torch.Generator().manual_seed(0)
    sums = {index: table.mean.new_zeros(table.mean.shape[:2]) for index, table in tables.items()}
    for ids in texts:
        pairs = _gradients(decoder, ids, ShiftedAttention(tables), source)
        for index, table in tables.items():
            sums[index] += _component_squares(table, pairs[index], sinks)
    return {index: total / len(texts) for index, total in sums.items()}


@dataclass(frozen=True)
class GradedNumbers:
    """Numbers of the keys before rotation and of the values of a layer, and what they matter.

    Args:
        numbers: of keys and of values.
        weights: square of the gradient of the log-likelihood by each number.
    """

    numbers: tuple[Float[Tensor, "K N D"], Float[Tensor, "K N D"]]
    weights: tuple[Float[Tensor, "K N D"], Float[Tensor, "K N D"]]

    @staticmethod
    def concat(texts: Sequence[GradedNumbers]) -> GradedNumbers:
        """Numbers of all texts."""
        keys, values = (torch.cat([text.numbers[side] for text in texts], 1) for side in (0, 1))
        ours, theirs = (torch.cat([text.weights[side] for text in texts], 1) for side in (0, 1))
        return GradedNumbers((keys, values), (ours, theirs))


def graded_numbers(
    decoder: Decoder, ids: Sequence[int], sinks: int, seed: int
) -> dict[int, GradedNumbers]:
    """Numbers of a text by managed layer, with their gradients.

    Args:
        sinks: first tokens that do not count.
        seed: of the tokens that are drawn.
    """
    layers = {layer.index: layer for layer in decoder.spec.managed}
    attention = ShiftedAttention(layers)
    source = torch.Generator().manual_seed(seed)
    gradients = _gradients(decoder, ids, attention, source)
    found = dict[int, GradedNumbers]()
    for index, layer in layers.items():
        radians = torch.tensor(layer.radians or ())
        keys, values = (side.float().cpu() for side in attention.seen[index])
        ours, theirs = (side.float().cpu() for side in gradients[index])
        back = -torch.arange(keys.shape[1])
        keys, ours = (rotate(side, back, radians)[:, sinks:] for side in (keys, ours))
        squares = ours.square(), theirs[:, sinks:].square()
        found[index] = GradedNumbers((keys, values[:, sinks:]), squares)
    return found


def _gradients(
    decoder: Decoder, ids: Sequence[int], attention: ShiftedAttention, source: torch.Generator
) -> dict[int, tuple[Tensor, Tensor]]:
    """Gradient of the log-likelihood of drawn tokens, by the keys and values of each layer."""
    head = LMHead(decoder.module)
    with torch.enable_grad(), decoder.attention:
        states = call_uncached(decoder.body, ids, RenumberedAttention(attention, decoder.spec))
        drawn = _likelihood_gradient(head, states.detach(), source)
        shifts = [side for pair in attention.shifts.values() for side in pair]
        sides = iter(torch.autograd.grad(states, shifts, drawn))
    return {index: (next(sides), next(sides)) for index in attention.shifts}


def cost_weights(costs: Mapping[int, Float[Tensor, "2 K"]]) -> dict[int, Float[Tensor, "2 K"]]:
    """Factors on components, 1 on geometric average, with which noise costs the same."""
    logarithms = {index: cost.clamp(min=1e-30).log2() / 2 for index, cost in costs.items()}
    mean = torch.stack([logarithm.mean() for logarithm in logarithms.values()]).mean()
    return {
        i: 2.0 ** (logarithm - mean).clamp(-RANGE, RANGE) for i, logarithm in logarithms.items()
    }


def _likelihood_gradient(
    head: LMHead, states: HiddenStates, source: torch.Generator
) -> HiddenStates:
    """Gradient, by hidden states, of the log-likelihood of tokens drawn behind them."""
    found = list[Tensor]()
    for rows in states.split(CHUNK_ROWS):
        rows.requires_grad_()
        likelihoods = head.logits(rows).log_softmax(-1)
        drawn = torch.multinomial(likelihoods.detach().exp().cpu(), 1, generator=source)
        likely = likelihoods.gather(1, drawn.to(likelihoods.device)).sum()
        found.append(torch.autograd.grad(likely, rows)[0])
    return torch.cat(found)


def _component_squares(
    tables: TransformTables, gradients: tuple[Tensor, Tensor], sinks: int
) -> Float[Tensor, "2 K"]:
    """Mean square of the gradients by components of a layer's keys and values."""
    found = list[Tensor]()
    for side, gradient in enumerate(gradients):
        own = gradient.float().cpu()
        if side == KEYS:
            own = rotate(own, -torch.arange(own.shape[1]), torch.tensor(tables.radians))
        by_component = own[:, sinks:] @ tables.inverse[side].transpose(1, 2)
        found.append(by_component.square().mean((1, 2)))
    return torch.stack(found)
