"""Principal components of keys and values over all layers of a model, and coding by them (KVTC).

    keys before rotation of all layers side by side  -  mean  ->  x basis  ->  components
    components  ->  codes of each group  ->  zlib

One file of tensors per model, under `$LARDER_HOME/<fingerprint>/`, that `larder train kvtc` writes.
Its bytes are counted apart from the caches that it codes. A group of a token has a shift and a
scale in float16. Groups follow each other, each with the shifts, the scales and then the codes of
all tokens.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from larder.cache.table_file import TrainedTables
from larder.ops.bit_allocation import quantized_group
from larder.ops.quantization import dequantize, pack_codes, unpack_codes

SIDES = ("keys", "values")
STORED_DTYPE = torch.bfloat16  # of bases
LEVEL = 9  # of DEFLATE
SCALE_BYTES = 2

Numbers = Float[Tensor, "N W"]
GroupPlan = Int[Tensor, "G 2"]


@dataclass(frozen=True, eq=False)
class PrincipalSide:
    """Principal components of the keys or values of all layers.

    Args:
        basis: columns are directions, largest deviation first.
        plans: size and bits of each group of components, in order, by the share of the bytes.
    """

    mean: Float[Tensor, " W"]
    basis: Float[Tensor, "W R"]
    plans: Mapping[str, Int[Tensor, "G 2"]]


@dataclass(frozen=True, eq=False)
class KvtcTables(TrainedTables):
    """Components of a model's keys and values.

    Args:
        radians: RoPE frequencies of each layer.
    """

    sides: tuple[PrincipalSide, PrincipalSide]
    radians: tuple[Float[Tensor, " half"], ...]
    method: ClassVar[str] = "kvtc"
    content: ClassVar[str] = "principal components"

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of the file, by name."""
        found = {
            f"radians.{index}": radians.float().clone()
            for index, radians in enumerate(self.radians)
        }
        for name, side in zip(SIDES, self.sides, strict=True):
            found |= {f"{name}.mean": side.mean, f"{name}.basis": side.basis.to(STORED_DTYPE)}
            found |= {f"{name}.plan.{share}": plan.int() for share, plan in side.plans.items()}
        return {name: tensor.contiguous() for name, tensor in sorted(found.items())}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> KvtcTables:
        count = sum(name.startswith("radians.") for name in tensors)
        keys, values = (_side(tensors, name) for name in SIDES)
        return cls((keys, values), tuple(tensors[f"radians.{n}"] for n in range(count)))


def _side(tensors: Mapping[str, Tensor], name: str) -> PrincipalSide:
    prefix = f"{name}.plan."
    plans = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if prefix in key}
    return PrincipalSide(tensors[f"{name}.mean"], tensors[f"{name}.basis"].float(), plans)


def encode(side: PrincipalSide, plan: GroupPlan, numbers: Numbers) -> UInt8[Tensor, " B"]:
    """Packed codes of the keys or values of all layers, a token a row."""
    return pack_components((numbers - side.mean) @ side.basis, plan)


def decode(side: PrincipalSide, plan: GroupPlan, packed: Tensor, count: int) -> Numbers:
    """Keys or values of `count` tokens.

    Raises:
        ValueError: the codes are damaged, or those of another number of tokens.
    """
    return unpack_components(packed, plan, count, side.basis.shape[1]) @ side.basis.T + side.mean


def pack_components(components: Numbers, plan: GroupPlan) -> UInt8[Tensor, " B"]:
    """Packed codes of components."""
    parts = list[bytes]()
    for group, _, bits in _groups(plan):
        codes, shifts, scales = quantized_group(components[:, group], bits)
        numbers = (shifts.half(), scales.half(), pack_codes(codes, bits))
        parts += [part.contiguous().numpy().tobytes() for part in numbers]
    packed = np.frombuffer(zlib.compress(b"".join(parts), LEVEL), np.uint8)
    return torch.from_numpy(packed.copy())


def unpack_components(packed: Tensor, plan: GroupPlan, count: int, width: int) -> Numbers:
    """Components of packed codes; 0 where a group has no bits.

    Raises:
        ValueError: as `decode`.
    """
    token_bytes = sum(2 * SCALE_BYTES + _row_bytes(size, bits) for _, size, bits in _groups(plan))
    data = _inflated(packed.numpy().tobytes(), count * token_bytes)
    found, start = torch.zeros(count, width), 0
    for group, size, bits in _groups(plan):
        row_bytes = _row_bytes(size, bits)
        stop = start + count * (2 * SCALE_BYTES + row_bytes)
        held = np.frombuffer(data[start:stop], np.uint8).copy()
        sizes = [SCALE_BYTES * count, SCALE_BYTES * count, row_bytes * count]
        shifts, scales, codes = torch.from_numpy(held).split(sizes)
        numbers = unpack_codes(codes.view(count, row_bytes), bits, size)
        half = (part.view(torch.float16)[:, None] for part in (shifts, scales))
        found[:, group], start = dequantize(numbers, *half), stop
    return found


def _inflated(packed: bytes, expected: int) -> bytes:
    """The `expected` bytes that were packed; at most one byte more is unpacked.

    Raises:
        ValueError: the codes are damaged, or another number of bytes.
    """
    inflater = zlib.decompressobj()
    try:
        data = inflater.decompress(packed, expected + 1)
    except zlib.error as error:
        raise ValueError(f"Codes cannot be unpacked: {error}") from None
    if len(data) != expected or not inflater.eof:
        raise ValueError(f"Codes of {expected} bytes are expected, and others were packed")
    return data


def _row_bytes(size: int, bits: int) -> int:
    """Bytes of the codes of a group in a token."""
    return -(-size // (8 // bits))


def _groups(plan: GroupPlan) -> Iterator[tuple[slice, int, int]]:
    """Components, size and bits of each group that has bits."""
    start = 0
    for size, bits in plan.tolist():
        if bits:
            yield slice(start, start + size), size, bits
        start += size
