"""Page pool: device slots for recalled pages, and attention to offloaded entries.

    slots   [ set 0: slot 0 | slot 1 | ... | set 1: slot 0 | ... ]      `page` rows a slot

A set is a page list that some query heads share. Pages that are requested again stay in their
slots; the others are gathered into one buffer, moved in one copy, and scattered into slots that are
not requested. A page whose version changed is moved again.

Rows without a requested entry, page padding included, get a bias that masks them in attention.
The others have none, or the log-weight of their page where an index samples pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.cache.forms.base import AttentionCall, AttentionState
from larder.cache.memory_usage import TensorOwner
from larder.core.observation import Entries
from larder.core.recall import Estimate, KeyTrees
from larder.core.spec import LayerSpec
from larder.core.types import Queries
from larder.ops.attention import merge_attention, ragged_attention
from larder.ops.cpu.decode_attention import AttendedRows

if TYPE_CHECKING:  # not before pages are recalled
    from larder.ops.cpu.recall_step import RecalledStep

MASKED_BIAS = -1e30  # finite, as biases must be; its weight is 0 beside anything seen
NO_PAGE = -1
BIAS_BYTES = 4

Int64Array = np.ndarray[Any, np.dtype[np.int64]]


class RoomNeeded(NamedTuple):
    """Room that slots lack for a step.

    Args:
        slots: of each set.
        num_pages: of each head, which the table has entries for.
    """

    slots: int
    num_pages: int


class PagePool(TensorOwner):
    """Slots for pages of one layer, in the model's memory.

    Args:
        sets: page lists; set n belongs to kv head n // (sets / K).
        slots: pages of each set.
        page: maximum entries of a page.
    """

    def __init__(
        self,
        layer: LayerSpec,
        sets: int,
        slots: int,
        page: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.sets, self.slots, self.page = sets, slots, page
        self.requested = self.moved = 0  # pages requested and moved so far
        self._layer = layer
        rows = sets * slots * page
        self._keys = torch.zeros(rows, layer.head_dim, dtype=dtype, device=device)
        self._values = torch.zeros_like(self._keys)
        self._biases = torch.full((rows,), MASKED_BIAS, device=device)
        self._pages = np.full((sets, slots), NO_PAGE, np.int64)
        self._versions = np.zeros((sets, slots), np.int64)
        self._table = np.full((sets, 0), NO_PAGE, np.int32)  # the slot of each page
        self._counts = torch.zeros(sets, dtype=torch.int64)
        self._starts = torch.arange(sets) * (slots * page)
        self._count_bytes()

    def load(
        self,
        pages: Int64[Tensor, "N P"],
        versions: Int64[Tensor, "N P"],
        numbers: Int64[Tensor, "N P S"],
        entries: Entries,
    ) -> None:
        """Load the given pages, and mask all others in attention.

        Args:
            pages: -1 after the last of each set.
            numbers: entry numbers of each page, -1 after the last.
            entries: the slow tier.
        """
        from larder.ops.cpu import page_slots  # not before pages are recalled

        if type(entries) is Entries and page_slots.supports(self._keys, entries.keys):
            self._load_by_kernel(pages, versions, numbers, entries)
            return
        wanted = np.full((self.sets, self.slots), NO_PAGE, np.int64)
        wanted[:, : pages.shape[1]] = pages.numpy()
        fresh = np.zeros_like(wanted)
        fresh[:, : pages.shape[1]] = versions.numpy()
        slots = self._slots_of(wanted, fresh)
        filled = np.zeros((self.sets, self.slots, self.page), bool)
        sets, ranks = np.nonzero(wanted >= 0)
        filled[sets, slots[sets, ranks]] = numbers.numpy()[sets, ranks] >= 0
        self._fetch(wanted, fresh, slots, numbers.numpy(), entries)
        seen = torch.from_numpy(filled.reshape(-1)).to(self._biases.device)
        self._biases = torch.where(seen, 0.0, MASKED_BIAS)
        some = torch.from_numpy(filled.any((1, 2)))
        self._counts = some * (self.slots * self.page)

    def add_log_weights(
        self, pages: Int64[Tensor, "N P"], log_weights: Float[Tensor, "N W"]
    ) -> None:
        """Add log-weights to the logits of the entries of loaded pages, until the next `load`.

        Args:
            pages: as they were loaded, -1 after the last of each set.
            log_weights: of these pages, and of some that were found behind them.
        """
        sets, ranks = torch.nonzero(pages >= 0, as_tuple=True)
        slots = torch.from_numpy(self._table)[sets, pages[sets, ranks]].long()
        added = log_weights[sets, ranks].float().clamp(min=MASKED_BIAS).to(self._biases)
        biases = self._biases.view(self.sets, self.slots, self.page)
        index = sets.to(biases.device), slots.to(biases.device)
        biases[index] = (biases[index] + added[:, None]).clamp(min=MASKED_BIAS)

    def recall(
        self,
        queries: Queries,
        trees: KeyTrees,
        count: int,
        entries: Entries,
        others: Sequence[AttendedRows],
    ) -> RecalledStep | RoomNeeded:
        """Find pages, `load` them, and attend to them and to other entries, in one kernel call.

        Where the slots have no room for what was found, nothing is changed.

        Args:
            queries: one per query head.
            count: pages found for each kv head at most.
            entries: the slow tier.
        """
        from larder.ops.cpu.recall_step import NO_ROOM, recall_step

        own = AttendedRows(self._keys, self._values, self._starts, self._counts, self._biases)
        tensors, scaling = self._tensors(entries), self._layer.scaling
        done = recall_step(
            queries, trees, count, self.page, tensors, (own, *others), scaling, MASKED_BIAS
        )
        self.requested, self.moved = self.requested + done.requested, self.moved + done.moved
        if done.outcome == NO_ROOM:
            return RoomNeeded(done.width, done.num_pages)
        return done

    def _load_by_kernel(
        self,
        pages: Int64[Tensor, "N P"],
        versions: Int64[Tensor, "N P"],
        numbers: Int64[Tensor, "N P S"],
        entries: Entries,
    ) -> None:
        """`load` in one kernel call, where slots and slow tier are in the same memory."""
        from larder.ops.cpu import page_slots

        self.widen_table(int(pages.max()) + 1 if pages.numel() else 0)
        self.requested += int((pages >= 0).sum())
        wanted = {"pages": pages, "versions": versions, "numbers": numbers}
        contiguous = {name: tensor.contiguous() for name, tensor in wanted.items()}
        self.moved += page_slots.load_pages(contiguous | self._tensors(entries), MASKED_BIAS)

    def _tensors(self, entries: Entries) -> dict[str, Tensor]:
        """Slots and slow tier by the names of `page_slots.load_pages`."""
        return {
            "starts": torch.tensor(entries.starts),
            "keys": entries.keys,
            "values": entries.values,
            "slot_keys": self._keys,
            "slot_values": self._values,
            "biases": self._biases,
            "counts": self._counts,
            "slot_pages": torch.from_numpy(self._pages),
            "slot_versions": torch.from_numpy(self._versions),
            "table": torch.from_numpy(self._table),
        }

    def attention_call(self, queries: Queries) -> AttentionCall:
        """Attention to the pages loaded last."""
        rows = self._keys, self._values, self._starts, self._counts
        call = partial(ragged_attention, queries, *rows, self._layer.scaling, self._biases)
        return partial(call, softcap=self._layer.softcap)

    @staticmethod
    def foreseen_bytes(layer: LayerSpec, rows: int, itemsize: int) -> int:
        """Bytes of slots with `rows` rows in all; the page table is not included.

        Args:
            itemsize: bytes of one number of a key or value.
        """
        return rows * (2 * layer.head_dim * itemsize + BIAS_BYTES)

    def own_tensors(self) -> tuple[Tensor, ...]:
        own = self._keys, self._values, self._biases, self._counts, self._starts
        tables = self._pages, self._versions, self._table
        return *own, *(torch.from_numpy(table) for table in tables)

    def widen_table(self, most: int) -> None:
        """Widen the table to so many pages of each set."""
        if most > self._table.shape[1]:
            more = max(most, 2 * self._table.shape[1]) - self._table.shape[1]
            self._table = np.pad(self._table, ((0, 0), (0, more)), constant_values=NO_PAGE)
            self._count_bytes()

    def _slots_of(self, wanted: Int64Array, versions: Int64Array) -> Int64Array:
        """Slot of each requested page: its present one, or one that is not requested."""
        self.widen_table(int(wanted.max(initial=NO_PAGE)) + 1)
        slots = np.full(wanted.shape, NO_PAGE, np.int64)
        if not self._table.shape[1]:
            return slots
        sets = np.arange(self.sets)[:, None]
        at = self._table[sets, np.maximum(wanted, 0)].astype(np.int64)
        is_there = (wanted >= 0) & (at >= 0) & (self._versions[sets, np.maximum(at, 0)] == versions)
        slots[is_there] = at[is_there]
        taken = np.zeros_like(is_there)
        owners, ranks = np.nonzero(is_there)
        taken[owners, at[owners, ranks]] = True
        free = np.argsort(taken, axis=1, kind="stable")
        missing = (wanted >= 0) & ~is_there
        owners, ranks = np.nonzero(missing)
        turns = (missing.cumsum(1) - 1)[owners, ranks]
        slots[owners, ranks] = free[owners, turns]
        return slots

    def _fetch(
        self,
        wanted: Int64Array,
        versions: Int64Array,
        slots: Int64Array,
        numbers: Int64Array,
        entries: Entries,
    ) -> None:
        """Move requested pages that are not in their slots."""
        sets, ranks = np.nonzero(wanted >= 0)
        into = slots[sets, ranks]
        old, pages = self._pages[sets, into], wanted[sets, ranks]
        moves = (old != pages) | (self._versions[sets, into] != versions[sets, ranks])
        self.requested += len(sets)
        self.moved += int(moves.sum())
        sets, ranks, into = sets[moves], ranks[moves], into[moves]
        if not len(sets):
            return
        old, pages = old[moves], pages[moves]
        members = numbers[sets, ranks]  # [moved, S]
        heads = sets // (self.sets // self._layer.kv_heads)
        rows = np.asarray(entries.starts)[heads][:, None] + members
        targets = (sets * self.slots + into)[:, None] * self.page + np.arange(self.page)
        held = members >= 0
        self._copy(torch.from_numpy(rows[held]), torch.from_numpy(targets[held]), entries)
        left = old >= 0
        self._table[sets[left], old[left]] = NO_PAGE
        # The former slot of a page with stale contents becomes empty.
        stale = self._table[sets, pages]
        lost = (stale >= 0) & (stale != into)
        self._pages[sets[lost], stale[lost]] = NO_PAGE
        self._table[sets, pages] = into
        self._pages[sets, into] = pages
        self._versions[sets, into] = versions[sets, ranks]

    def _copy(
        self, rows: Int64[Tensor, " M"], targets: Int64[Tensor, " M"], entries: Entries
    ) -> None:
        """Gather rows of the slow tier into one buffer, move it in one copy, and scatter it."""
        is_far = self._keys.device.type != "cpu"
        shape = 2, len(rows), self._layer.head_dim
        staging = torch.empty(shape, dtype=self._keys.dtype, pin_memory=is_far)
        entries.gather(rows, staging[0], staging[1])
        near = staging.to(self._keys.device, non_blocking=True)
        slots = targets.to(self._keys.device)
        self._keys.index_copy_(0, slots, near[0])
        self._values.index_copy_(0, slots, near[1])


def attend_estimate(queries: Queries, estimate: Estimate, layer: LayerSpec) -> AttentionState:
    """Attention to the centroids that estimate entries which were not fetched."""
    count, device = estimate.keys.shape[1], queries.device
    starts = torch.arange(layer.kv_heads) * count
    flat = [part.float().flatten(0, 1).to(device) for part in (estimate.keys, estimate.values)]
    bias = estimate.log_counts.float().clamp(min=MASKED_BIAS).flatten().contiguous().to(device)
    lengths = torch.full_like(starts, count)
    layout = starts, lengths, layer.scaling, bias
    return ragged_attention(queries, flat[0], flat[1], *layout, softcap=layer.softcap)


def attend_with_mean(
    fetched: AttentionCall, share: Float[Tensor, " H"], mean: Float[Tensor, "K D"], layer: LayerSpec
) -> AttentionState:
    """Attention to fetched entries, and to the mean value of the others.

    Args:
        share: of the fetched entries in the weight of all.
    """
    out, lse = fetched()
    left = ((1 - share) / share).log().clamp(min=MASKED_BIAS).to(lse)
    values = mean.to(out).repeat_interleave(layer.group, 0)[:, None]
    return merge_attention([out, values.expand_as(out)], [lse, lse + left[:, None]])
