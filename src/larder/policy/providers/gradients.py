"""Provider of gradients: how much the last hidden states depend on each token's attention output.

KVgrad (2026), https://openreview.net/forum?id=cg1wTCJjjk, as NVIDIA/kvpress 0.5.5 has it: the
objective is the sum of squares of the hidden states behind the last layer, before the last norm.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from larder.core.types import HiddenStates
from larder.policy.providers.base import GradientProvider


class Gradients(GradientProvider):
    """Input `gradients` [Q]: L2 norm of the gradient by the attention output of each token."""

    def objective(self, states: HiddenStates) -> Float[Tensor, ""]:
        return states.float().square().sum()

    def numbers(self, gradients: HiddenStates) -> Float[Tensor, " Q"]:
        return gradients.float().square().sum(-1).sqrt()


Part = Gradients
