"""Scorer by expected attention of future queries, estimated from the distribution of past ones.

Devoto et al., "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries
Distribution" (2025), arXiv:2510.00636. Queries before rotation are taken to be Gaussian, with the
mean and covariance of those just read; their rotation is the mean of those at the next `future`
positions. The expected exponential of a logit is then known in closed form; its share among all
entries, plus `epsilon`, times the length of the value, is the score. Query heads that share a kv
head are averaged.

Follows the authors' library, NVIDIA/kvpress, which takes the length of the value itself; the paper
multiplies it with the output projection, which a policy does not see. 0.01 is the epsilon of the
runs that the library lists. There, statistics are of the whole input; here they are of the block
that was read last, or of the tokens that a step of generation read: under `every_step()` that is
one query without any covariance, so take `lagged()` or none. Queries are turned back to what they
were before rotation, so models that norm queries are served too. A softcap, under which there is no
closed form, is applied to the expected logit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.arguments import require
from larder.core.observation import Observation
from larder.core.types import Packed, Queries
from larder.ops.attention import cap_logits, sink_logits, sinks_by_group
from larder.ops.attention_weights import softmax_with_sinks
from larder.ops.rope import unrotate_by_mean
from larder.policy.protect import ProtectedTokens
from larder.policy.scorers._future_queries import future_positions, rope_radians, unrotated_queries
from larder.policy.scorers.base import Scorer


@dataclass(frozen=True)
class Expected(Scorer):
    """Expected attention of Gaussian queries at the positions that come next.

    Args:
        future: positions that the rotation is averaged over.
        sinks: tokens at the start of the sequence that always stay; queries there do not count,
            unless there are no others.
        epsilon: added to every share, so that among entries that get next to nothing long values
            stay; 0 or more.
    """

    future: int = 512
    sinks: int = 4
    epsilon: float = 0.01

    def __post_init__(self) -> None:
        require(self.future >= 1, "expected.future", "at least 1 position", self.future)
        require(self.sinks >= 0, "expected.sinks", "0 or more", self.sinks)
        require(self.epsilon >= 0, "expected.epsilon", "0 or more", self.epsilon)

    def protected_tokens(self) -> ProtectedTokens:
        """The sinks."""
        return ProtectedTokens(self.sinks)

    def score(self, observation: Observation) -> Packed:
        radians = rope_radians(observation, "expected")
        unturned = unrotated_queries(observation, radians, self.sinks)
        groups = enumerate(torch.split(unturned, observation.layer.group))
        return torch.cat(
            [self._of_head(observation, head, group, radians) for head, group in groups]
        )

    def _of_head(
        self,
        observation: Observation,
        head: int,
        queries: Float[Tensor, "R Q D"],
        radians: Float[Tensor, " half"],
    ) -> Float[Tensor, " S"]:
        entries = observation.entries
        ahead = future_positions(observation, head, self.future)
        keys = unrotate_by_mean(entries.head_keys(head), ahead, radians) * observation.layer.scaling
        is_sink = entries.head_positions(head) < self.sinks
        logits = cap_logits(_expected_logits(queries, keys), observation.layer.softcap)
        heads = sinks_by_group(sink_logits(observation.layer, logits), observation.layer.kv_heads)[
            head
        ]
        shares = softmax_with_sinks(logits.masked_fill(is_sink, -torch.inf), heads).mean(0)
        lengths = entries.head_values(head).float().square().sum(-1).sqrt()
        return ((shares + self.epsilon) * lengths).masked_fill(is_sink, torch.inf)


def _expected_logits(queries: Queries, keys: Float[Tensor, "S D"]) -> Float[Tensor, "R S"]:
    """Logarithm of the mean exponential of a logit, for queries spread as those given."""
    mean = queries.mean(1)
    spread = queries - mean[:, None]
    covariance = spread.transpose(1, 2) @ spread / queries.shape[1]  # [R, D, D]
    return mean @ keys.T + ((keys @ covariance) * keys).sum(-1) / 2


Part = Expected
