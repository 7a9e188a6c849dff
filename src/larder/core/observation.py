"""What a layer saw: all that a scorer may base its judgement on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from larder.core.spec import LayerSpec
from larder.core.types import Packed, PackedMask


@dataclass(frozen=True)
class Entries:
    """The cached entries of one layer: views into the cache, valid until it changes.

    Args:
        keys, values: flat storage; kv head h owns rows [starts[h], starts[h] + lengths[h]).
        positions: true positions, one per row of the storage.
        starts, lengths: one number per kv head.
    """

    keys: Float[Tensor, "C D"]
    values: Float[Tensor, "C D"]
    positions: Int[Tensor, " C"]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    def rows(self, head: int) -> slice:
        """Where a head's entries lie in the storage."""
        return slice(self.starts[head], self.starts[head] + self.lengths[head])

    def head_keys(self, head: int) -> Float[Tensor, "S D"]:
        return self.keys[self.rows(head)]

    def head_values(self, head: int) -> Float[Tensor, "S D"]:
        return self.values[self.rows(head)]

    def head_positions(self, head: int) -> Int[Tensor, " S"]:
        return self.positions[self.rows(head)]

    def between(self, start: int, stop: int) -> Entries:
        """The entries at positions [start, stop), as views into the same storage."""
        starts: list[int] = []
        lengths: list[int] = []
        for head in range(len(self.lengths)):
            edges = torch.tensor([start, stop], device=self.positions.device)
            found = torch.searchsorted(self.head_positions(head).long(), edges)
            low, high = int(found[0]), int(found[1])
            starts.append(self.starts[head] + low)
            lengths.append(high - low)
        return replace(self, starts=tuple(starts), lengths=tuple(lengths))

    def packed_positions(self) -> Int[Tensor, " T"]:
        """Positions of all entries, head by head, without the slack between them."""
        return torch.cat([self.head_positions(head) for head in range(len(self.lengths))])


@dataclass(frozen=True)
class Seen:
    """One layer at the moment of judgement.

    Args:
        layer: its shape.
        entries: what it has cached, the newest block included, scratch tokens excluded.
        queries: post-RoPE queries of the block (append pass) or of the scratch prompt.
        query_positions: their true positions.
        length: true tokens read so far.
        span: positions [start, stop) that this pass speaks for.
        keys: post-RoPE keys of the pass's own tokens; those of a scratch pass are in no cache.
    """

    layer: LayerSpec
    entries: Entries
    queries: Float[Tensor, "H Q D"]
    query_positions: Int[Tensor, " Q"]
    length: int
    span: tuple[int, int]
    keys: Float[Tensor, "K Q D"]


@dataclass(frozen=True)
class Scored:
    """A layer's judgement: higher scores stay longer, protected entries stay always."""

    scores: Packed
    protected: PackedMask
    lengths: tuple[int, ...]

    def ranked(self) -> Packed:
        """Scores with the protected entries above all others."""
        return self.scores.masked_fill(self.protected, torch.inf)


@dataclass(frozen=True)
class Scratch:
    """A token sequence to be read behind the cache, only to see what it looks at.

    Args:
        ids: its tokens.
        span: positions [start, stop) of the cache that it speaks for.
    """

    ids: tuple[int, ...]
    span: tuple[int, int]


# Names of prompts to token ids: "episode", "repeat", "summarize", "question", ...
Prompts = Mapping[str, Sequence[int]]
