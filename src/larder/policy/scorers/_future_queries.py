"""Queries of a pass before rotation, and the positions of the queries that will follow."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from larder.core.errors import ScoreError
from larder.core.observation import Observation
from larder.core.types import Queries
from larder.ops.rope import rotate_per_head


def rope_radians(seen: Observation, scorer: str) -> Float[Tensor, " half"]:
    """Radians per position of each pair of dimensions.

    Raises:
        ScoreError: the layer rotates in a way that is not known.
    """
    if seen.layer.radians is None:
        raise ScoreError(
            f"Layer {seen.layer.index} rotates its queries in an unknown way, so "
            f"{scorer} cannot undo the rotation: take a scorer that uses cached keys."
        )
    return torch.tensor(seen.layer.radians, device=seen.queries.device)


def unrotated_queries(seen: Observation, radians: Float[Tensor, " half"], sinks: int) -> Queries:
    """Queries of the pass before rotation, without those of the sinks unless there are no others.

    Args:
        sinks: tokens at the start of the sequence whose queries do not count.
    """
    unturned = rotate_per_head(seen.queries.float(), -seen.effective_rope_positions, radians)
    counting = seen.query_positions >= sinks
    return unturned[:, counting] if bool(counting.any()) else unturned


def future_positions(seen: Observation, head: int, count: int) -> Int[Tensor, " count"]:
    """Positions that the next `count` queries of a kv head will be rotated to."""
    ahead = torch.arange(1, count + 1, device=seen.queries.device)
    return ahead + seen.effective_rope_positions[head, -1]
