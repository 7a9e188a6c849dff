"""Paired layer: some entries are shared with the adjacent layer (MiniCache).

    lower layer   own entries | rows of the shared entries that it holds
    upper layer   own entries | rows of the shared entries that it holds
    pair          shared entries: one direction each, two norms

A plan requests sharing by grade 1. Entries are shared after the upper layer's plan, if both layers
hold and request them, except those whose directions are too far apart; until then, and in a layer
without a partner, they stay unshared. What one layer evicts the other one still holds. A merge
target becomes the layer's own entry again, because the merged entry differs from the other
layer's.

With a codec, as the paper stacks the two, shared directions are quantized, and so is every other
entry that a plan requests to share: it gets grade 1 where grade 2 is a shared entry. Then no more
than the share `apart` of what is quantized stays unshared by its angle; of more, those of the
smallest angles are shared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Bool, Float, Int8, Int64
from torch import Tensor

from larder.cache.entry_columns import check_columns
from larder.cache.forms._shared_entries import (
    LOWER,
    UPPER,
    PairedOrder,
    SharedEntries,
    SharingRequest,
    angles,
    requested_by_both,
    sharing_candidates,
    similar_directions,
)
from larder.cache.forms.base import AttentionCall, CacheLayer
from larder.cache.forms.graded import GradedLayer, PlanCarrier
from larder.cache.forms.ragged import RaggedLayer
from larder.cache.merged_entries import MergedEntries, merge_by_index, no_merges
from larder.cache.quantized_tier import QuantizedTier, saved_codecs, saved_tiers
from larder.cache.row_updates import InsertedEntries
from larder.cache.spec import CacheSpec, LayerOptions, with_prefix
from larder.cache.validation import check_grades, check_kept
from larder.core.observation import Entries
from larder.core.plan import Plan
from larder.core.spec import LayerPairing, LayerSpec, ModelSpec
from larder.core.types import Keys, Positions, Queries, Values
from larder.ops.packing import starts_of, storage_rows


class PairedLayer(GradedLayer):
    """Layer of a pair; without a partner, a ragged or graded layer.

    The inherited methods are those of its own entries.

    `entries` returns a copy as soon as any entry is shared.

    Args:
        side: `LOWER` or `UPPER`.
    """

    supports, requires = frozenset({"ledger", "codecs"}), frozenset[str]()
    has_public_name = True
    spans_layers = True

    def __init__(self, layer: LayerSpec, options: LayerOptions, side: int = LOWER) -> None:
        self.side, spec = side, options.spec
        self.requested = SharingRequest.none()
        like = torch.empty(0, layer.head_dim, dtype=options.dtype, device=options.device)
        columns, codec = len(spec.ledger.columns), next(iter(spec.codecs), None)
        self._pair = LayerPair(SharedEntries.nothing(like, columns, codec), spec.pairing)
        super().__init__(layer, options)
        self._join(self._pair)

    @classmethod
    def create(cls, layer: LayerSpec, model: ModelSpec, spec: CacheSpec) -> PairedLayer:
        uppers = [upper for _, upper in spec.pairing.pairs(model.managed)]
        side = UPPER if layer.index in uppers else LOWER
        return cls(layer, LayerOptions(model.dtype, model.device, spec), side)

    @classmethod
    def link_layers(cls, layers: Sequence[CacheLayer], spec: CacheSpec) -> None:
        """Link the layers of pairs: each lower layer with the next upper one."""
        link_pairs(layers)

    def append(self, keys: Keys, values: Values, positions: Positions) -> None:
        self.requested = SharingRequest.none()  # rows move
        super().append(keys, values, positions)

    def apply(self, plan: Plan) -> None:
        self._carry(plan, RaggedLayer.apply_folded)

    def evict(self, plan: Plan) -> None:
        self._carry(plan, RaggedLayer.evict_folded)

    def write_columns(self, columns: Mapping[str, Float[Tensor, " C"]]) -> None:
        if not self._has_shared:
            super().write_columns(columns)
            return
        order = self._order()
        check_columns(columns, self._ragged.ledger, len(order.indices))
        held = self._columns(columns, order)
        names = self._ragged.ledger.columns
        super().write_columns(dict(zip(names, held[:, : order.own], strict=True)))
        shared = self._pair.shared
        rows = shared.rows(self.side)
        self._pair.replace_shared(shared.select(self.side, rows, held[:, order.own :]))

    def truncate(self, length: int) -> None:
        self.requested = SharingRequest.none()
        super().truncate(length)
        shared = self._pair.shared
        rows = shared.rows(self.side)
        rows = rows[shared.positions[rows] < length]
        columns = shared.columns[self.side][:, rows]
        self._pair.replace_shared(shared.select(self.side, rows, columns))

    def entries(self) -> Entries:
        own = self.own
        if not self._has_shared:
            return own
        order, shared = self._order(), self._pair.shared
        decoded = shared.decoded(self.side, shared.rows(self.side))
        there = order.indices.to(own.keys.device)
        keys, values = (
            torch.cat([own.pack(mine), theirs.to(mine.dtype)])[there]
            for mine, theirs in zip((own.keys, own.values), decoded, strict=True)
        )
        counts = torch.tensor(self.lengths)
        return Entries(
            keys=keys,
            values=values,
            positions=order.positions[order.indices].int().to(own.keys.device),
            starts=tuple(starts_of(counts).tolist()),
            lengths=self.lengths,
            scalars=own.scalars,
            columns=dict(zip(own.columns, self._columns({}, order)[:, there], strict=True)),
            grades=self._grades(order)[order.indices].to(own.keys.device),
        )

    def state(self) -> dict[str, Tensor]:
        """Tensors of the layer; those of the upper layer include the shared entries."""
        pairing = self._pair.pairing
        numbers = [float(self.side), pairing.start, pairing.weight, pairing.apart]
        state = super().state() | {"pair": torch.tensor(numbers, dtype=torch.float64)}
        if self.side == UPPER:
            named = self._pair.shared.state()
            state |= {f"shared.{name}": tensor for name, tensor in named.items()}
        return state

    @classmethod
    def adopt(cls, layer: LayerSpec, state: dict[str, Tensor]) -> PairedLayer:
        """Restored layer without a partner; `link_pairs` links it."""
        side, start, weight, apart = state["pair"].tolist()
        pairing, keys = LayerPairing(start=start, weight=weight, apart=apart), state["keys"]
        codecs = saved_codecs(state)
        spec = CacheSpec("paired", codecs=codecs, pairing=pairing)
        half = cls(layer, LayerOptions.of_state(state, spec), int(side))
        half._adopt_ragged(state)
        ledger, size = half._ragged.ledger, layer.head_dim
        half._hold(tuple(QuantizedTier.adopt(tier, ledger, size) for tier in saved_tiers(state)))
        shared = SharedEntries.nothing(keys[:0], len(ledger.columns), next(iter(codecs), None))
        if half.side == UPPER:
            own = with_prefix("shared.", state)  # the layer's own keys are there, too
            shared = SharedEntries.adopt(own, size)
        half._join(LayerPair(shared, pairing))
        return half

    def _like(self) -> PairedLayer:
        """Layer with the same shared entries if it is the upper one; `link_pairs` links it."""
        copy = PairedLayer(self.layer, self.options, self.side)
        copy._hold(self._coded)
        if self.side == UPPER:
            copy._pair.replace_shared(self._pair.shared)
        return copy

    def _copy_tensors(self) -> None:
        super()._copy_tensors()
        copied = SharedEntries.adopt(self._pair.shared.state(), self.layer.head_dim)
        self._pair.replace_shared(copied)

    def own_tensors(self) -> tuple[Tensor, ...]:
        """Quantized tiers, and the shared entries in the upper layer."""
        tensors = super().own_tensors()
        return tensors if self.side == LOWER else (*tensors, *self._pair.shared.tensors().values())

    @property
    def lengths(self) -> tuple[int, ...]:
        own = torch.tensor(super().lengths)
        return tuple((own + self._pair.shared.counts(self.side, len(own))).tolist())

    def link(self, upper: PairedLayer) -> None:
        """Become the lower layer of the pair of `upper`."""
        self._join(upper._pair)

    @property
    def own(self) -> Entries:
        """Entries that are not shared."""
        return super().entries()

    @property
    def own_grades(self) -> Int8[Tensor, " T"]:
        """Grades of the own entries, in host memory."""
        return self.own.packed_grades()

    @property
    def coded(self) -> SharingRequest:
        """Own entries that are quantized, as if they were requested to be shared."""
        order, rows = self._order(), self.own_grades.nonzero().flatten()
        return SharingRequest(rows, order.ranks[rows])

    @property
    def is_coded(self) -> bool:
        """True if there is a codec."""
        return len(self._coded) > 0

    def remove_shared(self, rows: Int64[Tensor, " N"], change: PlanCarrier) -> None:
        """Remove own entries, given as packed rows, that are shared from now on.

        Other ones that were requested to be shared are quantized, if there is a codec.
        """
        grades = self.own_grades.clone()
        if self.is_coded:
            grades[self.requested.rows] = 1
        self.requested = SharingRequest.none()
        keep = torch.ones(len(grades), dtype=torch.bool)
        keep[rows] = False
        plan = Plan.from_mask(keep, super().lengths)
        self._change_own(replace(plan, grades=grades[keep]), no_merges(self._ragged.like), change)

    def _join(self, pair: LayerPair) -> None:
        self._pair = pair
        pair.halves[self.side] = self
        self.count_shared()

    def count_shared(self) -> None:
        """Count bytes and entries of the layer again, after the shared entries changed."""
        self._count_bytes()
        coded = sum(map(len, self._coded))
        self.usage.set_entries(coded + int(self._pair.shared.held[self.side].sum()))

    def _hold(self, coded: tuple[QuantizedTier, ...]) -> None:
        self._coded = coded
        self.count_shared()

    @property
    def _is_mixed(self) -> bool:
        return self._has_shared or self._has_coded

    @property
    def _has_shared(self) -> bool:
        return len(self._pair.shared) > 0

    def _other_calls(self, queries: Queries) -> list[AttentionCall]:
        own, shared = super()._other_calls(queries), self._pair.shared
        if not self._has_shared:
            return own
        return [*own, partial(shared.attend, self.side, queries, self.layer, self._bias_column)]

    def _order(self) -> PairedOrder:
        own, shared = self.own, self._pair.shared
        rows = shared.rows(self.side)
        kv_heads = torch.arange(len(own.lengths))
        owners = torch.repeat_interleave(kv_heads, torch.tensor(own.lengths))
        heads = torch.cat([owners, shared.heads[rows].long().cpu()])
        positions = torch.cat([own.packed_positions(), shared.positions[rows]]).long().cpu()
        return PairedOrder(heads, positions, len(owners), ((heads << 32) + positions).argsort())

    def _grades(self, order: PairedOrder) -> Int8[Tensor, " T"]:
        """Grades of own entries, then of shared ones."""
        shared = torch.full((len(order.heads) - order.own,), len(self._coded) + 1)
        return torch.cat([self.own_grades, shared.to(torch.int8)])

    def _columns(
        self, changed: Mapping[str, Tensor], order: PairedOrder, indices: Tensor | None = None
    ) -> Float[Tensor, "n T"]:
        """All columns, own entries first, some of them replaced.

        Args:
            changed: numbers of the entries at `indices`, by default all in packed order.
        """
        own, shared = self.own, self._pair.shared
        theirs = shared.columns[self.side][:, shared.rows(self.side)]
        held = torch.cat([own.packed_columns(), theirs], dim=1)
        there = (order.indices if indices is None else indices).to(held.device)
        for name, numbers in changed.items():
            held[self._ragged.ledger.columns.index(name), there] = numbers.to(held)
        return held

    def _sums(self, plan: Plan, order: PairedOrder) -> MergedEntries:
        """Merged entries of a plan; targets are indices."""
        own, shared = self.own, self._pair.shared
        if not len(plan.folds):
            return no_merges(own.empty_like)
        layout, theirs = own.layout, shared.rows(self.side)

        def numbers(indices: Int64[Tensor, " N"]) -> tuple[Tensor, Tensor]:
            mine = indices < order.own
            rows = storage_rows(indices[mine], *layout).to(own.keys.device)
            others = theirs[(indices[~mine] - order.own).to(theirs.device)]
            parts = zip((own.keys, own.values), shared.decoded(self.side, others), strict=True)
            keys, values = (torch.cat([part[rows].float(), other]) for part, other in parts)
            return keys, values  # indices ascend: own entries come first

        return merge_by_index(plan, order.indices, numbers, own.keys.device)

    def _inserted_entries(
        self, sums: MergedEntries, order: PairedOrder, columns: Float[Tensor, "n T"]
    ) -> InsertedEntries | None:
        """Merge targets that were shared, in order of heads and positions."""
        indices = sums.targets.cpu()
        come = (indices >= order.own).nonzero().flatten()
        come = come[
            (order.heads[indices[come]] * (1 << 32) + order.positions[indices[come]]).argsort()
        ]
        if not len(come):
            return None
        there, indices = come.to(columns.device), indices[come]
        return InsertedEntries(
            order.heads[indices],
            sums.keys[there],
            sums.values[there],
            order.positions[indices].int().to(columns.device),
            columns[:, indices.to(columns.device)],
        )

    def _carry(self, plan: Plan, change: PlanCarrier) -> None:
        check_kept(plan, self.lengths)
        self._ragged.check_numbers(plan)
        order, shared = self._order(), self._pair.shared
        sums = self._sums(plan, order)
        kept = order.indices[plan.kept.cpu()]
        mine = (kept < order.own) | torch.isin(kept, sums.targets.cpu())
        before = self._grades(order)[kept].masked_fill(torch.isin(kept, sums.targets.cpu()), 0)
        grades = check_grades(plan, before, len(self._coded) + 1)
        columns = self._columns(plan.columns, order, kept)
        rows = shared.rows(self.side)[(kept[~mine] - order.own).to(shared.held.device)]
        left = shared.select(self.side, rows, columns[:, kept[~mine]])
        inserted = self._inserted_entries(sums, order, columns)
        rest = self._rest(plan, kept, kept < order.own, grades, order)
        self._change_own(rest, sums.among(rest.kept), change, inserted)
        self.replaced_bytes += shared.nbytes
        self._pair.replace_shared(left)
        requested = ((grades[mine] > 0) & (before[mine] == 0)).nonzero().flatten()
        indices = kept[mine][requested]
        self.requested = SharingRequest(requested, order.ranks[indices])
        if self.side == UPPER:
            self._pair.share_requested(change)

    def _rest(
        self,
        plan: Plan,
        kept: Int64[Tensor, " T"],
        stays: Bool[Tensor, " T"],
        grades: Int8[Tensor, " T"],
        order: PairedOrder,
    ) -> Plan:
        """Part of a plan for the own entries that it keeps; what is requested waits for the pair.

        Args:
            kept, grades: indices of the kept entries, and their new grades.
            stays: mask of the own ones among them.
        """
        counts = torch.bincount(order.heads[kept[stays]], minlength=len(plan.lengths))
        there = stays.to(plan.kept.device)
        columns = {name: part[there] for name, part in plan.columns.items()}
        lengths = tuple(counts.tolist())
        rest = Plan(kept[stays], lengths, columns=columns, scalars=plan.scalars)
        if self.is_coded and self._pair.is_single:
            rest = replace(rest, grades=grades[stays].clamp(max=len(self._coded)))
        return rest


class LayerPair:
    """Two layers and their shared entries; a layer without a partner has a pair of its own."""

    def __init__(self, shared: SharedEntries, pairing: LayerPairing) -> None:
        self.shared = shared
        self.pairing = pairing
        self.halves: dict[int, PairedLayer] = {}

    @property
    def is_single(self) -> bool:
        """True if there is one layer alone."""
        return len(self.halves) < 2

    def share_requested(self, change: PlanCarrier) -> None:
        """Share the entries that both layers requested, and have the others quantized."""
        if self.is_single:
            return
        halves = self.halves[LOWER], self.halves[UPPER]
        chosen = self._chosen(halves)
        shared = self.shared
        if len(chosen[0]):
            candidates = sharing_candidates((halves[LOWER].own, halves[UPPER].own), *chosen)
            shared = shared.joined(candidates, self.pairing.weight)
        for half, rows in zip(halves, chosen, strict=True):
            if len(rows) or (half.is_coded and len(half.requested.rows)):
                half.remove_shared(rows, change)
        self.replace_shared(shared)

    def _chosen(
        self, halves: tuple[PairedLayer, PairedLayer]
    ) -> tuple[Int64[Tensor, " N"], Int64[Tensor, " N"]]:
        """Rows, in either layer, of the entries to share."""
        found = requested_by_both(halves[0].requested, halves[1].requested)
        if not len(found[0]):
            return found
        candidates = sharing_candidates((halves[LOWER].own, halves[UPPER].own), *found)
        alike = similar_directions(candidates, self.pairing.apart).cpu()
        chosen = found[0][alike], found[1][alike]
        if not halves[0].is_coded:
            return chosen
        return self._with_excess(halves, chosen, (found[0][~alike], found[1][~alike]))

    def _with_excess(
        self,
        halves: tuple[PairedLayer, PairedLayer],
        chosen: tuple[Int64[Tensor, " N"], Int64[Tensor, " N"]],
        apart: tuple[Int64[Tensor, " M"], Int64[Tensor, " M"]],
    ) -> tuple[Int64[Tensor, " _"], Int64[Tensor, " _"]]:
        """Rows to share, and the nearest of those apart that are too many to be left unshared.

        Args:
            apart: rows that were requested now and are not alike.
        """
        coded = requested_by_both(halves[0].coded, halves[1].coded)
        lower, upper = (torch.cat(pair) for pair in zip(coded, apart, strict=True))
        total = len(self.shared) + len(chosen[0]) + len(lower)
        excess = len(lower) - int(self.pairing.apart * total)
        if excess <= 0:
            return chosen
        candidates = sharing_candidates((halves[LOWER].own, halves[UPPER].own), lower, upper)
        spread = angles(*candidates.keys) + angles(*candidates.values)
        nearest = spread.argsort()[:excess].cpu()
        pairs = zip(chosen, (lower[nearest], upper[nearest]), strict=True)
        rows, others = (torch.cat(pair).sort().values for pair in pairs)
        return rows, others

    def replace_shared(self, shared: SharedEntries) -> None:
        """Replace the shared entries, in the counts of both layers too."""
        self.shared = shared
        for half in self.halves.values():
            half.count_shared()


def link_pairs(layers: Sequence[CacheLayer]) -> None:
    """Link the layers of pairs: each lower layer with the next upper one."""
    waiting: PairedLayer | None = None
    for store in layers:
        if not isinstance(store, PairedLayer):
            continue
        if store.side == LOWER:
            waiting = store
        elif waiting is not None:
            waiting.link(store)
            waiting = None


Part = PairedLayer
