"""How much of what a query wants an index finds, on keys that are given."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.core.observation import Entries
from larder.core.recall import Index
from larder.core.spec import LayerSpec

RANKS = (1, 3, 5)
ENDS = 32  # sinks, and as many of the latest, that are never parked


def parked(keys: Float[Tensor, "K S D"]) -> Entries:
    """All entries but the ends, as a slow tier holds them; values do not matter."""
    flat = keys[:, ENDS : keys.shape[1] - ENDS].contiguous()
    heads, length, head_dim = flat.shape
    rows = flat.view(-1, head_dim)
    starts = tuple(head * length for head in range(heads))
    nowhere = torch.zeros(len(rows), dtype=torch.int32)
    return Entries(rows, rows, nowhere, starts, (length,) * heads)


@dataclass
class Recalled:
    """Means over query heads and queries, as sums until `means` divides them.

    Args:
        at: share of the 1, 3 and 5 keys with the largest products that were found.
        pages: share of the pages that exact search over the same pages finds.
        mass: attention, over all keys, that the found and the unparked entries have.
        possible: the same if as many were chosen one by one, by their products.
    """

    at: dict[int, float]
    pages: float = 0.0
    mass: float = 0.0
    possible: float = 0.0
    count: int = 0

    def means(self) -> dict[str, float]:
        named = {f"recall@{rank}": value for rank, value in self.at.items()}
        named |= {"pages": self.pages, "mass": self.mass, "possible": self.possible}
        return {name: value / self.count for name, value in named.items()}


def listen(
    index: Index,
    layer: LayerSpec,
    keys: Float[Tensor, "K S D"],
    queries: Float[Tensor, "H Q D"],
    count: int,
    into: Recalled,
) -> None:
    """Ask an index that has taken in `parked(keys)`, and add to the sums."""
    entries = parked(keys)
    for query in queries.unbind(1):
        found = index.find(query.contiguous(), entries, count).pages
        wanted = index.exact(query.contiguous(), entries, count).pages
        held = index.contents(found)
        for head in range(layer.query_heads):
            row = head * len(found) // layer.query_heads
            own = keys[head // layer.group]
            _one(own @ query[head], layer.scaling, held[row], into)
            right = set(wanted[row].tolist()) - {-1}
            into.pages += len(right & set(found[row].tolist())) / max(len(right), 1)


def _one(
    products: Float[Tensor, " S"], scaling: float, held: Int64[Tensor, "P E"], into: Recalled
) -> None:
    """Count for one query head."""
    inner = slice(ENDS, len(products) - ENDS)
    is_found = torch.zeros(len(products) - 2 * ENDS, dtype=torch.bool)
    is_found[held[held >= 0]] = True
    best = products[inner].argsort(descending=True)
    weights = (products * scaling).softmax(-1)
    ends = float(weights.sum() - weights[inner].sum())
    for rank in into.at:
        into.at[rank] += float(is_found[best[:rank]].float().mean())
    into.mass += ends + float(weights[inner][is_found].sum())
    into.possible += ends + float(weights[inner][best[: held.numel()]].sum())
    into.count += 1
