"""What else a query's weights are shared with, besides the entries that are judged.

Keys, positions and what the cache remembers are copied, one layer's at a time; values have no say
in weights, and are zeros that take no memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor

from larder.core.observation import Entries, Observation
from larder.core.types import PackedMask


def with_pass_keys(seen: Observation, entries: Entries) -> Entries:
    """Entries with the pass's own tokens behind those of every head, as plain attention sees them.

    Their values are zeros, and nothing is remembered of them: each stands for itself.
    """
    heads = range(seen.layer.kv_heads)
    own = list(torch.unbind(seen.keys.to(entries.keys.dtype)))
    ahead = seen.query_positions.to(entries.positions.dtype)
    fresh = torch.zeros(len(ahead), device=ahead.device)
    return _packed_entries(
        [torch.cat([entries.head_keys(h), own[h]]) for h in heads],
        [torch.cat([entries.head_positions(h), ahead]) for h in heads],
        {
            name: [torch.cat([column[entries.rows(h)], fresh]) for h in heads]
            for name, column in entries.columns.items()
        },
    )


def select_keys(seen: Observation, marked: PackedMask) -> Entries:
    """The entries that a packed mask marks; their values are zeros."""
    marks = torch.split(marked, list(seen.entries.lengths))
    heads = range(seen.layer.kv_heads)
    return _packed_entries(
        [seen.entries.head_keys(h)[marks[h]] for h in heads],
        [seen.entries.head_positions(h)[marks[h]] for h in heads],
        {
            name: [column[seen.entries.rows(h)][marks[h]] for h in heads]
            for name, column in seen.entries.columns.items()
        },
    )


def _packed_entries(
    keys: list[Tensor], positions: list[Tensor], columns: Mapping[str, list[Tensor]]
) -> Entries:
    lengths = tuple(len(head) for head in keys)
    starts = tuple(accumulate(lengths, initial=0))[:-1]
    together = torch.cat(keys)
    nothing = together.new_zeros(1, 1).expand(together.shape)
    remembered = {name: torch.cat(heads) for name, heads in columns.items()}
    return Entries(together, nothing, torch.cat(positions), starts, lengths, remembered)
