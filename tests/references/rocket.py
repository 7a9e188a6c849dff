"""RocketKV's second stage in plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence

from references.lloyd import Vector
from references.recalling import Rows, of_groups, softmax
from references.sparq import channels_of


def sizes(ratio: float, head_dim: int) -> tuple[int, int]:
    """Entries of a chunk, and channels that are read."""
    chunk = math.ceil(ratio**0.5)
    chunk = 1 if chunk > ratio else chunk
    return chunk, int(head_dim * chunk / ratio)


def scores(
    queries: Sequence[Vector], keys: Sequence[Sequence[Vector]], ratio: float, scaling: float
) -> Rows:
    """Of every kv head, what its query heads would give each chunk."""
    chunk, read = sizes(ratio, len(queries[0]))
    group = len(queries) // len(keys)
    rows = []
    for h, query in enumerate(queries):
        own = keys[h // group]
        channels = channels_of(queries[h // group * group : (h // group + 1) * group], read)
        share = sum(abs(query[d]) for d in channels) / sum(map(abs, query))
        logits = []
        for at in range(0, len(own), chunk):
            some = own[at : at + chunk]
            logit = 0.0
            for d in channels:
                side = max if query[d] >= 0 else min
                logit += query[d] * side(key[d] for key in some)
            logits.append(logit * scaling / math.sqrt(share))
        rows.append(softmax(logits))
    return of_groups(rows, len(keys))
