"""Provider of the hidden states at the input of a layer's attention, one row per token."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from larder.policy.providers.base import ActivationProvider


class States(ActivationProvider):
    """Input `states` [Q, hidden]."""

    def capture(
        self, attention: nn.Module, states: Float[Tensor, "Q hidden"]
    ) -> Float[Tensor, "Q hidden"]:
        return states


Part = States
