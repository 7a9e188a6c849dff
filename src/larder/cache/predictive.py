"""Prediction of each layer's keys and values from the decoded layer below, and coding by it.

    keys of layer n      from  keys and values of layer n - 1
    values of layer n    from  keys of layer n, keys and values of layer n - 1
    residual             x forward  ->  components, of all kv heads together  ->  symbols

Keys are taken before rotation. One file of tensors per model, under `$LARDER_HOME/<fingerprint>/`,
that `larder train predictive` writes. Its bytes are counted apart from the caches that it codes.

The decoder predicts what the encoder has predicted, and no error adds up over layers. All
components of all layers have one step; components whose deviation lies below it take next to no
bits. Symbols are range coded in blocks of tokens; see `larder.ops.cpu.range_coder`.

Decoded layers are float32, or bfloat16 for a bfloat16 cache, whose products take half the time:
the encoder predicts from the same rounded layers, so rounding does not add up either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int32, Int64, UInt8
from torch import Tensor

from larder.cache.table_file import TrainedTables
from larder.ops import transform_coder as coding
from larder.ops.cpu import range_coder
from larder.ops.rope import rotate
from larder.ops.symbol_model import classes_of

SIDES = ("keys", "values")
PARTS = ("weights", "bias", "forward", "deviation")
STORED_DTYPE = torch.bfloat16  # of weights and transforms
BLOCK_TOKENS = 1024  # tokens of one side of a layer that are coded together
SAMPLE_TOKENS, SAMPLE_STRETCHES = 1024, 4  # of a long text, that a step is found with
TRIES = 20
TOLERANCE = 0.004  # octaves of the bytes that may be left
FIRST_SLOPE, FLATTEST = 0.5, 0.05  # octaves of bytes lost with one of the step
FIRST_STEP, FINEST, COARSEST = 1.0, 2.0**-16, 2.0**16

Numbers = Float[Tensor, "N W"]
Inputs = Sequence[Float[Tensor, "N _"]]  # decoded, that a prediction is made from
Layer = tuple[Numbers, Numbers]  # keys before rotation, and values; kv heads side by side


@dataclass(frozen=True, eq=False)
class LinearPrediction:
    """Linear prediction of the keys or values of one layer, all kv heads side by side.

    Args:
        weights, bias: as in `SidePrediction`.
    """

    weights: Float[Tensor, "I W"]
    bias: Float[Tensor, " W"]

    def predicted(self, inputs: Inputs, count: int) -> Numbers:
        """Prediction of `count` tokens from decoded inputs."""
        found = self.bias.expand(count, -1)
        first = 0
        for part in inputs:
            found = torch.addmm(found, part, self.weights[first : first + part.shape[1]])
            first += part.shape[1]
        return found


@dataclass(frozen=True, eq=False)
class SidePrediction:
    """Prediction of the keys or values of one layer, all kv heads side by side.

    Args:
        weights: of the inputs, which are laid side by side; no rows where nothing is below.
        forward: columns are the directions of the residual's components.
        deviation: of each component on the training text.
    """

    weights: Float[Tensor, "I W"]
    bias: Float[Tensor, " W"]
    forward: Float[Tensor, "W W"]
    deviation: Float[Tensor, " W"]

    @cached_property
    def inverse(self) -> Float[Tensor, "W W"]:
        """Matrix that turns components back."""
        return torch.linalg.inv(self.forward.double()).float().contiguous()

    def predicted(self, inputs: Inputs, count: int) -> Numbers:
        """Prediction of `count` tokens from decoded inputs."""
        return LinearPrediction(self.weights, self.bias).predicted(inputs, count)

    def components(self, numbers: Numbers, predicted: Numbers) -> Numbers:
        """Components of what the prediction leaves."""
        return (numbers - predicted) @ self.forward

    def restored(self, inputs: Inputs, components: Numbers, dtype: torch.dtype) -> Numbers:
        """Numbers of dequantized components: prediction and residual in one product.

        Args:
            dtype: of the product and of what is returned.
        """
        weights, bias = self._joined(dtype)
        return torch.addmm(bias, torch.cat([*inputs, components.to(dtype)], 1), weights)

    def _joined(self, dtype: torch.dtype) -> tuple[Float[Tensor, "J W"], Float[Tensor, " W"]]:
        """Weights of the inputs and, below them, of the components; and the bias."""
        return self._joined_bfloat16 if dtype is torch.bfloat16 else self._joined_float32

    @cached_property
    def _joined_float32(self) -> tuple[Float[Tensor, "J W"], Float[Tensor, " W"]]:
        return torch.cat([self.weights, self.inverse]), self.bias

    @cached_property
    def _joined_bfloat16(self) -> tuple[Float[Tensor, "J W"], Float[Tensor, " W"]]:
        weights, bias = self._joined_float32
        return weights.bfloat16(), bias.bfloat16()


@dataclass(frozen=True, eq=False)
class PredictiveTables(TrainedTables):
    """Predictions of all managed layers of a model, in order.

    Args:
        layers: of keys and values.
        radians: RoPE frequencies of each layer.
    """

    layers: tuple[tuple[SidePrediction, SidePrediction], ...]
    radians: tuple[Float[Tensor, " half"], ...]
    method: ClassVar[str] = "predictive"
    content: ClassVar[str] = "predictions"

    @property
    def nbytes(self) -> int:
        """Bytes of the file's tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of the file, by name."""
        found = dict[str, Tensor]()
        for index, (pair, radians) in enumerate(zip(self.layers, self.radians, strict=True)):
            found[f"{index}.radians"] = radians.float().clone()  # may be shared by layers
            for side, tables in zip(SIDES, pair, strict=True):
                for part in PARTS:
                    number = getattr(tables, part)
                    number = number if part == "deviation" else number.to(STORED_DTYPE)
                    found[f"{index}.{side}.{part}"] = number.contiguous()
        return found

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> PredictiveTables:
        count = sum(name.endswith(".radians") for name in tensors)
        pairs = [
            [
                SidePrediction(*(tensors[f"{index}.{side}.{part}"].float() for part in PARTS))
                for side in SIDES
            ]
            for index in range(count)
        ]
        radians = tuple(tensors[f"{index}.radians"] for index in range(count))
        return cls(tuple((keys, values) for keys, values in pairs), radians)


