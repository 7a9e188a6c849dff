"""Prediction of each layer from the decoded layer below, at a share of the bfloat16 bytes.

Parked holding of Larder's own policy; no publication has all of it. Keys before rotation are
predicted from keys and values of the layer below, values from the keys of their own layer too, by
linear maps that `larder train predictive` fits on decoded inputs, as Shutova et al., "Cache Me If
You Must: Adaptive Key-Value Quantization for Large Language Models" (AQUA-KV, 2025),
arXiv:2501.19392, section 3, do. What differs: the residual of all kv heads together is decorrelated
in the metric of the queries and range coded with one step for all layers, where AQUA-KV has a
vector quantizer of fixed width; so bits go to where the residual is. The step is found for each
cache, on a sample of long ones, so that codes take the share. The first `SINKS` positions are
stored in bfloat16.

A cache is coded so where every head of every managed layer holds the same tokens: dense caches, and
those that evict whole tokens. What a policy evicts by head is coded as `entropy` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from larder.cache.predictive import (
    BLOCK_TOKENS,
    EntropyCodedSide,
    Layer,
    PredictiveTables,
    by_head,
    decode,
    encode,
    fitting_step,
    side_by_side,
)
from larder.core.errors import Damaged
from larder.ops.quantization import check_range
from larder.store.codecs.base import CodedStack, LayerStack, RowLayout, StorageCodec, TensorRole
from larder.store.codecs.entropy import Entropy

SINKS = 4  # first positions, whose keys and values are unlike all others
EXACT_DTYPE = torch.bfloat16  # of theirs
SIDE_BYTES, BLOCK_BYTES = 600, 110  # of a side of a layer, and of a block, beside its bits
ROLES = (TensorRole.KEYS, TensorRole.VALUES)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # of decoded layers


class Predictive(StorageCodec):
    """Predicted from the decoded layer below, range coded, in an eighth of the bfloat16 bytes."""

    spans_layers: ClassVar[bool] = True
    share: ClassVar[float] = 1 / 8  # of the bytes in bfloat16

    def check_model(self, model: str) -> None:
        PredictiveTables.load(model)

    def encode(self, numbers: Float[Tensor, "T D"], rows: RowLayout) -> dict[str, Tensor]:
        return Entropy().encode(numbers, rows)

    def decode(self, coded: Mapping[str, Tensor], rows: RowLayout) -> Float[Tensor, "T D"]:
        return Entropy().decode(coded, rows)

    def encode_stack(self, stack: LayerStack) -> CodedStack:
        tables = PredictiveTables.find(stack.model)
        is_coded = stack.positions >= SINKS
        if tables is None or not _fits(tables, stack) or not bool(is_coded.any()):
            return CodedStack()
        for sides in stack.sides:
            for side in sides.values():
                check_range(side)
        rows, positions = is_coded.nonzero().flatten(), stack.positions[is_coded]

        def layer(index: int) -> Layer:
            keys, values = (stack.sides[index][role][:, rows] for role in ROLES)
            rotated = side_by_side(keys, positions, tables.radians[index])
            return rotated, side_by_side(values, positions)

        step = fitting_step(tables, layer, self._bits(stack, len(rows)))
        is_bfloat16 = stack.sides[0][TensorRole.KEYS].dtype is torch.bfloat16
        name = "bfloat16" if is_bfloat16 else "float32"
        sides = [
            {
                role: {
                    "words": own.payload,
                    "sizes": own.sizes,
                    "exact": stack.sides[layer_index][role][:, ~is_coded].to(EXACT_DTYPE),
                }
                for role, own in zip(ROLES, pair, strict=True)
            }
            for layer_index, pair in enumerate(encode(tables, layer, step, DTYPES[name]))
        ]
        note = {"model": stack.model, "tables": tables.digest, "step": step, "dtype": name}
        return CodedStack(tuple(sides), note)

    def decode_stack(
        self, coded: CodedStack, positions: Int[Tensor, " S"], heads: Sequence[int]
    ) -> Iterator[dict[TensorRole, Float[Tensor, "K S D"]]]:
        tables, step = PredictiveTables.find(str(coded.note["model"])), float(coded.note["step"])
        if tables is None or tables.digest != coded.note["tables"]:
            raise Damaged("The cache was coded with predictions that are no longer here.")
        if not len(tables.layers) == len(coded.sides) == len(heads) or not 0 < step < torch.inf:
            raise Damaged(f"{len(coded.sides)} layers, coded with the step {step}, do not fit.")
        is_coded, dtype = positions >= SINKS, DTYPES[str(coded.note.get("dtype", "float32"))]
        coded_positions = positions[is_coded]

        def codes(index: int) -> tuple[EntropyCodedSide, EntropyCodedSide]:
            keys, values = (coded.sides[index][role] for role in ROLES)
            return _coded_side(keys), _coded_side(values)

        layers = decode(tables, codes, len(coded_positions), step, dtype)
        for layer_index, (keys, values) in enumerate(layers):
            rotated = tables.radians[layer_index]
            numbers = (
                by_head(keys, heads[layer_index], coded_positions, rotated),
                by_head(values, heads[layer_index], coded_positions),
            )
            yield {
                role: with_exact(number, coded.sides[layer_index][role]["exact"], is_coded)
                for role, number in zip(ROLES, numbers, strict=True)
            }

    def _bits(self, stack: LayerStack, coded: int) -> float:
        """Bits of a coded number that the share leaves; half the share where it leaves less.

        Args:
            coded: tokens that are coded.
        """
        sides = [side for both in stack.sides for side in both.values()]
        numbers = sum(side.shape[0] * side.shape[2] for side in sides)
        each = EXACT_DTYPE.itemsize * numbers
        beside = len(sides) * (SIDE_BYTES + BLOCK_BYTES * -(-coded // BLOCK_TOKENS))
        exact = (len(stack.positions) - coded) * each
        left = self.share * len(stack.positions) * each - exact - beside
        return 8 * max(left / coded, self.share * each / 2) / numbers


class Predictive12(Predictive):
    """Predictive coding in a twelfth of the bfloat16 bytes."""

    share: ClassVar[float] = 1 / 12


class Predictive16(Predictive):
    """Predictive coding in a sixteenth of the bfloat16 bytes."""

    share: ClassVar[float] = 1 / 16


def _fits(tables: PredictiveTables, stack: LayerStack) -> bool:
    widths = [
        tuple(side.shape[0] * side.shape[2] for side in sides.values()) for sides in stack.sides
    ]
    wanted = [tuple(len(side.bias) for side in pair) for pair in tables.layers]
    return widths == wanted


def _coded_side(tensors: Mapping[str, Tensor]) -> EntropyCodedSide:
    return EntropyCodedSide(tensors["words"], tensors["sizes"])


def with_exact(
    numbers: Float[Tensor, "K N D"], exact: Float[Tensor, "K M D"], is_coded: Tensor
) -> Float[Tensor, "K S D"]:
    """Coded and exact tokens in order."""
    whole = numbers.new_empty(len(numbers), len(is_coded), numbers.shape[2])
    whole[:, is_coded], whole[:, ~is_coded] = numbers, exact.to(numbers.dtype)
    return whole


Part = Predictive
