"""What two layers share, and when: the part of a paired layer that both have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from larder.cache.entry_merging import MergedEntries
from larder.cache.forms._shared_entries import LOWER, UPPER, SharedEntries, SharingCandidates
from larder.cache.forms.ragged import RaggedLayer
from larder.cache.row_updates import InsertedEntries
from larder.core.observation import Entries
from larder.core.pairing import LayerPairing
from larder.core.plan import Plan
from larder.ops.slerp import angles

ALL_ALIKE = 1e-6  # radians between the least and the greatest angle that are rounding's
# Carries out a plan in a layer's own entries: what folds make of them, and what comes beside them.
PlanApplier = Callable[[RaggedLayer, Plan, MergedEntries, InsertedEntries | None], None]


@runtime_checkable
class PairMember(Protocol):
    """A layer of a pair, as its pair sees it."""

    @property
    def wished(self) -> SharingRequest:
        """Entries that it would share."""
        ...

    def own_entries(self) -> Entries:
        """Those that are not shared, as views."""
        ...

    def give_up(self, rows: Int64[Tensor, " N"], change: PlanApplier) -> None:
        """These own entries are held as shared ones from now on."""
        ...


class LayerPair:
    """What two layers share, and who they are; a layer without a partner has a pair of its own."""

    def __init__(self, shared: SharedEntries, pairing: LayerPairing) -> None:
        self.shared = shared
        self.pairing = pairing
        self.halves: dict[int, PairMember] = {}

    def meet(self, change: PlanApplier) -> None:
        """Share what both layers would."""
        if len(self.halves) < 2:
            return
        halves = self.halves[LOWER], self.halves[UPPER]
        found = _requested_by_both(halves[0].wished, halves[1].wished)
        sheet = _sharing_candidates(halves, *found)
        alike = _similar_directions(sheet, self.pairing.apart)
        if not bool(alike.any()):
            return
        chosen = [rows[alike.cpu()] for rows in found]
        shared = self.shared.joined(_sharing_candidates(halves, *chosen), self.pairing.weight)
        for half, rows in zip(halves, chosen, strict=True):
            half.give_up(rows, change)
        self.shared = shared


@dataclass(frozen=True)
class SharingRequest:
    """Own entries that a layer would share: packed rows, and what identifies them."""

    rows: Int64[Tensor, " N"]
    names: Int64[Tensor, " N"]

    @staticmethod
    def none() -> SharingRequest:
        nothing = torch.zeros(0, dtype=torch.int64)
        return SharingRequest(nothing, nothing)


@dataclass(frozen=True)
class PairedOrder:
    """All entries of a layer: its own, then the shared ones that it holds; in host memory.

    Args:
        own: how many are its own.
        places: of the entries in packed order.
    """

    heads: Int64[Tensor, " T"]
    positions: Int64[Tensor, " T"]
    own: int
    places: Int64[Tensor, " T"]

    @property
    def is_shared(self) -> Bool[Tensor, " T"]:
        return torch.arange(len(self.heads)) >= self.own


def _requested_by_both(
    one: SharingRequest, other: SharingRequest
) -> tuple[Int64[Tensor, " N"], Int64[Tensor, " N"]]:
    """The rows, in either layer, of the entries that both name."""
    mine = torch.isin(one.names, other.names)
    theirs = torch.isin(other.names, one.names)
    return one.rows[mine], other.rows[theirs]


def _sharing_candidates(
    halves: tuple[PairMember, PairMember], lower: Int64[Tensor, " N"], upper: Int64[Tensor, " N"]
) -> SharingCandidates:
    keys: list[Tensor] = []
    values: list[Tensor] = []
    columns: list[Tensor] = []
    held = [half.own_entries() for half in halves]
    for entries, rows in zip(held, (lower, upper), strict=True):
        there = rows.to(entries.keys.device)
        keys.append(entries.pack(entries.keys)[there])
        values.append(entries.pack(entries.values)[there])
        own = [entries.column(name)[there] for name in entries.columns]
        nothing = entries.keys.new_zeros(0, len(rows)).float()
        columns.append(torch.stack(own) if own else nothing)
    device, counts = held[0].keys.device, torch.tensor(held[0].lengths)
    heads = torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int16), counts)
    positions = held[0].packed_positions()[lower.to(device)].int()
    return SharingCandidates(
        (keys[0], keys[1]),
        (values[0], values[1]),
        heads[lower].to(device),
        positions,
        torch.stack(columns),
    )


def _similar_directions(sheet: SharingCandidates, apart: float) -> Bool[Tensor, " N"]:
    """Which entries to share: not those in the upper part of the range of angles, keys or values.

    Of a single entry, or all alike, none is apart.
    """
    alike = torch.ones(len(sheet.heads), dtype=torch.bool, device=sheet.keys[0].device)
    for pair in (sheet.keys, sheet.values):
        angle = angles(*pair)
        if len(angle):
            least, most = angle.min(), angle.max()
            alike &= (angle <= most - apart * (most - least)) | (most - least < ALL_ALIKE)
    return alike
