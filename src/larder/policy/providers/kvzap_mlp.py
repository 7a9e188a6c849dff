"""Provider of KVzap's prediction of the logarithm of KVzip+'s score, by a perceptron.

Jegou and Jeblick, "KVzap: Fast, Adaptive, and Faithful KV Cache Pruning" (2026), arXiv:2601.07891.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from larder.policy.providers._layer_gates import PerceptronGate


class KVzapPerceptronGate(PerceptronGate):
    """Column `kvzap_mlp`: per layer a linear map, GELU, and a linear map."""

    @property
    def activation(self) -> Callable[[Tensor], Tensor]:
        return F.gelu


Part = KVzapPerceptronGate
