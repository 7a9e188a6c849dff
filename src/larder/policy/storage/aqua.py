"""Storage of tokens as residuals of a prediction from the layer below (AQUA-KV).

Shutova et al., "Cache Me If You Must: Adaptive Key-Value Quantization for Large Language Models"
(2025), arXiv:2501.19392, section 3: keys of a layer are predicted from the decoded keys of the
layer below, values from the decoded keys of their own layer and the values below, by linear maps
that are fitted once per model; what the prediction leaves is quantized by HIGGS in 2 bits, the
first layer in 4. First and latest tokens stay exact. Checked against released code. What differs:
the mean of the first layer is subtracted, and one Hadamard transform spans all kv heads where their
numbers allow it (`larder.ops.vector_quantization`). Weights are those of `larder train aqua`.

All kv heads of all layers must hold the same tokens, so only policies that keep or drop whole
tokens go with it, such as `sinks_and_window() > uniform()`; other plans are refused. At every step
each layer is decoded from the layer below, which takes three products with W x W matrices per coded
token and layer, where W is the number of channels of all kv heads.

Under a budget this spends the bytes that it saves on more tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from larder.core.codec import ResidualSpec
from larder.core.errors import BudgetError
from larder.core.memory_budget import count_of_tokens
from larder.core.observation import Entries, LayerScores
from larder.core.plan import Plan
from larder.core.spec import POSITION_BYTES, LayerSpec
from larder.core.spelling import spell
from larder.policy.storage.base import Storage


@dataclass(frozen=True)
class Aqua(Storage):
    """First and latest tokens exact, all others as coded residuals.

    Args:
        bits: per number of a residual, 1 to 4, without scales.
        first_bits: per number of the first layer, 1 to 4.
        sinks: first positions of a text that stay exact, where they are kept.
        recent: latest positions that stay exact, where they are kept.
    """

    bits: int = 2
    first_bits: int = 4
    sinks: int = 4
    recent: int = 128
    compares_layers: ClassVar[bool] = True  # plans of all layers are compared before any is applied

    def __post_init__(self) -> None:
        ResidualSpec(self.bits, self.first_bits, self.sinks, self.recent)

    @property
    def form(self) -> str:
        return "residual"

    @property
    def residual(self) -> ResidualSpec:
        return ResidualSpec(self.bits, self.first_bits, self.sinks, self.recent)

    @property
    def exact_tokens(self) -> int:
        """Tokens that stay exact."""
        return self.sinks + self.recent

    def entries(self, tokens: int, layers: Sequence[LayerSpec], itemsize: int) -> int:
        self.check(layers, itemsize)
        if tokens <= self.exact_tokens:
            raise BudgetError(
                f"The budget of {count_of_tokens(tokens)} is no more than the {self.exact_tokens} "
                "that "
                f"{spell(self)} keeps exact: raise the budget, or lower sinks or recent."
            )
        more = (tokens - self.exact_tokens) * self._gain(layers, itemsize)
        return self.exact_tokens + int(more)

    def check(self, layers: Sequence[LayerSpec], itemsize: int) -> None:
        """Check that a coded token takes fewer bytes than an exact one.

        Raises:
            BudgetError: it takes as many.
        """
        if self._gain(layers, itemsize) <= 1:
            raise BudgetError(
                f"{spell(self)} takes as many bytes for a coded token as for an exact one: lower "
                "bits, or leave the storage out."
            )

    def full_precision_entries(self, quota: int, layer: LayerSpec, itemsize: int) -> int:
        return min(quota, self.exact_tokens)

    def grade(
        self, plan: Plan, entries: Entries, scored: LayerScores, quota: int, share: float
    ) -> Plan:
        """The plan: what is coded follows from positions alone."""
        return plan

    def _gain(self, layers: Sequence[LayerSpec], itemsize: int) -> float:
        """Tokens of all layers that are coded in the bytes of one exact token."""
        exact = sum(
            layer.kv_heads * (2 * layer.head_dim * itemsize + POSITION_BYTES) for layer in layers
        )
        coded = sum(
            self.residual.token_bytes(layer.kv_heads * layer.head_dim, index)
            for index, layer in enumerate(layers)
        )
        return exact / coded if layers else 1.0


Part = Aqua
