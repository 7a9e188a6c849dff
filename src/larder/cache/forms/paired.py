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

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.cache.entry_columns import check_columns
from larder.cache.forms._composite import CompositeLayer
from larder.cache.forms._shared_entries import (
    LOWER,
    UPPER,
    LayerPair,
    PairedOrder,
    PlanApplier,
    SharedEntries,
    SharingRequest,
)
from larder.cache.forms.base import AttentionCall, CacheLayer
from larder.cache.forms.ragged import RaggedLayer
from larder.cache.merged_entries import MergedEntries, merge_by_place, no_merges
from larder.cache.row_updates import InsertedEntries
from larder.cache.spec import CacheSpec
from larder.cache.validation import check_grades, check_kept
from larder.core.ledger import Ledger
from larder.core.observation import Entries
from larder.core.plan import Plan
from larder.core.spec import LayerPairing, LayerSpec, ModelSpec
from larder.core.types import Keys, Positions, Queries, Values
from larder.ops.packing import starts_of, storage_rows


class PairedLayer(CompositeLayer):
    """Layer of a pair; without a partner, a ragged layer.

    `entries` returns a copy as soon as any entry is shared.

    Args:
        ledger: columns and scalars that the policy keeps.
        side: `LOWER` or `UPPER`.
    """

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
        del spec
        link_pairs(layers)

    def append(self, keys: Keys, values: Values, positions: Positions) -> None:
        self.wished = SharingRequest.none()  # rows move
        self._finest.append(keys, values, positions)
        self.replaced_bytes = self._finest.replaced_bytes

    def apply(self, plan: Plan) -> None:
        self._carry(plan, RaggedLayer.apply_folded)

    def evict(self, plan: Plan) -> None:
        self._carry(plan, RaggedLayer.evict_folded)

    def note(self, columns: Mapping[str, Float[Tensor, " C"]]) -> None:
        if not self._is_mixed:
            self._finest.note(columns)
            return
        order = self._order()
        check_columns(columns, self._finest.ledger, len(order.places))
        held = self._columns(columns, order)
        self._finest.note_packed(held[:, : order.own])
        shared = self._pair.shared
        rows = shared.rows(self.side)
        self._pair.replace_shared(shared.select(self.side, rows, held[:, order.own :]))

    def truncate(self, length: int) -> None:
        self.wished = SharingRequest.none()
        self._finest.truncate(length)
        shared = self._pair.shared
        rows = shared.rows(self.side)
        rows = rows[shared.positions[rows] < length]
        columns = shared.columns[self.side][:, rows]
        self._pair.replace_shared(shared.select(self.side, rows, columns))

    def entries(self) -> Entries:
        own = self._finest.entries()
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
        state = self._finest.state() | {"pair": torch.tensor(numbers, dtype=torch.float64)}
        if self.side == UPPER:
            named = self._pair.shared.tensors()
            state |= {f"shared.{name}": tensor.clone() for name, tensor in named.items()}
        return state

    @classmethod
    def adopt(cls, layer: LayerSpec, state: dict[str, Tensor]) -> PairedLayer:
        """Restored layer without a partner; `link_pairs` links it."""
        side, *numbers = state["pair"].tolist()
        keys = state["keys"]
        half = cls(layer, keys.dtype, keys.device, Ledger(), LayerPairing(*numbers), int(side))
        half._finest = half._attach(RaggedLayer.adopt(layer, state), half._finest)
        like, columns = keys[:0], len(half._finest.ledger.columns)
        shared = SharedEntries.nothing(like, columns)
        if half.side == UPPER:
            prefix = "shared."  # beside it are this layer's own `keys` and `values`
            entries = {
                name.removeprefix(prefix): tensor
                for name, tensor in state.items()
                if name.startswith(prefix)
            }
            shared = SharedEntries.adopt(entries)
        half._join(LayerPair(shared, LayerPairing(*numbers)))
        return half

    def own_tensors(self) -> tuple[Tensor, ...]:
        """The shared entries, in the upper layer."""
        return () if self.side == LOWER else tuple(self._pair.shared.tensors().values())

    @property
    def lengths(self) -> tuple[int, ...]:
        own = torch.tensor(self._finest.lengths)
        return tuple((own + self._pair.shared.counts(self.side, len(own))).tolist())

    def link(self, upper: PairedLayer) -> None:
        """Become the lower layer of the pair of `upper`."""
        self._join(upper._pair)

    def give_up(self, rows: Int64[Tensor, " N"], change: PlanApplier) -> None:
        """Remove own entries, given as packed rows, that are shared from now on."""
        keep = torch.ones(sum(self._finest.lengths), dtype=torch.bool)
        keep[rows] = False
        own = self._finest
        change(own, Plan.from_mask(keep, own.lengths), no_merges(own.entries().keys), None)
        self.wished = SharingRequest.none()

    def own_entries(self) -> Entries:
        """Entries that are not shared, as views."""
        return self._finest.entries()

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
        sizes = self.layer.kv_heads, self.layer.scaling
        return [partial(self._pair.shared.attend, self.side, queries, *sizes, self._bias_column)]

    def _order(self) -> PairedOrder:
        own, shared = self._finest.entries(), self._pair.shared
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
        own, shared = self._finest.entries(), self._pair.shared
        columns = [own.column(name) for name in own.columns]
        finest = torch.stack(columns) if columns else own.keys.new_zeros(0, order.own).float()
        theirs = shared.columns[self.side][:, shared.rows(self.side)]
        held = torch.cat([finest, theirs], dim=1)
        there = (order.places if places is None else places).to(held.device)
        for name, numbers in changed.items():
            held[self._finest.ledger.columns.index(name), there] = numbers.to(held)
        return held

    def _sums(self, plan: Plan, order: PairedOrder) -> MergedEntries:
        """Merged entries of a plan; targets are places."""
        own, shared = self._finest.entries(), self._pair.shared
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
        self._finest.check_numbers(plan)
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
        change(self._finest, rest, sums.among(kept[stays]), arrivals)
        self.replaced_bytes = self._finest.replaced_bytes + shared.nbytes
        self._pair.replace_shared(left)
        wished = (grades[mine] == 1).nonzero().flatten()
        places = kept[mine][wished]
        self.wished = SharingRequest(wished, (order.heads[places] << 32) + order.positions[places])
        if self.side == UPPER:
            self._pair.share_requested(change)


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
