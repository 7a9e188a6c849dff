"""Scorer by what an entry adds to the span of the values that future queries will read (CAPKV).

Yang et al., "Rethinking KV Cache Eviction via a Unified Information-Theoretic Objective" (2026),
arXiv:2604.25975, known to us by the code that NVIDIA/kvpress released. Entry i has a relevance w_i
= exp(tau cos(k_i, q)), where q is the mean of past queries, rotated as the next `future` positions
will be on average. The capacity of a head is A = I + sum_i w_i v_i v_i^T over its values, and the
score of an entry w_i v_i^T A^-1 v_i: high where it is relevant and no other relevant entry has a
value like its own. Query heads that share a kv head are averaged.

As there, keys and the mean query have unit length (the paper multiplies them as they are), and
relevances are relative to the head's largest. Queries are those of the block that was read last;
at a step of generation, that of the newest token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from larder.core.arguments import require
from larder.core.observation import Observation
from larder.core.types import Packed
from larder.ops.rope import unrotate_by_mean
from larder.policy.protect import ProtectedTokens
from larder.policy.scorers._future_queries import future_positions, rope_radians, unrotated_queries
from larder.policy.scorers.base import Scorer

FLOOR = 1e-6  # added to every relevance inside the capacity
LEAST_RIDGE = 1e-12  # of the largest number of a capacity in float64, in place of a lost identity


@dataclass(frozen=True)
class CapKV(Scorer):
    """Relevance times leverage of the value among relevant values.

    Args:
        tau: sharpness of the relevance; 0 leaves the leverage of values alone.
        future: positions that the rotation of the mean query is averaged over.
        sinks: tokens at the start of the sequence that always stay and do not count, unless there
            are no others.
    """

    tau: float = 5.0
    future: int = 512
    sinks: int = 4

    def __post_init__(self) -> None:
        require(0 <= self.tau < math.inf, "capkv.tau", "0 or more", self.tau)
        require(self.future >= 1, "capkv.future", "at least 1 position", self.future)
        require(self.sinks >= 0, "capkv.sinks", "0 or more", self.sinks)

    def protected_tokens(self) -> ProtectedTokens:
        """The sinks."""
        return ProtectedTokens(self.sinks)

    def score(self, observation: Observation) -> Packed:
        radians = rope_radians(observation, "capkv")
        means = unrotated_queries(observation, radians, self.sinks).mean(1)
        groups = enumerate(torch.split(means, observation.layer.group))
        return torch.cat(
            [self._of_head(observation, head, group, radians) for head, group in groups]
        )

    def _of_head(
        self,
        observation: Observation,
        head: int,
        means: Float[Tensor, "R D"],
        radians: Float[Tensor, " half"],
    ) -> Float[Tensor, " S"]:
        entries = observation.entries
        is_sink = entries.head_positions(head) < self.sinks
        keys = normalize(entries.head_keys(head)[~is_sink].float(), dim=-1)
        values = entries.head_values(head)[~is_sink].float()
        scores = values.new_full((len(is_sink),), torch.inf)
        if len(values):
            ahead = future_positions(observation, head, self.future)
            rotated = unrotate_by_mean(means, -ahead, radians)  # the inverse of the inverse
            alike = normalize(rotated, dim=-1) @ keys.T
            scores[~is_sink] = _capacity_scores(self.tau * alike, values)
        return scores


def _capacity_scores(logits: Float[Tensor, "R S"], values: Float[Tensor, "S D"]) -> Packed:
    relevance = (logits - logits.amax(-1, keepdim=True)).exp()
    weights = relevance + FLOOR
    solved, failures = _solved(weights, values)
    if bool(failures.any()):  # values so large, such as SubGen's, that the identity is lost
        solved = _solved(weights.double(), values.double(), LEAST_RIDGE)[0].float()
    leverage = torch.einsum("rds,sd->rs", solved, values)
    return (relevance * leverage).mean(0)


def _solved(
    weights: Float[Tensor, "R S"], values: Float[Tensor, "S D"], least_ridge: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Values over the capacity of each query [R, D, S], and which solutions failed.

    Args:
        least_ridge: share of the largest number of the capacity that is added to its diagonal
            where the identity is less.
    """
    weighed = values * weights[..., None]  # [R, S, D]
    capacity = weighed.mT @ values
    ridge = (least_ridge * capacity.amax((1, 2))).clamp(min=1)
    capacity = capacity + ridge[:, None, None] * torch.eye(values.shape[1]).to(values)
    # positive definite; torch 2.13's LU of a batch of matrices above 128 fails on several threads
    roots, failures = torch.linalg.cholesky_ex(capacity)  # pyright: ignore
    values = values.T.expand(len(capacity), -1, -1)
    return torch.cholesky_solve(values, roots), failures  # pyright: ignore


Part = CapKV
