"""Entries of two layers that are to be shared: requests for them, and which are alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from larder.cache.forms._shared_entries import SharingCandidates, angles
from larder.cache.row_updates import HEAD_STRIDE
from larder.core.observation import Entries

ALL_ALIKE = 1e-6  # radians between the least and the greatest angle that are rounding errors


@dataclass(frozen=True)
class SharingRequest:
    """Own entries that a layer requests to share: packed rows, and identifiers of the entries."""

    rows: Int64[Tensor, " N"]
    names: Int64[Tensor, " N"]

    @staticmethod
    def none() -> SharingRequest:
        nothing = torch.zeros(0, dtype=torch.int64)
        return SharingRequest(nothing, nothing)


@dataclass(frozen=True)
class PairedOrder:
    """All entries of a layer: its own, then its shared ones; in host memory.

    Args:
        own: number of own entries.
        indices: of the entries in packed order.
    """

    heads: Int64[Tensor, " T"]
    positions: Int64[Tensor, " T"]
    own: int
    indices: Int64[Tensor, " T"]

    @property
    def ranks(self) -> Int64[Tensor, " T"]:
        """Identifiers of the entries, which ascend in packed order."""
        return self.heads * HEAD_STRIDE + self.positions


def requested_by_both(
    one: SharingRequest, other: SharingRequest
) -> tuple[Int64[Tensor, " N"], Int64[Tensor, " N"]]:
    """Rows, in either layer, of the entries that both request."""
    mine = torch.isin(one.names, other.names)
    theirs = torch.isin(other.names, one.names)
    return one.rows[mine], other.rows[theirs]


def sharing_candidates(
    held: tuple[Entries, Entries], lower: Int64[Tensor, " N"], upper: Int64[Tensor, " N"]
) -> SharingCandidates:
    keys: list[Tensor] = []
    values: list[Tensor] = []
    columns: list[Tensor] = []
    for entries, rows in zip(held, (lower, upper), strict=True):
        there = rows.to(entries.keys.device)
        keys.append(entries.pack(entries.keys)[there])
        values.append(entries.pack(entries.values)[there])
        columns.append(entries.packed_columns()[:, there])
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


def similar_directions(candidates: SharingCandidates, apart: float) -> Bool[Tensor, " N"]:
    """Mask of the entries to share: not those in the upper part of the range of angles.

    Keys and values both count. A single entry, or entries of equal angles, are all shared.
    """
    alike = torch.ones(len(candidates.heads), dtype=torch.bool, device=candidates.keys[0].device)
    for lower, upper in (candidates.keys, candidates.values):
        angle = angles(lower, upper)
        if len(angle):
            least, most = angle.min(), angle.max()
            alike &= (angle <= most - apart * (most - least)) | (most - least < ALL_ALIKE)
    return alike
