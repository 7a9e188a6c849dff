"""A list of entries per head, whose keys are turned to their index whenever they are looked at."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from larder.cache import NewTokens
from references.cache.folding import Fold, folded
from references.cache.loop import Entry, attend_one
from references.cache.ragged import RaggedLoop
from references.ops.softmax import sink_of


class CompactLoop(RaggedLoop):
    """Holds keys as they were before rotation."""

    exact = False

    def append(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        for head, entries in enumerate(self.heads):
            for q, position in enumerate(positions.tolist()):
                unturned = self.turned(keys[head, q], -position)
                entries.append(Entry(position, unturned, values[head, q]))

    def attend(self, new: NewTokens) -> Tensor:
        queries, keys, values, positions = new.queries, new.keys, new.values, new.positions
        group = self.layer.query_heads // self.layer.kv_heads
        out = torch.zeros(queries.shape, dtype=torch.float64)
        for head in range(queries.shape[0]):
            kv, first = head // group, 0
            for section in new.section_lengths:
                for q in range(section):
                    own = [self.fresh(keys, values, positions, kv, first + s) for s in range(q + 1)]
                    seen = self.looked_at([*self.heads[kv], *own])
                    unturned = self.turned(queries[head, first + q], -int(positions[first + q]))
                    query = self.turned(unturned, len(seen) - 1)
                    layer = self.layer
                    numbers = layer.scaling, layer.softcap, sink_of(layer.sinks, head)
                    out[head, first + q] = attend_one(query, seen, *numbers)
                first += section
        return out

    def fresh(self, keys: Tensor, values: Tensor, positions: Tensor, kv: int, q: int) -> Entry:
        at = int(positions[q])
        return Entry(at, self.turned(keys[kv, q], -at), values[kv, q])

    def shown(self) -> list[list[Entry]]:
        return [self.looked_at(entries) for entries in self.heads]

    def fold(self, chosen: Sequence[Sequence[int]], folds: Sequence[Fold]) -> None:
        targets = {fold.target for fold in folds}
        merged = folded(self.shown(), chosen, folds)
        for head, indices in enumerate(chosen):
            for row, index in enumerate(indices):
                if (head, index) in targets:
                    sums, dtype = merged[head][row], self.heads[head][index].key.dtype
                    back = self.turned(sums.key.double(), -index).to(dtype)
                    merged[head][row] = Entry(sums.position, back, sums.value)
                else:
                    merged[head][row] = self.heads[head][index]
        self.heads = merged

    def looked_at(self, entries: list[Entry]) -> list[Entry]:
        return [
            Entry(entry.position, self.turned(entry.key, index), entry.value)
            for index, entry in enumerate(entries)
        ]

    def turned(self, vector: Tensor, position: int) -> Tensor:
        """In double precision, pair by pair; rounded to the type that is held."""
        assert self.layer.radians is not None
        half, numbers = len(self.layer.radians), vector.tolist()
        out = list(numbers)
        for pair, radians in enumerate(self.layer.radians):
            cosine, sine = math.cos(position * radians), math.sin(position * radians)
            x, y = numbers[pair], numbers[pair + half]
            out[pair], out[pair + half] = x * cosine - y * sine, y * cosine + x * sine
        return torch.tensor(out, dtype=torch.float64).to(vector.dtype)