@dataclass(frozen=True)
class EntropyCodedSide:
    """Keys or values of one layer.

    Args:
        payload: words of all blocks.
        sizes: bytes of each block.
    """

    payload: UInt8[Tensor, " B"]
    sizes: Int32[Tensor, " M"]


def encode(
    tables: PredictiveTables,
    layer: Callable[[int], Layer],
    step: float,
    dtype: torch.dtype = torch.float32,
) -> Iterator[tuple[EntropyCodedSide, EntropyCodedSide]]:
    """Codes of each layer in order.

    Args:
        layer: numbers of a layer, by its index.
        dtype: of decoded layers, float32 or bfloat16.

    Raises:
        CacheError: a number is not finite, or too large for the step.
    """
    below: tuple[Numbers, ...] = ()
    for index, pair in enumerate(tables.layers):
        coded, decoded = list[EntropyCodedSide](), list[Numbers]()
        for side, numbers in zip(pair, layer(index), strict=True):
            symbols, own = _symbols(side, numbers, (*decoded, *below), step, dtype)
            coded.append(_packed(symbols, side, step))
            decoded.append(own)
        below = decoded[0], decoded[1]
        yield coded[0], coded[1]


def decode(
    tables: PredictiveTables,
    coded: Callable[[int], tuple[EntropyCodedSide, EntropyCodedSide]],
    count: int,
    step: float,
    dtype: torch.dtype = torch.float32,
) -> Iterator[Layer]:
    """Numbers of `count` tokens of each layer in order.

    Args:
        dtype: that they were encoded with.

    Raises:
        ValueError: blocks and tokens do not match.
    """
    below: tuple[Numbers, ...] = ()
    for index, pair in enumerate(tables.layers):
        decoded = list[Numbers]()
        for side, coded_side in zip(pair, coded(index), strict=True):
            components = _unpacked(coded_side, side, count, step)
            decoded.append(side.restored((*decoded, *below), components, dtype))
        below = decoded[0], decoded[1]
        yield below


def fitting_step(tables: PredictiveTables, layer: Callable[[int], Layer], bits: float) -> float:
    """Smallest step with which a number takes no more bits, found on a sample of a long text.

    Bytes fall as the step grows, so the secant method within the bounds of a bisection finds it.
    """
    rows = _sample(len(layer(0)[0]))
    some = [tuple(side[rows] for side in layer(index)) for index in range(len(tables.layers))]
    low, high = math.log2(FINEST), math.log2(COARSEST)
    tried, slope, last = math.log2(FIRST_STEP), -FIRST_SLOPE, (math.nan, math.nan)
    for turn in range(TRIES):
        found = math.log2(_bits(tables, some, 2.0**tried) / bits)
        low, high = (tried, high) if found > 0 else (low, tried)
        if -TOLERANCE <= found <= 0:
            break
        if math.isfinite(last[0]) and tried != last[0]:
            slope = min((found - last[1]) / (tried - last[0]), -FLATTEST)
        last = tried, found
        guess = tried - (found + TOLERANCE / 2) / slope if turn < TRIES // 2 else math.inf
        tried = guess if low < guess < high else (low + high) / 2
    return 2.0**high


