"""What else a query's weights are shared with, besides the entries that are judged.

Keys and positions are copied, one layer's at a time; values have no say in weights, and are zeros
that take no memory.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from larder.core.observation import Entries, Seen
from larder.core.types import PackedMask


def with_own_keys(seen: Seen, entries: Entries) -> Entries:
    """Entries with the pass's own tokens behind those of every head, as plain attention sees them.

    Their values are zeros.
    """
    heads = range(seen.layer.kv_heads)
    own = list(torch.unbind(seen.keys.to(entries.keys.dtype)))
    ahead = seen.query_positions.to(entries.positions.dtype)
    return _joined(
        [torch.cat([entries.head_keys(h), own[h]]) for h in heads],
        [torch.cat([entries.head_positions(h), ahead]) for h in heads],
    )


def keys_of(seen: Seen, marked: PackedMask) -> Entries:
    """The entries that a packed mask marks; their values are zeros."""
    marks = torch.split(marked, list(seen.entries.lengths))
    heads = range(seen.layer.kv_heads)
    return _joined(
        [seen.entries.head_keys(h)[marks[h]] for h in heads],
        [seen.entries.head_positions(h)[marks[h]] for h in heads],
    )


def _joined(keys: list[Tensor], positions: list[Tensor]) -> Entries:
    lengths = tuple(len(head) for head in keys)
    starts = tuple(accumulate(lengths, initial=0))[:-1]
    together = torch.cat(keys)
    nothing = together.new_zeros(1, 1).expand(together.shape)
    return Entries(together, nothing, torch.cat(positions), starts, lengths)
