"""LSH sampling index (MagicPIG): entries drawn by hash collisions, weighted by their probability.

Chen et al., "MagicPIG: LSH Sampling for Efficient LLM Generation" (2024), arXiv:2410.16179: keys
are hashed by the signs of their products with random directions, in many tables. A query head draws
the keys that collide with it in at least two tables; keys of large products are drawn more often.
With p = 1 - angle / pi, P = p**bits and n tables, a key is drawn with the probability
u = 1 - (1 - P)**n - n P (1 - P)**(n - 1). Its logit is raised by -ln(u), so that over the random
directions the sum of weights is that of all keys: attention is estimated without bias where the
largest keys alone would miss the many small ones. Keys are hashed less their mean, which changes no
softmax. Sizes, two collisions, and the mean are those of the released code.

Differences: the mean is that of the keys at the first build, and again each time a head has twice
the entries. Every layer has directions of its own. The paper fetches all that collide; of more than
`tokens`, here `tokens` stay by priority sampling (Duffield, Lund, Thorup, "Priority sampling for
estimation of arbitrary subset sums", Journal of the ACM 54, 2007), which leaves sums without bias,
too. Where all entries of a head fit in `tokens`, all are fetched and none is weighted. Layers 0 and
16 of the released code are dense; here only the first `dense` layers are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int16, Int64
from torch import Tensor

from larder.core.arguments import require
from larder.core.errors import BadParameter
from larder.core.observation import Entries
from larder.core.recall import RecallResult
from larder.core.spec import LayerSpec
from larder.ops.search import top_rows
from larder.recall._index_base import EntryIndex, EntryRecall, grow_table

COLLISIONS = 2  # tables in which a key collides with the query, at least
MAX_BITS = 15  # of a code that an int16 holds
MAX_HASHED = 4096  # keys hashed at once


@dataclass(frozen=True)
class MagicPig(EntryRecall):
    """Entries drawn by collisions of hashes, each query head its own.

    Args:
        bits: random directions of each table.
        tables: hash tables.
        seed: of the random directions.
    """

    bits: int = 10
    tables: int = 150
    seed: int = 0

    is_plain: ClassVar[bool] = False
    weighs_pages: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 <= self.bits <= MAX_BITS, "magicpig.bits", f"from 1 to {MAX_BITS}", self.bits)
        if self.tables < COLLISIONS:
            raise BadParameter(
                f"magicpig.tables must be at least {COLLISIONS}, got {self.tables}: a key is drawn "
                f"if it collides in {COLLISIONS} of them."
            )

    def sets(self, layer: LayerSpec) -> int:
        return layer.query_heads

    def index(self, layer: LayerSpec) -> MagicPigIndex:
        return MagicPigIndex(layer, self)


class MagicPigIndex(EntryIndex):
    """Index with the codes of every key in every table, and the random directions."""

    tables = {"made_of": None, "means": None, "codes": 2}

    def __init__(self, layer: LayerSpec, part: MagicPig) -> None:
        super().__init__(layer)
        self._part = part
        source = torch.Generator().manual_seed(part.seed + layer.index)
        size = layer.head_dim, part.tables * part.bits
        self._directions = torch.randn(size, generator=source)
        self._made_of = torch.zeros(layer.kv_heads, dtype=torch.int64)
        self._means = torch.zeros(layer.kv_heads, layer.head_dim)
        self._codes = torch.zeros(layer.kv_heads, part.tables, 0, dtype=torch.int16)

    def _extend(self, entries: Entries, indexed: tuple[int, ...], queries: Tensor | None) -> None:
        self._codes = grow_table(self._codes, max(entries.lengths), dim=2)
        for head, (before, now) in enumerate(zip(indexed, entries.lengths, strict=True)):
            if now == before:
                continue
            first = before
            if now >= max(2 * int(self._made_of[head]), 1):
                self._means[head] = entries.head_keys(head).float().mean(0)
                self._made_of[head], first = now, 0
            keys = entries.keys_from(head, first).float() - self._means[head]
            codes = [self._hash_codes(some) for some in keys.split(MAX_HASHED)]
            self._codes[head, :, first:now] = torch.cat(codes).T

    def _hash_codes(self, rows: Float[Tensor, "N D"]) -> Int16[Tensor, "N L"]:
        """Codes of some vectors: the signs of their products, as bits, table by table."""
        bits = self._part.bits
        signs = (rows @ self._directions > 0).view(len(rows), self._part.tables, bits)
        powers = 2 ** torch.arange(bits, dtype=torch.int16)
        return (signs * powers).sum(2, dtype=torch.int16)

    def find(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        indexed = torch.tensor(self.paged.indexed).repeat_interleave(self.layer.group)
        fits = indexed <= count
        heads, numbers = torch.nonzero(self._collides(queries) & ~fits[:, None], as_tuple=True)
        logits, raised = self._weighted(queries, entries, heads, numbers)
        # Priority sampling: of more than `count`, those of the highest weight over a random number.
        shape = len(queries), max(self.paged.indexed)
        priorities = torch.full(shape, -torch.inf, dtype=torch.float64)
        priorities[heads, numbers] = logits + raised - self._noise(numbers).log()
        ranked = top_rows(priorities.float(), count + 1)
        least = torch.full((len(queries),), -torch.inf, dtype=torch.float64)
        if ranked.shape[1] > count:
            last = priorities.gather(1, ranked[:, count:].clamp(min=0))[:, 0]
            least = torch.where(ranked[:, count] < 0, least, last)
        weights = torch.zeros(shape, dtype=torch.float64)
        weights[heads, numbers] = torch.maximum(logits + raised, least[heads]) - logits
        return self._result(ranked[:, :count], weights, indexed, fits)

    def _result(
        self,
        pages: Int64[Tensor, "H P"],
        weights: Float[Tensor, "H M"],
        indexed: Int64[Tensor, " H"],
        fits: Bool[Tensor, " H"],
    ) -> RecallResult:
        """Result: what was drawn, or all entries of a head where they fit."""
        every = torch.arange(pages.shape[1]).expand_as(pages)
        every = every.masked_fill(every >= indexed[:, None], -1)
        pages = torch.where(fits[:, None], every, pages)
        log_weights = weights.gather(1, pages.clamp(min=0))
        is_empty = (pages < 0).all(1) & (indexed > 0)
        if bool(is_empty.any()):  # some page must be found: it has no weight
            pages[is_empty, 0] = 0
            log_weights[is_empty] = -torch.inf
        return RecallResult(pages, log_weights=log_weights.float())

    def _collides(self, queries: Float[Tensor, "H D"]) -> Bool[Tensor, "H M"]:
        """Mask of the entries that collide with each query head."""
        most = max(self.paged.indexed)
        asked = self._hash_codes(queries.float()).view(self.layer.kv_heads, self.layer.group, -1)
        codes = self._codes[:, :, :most]
        hits = [(codes == code[..., None]).sum(1, dtype=torch.int16) for code in asked.unbind(1)]
        owned = torch.arange(most) < torch.tensor(self.paged.indexed)[:, None]
        return ((torch.stack(hits, 1) >= COLLISIONS) & owned[:, None]).flatten(0, 1)

    def _noise(self, numbers: Int64[Tensor, " N"]) -> Float[Tensor, " N"]:
        """Fixed random number in (0, 1] of every entry number, in float64."""
        mixed = numbers + (self._part.seed << 20) + 1
        for shift in (15, 13, 16):
            mixed = (mixed ^ (mixed >> shift)) * 0x2C1B3C6D % (1 << 32)
        return (mixed.double() + 1) / (1 << 32)

    def _weighted(
        self,
        queries: Float[Tensor, "H D"],
        entries: Entries,
        heads: Int64[Tensor, " N"],
        numbers: Int64[Tensor, " N"],
    ) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        """Logits of some entries, and -ln of the probability of drawing each, in float64.

        Args:
            heads: query head of each entry.
        """
        owners = heads // self.layer.group
        keys = entries.keys[torch.tensor(entries.starts)[owners] + numbers].double()
        asked = queries.double()[heads]
        shifted = keys - self._means[owners]
        lengths = shifted.norm(dim=1) * asked.norm(dim=1)
        cosines = (shifted * asked).sum(1) / lengths.clamp(min=torch.finfo(torch.float32).tiny)
        chance = (1 - cosines.clamp(-1.0, 1.0).acos() / math.pi) ** self._part.bits
        tables = self._part.tables
        misses = (1 - chance) ** (tables - 1)
        drawn = 1 - misses * (1 - chance) - tables * chance * misses
        raised = -drawn.clamp(min=torch.finfo(torch.float32).tiny).log()
        return (keys * asked).sum(1) * self.layer.scaling, raised

    def tensors(self) -> tuple[Tensor, ...]:
        return (*super().tensors(), self._directions)


Part = MagicPig
