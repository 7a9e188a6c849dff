"""Shows a policy queries and keys as attention took them, where a layer turns them to its own."""

from __future__ import annotations

from dataclasses import replace

import torch

from larder.core.observation import Observation
from larder.ops.rope import rerotate_per_head


def rotate_to_cache_positions(seen: Observation, own: int) -> Observation:
    """The same, with queries and keys turned to the places that follow the layer's entries.

    What stands later than right behind the text, or earlier, does so in its places too.

    Args:
        own: how many of the entries of each head are the queries' own tokens.
    """
    true, radians = seen.query_positions, seen.layer.radians
    if radians is None or not len(seen.entries.places):
        return seen
    shift = true[0] - (seen.length - own)
    lengths = torch.tensor(seen.entries.lengths, device=true.device)
    first = (lengths - own + shift).clamp(min=0)
    places = first[:, None] + true - true[0]
    turning = torch.tensor(radians, device=true.device)
    return replace(
        seen,
        queries=rerotate_per_head(seen.queries, true, places, turning),
        keys=rerotate_per_head(seen.keys, true, places, turning),
        places=places,
    )
