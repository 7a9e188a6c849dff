"""Queries of a pass before rotation, and the positions of the queries that will follow."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from larder.core.errors import ScoreError
from larder.core.observation import Observation
from larder.core.types import Queries
from larder.ops.rope import rotate_per_head


def rope_radians(observation: Observation, scorer: str) -> Float[Tensor, " half"]:
    """Radians per position of each pair of dimensions.

    Raises:
        ScoreError: the layer rotates in a way that is not known.
    """
    if observation.layer.radians is None:
        raise ScoreError(
            f"Layer {observation.layer.index} rotates its queries in an unknown way, so "
            f"{scorer} cannot undo the rotation: take a scorer that uses cached keys."
        )
    return torch.tensor(observation.layer.radians, device=observation.queries.device)


def unrotated_queries(
    observation: Observation, radians: Float[Tensor, " half"], sinks: int
) -> Queries:
    """Queries of the pass before rotation, without those of the sinks unless there are no others.

    Args:
        sinks: tokens at the start of the sequence whose queries do not count.
    """
    unturned = rotate_per_head(
        observation.queries.float(), -observation.effective_rope_positions, radians
    )
    counting = observation.query_positions >= sinks
    return unturned[:, counting] if bool(counting.any()) else unturned


def future_positions(observation: Observation, head: int, count: int) -> Int[Tensor, " count"]:
    """Positions that the next `count` queries of a kv head will be rotated to."""
    ahead = torch.arange(1, count + 1, device=observation.queries.device)
    return ahead + observation.effective_rope_positions[head, -1]