def _bits(tables: PredictiveTables, layers: Sequence[Sequence[Numbers]], step: float) -> float:
    """Bits of a number."""
    below: tuple[Numbers, ...] = ()
    total, numbers = 0.0, 0
    for pair, layer in zip(tables.layers, layers, strict=True):
        decoded = list[Numbers]()
        for side, part in zip(pair, layer, strict=True):
            symbols, known = _symbols(side, part, (*decoded, *below), step, torch.float32)
            bases = classes_of(side.deviation.numpy(), step)
            tiers = np.zeros(len(part), np.int8)
            total += range_coder.count_bits(symbols.float().numpy() * step, tiers, bases, step)
            decoded.append(known)
            numbers += part.numel()
        below = decoded[0], decoded[1]
    return total / max(numbers, 1)


def _symbols(
    side: SidePrediction, numbers: Numbers, inputs: Inputs, step: float, dtype: torch.dtype
) -> tuple[Int32[Tensor, "N W"], Numbers]:
    """Symbols of the components, and the numbers as they will be decoded."""
    predicted = side.predicted([part.float() for part in inputs], len(numbers))
    components = side.components(numbers, predicted)
    tiers = np.zeros(len(numbers), np.int8)
    symbols = torch.from_numpy(coding.quantized(components.numpy(), tiers, step))
    return symbols, side.restored(inputs, symbols.float() * step, dtype)


def _packed(symbols: Int32[Tensor, "N W"], side: SidePrediction, step: float) -> EntropyCodedSide:
    bases = classes_of(side.deviation.numpy(), step)
    blocks = [
        range_coder.encode(block.numpy(), np.zeros(len(block), np.int8), bases)
        for block in symbols.split(BLOCK_TOKENS)
        if len(block)
    ]
    payload = np.concatenate([np.zeros(0, np.uint8), *blocks])
    sizes = torch.tensor([len(block) for block in blocks], dtype=torch.int32)
    return EntropyCodedSide(torch.from_numpy(payload), sizes)


def _unpacked(coded: EntropyCodedSide, side: SidePrediction, count: int, step: float) -> Numbers:
    """Dequantized components."""
    bases = classes_of(side.deviation.numpy(), step)
    lengths = [min(BLOCK_TOKENS, count - first) for first in range(0, count, BLOCK_TOKENS)]
    if len(lengths) != len(coded.sizes) or int(coded.sizes.sum()) != len(coded.payload):
        raise ValueError(f"{len(coded.sizes)} blocks of codes cannot hold {count} tokens")
    parts = [
        torch.from_numpy(range_coder.decode(words.numpy(), length, bases, step)[0])
        for words, length in zip(coded.payload.split(coded.sizes.tolist()), lengths, strict=True)
    ]
    return torch.cat([torch.zeros(0, len(bases)), *parts])


def _sample(count: int) -> Int64[Tensor, " N"]:
    """Indices of all tokens, or of some stretches of a long text."""
    if count <= SAMPLE_TOKENS:
        return torch.arange(count)
    size = SAMPLE_TOKENS // SAMPLE_STRETCHES
    firsts = torch.linspace(0, count - size, SAMPLE_STRETCHES).long()
    return (firsts[:, None] + torch.arange(size)).flatten()


def side_by_side(
    numbers: Float[Tensor, "K N D"], positions: Tensor, radians: Tensor | None = None
) -> Numbers:
    """Kv heads side by side, in float32; rotated back where there are frequencies."""
    plain = numbers.float()
    if radians is not None:
        plain = rotate(plain, -positions, radians)
    return plain.transpose(0, 1).flatten(1)


def by_head(
    numbers: Numbers, heads: int, positions: Tensor, radians: Tensor | None = None
) -> Float[Tensor, "K N D"]:
    """Numbers of each kv head; rotated where there are frequencies."""
    heads_first = numbers.unflatten(1, (heads, -1)).transpose(0, 1)
    return heads_first if radians is None else rotate(heads_first, positions, radians)
