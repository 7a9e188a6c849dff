"""Paired layer: some entries are shared with the adjacent layer (MiniCache).

    lower layer   own entries | rows of the shared entries that it holds
    upper layer   own entries | rows of the shared entries that it holds
    pair          shared entries: one direction each, two norms

A plan requests sharing by grade 1. Entries are shared after the upper layer's plan, if both layers
hold and request them, except those whose directions are too far apart; until then, and in a layer
without a partner, they stay unshared. What one layer evicts the other one still holds. A merge
target becomes the layer's own entry again, because the merged entry differs from the other
layer's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from larder.cache.entry_columns import check_columns
from larder.cache.forms._composite import MixedLayer
from larder.cache.forms._shared_entries import (
    LOWER,
    UPPER,
    SharedEntries,
    SharingCandidates,
    angles,
)
from larder.cache.forms.base import AttentionCall, CacheLayer
from larder.cache.forms.ragged import RaggedLayer
from larder.cache.merged_entries import MergedEntries, merge_by_place, no_merges
from larder.cache.row_updates import InsertedEntries
from larder.cache.spec import CacheSpec, with_prefix
from larder.cache.validation import check_grades, check_kept
from larder.core.ledger import Ledger
from larder.core.observation import Entries
from larder.core.plan import Plan
from larder.core.spec import LayerPairing, LayerSpec, ModelSpec
from larder.core.types import Keys, Positions, Queries, Values
from larder.ops.packing import starts_of, storage_rows

ALL_ALIKE = 1e-6  # radians between the least and the greatest angle that are rounding errors
# Applies a plan to a layer's own entries, with merged and inserted entries.
PlanApplier = Callable[[RaggedLayer, Plan, MergedEntries, InsertedEntries | None], None]


class PairedLayer(MixedLayer):
    """Layer of a pair; without a partner, a ragged layer.

    `entries` returns a copy as soon as any entry is shared.

    Args:
        ledger: columns and scalars that the policy keeps.
        side: `LOWER` or `UPPER`.
    """

    spans_layers = True

    def __init__(
        self,
        layer: LayerSpec,
        dtype: torch.dtype,
        device: torch.device,
        ledger: Ledger,
        pairing: LayerPairing,
        side: int = LOWER,
    ) -> None:
        super().__init__(layer, RaggedLayer(layer, dtype, device, ledger))
        self.side = side
        self.wished = SharingRequest.none()
        like = torch.empty(0, layer.head_dim, dtype=dtype, device=device)
        self._join(LayerPair(SharedEntries.nothing(like, len(ledger.columns)), pairing))

    @classmethod
    def create(cls, layer: LayerSpec, model: ModelSpec, spec: CacheSpec) -> PairedLayer:
        uppers = [upper for _, upper in spec.pairing.pairs(model.managed)]
        side = UPPER if layer.index in uppers else LOWER
        return cls(layer, model.dtype, model.device, spec.ledger, spec.pairing, side)

    @classmethod
    def link_layers(cls, layers: Sequence[CacheLayer], spec: CacheSpec) -> None:
        """Link the layers of pairs: each lower layer with the next upper one."""
        link_pairs(layers)

    def append(self, keys: Keys, values: Values, positions: Positions) -> None:
        self.wished = SharingRequest.none()  # rows move
        super().append(keys, values, positions)

    def apply(self, plan: Plan) -> None:
        self._carry(plan, RaggedLayer.apply_folded)

    def evict(self, plan: Plan) -> None:
        self._carry(plan, RaggedLayer.evict_folded)

    def note(self, columns: Mapping[str, Float[Tensor, " C"]]) -> None:
        if not self._is_mixed:
            self._ragged.note(columns)
            return
        order = self._order()
        check_columns(columns, self._ragged.ledger, len(order.places))
        held = self._columns(columns, order)
        self._ragged.note_packed(held[:, : order.own])
        shared = self._pair.shared
        rows = shared.rows(self.side)
        self._pair.replace_shared(shared.select(self.side, rows, held[:, order.own :]))

    def truncate(self, length: int) -> None:
        self.wished = SharingRequest.none()
        self._ragged.truncate(length)
        shared = self._pair.shared
        rows = shared.rows(self.side)
        rows = rows[shared.positions[rows] < length]
        columns = shared.columns[self.side][:, rows]
        self._pair.replace_shared(shared.select(self.side, rows, columns))

    def entries(self) -> Entries:
        own = self._ragged.entries()
        if not self._is_mixed:
            return own
        order, shared = self._order(), self._pair.shared
        decoded = shared.decoded(self.side, shared.rows(self.side))
        there = order.places.to(own.keys.device)
        keys, values = (
            torch.cat([own.pack(mine), theirs.to(mine.dtype)])[there]
            for mine, theirs in zip((own.keys, own.values), decoded, strict=True)
        )
        counts = torch.tensor(self.lengths)
        return replace(
            own,
            keys=keys,
            values=values,
            positions=order.positions[order.places].int().to(own.keys.device),
            starts=tuple(starts_of(counts).tolist()),
            lengths=self.lengths,
            columns=dict(zip(own.columns, self._columns({}, order)[:, there], strict=True)),
            grades=order.is_shared[order.places].to(torch.int8).to(own.keys.device),
        )

    def state(self) -> dict[str, Tensor]:
        """Tensors of the layer; those of the upper layer include the shared entries."""
        pairing = self._pair.pairing
        numbers = [float(self.side), pairing.start, pairing.weight, pairing.apart]
        state = self._ragged.state() | {"pair": torch.tensor(numbers, dtype=torch.float64)}
        if self.side == UPPER:
            named = self._pair.shared.tensors()
            state |= {f"shared.{name}": tensor.clone() for name, tensor in named.items()}
        return state

    @classmethod
    def adopt(cls, layer: LayerSpec, state: dict[str, Tensor]) -> PairedLayer:
        """Restored layer without a partner; `link_pairs` links it."""
        side, start, weight, apart = state["pair"].tolist()
        pairing, keys = LayerPairing(start=start, weight=weight, apart=apart), state["keys"]
        half = cls(layer, keys.dtype, keys.device, Ledger(), pairing, int(side))
        half._adopt_ragged(state)
        like, columns = keys[:0], len(half._ragged.ledger.columns)
        shared = SharedEntries.nothing(like, columns)
        if half.side == UPPER:
            shared = SharedEntries.adopt(with_prefix("shared.", state))  # own keys are there, too
        half._join(LayerPair(shared, pairing))
        return half

    def _like(self) -> PairedLayer:
        """Layer with the same shared entries if it is the upper one; `link_pairs` links it."""
        like, ledger, pairing = self._ragged.like, self._ragged.ledger, self._pair.pairing
        copy = PairedLayer(self.layer, like.dtype, like.device, ledger, pairing, self.side)
        if self.side == UPPER:
            copy._pair.replace_shared(self._pair.shared)
        return copy

    def _copy_tensors(self) -> None:
        own = self._pair.shared.tensors().items()
        copies = {name: tensor.clone() for name, tensor in own}
        self._pair.replace_shared(SharedEntries.adopt(copies))

    def own_tensors(self) -> tuple[Tensor, ...]:
        """The shared entries, in the upper layer."""
        return () if self.side == LOWER else tuple(self._pair.shared.tensors().values())

    @property
    def lengths(self) -> tuple[int, ...]:
        own = torch.tensor(self._ragged.lengths)
        return tuple((own + self._pair.shared.counts(self.side, len(own))).tolist())

    def link(self, upper: PairedLayer) -> None:
        """Become the lower layer of the pair of `upper`."""
        self._join(upper._pair)

    @property
    def own(self) -> RaggedLayer:
        """Entries that are not shared."""
        return self._ragged

    def give_up(self, rows: Int64[Tensor, " N"], change: PlanApplier) -> None:
        """Remove own entries, given as packed rows, that are shared from now on."""
        keep = torch.ones(sum(self._ragged.lengths), dtype=torch.bool)
        keep[rows] = False
        own = self._ragged
        change(own, Plan.from_mask(keep, own.lengths), no_merges(own.entries().keys), None)
        self.wished = SharingRequest.none()

    def _join(self, pair: LayerPair) -> None:
        self._pair = pair
        pair.halves[self.side] = self
        self.count_shared()

    def count_shared(self) -> None:
        """Count bytes and entries of the layer again, after the shared entries changed."""
        self._count_bytes()
        self.usage.set_entries(int(self._pair.shared.held[self.side].sum()))

    @property
    def _is_mixed(self) -> bool:
        return len(self._pair.shared) > 0

    def _other_calls(self, queries: Queries) -> list[AttentionCall]:
        if not self._is_mixed:
            return []
        shared = self._pair.shared
        return [partial(shared.attend, self.side, queries, self.layer, self._bias_column)]

    def _order(self) -> PairedOrder:
        own, shared = self._ragged.entries(), self._pair.shared
        rows = shared.rows(self.side)
        kv_heads = torch.arange(len(own.lengths))
        owners = torch.repeat_interleave(kv_heads, torch.tensor(own.lengths))
        heads = torch.cat([owners, shared.heads[rows].long().cpu()])
        positions = torch.cat([own.packed_positions(), shared.positions[rows]]).long().cpu()
        return PairedOrder(heads, positions, len(owners), ((heads << 32) + positions).argsort())

    def _columns(
        self, changed: Mapping[str, Tensor], order: PairedOrder, places: Tensor | None = None
    ) -> Float[Tensor, "n T"]:
        """All columns, own entries first, some of them replaced.

        Args:
            changed: numbers of the entries at `places`, by default all in packed order.
        """
        own, shared = self._ragged.entries(), self._pair.shared
        columns = [own.column(name) for name in own.columns]
        finest = torch.stack(columns) if columns else own.keys.new_zeros(0, order.own).float()
        theirs = shared.columns[self.side][:, shared.rows(self.side)]
        held = torch.cat([finest, theirs], dim=1)
        there = (order.places if places is None else places).to(held.device)
        for name, numbers in changed.items():
            held[self._ragged.ledger.columns.index(name), there] = numbers.to(held)
        return held

    def _sums(self, plan: Plan, order: PairedOrder) -> MergedEntries:
        """Merged entries of a plan; targets are places."""
        own, shared = self._ragged.entries(), self._pair.shared
        if not len(plan.folds):
            return no_merges(own.keys)
        layout, theirs = own.layout, shared.rows(self.side)

        def numbers(places: Int64[Tensor, " N"]) -> tuple[Tensor, Tensor]:
            mine = places < order.own
            rows = storage_rows(places[mine], *layout).to(own.keys.device)
            others = theirs[(places[~mine] - order.own).to(theirs.device)]
            parts = zip((own.keys, own.values), shared.decoded(self.side, others), strict=True)
            keys, values = (torch.cat([part[rows].float(), other]) for part, other in parts)
            return keys, values  # places ascend: own entries come first

        return merge_by_place(plan, order.places, numbers, own.keys.device)

    def _arrivals(
        self, sums: MergedEntries, order: PairedOrder, columns: Float[Tensor, "n T"]
    ) -> InsertedEntries | None:
        """Merge targets that were shared, in order of heads and positions."""
        places = sums.targets.cpu()
        come = (places >= order.own).nonzero().flatten()
        come = come[
            (order.heads[places[come]] * (1 << 32) + order.positions[places[come]]).argsort()
        ]
        if not len(come):
            return None
        there, places = come.to(columns.device), places[come]
        return InsertedEntries(
            order.heads[places],
            sums.keys[there],
            sums.values[there],
            order.positions[places].int().to(columns.device),
            columns[:, places.to(columns.device)],
        )

    def _carry(self, plan: Plan, change: PlanApplier) -> None:
        check_kept(plan, self.lengths)
        self._ragged.check_numbers(plan)
        order, shared = self._order(), self._pair.shared
        sums = self._sums(plan, order)
        kept = order.places[plan.kept.cpu()]
        mine = (kept < order.own) | torch.isin(kept, sums.targets.cpu())
        grades = check_grades(plan, (~mine).to(torch.int8), 1)
        stays = kept < order.own
        counts = torch.bincount(order.heads[kept[stays]], minlength=len(plan.lengths))
        there = stays.to(plan.kept.device)
        rest = Plan(
            kept[stays],
            tuple(counts.tolist()),
            columns={name: part[there] for name, part in plan.columns.items()},
            scalars=plan.scalars,
        )
        columns = self._columns(plan.columns, order, kept)
        rows = shared.rows(self.side)[(kept[~mine] - order.own).to(shared.held.device)]
        left = shared.select(self.side, rows, columns[:, kept[~mine]])
        arrivals = self._arrivals(sums, order, columns)
        change(self._ragged, rest, sums.among(kept[stays]), arrivals)
        self.replaced_bytes = self._ragged.replaced_bytes + shared.nbytes
        self._pair.replace_shared(left)
        wished = (grades[mine] == 1).nonzero().flatten()
        places = kept[mine][wished]
        self.wished = SharingRequest(wished, (order.heads[places] << 32) + order.positions[places])
        if self.side == UPPER:
            self._pair.share_requested(change)


class LayerPair:
    """Two layers and their shared entries; a layer without a partner has a pair of its own."""

    def __init__(self, shared: SharedEntries, pairing: LayerPairing) -> None:
        self.shared = shared
        self.pairing = pairing
        self.halves: dict[int, PairedLayer] = {}

    def share_requested(self, change: PlanApplier) -> None:
        """Share the entries that both layers requested."""
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
        self.replace_shared(shared)

    def replace_shared(self, shared: SharedEntries) -> None:
        """Replace the shared entries, in the counts of both layers too."""
        self.shared = shared
        for half in self.halves.values():
            half.count_shared()


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
    """Rows, in either layer, of the entries that both request."""
    mine = torch.isin(one.names, other.names)
    theirs = torch.isin(other.names, one.names)
    return one.rows[mine], other.rows[theirs]


def _sharing_candidates(
    halves: tuple[PairedLayer, PairedLayer], lower: Int64[Tensor, " N"], upper: Int64[Tensor, " N"]
) -> SharingCandidates:
    keys: list[Tensor] = []
    values: list[Tensor] = []
    columns: list[Tensor] = []
    held = [half.own.entries() for half in halves]
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
    """Mask of the entries to share: not those in the upper part of the range of angles.

    Keys and values both count. A single entry, or entries of equal angles, are all shared.
    """
    alike = torch.ones(len(sheet.heads), dtype=torch.bool, device=sheet.keys[0].device)
    for lower, upper in (sheet.keys, sheet.values):
        angle = angles(lower, upper)
        if len(angle):
            least, most = angle.min(), angle.max()
            alike &= (angle <= most - apart * (most - least)) | (most - least < ALL_ALIKE)
    return alike


def link_pairs(stores: Sequence[CacheLayer]) -> None:
    """Link the layers of pairs: each lower layer with the next upper one."""
    waiting: PairedLayer | None = None
    for store in stores:
        if not isinstance(store, PairedLayer):
            continue
        if store.side == LOWER:
            waiting = store
        elif waiting is not None:
            waiting.link(store)
            waiting = None


Part = PairedLayer
