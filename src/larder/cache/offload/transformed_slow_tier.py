"""Slow tier of transform components: blocks of `larder.cache.offload.coded_slow_tier` as codes.

    payload   [ components of a block | components of a block | ... ]     in order of arrival

Positions stay as they are in every slow tier. All blocks have one step, that of the calibration
for the bits of the spec (`calibrated_step`), so an entry is coded once, whatever comes later.
Components are centered on the means of the first blocks of their head where the spec says so. A
block of the entropy coder is decoded as a whole, one entry for each state of the coder at once; of
fixed widths, and of what is transformed back, only the rows that are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64, UInt8
from torch import Tensor

from larder.cache.component_means import ComponentMeans
from larder.cache.offload.coded_slow_tier import (
    CodedNumbers,
    CodedSlowTier,
    KeysAndValues,
    split_ready,
)
from larder.cache.offload.slow_tier import OffloadBatch, SlowTier
from larder.cache.spec import text_of, text_tensor
from larder.cache.transform_tables import TransformTables, calibrated_step
from larder.cache.transformed_tier import CODINGS
from larder.core.codec import MeanSource, TransformSpec
from larder.core.errors import CacheError
from larder.core.spec import LayerSpec
from larder.ops import transform_coder as coding
from larder.ops.packing import starts_of
from larder.ops.quantized_attention import KVSide

Blocks = Int64[np.ndarray, " B"]
PAYLOAD, SIZES, OWNERS, TABLES = "coded.payload", "coded.sizes", "coded.owners", "coded.tables"


@dataclass(frozen=True, eq=False)
class TransformedNumbers(CodedNumbers):
    """Transform-coded keys and values of all heads.

    Args:
        step: quantization step of all components.
        means: that components are centered on; of heads without blocks they are open.
        payload: codes of all blocks.
        ends: of each block in the payload.
        blocks: of each head, the indices of its blocks among all.
        waiting: residual window of each head.
    """

    spec: TransformSpec
    tables: TransformTables
    step: float
    means: ComponentMeans
    payload: UInt8[Tensor, " N"]
    ends: Int64[Tensor, " B"]
    blocks: tuple[Int64[Tensor, " _"], ...]
    waiting: tuple[KeysAndValues, ...]

    @staticmethod
    def nothing(
        spec: TransformSpec, tables: TransformTables, waiting: KeysAndValues
    ) -> TransformedNumbers:
        """No entries.

        Args:
            waiting: empty keys and values.
        """
        heads, none = tables.mean.shape[1], torch.empty(0, dtype=torch.int64)
        means, payload = ComponentMeans.zeros(), torch.empty(0, dtype=torch.uint8)
        step, rest = calibrated_step(spec), ((none,) * heads, (waiting,) * heads)
        return TransformedNumbers(spec, tables, step, means, payload, none, *rest)

    @property
    def coded(self) -> Int64[Tensor, " K"]:
        return torch.tensor([len(own) * self.spec.block for own in self.blocks])

    def decoded(
        self,
        heads: Int64[Tensor, " N"],
        members: Int64[Tensor, " N"],
        positions: Int[Tensor, " N"],
        side: KVSide,
    ) -> Float[Tensor, "N D"]:
        return self._sides(heads, members, positions, (side,))[0]

    def both(
        self,
        heads: Int64[Tensor, " N"],
        members: Int64[Tensor, " N"],
        positions: Int[Tensor, " N"],
    ) -> KeysAndValues:
        keys, values = self._sides(heads, members, positions, tuple(KVSide))
        return keys, values

    def tensors(self) -> tuple[Tensor, ...]:
        waiting = (side for pair in self.waiting for side in pair)
        means = self.means.codes, self.means.scales
        held = self.payload, self.ends, *means, *self.blocks, *waiting
        return tuple(tensor for tensor in held if tensor.numel())

    def extended(
        self, ready: Sequence[KeysAndValues], positions: Sequence[Int64[Tensor, " _"]]
    ) -> TransformedNumbers:
        """Numbers with whole blocks of entries behind those of each head.

        Raises:
            CacheError: a component is not finite, or too large for the step.
        """
        components = [
            self.tables.components(head, keys.float(), values.float(), positions[head])
            for head, (keys, values) in enumerate(ready)
        ]
        means, payloads = self._means_with(components), [self.payload.numpy()]
        sizes, blocks, count = list[int](), list(self.blocks), len(self.ends)
        for head, own in enumerate(components):
            centered = (own - means.of_head(head)).numpy()
            codes = [self._encoded(head, some) for some in self._chunks(centered)]
            payloads += codes
            sizes += [len(each) for each in codes]
            blocks[head] = torch.cat([blocks[head], torch.arange(count, count + len(codes))])
            count += len(codes)
        first = int(self.ends[-1]) if len(self.ends) else 0
        ends = torch.cat([self.ends, first + torch.tensor(sizes, dtype=torch.int64).cumsum(0)])
        payload = torch.from_numpy(np.concatenate(payloads))
        return replace(self, means=means, payload=payload, ends=ends, blocks=tuple(blocks))

    def first_blocks(self, counts: Sequence[int]) -> TransformedNumbers:
        """Numbers of the first blocks of each head alone, with nothing that waits."""
        kept = [own[:count] for own, count in zip(self.blocks, counts, strict=True)]
        order = torch.cat(kept).sort().values
        codes = [self._codes(block) for block in order.tolist()]
        sizes = torch.tensor([len(each) for each in codes], dtype=torch.int64)
        payload = torch.from_numpy(np.concatenate([np.zeros(0, np.uint8), *codes]))
        blocks = tuple(torch.searchsorted(order, own) for own in kept)
        none = tuple((keys[:0], values[:0]) for keys, values in self.waiting)
        ends = sizes.cumsum(0)
        return replace(self, payload=payload, ends=ends, blocks=blocks, waiting=none)

    @property
    def owners(self) -> Int64[Tensor, " B"]:
        """Head of each block."""
        counts = torch.tensor([len(own) for own in self.blocks])
        heads = torch.arange(len(counts)).repeat_interleave(counts)
        return torch.empty_like(heads).index_copy_(0, torch.cat(self.blocks), heads)

    def _means_with(self, components: Sequence[Float[Tensor, "N D2"]]) -> ComponentMeans:
        """Means with those of heads that get their first blocks."""
        fresh = [
            head
            for head, own in enumerate(components)
            if len(own) and not (len(self.means.codes) and bool(self.means.scales[head].any()))
        ]
        if self.spec.mean is MeanSource.MODEL or not fresh:
            return self.means
        owners = torch.cat([torch.full((len(components[head]),), head) for head in fresh])
        rows, heads = torch.cat([components[head] for head in fresh]), len(components)
        found = ComponentMeans.of(owners, rows, heads)
        open_heads = torch.tensor([head for head in range(heads) if head not in fresh])
        blank = ComponentMeans(torch.zeros_like(found.codes), torch.zeros_like(found.scales))
        before = self.means if len(self.means.codes) else blank
        return found.with_heads(before, open_heads.long())

    def _chunks(self, rows: Float[np.ndarray, "N D2"]) -> Iterator[Float[np.ndarray, "b D2"]]:
        return (rows[at : at + self.spec.block] for at in range(0, len(rows), self.spec.block))

    def _encoded(self, head: int, numbers: Float[np.ndarray, "b D2"]) -> UInt8[np.ndarray, " B"]:
        tiers = np.zeros(len(numbers), np.int8)
        return coding.encoded(numbers, tiers, self._deviations(head), self.step, self.spec.coder)

    def _codes(self, block: int) -> UInt8[np.ndarray, " B"]:
        """Payload of a block."""
        first = int(self.ends[block - 1]) if block else 0
        return self.payload[first : int(self.ends[block])].numpy()

    def _layout(self) -> tuple[Blocks, Blocks, Blocks]:
        """First byte, size and head of each block, as the coders read them."""
        ends = self.ends.numpy()
        sizes = np.diff(ends, prepend=0)
        return ends - sizes, sizes, self.owners.numpy()

    def _components(self, places: Int64[Tensor, " N"], read: int) -> Float[Tensor, "N R"]:
        """Components of some entries without their means, in float32.

        Args:
            places: entry e of block b is at b times the size of a block, plus e.
            read: components of each entry, from the first on.
        """
        deviations = self.tables.deviation.transpose(0, 1).flatten(1).numpy()
        own = self.spec.block, places.numpy(), deviations, self.step, self.spec.coder, read
        return torch.from_numpy(coding.decoded_rows(self.payload.numpy(), *self._layout(), *own))

    def _sides(
        self,
        heads: Int64[Tensor, " N"],
        members: Int64[Tensor, " N"],
        positions: Int[Tensor, " N"],
        sides: tuple[KVSide, ...],
    ) -> list[Float[Tensor, "N D"]]:
        """Keys, values or both of some entries."""
        if bool((heads.diff() < 0).any()):
            order = heads.argsort(stable=True)
            found = self._sides(heads[order], members[order], positions[order], sides)
            return [torch.empty_like(rows).index_copy_(0, order, rows) for rows in found]
        beyond = members - self.coded[heads]  # of the residual window, where it is not negative
        waits = beyond >= 0
        if not bool(waits.any()):
            return self._restored(heads, members, positions, sides)
        coded, late = (~waits).nonzero().flatten(), waits.nonzero().flatten()
        restored = self._restored(heads[coded], members[coded], positions[coded], sides)
        firsts = starts_of(torch.tensor([len(keys) for keys, _ in self.waiting]))
        found = list[Tensor]()
        for rows, side in zip(restored, sides, strict=True):
            window = torch.cat([pair[side is KVSide.VALUES] for pair in self.waiting]).float()
            into = rows.new_empty(len(heads), rows.shape[1]).index_copy_(0, coded, rows)
            found.append(into.index_copy_(0, late, window[firsts[heads[late]] + beyond[late]]))
        return found

    def _restored(
        self,
        heads: Int64[Tensor, " N"],
        members: Int64[Tensor, " N"],
        positions: Int[Tensor, " N"],
        sides: tuple[KVSide, ...],
    ) -> list[Float[Tensor, "N D"]]:
        """Keys, values or both of coded entries in order of heads."""
        size, dim = self.spec.block, self.tables.mean.shape[2]
        found = [torch.empty(len(heads), dim) for _ in sides]
        firsts = starts_of(self.coded // size)
        places = torch.cat(self.blocks)[firsts[heads] + members // size] * size + members % size
        rows = self._components(places, dim if sides == (KVSide.KEYS,) else 2 * dim)
        means, stop = self.means.numbers, 0
        for head, count in enumerate(torch.bincount(heads, minlength=len(firsts)).tolist()):
            own = slice(stop, stop := stop + count)
            numbers = rows[own]
            if len(means):
                numbers += means[head, : rows.shape[1]]
            for into, side in zip(found, sides, strict=True):
                into[own] = self._turned_back(head, numbers, positions[own], side)
        return found

    def _turned_back(
        self,
        head: int,
        components: Float[Tensor, "N _"],
        positions: Int[Tensor, " N"],
        side: KVSide,
    ) -> Float[Tensor, "N D"]:
        """Keys or values of components of a head."""
        dim = self.tables.mean.shape[2]
        if side is KVSide.KEYS:
            return self.tables.keys(head, components[:, :dim], positions.long())
        return self.tables.values(head, components[:, dim:])

    def _deviations(self, head: int) -> Float[np.ndarray, " D2"]:
        return self.tables.deviation[:, head].flatten().numpy()


class TransformedSlowTier(CodedSlowTier):
    """Slow tier of one layer, transform coded except for the residual window.

    Args:
        spec: coding of the blocks, with the model's fingerprint.
        tables: transforms of the layer.
    """

    def __init__(
        self,
        layer: LayerSpec,
        dtype: torch.dtype,
        columns: tuple[str, ...],
        is_pinned: bool,
        spec: TransformSpec,
        tables: TransformTables,
    ) -> None:
        none = torch.empty(0, layer.head_dim, dtype=dtype)
        numbers = TransformedNumbers.nothing(spec, tables, (none, none))
        super().__init__(layer, dtype, columns, is_pinned, numbers)

    def _copy_into(self, other: SlowTier, chosen: Bool[Tensor, " T"]) -> None:
        """Copy the first blocks of each head that are wholly chosen, and code the rest again."""
        assert isinstance(other, TransformedSlowTier)  # made by `_like`
        lengths, size = self._lengths.tolist(), self._transformed.spec.block
        parts, coded = chosen.split(lengths), self._transformed.coded.tolist()
        firsts = [int(own.long().cumprod(0).sum()) for own in parts]
        blocks = [min(first, own) // size for first, own in zip(firsts, coded, strict=True)]
        kept = torch.tensor(blocks) * size
        rows, heads = self._packed(torch.ones_like(chosen))
        is_first = rows - self._starts[heads] < kept[heads]
        first = rows[is_first]
        tensors = {"positions": self._positions[first], "columns": self._columns[:, first]}
        other.adopt_blocks(tensors | {"lengths": kept}, self._transformed.first_blocks(blocks))
        super()._copy_into(other, chosen & ~is_first)

    def state(self) -> dict[str, Tensor]:
        numbers, state = self._transformed, super().state()
        state["keys"], state["values"] = map(torch.cat, zip(*numbers.waiting, strict=True))
        sizes = numbers.ends.diff(prepend=torch.zeros(1, dtype=torch.int64))
        return state | {
            PAYLOAD: numbers.payload.clone(),
            SIZES: sizes.int(),
            OWNERS: numbers.owners.int(),
            TABLES: text_tensor(
                f"{CODINGS[numbers.spec.coder]} {numbers.tables.digest} {numbers.step!r}"
            ),
            **numbers.means.state(),
        }

    def adopt(self, state: Mapping[str, Tensor]) -> None:
        """Take ownership of the tensors of `state`.

        Raises:
            CacheError: they were coded with other tables, or are damaged.
        """
        numbers, layer = self._transformed, self._whole
        if (
            text_of(state[TABLES])
            != f"{CODINGS[numbers.spec.coder]} {numbers.tables.digest} {numbers.step!r}"
        ):
            raise CacheError(
                f"The offloaded entries of layer {layer.index} of the saved cache were coded with "
                "another calibration than the model now has: build the cache again."
            )
        size, owners = numbers.spec.block, state[OWNERS].long()
        full = torch.bincount(owners, minlength=layer.kv_heads) * size
        waits, ends = state["lengths"] - full, state[SIZES].long().cumsum(0)
        last = int(ends[-1]) if len(ends) else 0
        is_sound = last == len(state[PAYLOAD]) and bool((state[SIZES] > 0).all())
        if is_sound:
            codes = state[PAYLOAD].numpy()
            parts = zip((ends - state[SIZES].long()).tolist(), ends.tolist(), strict=True)
            sizes = size, 2 * layer.head_dim, numbers.spec.coder
            is_sound = all(coding.is_whole(codes[a:b], *sizes) for a, b in parts)
        if (
            not is_sound
            or len(full) != layer.kv_heads
            or bool(((waits < 0) | (waits >= size)).any())
        ):
            raise CacheError(
                f"The offloaded entries of layer {layer.index} of the saved cache are damaged: "
                "build the cache again."
            )
        keys, values = (state[side].split(waits.tolist()) for side in ("keys", "values"))
        blocks = tuple((owners == head).nonzero().flatten() for head in range(layer.kv_heads))
        own = {"payload": state[PAYLOAD], "ends": ends, "blocks": blocks}
        waiting, means = tuple(zip(keys, values, strict=True)), ComponentMeans.adopt(state)
        self.adopt_blocks(state, replace(numbers, waiting=waiting, means=means, **own))

    def adopt_blocks(self, state: Mapping[str, Tensor], numbers: TransformedNumbers) -> None:
        """Take ownership of numbers, and of the positions, columns and lengths of `state`."""
        none = numbers.waiting[0][0].new_empty(len(state["positions"]), 0)
        super().adopt({**state, "keys": none, "values": none.clone()})
        self._numbers = self._former = numbers
        self._count_bytes()

    @property
    def _transformed(self) -> TransformedNumbers:
        assert isinstance(self._numbers, TransformedNumbers)  # made by this class
        return self._numbers

    def _like(self) -> TransformedSlowTier:
        own = self._transformed.spec, self._transformed.tables
        return TransformedSlowTier(
            self._whole, self._keys.dtype, self._names, self._is_pinned, *own
        )

    def _with(self, batch: OffloadBatch) -> TransformedNumbers:
        held = self._transformed
        ready, waiting = split_ready(held.waiting, batch, held.spec.block, self._keys.dtype)
        coming = batch.positions.to("cpu").long().split(batch.lengths.tolist())
        positions = list[Tensor]()
        for head, fresh in enumerate(coming):
            end = int(self._starts[head] + self._lengths[head])
            late = self._positions[end - len(held.waiting[head][0]) : end].long()
            positions.append(torch.cat([late, fresh])[: len(ready[head][0])])
        if any(map(len, positions)):
            held = held.extended(ready, positions)
        return replace(held, waiting=waiting)

    def _coded_growth(self, batch: OffloadBatch, numbers: CodedNumbers) -> int:
        del batch
        before, after = (
            sum(tensor.nbytes for tensor in each.tensors()) for each in (self._numbers, numbers)
        )
        return max(after - before, 0)
