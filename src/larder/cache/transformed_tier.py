"""Transformed tier of a layer: entries as coded transform components, in blocks of a head.

    index     head, entries, first position, span, bytes     one row a block, by head, then position
    payload   [ positions | components ] [ positions | components ] ...

Components are centered on their means in the text where the spec says so (`ComponentMeans`); these
stay as they are as long as the step does. The positions of a block are a bitmap of its span; where
that is longer, 4 bytes each (span 0). A tier is immutable: a change makes a new one, so a change
that fails has changed nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, Int, Int8, Int32, Int64, UInt8
from torch import Tensor

from larder.cache.coded_blocks import (
    INDEX_BYTES,
    INDEX_FIELDS,
    CodedBlock,
    blocks_of,
    cached_call,
    packed_positions,
    position_bytes,
    unpacked_positions,
)
from larder.cache.component_means import CenteredBlock, CenteredBlocks, ComponentMeans
from larder.cache.spec import saved_spec_text, text_tensor
from larder.cache.transform_tables import KEYS, TransformTables
from larder.core.codec import Coder, MeanSource, TransformSpec
from larder.core.errors import CacheError
from larder.core.spec import LayerSpec
from larder.ops import transform_coder as coding
from larder.ops.cpu import transform_attention as kernel
from larder.ops.rope import rotation_table
from larder.ops.symbol_model import classes_of

if TYPE_CHECKING:  # `kvquant` alone codes levels
    from larder.ops.level_coder import CodedRanges, LevelCoder

CODINGS = dict.fromkeys(Coder, "lanes") | {Coder.PLANES: "planes"}  # versions, in saved states
ROUNDING_BYTES = 2  # of a block's words that a count of bits leaves out
SPEC_KEY, INDEX_KEY, PAYLOAD_KEY, STEP_KEY, COLUMNS_KEY = (
    "transform.spec",
    "transform.index",
    "transform.payload",
    "transform.step",
    "transform.columns",
)


@dataclass(frozen=True)
class ComponentBatch:
    """Entries to code, in order of heads and positions.

    Args:
        heads: kv head of each entry.
        components: of keys, then of values.
        tiers: -2 (finest) to 2.
        columns: ledger columns, one number per entry.
    """

    heads: Int64[Tensor, " N"]
    positions: Int64[Tensor, " N"]
    components: Float[Tensor, "N D2"]
    tiers: Int8[Tensor, " N"]
    columns: Float[Tensor, "n N"]

    def select(self, rows: Tensor) -> ComponentBatch:
        """Some of the entries, in the given order."""
        return ComponentBatch(
            self.heads[rows],
            self.positions[rows],
            self.components[rows],
            self.tiers[rows],
            self.columns[:, rows],
        )

    def blocks(self, size: int) -> Iterator[tuple[int, slice]]:
        """Head and rows of each block of at most `size` entries of a head."""
        heads, counts = self.heads.unique_consecutive(return_counts=True)
        start = 0
        for head, count in zip(heads.tolist(), counts.tolist(), strict=True):
            for first in range(start, start + count, size):
                yield head, slice(first, min(first + size, start + count))
            start += count


@dataclass(frozen=True)
class TransformedTier:
    """Coded entries of all heads of a layer.

    Args:
        step: quantization step of tier 0; 0 before the first entry is coded.
        columns: ledger columns, one number per entry in order of blocks.
        means: that components are centered on.
    """

    spec: TransformSpec
    tables: TransformTables
    step: float
    index: Int32[Tensor, "B F"]
    payload: UInt8[Tensor, " N"]
    columns: Float[Tensor, "n T"]
    means: ComponentMeans = field(default_factory=ComponentMeans.zeros)

    @staticmethod
    def nothing(spec: TransformSpec, tables: TransformTables, columns: int) -> TransformedTier:
        """Empty tier."""
        index = torch.zeros(0, INDEX_FIELDS, dtype=torch.int32)
        none = torch.zeros(0, dtype=torch.uint8)
        return TransformedTier(spec, tables, 0.0, index, none, torch.zeros(columns, 0))

    def encoded(self, batch: ComponentBatch, step: float) -> TransformedTier:
        """Tier of other entries in place of these.

        Raises:
            CacheError: a component is not finite, or too large for the step.
        """
        spec, tables, means = self.spec, self.tables, self.means_at(step, batch)
        rows: list[list[int]] = []
        parts: list[np.ndarray] = []
        ranges = self._held_ranges(batch)
        for head, block in batch.blocks(spec.block):
            positions = batch.positions[block].numpy()
            span, places = packed_positions(positions)
            numbers, tiers = _centered(batch, block, means, head), batch.tiers[block].numpy()
            held = _ranges_at(positions, *ranges[head]) if head in ranges else None
            codes = self._codes(head, numbers, tiers, step, held)
            parts += [places, codes]
            size = len(places) + len(codes)
            rows.append([head, len(positions), int(positions[0]), span, size])
        index = torch.tensor(rows, dtype=torch.int32).reshape(-1, INDEX_FIELDS)
        payload = np.concatenate(parts) if parts else np.zeros(0, np.uint8)
        return TransformedTier(
            spec, tables, step, index, torch.from_numpy(payload), batch.columns.clone(), means
        )

    def centered(self, batch: ComponentBatch, step: float) -> CenteredBlocks:
        """Blocks of other entries, centered as they are coded with a step."""
        means = self.means_at(step, batch)
        total, blocks = means.codes.nbytes + means.scales.nbytes, list[CenteredBlock]()
        for head, block in batch.blocks(self.spec.block):
            numbers, tiers = _centered(batch, block, means, head), batch.tiers[block].numpy()
            blocks.append(CenteredBlock(head, numbers, tiers))
            places = len(packed_positions(batch.positions[block].numpy())[1])
            total += INDEX_BYTES + places + ROUNDING_BYTES
        return CenteredBlocks(tuple(blocks), total)

    def estimate(self, centered: CenteredBlocks, step: float) -> float:
        """Bytes that other entries would take, columns left out; hardly ever too few."""
        total = float(centered.nbytes_beside)
        for block in centered.blocks:
            if self.spec.coder is Coder.LEVELS:
                total += len(self._level_coder.encoded(block.numbers))
            else:
                own = block.numbers, block.tiers, _deviations(self.tables, block.head)
                total += coding.coded_bytes(*own, step, self.spec.coder)
        return total

    def _codes(
        self,
        head: int,
        numbers: np.ndarray,
        tiers: np.ndarray,
        step: float,
        held: CodedRanges | None,
    ) -> UInt8[np.ndarray, " B"]:
        """Payload of the components of one block."""
        if self.spec.coder is Coder.LEVELS:
            return self._level_coder.encoded(numbers, held)
        deviations = _deviations(self.tables, head)
        return coding.encoded(numbers, tiers, deviations, step, self.spec.coder)

    def _held_ranges(self, batch: ComponentBatch) -> dict[int, tuple[np.ndarray, CodedRanges]]:
        """Positions and ranges of the values that are coded here, by head; those of blocks before
        the entries of a batch, and of coders without levels, are left out.
        """
        blocks: dict[int, list[tuple[np.ndarray, CodedRanges]]] = {}
        heads, counts = batch.heads.unique_consecutive(return_counts=True)
        firsts = batch.positions[counts.cumsum(0) - counts].tolist()
        lowest = dict(zip(heads.tolist(), firsts, strict=True))
        if self.spec.coder is not Coder.LEVELS:
            return {}
        for block in self.blocks:
            head, end = block.head, block.first + block.span
            if head not in lowest or (block.span and end <= lowest[head]):
                continue
            codes, width = self._codes_of(block), 2 * self.tables.mean.shape[2]
            ranges = self._level_coder.ranges_of(codes, block.count, width)
            blocks.setdefault(head, []).append((self.positions_of(block).numpy(), ranges))
        return {head: _joined_ranges(parts) for head, parts in blocks.items()}

    @property
    def _level_coder(self) -> LevelCoder:
        from larder.ops.level_coder import LevelCoder

        return LevelCoder(self.tables.levels.numpy(), self.spec.level_bits, self.spec.outliers)

    def means_at(self, step: float, batch: ComponentBatch) -> ComponentMeans:
        """Means that entries are centered on: those of the tier where it has the step already.

        Entries that are coded again with the same step and means are the same to the bit.
        """
        if len(self) and step == self.step:
            return self.means
        if self.spec.mean is MeanSource.MODEL or not len(batch.heads):
            return ComponentMeans.zeros()
        return ComponentMeans.of(batch.heads, batch.components, self.tables.mean.shape[1])

    def extended(self, later: TransformedTier) -> TransformedTier:
        """Tier with the blocks of another one of the same step and means, by head."""
        index = torch.cat([self.index, later.index])
        order = torch.argsort(index[:, 0].long() * (1 << 32) + index[:, 2])
        payloads = [
            *self.payload.split(self.index[:, 4].tolist()),
            *later.payload.split(later.index[:, 4].tolist()),
        ]
        columns = [
            *self.columns.split(self.index[:, 1].tolist(), 1),
            *later.columns.split(later.index[:, 1].tolist(), 1),
        ]
        places = order.tolist()
        payload = torch.cat([payloads[place] for place in places])
        numbers = torch.cat([columns[place] for place in places], 1)
        step = self.step or later.step
        return replace(
            self, step=step, index=index[order], payload=payload, columns=numbers, means=later.means
        )

    def __len__(self) -> int:
        return self.columns.shape[1]

    def lengths(self, heads: int) -> Int64[Tensor, " K"]:
        """Entries of each kv head."""
        owners, counts = self.index[:, 0].long(), self.index[:, 1].long()
        return torch.zeros(heads, dtype=torch.int64).index_add_(0, owners, counts)

    @property
    def blocks(self) -> list[CodedBlock]:
        """All blocks, read from the index: held, they would be bytes that nobody counts."""
        return blocks_of(self.index)

    @property
    def rounds(self) -> list[list[CodedBlock]]:
        """Blocks in groups with at most one block of each head."""
        groups: list[list[CodedBlock]] = []
        seen: dict[int, int] = {}
        for block in self.blocks:
            turn = seen[block.head] = seen.get(block.head, -1) + 1
            if turn == len(groups):
                groups.append([])
            groups[turn].append(block)
        return groups

    def can_attend(self, num_queries: int) -> bool:
        """True if the compiled kernel serves so many queries per kv head."""
        half, head_dim = len(self.tables.radians), self.tables.mean.shape[2]
        return kernel.supports(self.spec.coder, num_queries, head_dim, half)

    def positions_of(self, block: CodedBlock) -> Int64[Tensor, " N"]:
        """True positions of a block's entries."""
        size = position_bytes(block.count, block.span)
        places = self.payload[block.codes][:size].numpy()
        return torch.from_numpy(unpacked_positions(places, block.count, block.first, block.span))

    def _codes_of(self, block: CodedBlock) -> UInt8[np.ndarray, " B"]:
        """Payload of a block's components."""
        return self.payload[block.codes][position_bytes(block.count, block.span) :].numpy()

    def is_sound(self, block: CodedBlock) -> bool:
        """True if positions, and bytes where their coder can tell, are as a tier writes them."""
        positions = self.positions_of(block).numpy()
        if len(positions) != block.count or positions[0] != block.first:
            return False
        if (np.diff(positions) <= 0).any():
            return False
        found, places = packed_positions(positions)
        held = self.payload[block.codes][: len(places)].numpy()
        if found != block.span or not np.array_equal(places, held):
            return False
        width = 2 * self.tables.mean.shape[2]
        return coding.is_whole(self._codes_of(block), block.count, width, self.spec.coder)

    def components_of(self, block: CodedBlock) -> tuple[Float[Tensor, "N D2"], Int8[Tensor, " N"]]:
        """Components and tiers of a block's entries."""
        codes, count = self._codes_of(block), block.count
        if self.spec.coder is Coder.LEVELS:
            held = self._level_coder.decoded(codes, count, 2 * self.tables.mean.shape[2])
            return torch.from_numpy(held), torch.zeros(count, dtype=torch.int8)
        deviations = _deviations(self.tables, block.head)
        numbers, tiers = coding.decoded(codes, count, deviations, self.step, self.spec.coder)
        return torch.from_numpy(numbers) + self.means.of_head(block.head), torch.from_numpy(tiers)

    def attend(
        self,
        queries: Float[Tensor, "H Q D"],
        scaling: float,
        dtype: torch.dtype,
        column: int | None,
        other: kernel.Attended | None,
    ) -> kernel.Attended:
        """Attention to all entries by the compiled kernel, where `can_attend`.

        Args:
            dtype: that keys need not exceed in precision.
            column: ledger column that is added to the logits.
            other: attention to further entries, which is merged.
        """
        return kernel.transform_attention(queries, self.call(dtype, column), scaling, other)

    def call(self, dtype: torch.dtype, column: int | None) -> kernel.CodedEntriesCall:
        """All entries as the compiled kernel takes them, where `can_attend`.

        Args:
            dtype, column: as in `attend`.
        """
        own = self.payload, self.index, self.means.codes, self.means.scales, self.columns
        build = partial(self._build_call, dtype, column)
        call = cached_call(own, (self.step, dtype, column), build)
        return call.holding(self.payload, self.columns)

    def _build_call(self, dtype: torch.dtype, column: int | None) -> kernel.CodedEntriesCall:
        tables = self.tables
        is_narrow = dtype is torch.bfloat16  # keys need no more
        pairs = tables.bfloat16_keys if is_narrow else None
        own_bytes = tables.byte_keys if is_narrow else None
        ratios = tables.deviation[KEYS] / self.step
        rotation = rotation_table(self._length, tables.radians)
        own = self._kernel_means(), self._kernel_classes(), rotation
        heads = kernel.TransformedHeads(tables.inverse, pairs, own_bytes, ratios, *own)
        bias = None if column is None else self.columns[column]
        return kernel.CodedEntriesCall.of(
            self.payload, self._kernel_blocks(), heads, self.step, bias, self.spec.coder
        )

    def _kernel_means(self) -> Float[Tensor, "2 K D"]:
        """Means of keys before rotation, and of values, as the kernel adds them."""
        if not len(self.means.codes):
            return self.tables.mean
        codes, scales = self.means.codes.numpy(), self.means.scales.numpy()
        numbers = codes.reshape(len(codes), 2, -1) * scales[..., None]
        plain = numbers.swapaxes(0, 1)[:, :, None] @ self.tables.inverse.numpy()
        return torch.from_numpy(self.tables.mean.numpy() + plain[:, :, 0])

    def _kernel_blocks(self) -> Int64[Tensor, "B F"]:
        """Blocks as the kernel reads them."""
        heads, counts, firsts, spans, sizes = self.index.numpy().astype(np.int64).T
        places = np.where(spans > 0, -(-spans // 8), 4 * counts)
        starts, entries = sizes.cumsum() - sizes, counts.cumsum() - counts
        words = starts + places, sizes - places
        return torch.from_numpy(
            np.stack([heads, counts, firsts, spans, starts, *words, entries], 1)
        )

    def _kernel_classes(self) -> Int32[Tensor, "K D2"]:
        """Classes of the components of each head."""
        deviations = self.tables.deviation.transpose(0, 1).flatten(1)
        return torch.from_numpy(classes_of(deviations.numpy(), self.step))

    @property
    def _length(self) -> int:
        """Positions up to the last one that is coded."""
        ends = [1]
        for block in self.blocks:
            last = block.first + block.span - 1 if block.span else self.positions_of(block)[-1]
            ends.append(int(last) + 1)
        return max(ends)

    def batch(self) -> ComponentBatch:
        """All entries, decoded."""
        blocks = self.blocks
        pairs = [self.components_of(block) for block in blocks]
        width = 2 * self.tables.mean.shape[-1]
        heads = torch.repeat_interleave(self.index[:, 0].long(), self.index[:, 1].long())
        none = torch.zeros(0, dtype=torch.int64)
        return ComponentBatch(
            heads,
            torch.cat([none, *(self.positions_of(block) for block in blocks)]),
            torch.cat([torch.zeros(0, width), *(numbers for numbers, _ in pairs)]),
            torch.cat([none.to(torch.int8), *(tiers for _, tiers in pairs)]),
            self.columns,
        )

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that are not empty, the shared tables excluded."""
        coded = (self.index, self.payload, self.columns, self.means.codes, self.means.scales)
        return tuple(tensor for tensor in coded if tensor.numel())

    def copy(self) -> TransformedTier:
        """Tier with copies of all tensors."""
        means = ComponentMeans(self.means.codes.clone(), self.means.scales.clone())
        tensors = {name: getattr(self, name).clone() for name in ("index", "payload", "columns")}
        return replace(self, means=means, **tensors)

    def state(self) -> dict[str, Tensor]:
        """Copies of all tensors by name, with what names the calibration."""
        return {
            SPEC_KEY: text_tensor(
                f"{CODINGS[self.spec.coder]} {self.tables.digest} {self.spec.to_text()}"
            ),
            INDEX_KEY: self.index.clone(),
            PAYLOAD_KEY: self.payload.clone(),
            STEP_KEY: torch.tensor([self.step], dtype=torch.float64),
            COLUMNS_KEY: self.columns.clone(),
            **self.means.state(),
        }

    @staticmethod
    def adopt(layer: LayerSpec, state: Mapping[str, Tensor]) -> TransformedTier:
        """Tier restored from `state`, which takes ownership of the tensors.

        Raises:
            CacheError: the model is not calibrated here, or was calibrated again, or the words of
                the entries are those of another coder, or the blocks are damaged.
        """
        saved = saved_spec_text(state, SPEC_KEY, layer, "transform")
        coding_name, _, rest = saved.partition(" ")
        digest, _, text = rest.partition(" ")
        spec = TransformSpec.from_text(text) if coding_name in CODINGS.values() else None
        if spec is None or coding_name != CODINGS[spec.coder]:
            raise CacheError(
                f"Layer {layer.index} of the saved cache was coded by another version of Larder: "
                "build the cache again."
            )
        tables = TransformTables.load(layer, spec)
        if tables.digest != digest:
            raise CacheError(
                f"Layer {layer.index} of the saved cache was coded with the calibration {digest}, "
                f"but the model now has {tables.digest}: build the cache again."
            )
        index, payload, columns = (
            state[key].cpu() for key in (INDEX_KEY, PAYLOAD_KEY, COLUMNS_KEY)
        )
        step, means = float(state[STEP_KEY][0]), ComponentMeans.adopt(state)
        tier = TransformedTier(spec, tables, step, index, payload, columns, means)
        if not (_fits(tier, layer) and all(map(tier.is_sound, tier.blocks))):
            raise CacheError(
                f"The coded entries of layer {layer.index} of the saved cache are damaged: build "
                "the cache again."
            )
        return tier


def _fits(tier: TransformedTier, layer: LayerSpec) -> bool:
    """True if the index describes blocks of the layer's heads that fill payload and columns."""
    heads, counts, firsts, spans, sizes = tier.index.numpy().astype(np.int64).T
    words = sizes - np.where(spans > 0, -(-spans // 8), 4 * counts)
    least = coding.least_bytes(counts, 2 * layer.head_dim, tier.spec.coder)
    ordered = np.diff(heads * (1 << 32) + firsts) > 0
    valid = (heads >= 0) & (heads < layer.kv_heads) & (firsts >= 0) & (spans >= 0)
    valid &= (counts >= 1) & (counts <= tier.spec.block) & (words >= least)
    filled = sizes.sum() == len(tier.payload) and counts.sum() == tier.columns.shape[1]
    return bool(ordered.all() and valid.all() and filled)


def _centered(
    batch: ComponentBatch, rows: slice, means: ComponentMeans, head: int
) -> Float[np.ndarray, "N D2"]:
    return (batch.components[rows] - means.of_head(head)).numpy()


def _joined_ranges(
    parts: list[tuple[np.ndarray, CodedRanges]],
) -> tuple[Int[np.ndarray, " N"], CodedRanges]:
    from larder.ops.level_coder import CodedRanges

    held = [tier for _, tier in parts]
    joined = CodedRanges(
        np.concatenate([tier.is_held for tier in held]),
        np.concatenate([tier.ranges for tier in held]),
        np.concatenate([tier.channels for tier in held]),
    )
    return np.concatenate([places for places, _ in parts]), joined


def _ranges_at(
    positions: Int[np.ndarray, " N"], places: Int[np.ndarray, " M"], held: CodedRanges
) -> CodedRanges:
    """Ranges of the values at some positions, of those at `places`."""
    from larder.ops.level_coder import CodedRanges

    rows = np.searchsorted(places, positions).clip(max=len(places) - 1)
    return CodedRanges(places[rows] == positions, held.ranges[rows], held.channels[rows])


def _deviations(tables: TransformTables, head: int) -> np.ndarray:
    return tables.deviation[:, head].flatten().numpy()
