"""What else a query's weights are shared with, besides the entries that are judged."""

from __future__ import annotations

import torch
from torch import Tensor

from larder.core.observation import Entries, Seen


def with_own_keys(seen: Seen, entries: Entries) -> Entries:
    """Entries with the pass's own tokens behind those of every head, as plain attention sees them.

    A copy of one layer's keys. What has no place in the cache has no value: zeros stand for it.
    """
    heads = range(seen.layer.kv_heads)
    own = list(torch.unbind(seen.keys.to(entries.keys.dtype)))
    keys = [part for h in heads for part in (entries.head_keys(h), own[h])]
    nothing = torch.zeros_like(own[0])
    values = [part for h in heads for part in (entries.head_values(h), nothing)]
    ahead = seen.query_positions.to(entries.positions.dtype)
    positions = [part for h in heads for part in (entries.head_positions(h), ahead)]
    lengths = tuple(length + len(ahead) for length in entries.lengths)
    return _joined(keys, values, positions, lengths)


def at(seen: Seen, kept: Tensor) -> Entries:
    """The entries that a packed mask marks, in storage of their own."""
    parts = torch.split(kept, list(seen.entries.lengths))
    heads = range(seen.layer.kv_heads)
    return _joined(
        [seen.entries.head_keys(h)[parts[h]] for h in heads],
        [seen.entries.head_values(h)[parts[h]] for h in heads],
        [seen.entries.head_positions(h)[parts[h]] for h in heads],
        tuple(int(part.sum()) for part in parts),
    )


def _joined(
    keys: list[Tensor], values: list[Tensor], positions: list[Tensor], lengths: tuple[int, ...]
) -> Entries:
    starts = tuple(sum(lengths[:head]) for head in range(len(lengths)))
    return Entries(torch.cat(keys), torch.cat(values), torch.cat(positions), starts, lengths)
