"""Scorer by attention from the latest tokens, whose queries are held (PyramidInfer).

Yang et al., "PyramidInfer: Pyramid KV Cache Compression for High-throughput LLM Inference" (2024),
arXiv:2405.12532: the tokens that the recent ones attend to are the context worth keeping. While
text is generated the recent tokens move on, and so does what they attend to. The released code
holds the attention weights of the recent tokens; here their queries are held, R vectors for each
query head of a layer, and judge by their weights of today: where an entry is gone, the others have
its share.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.core.arguments import require
from larder.core.observation import LatestQueries, Observation
from larder.core.part import Ledger
from larder.policy.attention_reduction import ObservationWindow
from larder.policy.protect import ProtectedTokens
from larder.policy.scorers.base import AttentionScorer


@dataclass(frozen=True)
class RecentAttention(AttentionScorer):
    """Attention from the last `window` queries, of this pass and of earlier ones.

    Args:
        window: R, the queries that judge, in tokens. They always stay themselves.
    """

    window: int = 32

    def __post_init__(self) -> None:
        require(self.window >= 1, "recent_attention.window", "at least 1 token", self.window)

    def required_ledger(self) -> Ledger:
        return Ledger(queries=self.window)

    def default_reduction(self) -> tuple[str, str]:
        return "rising_mean", "layer_mean"

    def observation_window(self, observation: Observation) -> ObservationWindow:
        latest = LatestQueries(observation.queries, observation.query_positions)
        if observation.latest is not None:
            latest = observation.latest.extended(latest)
        latest = latest.last(self.window)
        return ObservationWindow(latest.queries, observation.entries, latest.positions)

    def protected_tokens(self) -> ProtectedTokens:
        """The tokens that judge."""
        return ProtectedTokens(last=self.window)


Part = RecentAttention
