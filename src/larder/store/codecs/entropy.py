"""Differences between neighboring tokens, in steps that grow with depth, entropy coded.

Yuhan Liu et al., "CacheGen: KV Cache Compression and Streaming for Fast Large Language Model
Serving" (2024), arXiv:2310.07240, section 5.2: tokens of a text have keys and values like their
neighbors', early layers matter more than late ones, and the steps that remain are far from equally
frequent. As there, ten tokens form a group; the first is the anchor, in 8 bits, and the others are
coded as the difference from it, in steps of 0.5, 1 or 1.5 units in the first, second and last
third of the layers.

What differs: a unit is the standard deviation of the differences of a channel of a head, times
the codec's `step_scale`, since steps of whole deviations lose too much on small models;
differences are taken from the anchor as it will be decoded, so that no error adds up; and the
entropy coder is zstd's instead of an arithmetic coder per channel and layer: a range coder makes
such steps some 3% smaller and opens them many times as slowly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Float, Int, Int16
from torch import Tensor

from larder.core.errors import Damaged
from larder.ops.quantization import check_range, dequantize, quantize, scales_and_offsets
from larder.store.blobs.container import compress, decompress, raw_bytes
from larder.store.codecs.base import RowLayout, StorageCodec

GROUP = 10  # tokens; the first one is the anchor
STEPS = (0.5, 1.0, 1.5)  # of the thirds of the layers, in units
STEP_SCALE = 0.5
ANCHOR_BITS = 8
MAX_STEPS = 2**15 - 1  # steps that a difference can be


class Entropy(StorageCodec):
    """Delta coding with layer-dependent steps (CacheGen), compressed by zstd."""

    step_scale: ClassVar[float] = STEP_SCALE

    def encode(self, numbers: Float[Tensor, "T D"], rows: RowLayout) -> dict[str, Tensor]:
        check_range(numbers)
        shared: dict[str, list[Tensor]] = {name: [] for name in ("lows", "scales", "steps")}
        anchors, differences = [], []
        for head in rows.heads():
            own = numbers[head].float()
            first, others = _split(len(own))
            lows, scales = _range(own[first])
            codes = quantize(own[first], *_spread(lows, scales, first), ANCHOR_BITS)
            decoded = dequantize(codes, *_spread(lows, scales, first))
            left = own[others] - decoded[others // GROUP]
            steps = _steps(left, rows, self.step_scale)
            counts = (left / steps.float()).round().clamp(-MAX_STEPS, MAX_STEPS)
            anchors.append(codes)
            differences.append(counts.to(torch.int16))
            for name, tensor in (("lows", lows), ("scales", scales), ("steps", steps)):
                shared[name].append(tensor)
        return {name: torch.stack(parts) for name, parts in shared.items()} | {
            "anchors": _tensor(compress(raw_bytes(torch.cat(anchors)))),
            "differences": _tensor(compress(_planes(torch.cat(differences)))),
        }

    def decode(self, coded: Mapping[str, Tensor], rows: RowLayout) -> Float[Tensor, "T D"]:
        counts = [-(-length // GROUP) for length in rows.lengths]
        wide = rows.head_dim
        anchors = _decompress(coded["anchors"], sum(counts) * wide).reshape(-1, wide)
        rest = sum(rows.lengths) - sum(counts)
        differences = _join_planes(_decompress(coded["differences"], 2 * rest * wide)).reshape(
            -1, wide
        )
        numbers = torch.empty(sum(rows.lengths), wide)
        parts = zip(
            rows.heads(),
            anchors.split(counts),
            differences.split([n - c for n, c in zip(rows.lengths, counts, strict=True)]),
            *(coded[name] for name in ("lows", "scales", "steps")),
            strict=True,
        )
        for head, codes, own, lows, scales, steps in parts:
            first, others = _split(head.stop - head.start)
            decoded = dequantize(codes, *_spread(lows, scales, first))
            numbers[head][first] = decoded
            numbers[head][others] = decoded[others // GROUP] + own.float() * steps.float()
        return numbers


class CoarseEntropy(Entropy):
    """Coarser level, in steps twice as wide (section 5.3)."""

    step_scale: ClassVar[float] = 2 * STEP_SCALE


class FineEntropy(Entropy):
    """Finer level, in steps a quarter as wide (section 5.3)."""

    step_scale: ClassVar[float] = STEP_SCALE / 4


class CacheGen(Entropy):
    """Chunks at three levels of entropy coding, finest first, of which a restore loads one.

    Section 5.3: a lossless cache of a text is stored as chunks, and every chunk at each of
    `levels`. Which one is loaded, or whether the rest of the text is read again, is up to
    `larder.store.stream_controller`. Other caches (compressed by a policy, several of a session, of
    models with sliding windows or latents) are stored as `entropy` does.
    """

    levels: ClassVar[tuple[str, ...]] = ("entropy_fine", "entropy", "entropy_coarse")
    unstreamed: ClassVar[str] = "entropy"


def _split(length: int) -> tuple[Tensor, Tensor]:
    """Indices of anchor rows and of rows coded as differences."""
    rows = torch.arange(length)
    return rows[rows % GROUP == 0], rows[rows % GROUP != 0]


def _range(anchors: Float[Tensor, "N D"]) -> tuple[Tensor, Tensor]:
    """Offset and scale of each channel of a head."""
    if not len(anchors):
        nothing = torch.zeros(anchors.shape[1], dtype=torch.float16)
        return nothing, nothing
    return scales_and_offsets(anchors.amin(0), anchors.amax(0), ANCHOR_BITS)


def _spread(lows: Tensor, scales: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    return lows.expand(len(rows), -1), scales.expand(len(rows), -1)


def _steps(left: Float[Tensor, "N D"], rows: RowLayout, scale: float) -> Tensor:
    """Step size of each channel, large enough for the largest difference."""
    size = STEPS[min(int(rows.depth * len(STEPS)), len(STEPS) - 1)] * scale
    if not len(left):
        return torch.ones(left.shape[1], dtype=torch.float16)
    usual = left.square().mean(0).sqrt() * size
    least = left.abs().amax(0) / (MAX_STEPS - 1)
    tiniest = torch.finfo(torch.float16).tiny
    return torch.maximum(usual, least).clamp_min(tiniest).to(torch.float16)


def _planes(counts: Int16[Tensor, "N D"]) -> bytes:
    """Byte planes: the low bytes of all numbers, then the high bytes, which are nearly constant.

    A sign goes into the lowest bit, so that small numbers of either sign have a high byte of 0.
    """
    wide = counts.int().flatten()
    folded = torch.where(wide < 0, -2 * wide - 1, 2 * wide)
    return bytes(raw_bytes(torch.stack([folded & 255, folded >> 8]).to(torch.uint8)))


def _join_planes(planes: Tensor) -> Int[Tensor, " N"]:
    low, high = planes.int().reshape(2, -1)
    folded = low + 256 * high
    return torch.where(folded % 2 == 1, -(folded + 1) // 2, folded // 2)


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _decompress(part: Tensor, size: int) -> Tensor:
    if part.dtype is not torch.uint8:
        raise Damaged("A compressed part is not made of bytes.")
    data = bytearray(decompress(raw_bytes(part), size))
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


Part = Entropy
