"""Provider of Locret's prediction of the highest logit that later tokens give an entry.

Huang et al., "Locret: Enhancing Eviction in Long-Context LLM Inference with Trained Retaining Heads
on Consumer-Grade Devices" (2024), arXiv:2410.01805. A retaining head reads queries, keys and values
before rotation. These are linear in the hidden state, so its first map is taken together with the
projections: a map from the hidden state.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from larder.policy.providers._layer_gates import PerceptronGate


class RetainingHead(PerceptronGate):
    """Column `locret`: per layer a linear map, SiLU, and a linear map."""

    @property
    def activation(self) -> Callable[[Tensor], Tensor]:
        return F.silu


Part = RetainingHead
