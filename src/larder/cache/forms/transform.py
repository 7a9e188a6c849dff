"""Transform layer: exact entries in a ragged part, all others as coded transform components.

    exact    sinks, and the latest entries: a ragged tier as in `larder.cache.forms.ragged`
    coded    a transformed tier, see `larder.cache.transformed_tier`

A plan codes the entries that it gives a grade above 0: grade g is the tier g - 3, with a step of
2^(g - 3) times the common one. A plan that gives importances and a number of bytes is fitted:
`fit_plans` finds tiers, and the step with which all layers together fill their bytes. An entry that
is coded never becomes exact again, nor finer, except as the target of a merge.

While text is generated, entries behind the latest `recent` are coded once a block of them is full,
in tier 0 with the step of the last plan.

Attention decodes a few blocks at a time: the compiled kernel of decode steps two per thread, other
calls one of each head. Components of values are averaged as they are, and only the average is
transformed back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float, Int8, Int64
from torch import Tensor

from larder.cache.coded_blocks import CodedBlock
from larder.cache.component_means import CenteredBlocks
from larder.cache.entry_columns import check_columns
from larder.cache.forms._composite import COLUMN_BYTES, MixedLayer
from larder.cache.forms._transform_fit import FitLayer, common_step, tiers_of
from larder.cache.forms.base import AttentionCall, AttentionState, CacheLayer
from larder.cache.memory_usage import storage_bytes
from larder.cache.merged_entries import MergedEntries, merge_entries, no_merges
from larder.cache.new_tokens import NewTokens
from larder.cache.row_updates import InsertedEntries
from larder.cache.spec import CacheSpec, LayerOptions
from larder.cache.transform_tables import TransformTables
from larder.cache.transformed_tier import ComponentBatch, TransformedTier
from larder.cache.validation import check_kept
from larder.core.codec import NUM_TIERS, TIER_GRADE
from larder.core.errors import CacheError
from larder.core.observation import Entries
from larder.core.plan import LayerPlans, Plan
from larder.core.spec import POSITION_BYTES, LayerSpec, ModelSpec
from larder.core.types import Keys, Positions, Queries, Values
from larder.ops.attention import merge_attention, ragged_attention
from larder.ops.cpu.decode_attention import StepStorage
from larder.ops.cpu.transform_attention import can_step as can_step_coded
from larder.ops.cpu.transform_attention import kernel_bytes
from larder.ops.packing import heads_of_packed, starts_of

GENERATED_BLOCK = 64  # most entries of a head that are coded together while text is generated


class TransformLayer(MixedLayer):
    """Per-head lengths; coded entries take about as many bytes as their information.

    `entries` returns a copy as soon as any entry is coded.
    """

    supports = requires = frozenset({"ledger", "transform"})
    has_public_name = False
    spans_layers = True

    def __init__(self, layer: LayerSpec, options: LayerOptions, tables: TransformTables) -> None:
        super().__init__(layer, options)
        spec = options.spec
        assert spec.transform is not None  # required
        self._hold(TransformedTier.nothing(spec.transform, tables, len(spec.ledger.columns)))

    @classmethod
    def create(cls, layer: LayerSpec, model: ModelSpec, spec: CacheSpec) -> TransformLayer:
        assert spec.transform is not None  # required
        own = spec.transform.of_model(model.fingerprint)
        options = LayerOptions(model.dtype, model.device, replace(spec, transform=own))
        return cls(layer, options, TransformTables.load(layer, own))

    @property
    def tier(self) -> TransformedTier:
        """The coded entries."""
        return self._tier

    def append(self, keys: Keys, values: Values, positions: Positions) -> None:
        super().append(keys, values, positions)
        if len(positions) == 1:
            self._code_behind(int(positions[0]))

    def step_storage(self) -> StepStorage | None:
        spec, group = self.layer, self.layer.query_heads // self.layer.kv_heads
        if not self._is_mixed:
            return self._exact_storage()
        can_step = spec.softcap is None and self._tier.can_attend(group) and can_step_coded()
        if not can_step or (storage := self._exact_storage()) is None:
            return None
        return storage._replace(coded=self._tier.call(self.options.dtype, self._bias_column))

    def _exact_storage(self) -> StepStorage | None:
        """Storage of the exact entries."""
        storage = self._ragged.step_storage()
        self.replaced_bytes = self._ragged.replaced_bytes
        return storage

    def count_step(self, position: int) -> None:
        self._ragged.count_step(position)
        self._code_behind(position)

    def apply(self, plan: Plan) -> None:
        self._carry_out(plan, is_eviction=False)

    def evict(self, plan: Plan) -> None:
        self._carry_out(plan, is_eviction=True)

    def write_columns(self, columns: Mapping[str, Float[Tensor, " C"]]) -> None:
        if not self._is_mixed:
            self._ragged.write_columns(columns)
            return
        ledger, order = self._ragged.ledger, self._order()
        check_columns(columns, ledger, len(order))
        held = self._columns()
        for name, numbers in columns.items():
            held[ledger.columns.index(name), order] = numbers
        exact, coded = held.split([sum(self._ragged.lengths), len(self._tier)], 1)
        tier = replace(self._tier, columns=coded.clone())
        self._ragged.write_packed_columns(exact)
        self._hold(tier)

    def truncate(self, length: int) -> None:
        tier = self._tier
        if len(tier):
            batch = tier.batch()
            stays = batch.positions < length
            if not bool(stays.all()):
                tier = self._encoded(batch.select(stays.nonzero().flatten()))
        self._ragged.truncate(length)
        self._hold(tier)

    def entries(self) -> Entries:
        exact = self._ragged.entries()
        if not self._is_mixed:
            return exact
        batch, order = self._tier.batch(), self._order()
        keys, values = self._restored(batch)
        like = exact.keys
        grades = torch.cat([torch.zeros(sum(exact.lengths)), batch.tiers + float(TIER_GRADE)])
        positions = torch.cat([exact.packed_positions().cpu(), batch.positions.int()])
        columns = self._columns()[:, order]
        return Entries(
            torch.cat([exact.pack(exact.keys), keys.to(like)])[order],
            torch.cat([exact.pack(exact.values), values.to(like)])[order],
            positions[order].to(like.device),
            tuple(starts_of(torch.tensor(self.lengths)).tolist()),
            self.lengths,
            dict(zip(self._ragged.ledger.columns, columns, strict=True)),
            exact.scalars,
            grades=grades[order].to(torch.int8).to(like.device),
        )

    @property
    def attention_copy_bytes(self) -> int:
        """Bytes of one decoded block of each head, or of two per thread of the kernel."""
        sizes = self._tier.index[:, 1]
        longest = int(sizes.max()) if len(sizes) else 0
        entry = 2 * self.layer.head_dim * torch.float32.itemsize
        decoded = self.layer.kv_heads * longest * entry
        if self._tier.can_attend(1):
            own = kernel_bytes(longest, len(sizes), self.layer.head_dim, self._tier.spec.coder)
            decoded = max(decoded, own)
        return decoded

    def state(self) -> dict[str, Tensor]:
        return self._ragged.state() | self._tier.state()

    @classmethod
    def adopt(cls, layer: LayerSpec, state: dict[str, Tensor]) -> TransformLayer:
        tier = TransformedTier.adopt(layer, state)
        spec = CacheSpec("transform", transform=tier.spec)
        store = cls(layer, LayerOptions.of_state(state, spec), tier.tables)
        store._adopt_ragged(state)
        store._hold(tier)
        return store

    def _like(self) -> TransformLayer:
        copy = TransformLayer(self.layer, self.options, self._tier.tables)
        copy._hold(self._tier)
        return copy

    def _copy_tensors(self) -> None:
        self._hold(self._tier.copy())

    def own_tensors(self) -> tuple[Tensor, ...]:
        return self._tier.tensors()

    @property
    def lengths(self) -> tuple[int, ...]:
        exact = torch.tensor(self._ragged.lengths)
        return tuple((exact + self._tier.lengths(len(exact))).tolist())

    @property
    def _is_mixed(self) -> bool:
        return bool(len(self._tier))

    def attention_calls(self, new: NewTokens) -> list[AttentionCall]:
        if not self._attends_coded(new.queries):
            return super().attention_calls(new)
        exact = list[AttentionCall]()
        if any(self._ragged.lengths):
            exact += self._ragged.attention_calls(new)
        return [partial(self._attend_both, exact, new.queries)]

    def _other_calls(self, queries: Queries) -> list[AttentionCall]:
        return [partial(self._attend_round, queries, blocks) for blocks in self._tier.rounds]

    def _attend_both(self, exact: Sequence[AttentionCall], queries: Queries) -> AttentionState:
        """Attention to all entries, the coded ones by the compiled kernel.

        Args:
            exact: calls for the entries that are exact.
        """
        states = [call() for call in exact]
        outs, lses = [out for out, _ in states], [lse for _, lse in states]
        other = merge_attention(outs, lses) if states else None
        sizes = self.layer.scaling, self.options.dtype, self._bias_column
        return self._tier.attend(queries, *sizes, other)

    def _attends_coded(self, queries: Queries) -> bool:
        """True if one call of a kernel attends to all coded entries."""
        rows = queries.shape[0] // self.layer.kv_heads * queries.shape[1]
        return (
            self._is_mixed
            and queries.device.type == "cpu"
            and self.layer.softcap is None
            and not (torch.is_grad_enabled() and queries.requires_grad)
            and self._tier.can_attend(rows)
        )

    def _attend_round(self, queries: Queries, blocks: list[CodedBlock]) -> AttentionState:
        """Attention to at most one block of each head, which is decoded for it."""
        tier, heads = self._tier, self.layer.kv_heads
        lengths = torch.zeros(heads, dtype=torch.int64)
        keys, components, biases = list[Tensor](), list[Tensor](), list[Tensor]()
        column = self._bias_column
        for block in blocks:
            head, positions = block.head, tier.positions_of(block)
            own, other = tier.components_of(block)[0].chunk(2, 1)
            keys.append(tier.tables.keys(head, own, positions))
            components.append(other)
            lengths[head] = len(positions)
            if column is not None:
                biases.append(tier.columns[column, block.entries])
        device = queries.device
        out, lse = ragged_attention(
            queries.float(),
            torch.cat(keys).to(device),
            torch.cat(components).to(device),
            starts_of(lengths),
            lengths,
            self.layer.scaling,
            bias=torch.cat(biases).to(device) if biases else None,
            softcap=self.layer.softcap,
        )
        averages = out.unflatten(0, (heads, -1)).cpu()
        restored = [
            tier.tables.values(head, average) if lengths[head] else average
            for head, average in enumerate(averages)
        ]
        return torch.cat(restored).to(device), lse

    def _carry_out(self, plan: Plan, is_eviction: bool) -> None:
        check_kept(plan, self.lengths)
        if plan.allowed_bytes and not plan.step:
            plan = self.fit_plans([self], {0: plan})[0]
        step = plan.step or self._tier.step
        held, order = self.entries(), self._order()
        sums = merge_entries(plan, held)
        grades = self._new_grades(plan, held, sums)
        if bool(grades.any()) and not step:
            raise CacheError(
                f"A plan for layer {self.layer.index} codes entries without a step: give it a step "
                "or bytes to fill, or use a compensation that lowers no precision."
            )
        tier = self._coded_after(plan, held, sums, grades, step)
        own, merged, inserted = self._exact_after(plan, held, order, sums, grades)
        between = storage_bytes((*self._tier.tensors(), *tier.tensors()))
        if is_eviction:
            self._ragged.evict_folded(own, merged, inserted)
        else:
            self._ragged.apply_folded(own, merged, inserted)
        self.replaced_bytes = self._ragged.replaced_bytes + between
        self._hold(tier)

    @classmethod
    def fit_plans(cls, layers: Sequence[CacheLayer], plans: Mapping[int, Plan]) -> LayerPlans:
        owned = {index: (store_of(layers[index]), plan) for index, plan in plans.items()}
        fitted = {
            i: pair for i, pair in owned.items() if pair[1].allowed_bytes and pair[1].grades.any()
        }
        if not fitted:
            return dict(plans)
        coded = [plan.importance.cpu()[plan.grades.cpu() > 0] for _, plan in fitted.values()]
        median = torch.cat(coded).median()
        graded = {
            index: (store, replace(plan, grades=_with_tiers(plan, median)))
            for index, (store, plan) in fitted.items()
        }
        step = common_step([store.fit_layer(plan) for store, plan in graded.values()])
        done = {index: replace(plan, step=step) for index, (_, plan) in graded.items()}
        return {index: done.get(index, plan) for index, plan in plans.items()}

    def fit_layer(self, plan: Plan) -> FitLayer:
        """Figures of the layer that the fit of a plan with grades needs."""
        grades = self._new_grades(plan, self.entries(), no_merges(self._ragged.entries().keys))
        coded, tiers = plan.kept.cpu()[grades > 0], (grades[grades > 0] - TIER_GRADE).char()

        def centered(step: float) -> CenteredBlocks:
            columns, held = torch.zeros(0, len(coded)), self.entries()
            batch = self.component_batch(held, coded, tiers, columns, no_merges(held.keys))
            return tier.centered(batch, step)

        like = self._ragged.entries().keys
        entry = 2 * self.layer.head_dim * like.itemsize + POSITION_BYTES
        tier, exact = self._tier, int((grades == 0).sum()) * entry
        columns = COLUMN_BYTES * len(self._ragged.ledger.columns) * len(coded)
        return FitLayer(tier, centered, exact, columns, plan.allowed_bytes, len(coded))

    def _new_grades(self, plan: Plan, entries: Entries, sums: MergedEntries) -> Int8[Tensor, " T"]:
        """Grade of each kept entry after a plan: of coded entries never a finer one."""
        former = entries.packed_grades().index_fill(0, sums.targets.cpu(), 0)[plan.kept.cpu()]
        if not len(plan.grades):
            return former
        wanted = plan.grades.cpu()
        if len(wanted) != len(former) or bool(((wanted < 0) | (wanted > NUM_TIERS)).any()):
            raise CacheError(
                f"A plan has {len(wanted)} grades for {len(former)} kept entries, from "
                f"{min(wanted.tolist(), default=0)} to {max(wanted.tolist(), default=0)}: give one "
                f"each, from 0 to {NUM_TIERS}."
            )
        return torch.where(former > 0, torch.maximum(former, wanted), wanted)

    def _coded_after(
        self, plan: Plan, entries: Entries, sums: MergedEntries, grades: Tensor, step: float
    ) -> TransformedTier:
        """Coded tier after a plan; the same one if nothing of it changes."""
        coded = plan.kept.cpu()[grades > 0]
        before = entries.packed_grades()
        is_same = (
            len(coded) == len(self._tier) and step == self._tier.step and not len(sums.targets)
        )
        tiers = (grades[grades > 0] - TIER_GRADE).to(torch.int8)
        if is_same and torch.equal(before[coded], grades[grades > 0]) and not plan.columns:
            return self._tier
        columns = self._planned_columns(plan, entries)[:, (grades > 0).nonzero().flatten()]
        batch = self.component_batch(entries, coded, tiers, columns, sums)
        return self._tier.encoded(batch, step)

    def _planned_columns(self, plan: Plan, entries: Entries) -> Float[Tensor, "n T"]:
        """Ledger columns of the kept entries after a plan."""
        self._ragged.check_numbers(plan)
        columns = entries.packed_columns().cpu()[:, plan.kept.cpu()]
        for name, numbers in plan.columns.items():
            columns[self._ragged.ledger.columns.index(name)] = numbers.float().cpu()
        return columns

    def component_batch(
        self,
        entries: Entries,
        packed: Int64[Tensor, " N"],
        tiers: Int8[Tensor, " N"],
        columns: Float[Tensor, "n N"],
        sums: MergedEntries,
    ) -> ComponentBatch:
        """Components of some packed entries, with merged ones in their new form."""
        heads = heads_of_packed(packed, entries.lengths)
        positions = entries.packed_positions().cpu().long()[packed]
        keys, values = entries.pack(entries.keys).float(), entries.pack(entries.values).float()
        if len(sums.targets):
            keys, values = keys.clone(), values.clone()
            keys[sums.targets], values[sums.targets] = sums.keys, sums.values
        parts: list[Tensor] = [torch.zeros(0, 2 * self.layer.head_dim)]
        for head in range(len(entries.lengths)):
            own = packed[heads == head].to(keys.device)
            there = positions[heads == head]
            sides = keys[own].cpu(), values[own].cpu()
            parts.append(self._tier.tables.components(head, *sides, there))
        return ComponentBatch(heads, positions, torch.cat(parts), tiers, columns)

    def _exact_after(
        self, plan: Plan, entries: Entries, order: Tensor, sums: MergedEntries, grades: Tensor
    ) -> tuple[Plan, MergedEntries, InsertedEntries | None]:
        """Plan, merged entries and inserted entries of the exact part."""
        kept, count = plan.kept.cpu(), sum(self._ragged.lengths)
        indices, exact = order[kept], grades == 0
        stays = exact & (indices < count)
        heads = heads_of_packed(kept, entries.lengths)
        lengths = torch.bincount(heads[stays], minlength=len(entries.lengths))
        marked = stays.to(plan.kept.device)
        columns = {name: numbers[marked] for name, numbers in plan.columns.items()}
        own = Plan(indices[stays], tuple(lengths.tolist()), columns=columns, scalars=plan.scalars)
        targets = order[sums.targets.cpu()]
        mine = targets < count
        merged = MergedEntries(targets[mine], sums.keys[mine], sums.values[mine]).among(
            indices[stays]
        )
        comes = (exact & (indices >= count)).nonzero().flatten()
        if not len(comes):
            return own, merged, None
        found = torch.searchsorted(sums.targets.cpu(), kept[comes])
        positions = entries.packed_positions()[plan.kept[comes.to(plan.kept.device)]]
        numbers = self._planned_columns(plan, entries)[:, comes].to(entries.keys.device)
        sides = sums.keys[found], sums.values[found]
        return own, merged, InsertedEntries(heads[comes], *sides, positions, numbers)

    def _code_behind(self, newest: int) -> None:
        """Code generated entries behind the token at position `newest`, once there are enough."""
        spec = self._tier.spec
        full = min(GENERATED_BLOCK, spec.block) + spec.recent
        if self._tier.step and max(self._ragged.lengths) >= full:
            self._code_generated(newest)

    def _code_generated(self, newest: int) -> None:
        """Code the entries behind the latest ones, once a block of them is full."""
        exact, spec = self._ragged.entries(), self._tier.spec
        positions = exact.packed_positions().cpu().long()
        behind = (positions >= spec.sinks) & (positions <= newest - spec.recent)
        heads = heads_of_packed(torch.arange(len(positions)), exact.lengths)
        counts = torch.bincount(heads[behind], minlength=len(exact.lengths))
        if int(counts.max()) < min(GENERATED_BLOCK, spec.block):
            return
        packed = behind.nonzero().flatten()
        columns = exact.packed_columns().cpu()[:, packed]
        tiers = torch.zeros(len(packed), dtype=torch.int8)
        batch = self.component_batch(exact, packed, tiers, columns, no_merges(exact.keys))
        tier = self._tier.extended(self._encoded(batch))
        stays = (~behind).nonzero().flatten()
        lengths = tuple((torch.tensor(exact.lengths) - counts).tolist())
        self._ragged.evict(Plan(stays.to(exact.keys.device), lengths))
        self._hold(tier)

    def _encoded(self, batch: ComponentBatch) -> TransformedTier:
        """Entries coded with the present step."""
        return self._tier.encoded(batch, self._tier.step)

    def _restored(self, batch: ComponentBatch) -> tuple[Float[Tensor, "N D"], Float[Tensor, "N D"]]:
        """Rotated keys, and values, of components."""
        tables, (own, other) = self._tier.tables, batch.components.chunk(2, 1)
        keys, values = torch.empty_like(own), torch.empty_like(other)
        for head in range(self.layer.kv_heads):
            mine = batch.heads == head
            keys[mine] = tables.keys(head, own[mine], batch.positions[mine])
            values[mine] = tables.values(head, other[mine])
        return keys, values

    def _order(self) -> Int64[Tensor, " T"]:
        """Index of each packed entry among the exact entries and then the coded ones."""
        exact = self._ragged.entries()
        heads = heads_of_packed(torch.arange(sum(exact.lengths)), exact.lengths)
        positions = exact.packed_positions().cpu().long()
        if self._is_mixed:
            index = self._tier.index
            coded = torch.repeat_interleave(index[:, 0].long(), index[:, 1].long())
            heads = torch.cat([heads, coded])
            own = map(self._tier.positions_of, self._tier.blocks)
            positions = torch.cat([positions, *own])
        return torch.argsort(heads * (1 << 32) + positions)

    def _columns(self) -> Float[Tensor, "n T"]:
        """Ledger columns of the exact entries, then of the coded ones."""
        return torch.cat([self._ragged.entries().packed_columns().cpu(), self._tier.columns], 1)

    def _hold(self, tier: TransformedTier) -> None:
        self._tier = tier
        self._count_bytes()
        self.usage.set_entries(len(tier))


def store_of(layer: CacheLayer) -> TransformLayer:
    """The layer, which is one of this form. Raises: CacheError: it is not."""
    if not isinstance(layer, TransformLayer):
        raise CacheError(
            f"Layer {layer.layer.index} is no transform layer, but a plan gives it bytes to fill: "
            "plan managed layers alone."
        )
    return layer


def _with_tiers(plan: Plan, median: Float[Tensor, ""]) -> Int8[Tensor, " T"]:
    """Grades of a plan with tiers by importance."""
    grades = plan.grades.cpu()
    tiers = tiers_of(plan.importance.cpu(), median)
    return torch.where(grades > 0, tiers + TIER_GRADE, grades).to(torch.int8)


Part = TransformLayer
