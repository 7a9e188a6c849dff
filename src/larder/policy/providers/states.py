"""Provider of the hidden states at the input of a layer's attention, one row per token."""

from __future__ import annotations

from torch import nn

from larder.core.types import HiddenStates
from larder.policy.providers.base import ActivationProvider


class States(ActivationProvider):
    """Input `states` [Q, hidden]."""

    def capture(self, attention: nn.Module, states: HiddenStates) -> HiddenStates:
        return states


Part = States
