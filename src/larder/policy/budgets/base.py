"""Base classes of budgets: number of entries per layer, and the choice of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from larder.core.arguments import require
from larder.core.errors import BadParameter
from larder.core.observation import Calibration, Observation, ScoredLayers
from larder.core.part import PolicyPart
from larder.core.plan import LayerPlans, LayerQuotas, StepQuota
from larder.core.registry import public_name
from larder.core.types import Packed, PackedMask

WITHOUT_LIMIT = 1 << 62  # entries per head, above any real cache


@dataclass(frozen=True)
class Budget(PolicyPart, ABC):
    """Distribution of a number of entries over layers and heads. A frozen dataclass.

    With neither `tokens` nor `kept` the size is open.

    Args:
        tokens: entries per kv head, averaged over layers.
        kept: the same as a fraction of the context.

    Raises:
        BadParameter: both sizes are given, or one is out of range.
    """

    tokens: int | None = None
    kept: float | None = None

    keeps_everything: ClassVar[bool] = False  # whatever the budget
    separates_streaming_heads: ClassVar[bool] = False  # from retrieval heads
    # Whether a protected share is relative to each layer's own entries, not to the average.
    protects_own_share: ClassVar[bool] = False
    # Whether all layers share one pool of entries, so that only their sum is bounded.
    has_shared_pool: ClassVar[bool] = False
    # Whether a text is cut that fits into the budget as it is.
    cuts_within_size: ClassVar[bool] = False
    # Whether `choose` gets layers that were cut again, as more layers are scored.
    replans: ClassVar[bool] = False

    def __post_init__(self) -> None:
        name, tokens, kept = public_name(type(self)), self.tokens, self.kept
        if tokens is not None and kept is not None:
            raise BadParameter(
                f"{name} was given tokens={tokens} and kept={kept}: give one of the two."
            )
        require(tokens is None or tokens >= 1, f"{name}.tokens", "at least 1", tokens)
        require(kept is None or 0 < kept <= 1, f"{name}.kept", "a fraction in (0, 1]", kept)

    def measure(self, observation: Observation, scores: Packed) -> tuple[float, ...]:
        """Statistics that `choose` needs beyond scores, measured when the layer is scored."""
        return ()

    def inspect(
        self, observation: Observation, scores: Packed, protected: PackedMask
    ) -> tuple[float, ...]:
        """`measure`, for budgets that also need to know which entries always stay."""
        return self.measure(observation, scores)

    def layer_tokens(
        self, tokens: int, layers: int, least: int, most: int, calibration: Calibration
    ) -> tuple[int, ...]:
        """Entries per kv head for each managed layer; they sum to `layers * tokens`.

        Args:
            tokens: average over layers.
            layers: number of managed layers.
            least: entries that each layer needs for protected tokens.
            most: most entries of a layer, the length of the context.
            calibration: measurements named in `calibrations`.
        """
        return (tokens,) * layers

    def head_weights(self, calibration: Calibration) -> tuple[float, ...]:
        """Weight of each head, layer by layer, for `LayerScores.weights`.

        One number per kv head, or one per query head, whose groups are then averaged. Empty by
        default: heads are treated alike.

        Args:
            calibration: measurements named in `calibrations`.
        """
        return ()

    def is_plan_due(self, lengths: LayerQuotas, allowed: LayerQuotas) -> bool:
        """True if a plan is due during decode.

        Args:
            lengths: entries of each managed layer, all heads together, by layer index.
            allowed: most entries of each layer without a plan.
        """
        if self.has_shared_pool:
            return sum(lengths[layer] for layer in allowed) > sum(allowed.values())
        return any(lengths[layer] > most for layer, most in allowed.items())

    def step_quota(
        self, scalars: Mapping[str, Float[Tensor, " K"]], quota: int, tokens: int
    ) -> StepQuota | None:
        """Quota form of `choose` in a decode step, if each head keeps its own best; else None.

        Args:
            scalars: ledger scalars of the layer.
            quota: entries per kv head of the layer.
            tokens: M, the budget that protected shares are relative to.
        """
        del scalars, quota, tokens

    @abstractmethod
    def choose(self, ready: ScoredLayers, quotas: LayerQuotas) -> LayerPlans:
        """Plans for the scored layers that can be decided now.

        Args:
            ready: scored layers without a plan, by layer index; with `replans`, also layers cut
                earlier, in their present state.
            quotas: entries per kv head of every managed layer, by layer index.
        """


@dataclass(frozen=True)
class CrossLayerBudget(Budget):
    """Base of budgets in which all layers share one pool; plans wait for the last layer."""

    has_shared_pool = True

    def choose(self, ready: ScoredLayers, quotas: LayerQuotas) -> LayerPlans:
        return {} if len(ready) < len(quotas) else self._choose(dict(sorted(ready.items())), quotas)

    @abstractmethod
    def _choose(self, ready: ScoredLayers, quotas: LayerQuotas) -> LayerPlans:
        """Plans for all layers, given in order of their indices."""
