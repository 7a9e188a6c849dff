"""Provider of TRIM-KV's retention: how slowly an entry loses its worth as it ages.

Bui et al., "Cache What Lasts: Token Retention for Memory-Bounded KV Cache in LLMs" (2025),
arXiv:2512.03324, section 4.1. A gate reads the hidden state before attention and gives the
logarithm of beta, a number in (0, 1) for each kv head; an entry of age a has the worth beta^a.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from larder.core.types import HiddenStates, NamedTensors
from larder.policy.providers._layer_gates import PerceptronGate


class RetentionGate(PerceptronGate):
    """Column `trim`: log beta, at most 0; per layer a linear map, SiLU, a linear map, log-sigmoid.

    The second map's bias is the one that training begins with far above 0, where nothing decays.
    """

    @property
    def activation(self) -> Callable[[Tensor], Tensor]:
        return F.silu

    def gate(self, states: HiddenStates, weights: NamedTensors) -> Float[Tensor, "Q K"]:
        return F.logsigmoid(super().gate(states, weights))


Part = RetentionGate
