"""Base of methods whose gates say how fast each entry loses its worth.

The loss is KL to the full cache plus a hinge on what decayed entries sum up to beyond a capacity M,
as a share of the tokens so far: the sum is that of the released attention, the hinge is read from
the papers (arXiv:2512.03324 and arXiv:2605.09649), whose code of training is not released.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.errors import BadParameter
from larder.core.family import public_name
from larder.models.decoder import Decoder
from larder.policy.providers._layer_gates import FIRST
from larder.training.gated_attention import DecayedAttention, LayerGate
from larder.training.passage_methods._gate_distillation import GateDistillation


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
