"""Gapless layer: tiered, with recalled and resident entries at positions without gaps.

Liu et al., "ReAttention: Training-Free Infinite Context with Finite Attention Scope" (2024),
arXiv:2407.15176 (LongCache): what a token attends to is rotated to consecutive positions, so that
no distance exceeds the number of these entries, however long the text.

Queries keep their true position. Of a kv head's m resident and found entries, in the order of their
true positions, the last one stands right before the query, or is the query's own token, and the
first one m - 1 positions before that. Where all entries are found they stand where they stood, and
where everything is attended to without a search nothing is moved. Keys are held rotated to true
positions, as the index expects them; a step rotates a copy of those that it attends to.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from larder.cache.forms.base import AttentionCall
from larder.cache.forms.ragged import RaggedLayer
from larder.cache.forms.tiered import TieredLayer
from larder.cache.new_tokens import NewTokens
from larder.cache.offload.page_selection import PageSelection
from larder.cache.spec import LayerOptions
from larder.core.errors import CacheError
from larder.core.observation import Entries
from larder.core.spec import POSITION_BYTES, LayerSpec
from larder.core.types import Mode, Queries
from larder.ops.attention import ragged_attention
from larder.ops.packing import starts_of
from larder.ops.rope import rerotate


class GaplessLayer(TieredLayer):
    """Tiered layer whose searched steps and blocks attend at consecutive positions.

    Raises:
        CacheError: the layer's rotary embedding is unknown.
    """

    has_public_name = False
    reads_in_place = False

    def __init__(self, layer: LayerSpec, options: LayerOptions) -> None:
        if layer.radians is None:
            raise CacheError(
                f"Layer {layer.index} has a rotary embedding unknown to Larder, so its keys cannot "
                "be moved to positions without gaps: leave compact() out."
            )
        super().__init__(layer, options)
        self._records = False

    def record_logits(self) -> None:
        self._records = True
        super().record_logits()

    @property
    def _reads_all(self) -> bool:
        """False: a step that attended to everything would see distances of the whole text."""
        return False

    @property
    def attention_copy_bytes(self) -> int:
        """Bytes of the entries that a step attends to, which are copied and rotated."""
        recalled = self.parking.recall.pages * self.parking.recall.page
        sets = self.parking.recall.sets(self.layer)
        rows = sum(self.lengths) * (sets // self.layer.kv_heads) + recalled * sets
        itemsize = self._ragged.entries().keys.itemsize
        return rows * (2 * self.layer.head_dim * itemsize + 2 * POSITION_BYTES)

    def attention_calls(self, new: NewTokens) -> Iterator[AttentionCall]:
        selection = self._selection(new.queries, new.mode)
        if selection is None:
            yield from self._ragged.attention_calls(new)
            if len(self._slow):
                yield from self._slow.attention_calls(new.queries)
            return
        if self._records:  # what scorers judge by: logits of resident entries where they were
            self._records = False
            for call in self._ragged.attention_calls(new):
                call()
        behind = int(new.positions[0]) + int(new.is_step)
        rows = _visible(self._ragged, self._slow.entries(), selection)
        yield partial(self._attend, new.queries, rows, behind)

    def _selection(self, queries: Queries, mode: Mode) -> PageSelection | None:
        """Pages that the queries attend to; None for attention to everything."""
        if not len(self._slow) or (search := self._search(queries, mode)) is None:
            return None
        held = self._slow.entries()
        if (selection := self._leader_selection(held)) is not None:
            return selection
        return None if search(queries, held, self._observed) is None else self.fetcher.selection

    def _attend(
        self, queries: Queries, rows: list[tuple[Tensor, Tensor, Tensor]], behind: int
    ) -> tuple[Tensor, Tensor]:
        """Attention to entries rotated to the positions right before `behind`."""
        radians = torch.tensor(self.layer.radians, device=queries.device)
        rotated: list[Tensor] = []
        for keys, _, positions in rows:
            ranks = torch.argsort(torch.argsort(positions, stable=True), stable=True)
            new = behind - len(positions) + ranks
            rotated.append(rerotate(keys[None], positions, new, radians)[0])
        lengths = torch.tensor([len(positions) for _, _, positions in rows])
        values = torch.cat([values for _, values, _ in rows])
        layout = starts_of(lengths), lengths, self.layer.scaling
        return ragged_attention(
            queries, torch.cat(rotated), values, *layout, softcap=self.layer.softcap
        )


def _visible(
    ragged: RaggedLayer, parked: Entries, selection: PageSelection
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Keys, values and true positions of what each set attends to.

    Offloaded entries that the search did not know yet are all among them.
    """
    held, rows = ragged.entries(), list[tuple[Tensor, Tensor, Tensor]]()
    group = len(selection.pages) // len(held.lengths)
    for number, numbers in enumerate(selection.numbers.flatten(1)):
        head = number // group
        later = torch.arange(selection.lengths[head], parked.lengths[head])
        found = torch.cat([numbers[numbers >= 0], later]) + parked.starts[head]
        keys, values = torch.empty(2, len(found), held.keys.shape[1], dtype=held.keys.dtype)
        parked.gather(found, keys, values)
        positions = parked.positions[found].to(held.positions)
        rows.append(
            (
                torch.cat([keys.to(held.keys.device), held.head_keys(head)]),
                torch.cat([values.to(held.values.device), held.head_values(head)]),
                torch.cat([positions, held.head_positions(head)]).long(),
            )
        )
    return rows


Part = GaplessLayer
