"""Rounding to codes: equal to the loop, within half a step, refused beyond float16."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from larder.core import BITS, BadParameter, CacheError, Codec, ScaleGranularity
from larder.ops import (
    FLOAT16_MAX,
    QuantizedRows,
    concat_rows,
    dequantize,
    pack_codes,
    quantize,
    quantize_rows,
    scales_and_offsets,
    unpack_codes,
)
from references.ops import quantization as loop

NONE = torch.empty(0, 0)
bits = st.sampled_from(BITS)
sizes = (60000, 2.0**-10, 4)
some_numbers = st.lists(
    st.sampled_from(sizes).flatmap(lambda most: st.floats(-most, most, width=32)),
    min_size=1,
    max_size=9,
)


@given(some_numbers, bits)
def test_group_error_is_at_most_half_a_step(numbers, bits) -> None:
    row = torch.tensor(numbers)
    if bits == 1 and row.max() - loop.half_below(min(numbers)) > FLOAT16_MAX:
        with pytest.raises(CacheError, match="cannot be quantized to one bit"):
            scales_and_offsets(row.min(), row.max(), bits)
        return
    offset, scale = scales_and_offsets(row.min(), row.max(), bits)
    codes = quantize(row, offset.expand(len(row)), scale.expand(len(row)), bits)
    back = dequantize(codes, offset.expand(len(row)), scale.expand(len(row)))
    assert offset.isfinite() and scale.isfinite() and back.isfinite().all()
    allowed = float(scale) / 2 if scale else loop.spacing(numbers[0]) / 2
    assert float((back - row).abs().max()) <= allowed * (1 + 1e-4) + 1e-6 * float(row.abs().max())
    expected = loop.quantized([float(x) for x in row], bits)
    assert float(offset) == expected.offset
    assert abs(float(scale) - expected.scale) <= loop.spacing(expected.scale)
    assert (scale == 0) == (min(numbers) == max(numbers))


@given(st.integers(0, 99), bits, st.integers(1, 19), st.integers(0, 5))
def test_packed_codes_round_trip(seed, bits, width, rows) -> None:
    codes = torch.randint(2**bits, (rows, width), generator=torch.Generator().manual_seed(seed))
    codes = codes.to(torch.uint8)
    stored = pack_codes(codes, bits)
    fields = [own for own in (8, 4, 2, 1) if bits & own]  # each fills whole bytes
    assert stored.shape == (rows, sum(-(-width * own // 8) for own in fields))
    assert torch.equal(unpack_codes(stored, bits, width), codes)


def drawn(seed: int, rows: int, channels: int = 10) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-2, 1, channels)[torch.randperm(channels, generator=source)]
    return torch.randn(rows, channels, generator=source) * sizes + sizes


BY_ENTRY = ScaleGranularity.ENTRY
CODECS = {
    "plain": Codec(4, 2, 4),
    "fine": Codec(8, 8, 3),
    "far": Codec(2, 4, 5, outliers=0.15),
    "thin": Codec(4, 4, 4, channels=0.45),
    "thin_and_far": Codec(2, 2, 4, outliers=0.1, channels=0.7),
    "thin_only": Codec(0, 4, 4, channels=0.3),
    "odd": Codec(3, 7, 4),
    "odd_by_entry": Codec(5, 1, 4, outliers=0.1, key_scales=BY_ENTRY),
    "leveled": Codec(2, 2, 4, balance=0.5),
    "leveled_and_far": Codec(4, 4, 3, outliers=0.1, balance=1.0),
}


def by_loop(rows: Tensor, codec: Codec, side: str, weights: Tensor) -> Tensor:
    """One group of keys or values."""
    values = side == "values"
    case = {
        "bits": codec.value_bits if values else codec.key_bits,
        "piece": codec.group,
        "by_channel": not (values or codec.balance or codec.key_scales is BY_ENTRY),
        "outliers": codec.outliers,
    }
    if not values:
        kept = max(round(codec.channels * rows.shape[1]), 1)
        case |= {"kept": kept, "balance": codec.balance, "weights": weights.tolist() or None}
    return torch.tensor(loop.rounded(rows.tolist(), **case))


def grouped(counts: list[int]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))


def coded(
    codec: Codec, side: str, rows: Tensor, counts: list[int], weights: Tensor
) -> QuantizedRows:
    scheme = codec.keys(rows.shape[1]) if side == "keys" else codec.values(rows.shape[1])
    return quantize_rows(rows, torch.tensor(counts), scheme, weights, torch.float32)


@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("weighed", ["by_weights", "by_itself"])
@pytest.mark.parametrize("name", CODECS)
def test_groups_equal_the_reference(name, weighed, side) -> None:
    codec, counts = CODECS[name], [4, 2, 3, 1]
    rows = drawn(3, sum(counts))
    weights = NONE
    if weighed == "by_weights" and side == "keys":
        weights = torch.rand(len(counts), rows.shape[1]) + 0.05
    held = coded(codec, side, rows, counts, weights)
    got = held.decoded(torch.arange(len(rows)), grouped(counts))
    parts = zip(rows.split(counts), weights if len(weights) else [NONE] * 4, strict=True)
    expected = torch.cat([by_loop(part, codec, side, own) for part, own in parts])
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)


@settings(max_examples=25)
@given(st.sampled_from(sorted(CODECS)), st.sampled_from(["keys", "values"]), st.data())
def test_removed_rows_do_not_affect_others(name, side, data) -> None:
    counts = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    rows = drawn(sum(counts), sum(counts))
    held = concat_rows([coded(CODECS[name], side, rows, counts, NONE)] * 2)
    counts = counts * 2
    own = grouped(counts)
    whole = held.decoded(torch.arange(len(own)), own)
    kept = sorted(data.draw(st.sets(st.integers(0, len(own) - 1))))
    kept = torch.tensor(kept, dtype=torch.int64)
    groups, renamed = own[kept].unique(return_inverse=True)
    left = held.select(kept, groups)
    assert torch.equal(left.decoded(torch.arange(len(kept)), renamed), whole[kept])
    turned = torch.randperm(len(own))
    assert torch.equal(held.decoded(turned, own[turned]), whole[turned])


def test_numbers_beyond_float16_are_refused() -> None:
    rows = torch.ones(3, 4)
    for bad in (2 * FLOAT16_MAX, torch.inf, torch.nan):
        rows[1, 2] = bad
        for side in ("keys", "values"):
            with pytest.raises(CacheError, match="keep such entries at full precision"):
                coded(Codec(), side, rows, [3], NONE)
    rows[1, 2] = -FLOAT16_MAX
    coded(Codec(), "keys", rows, [3], NONE)
    rows[1, 2] = 2 * FLOAT16_MAX
    assert coded(Codec(0, 0), "keys", rows, [3], NONE).stored.max() == 2 * FLOAT16_MAX


def test_one_bit_does_not_span_more_than_float16() -> None:
    rows = torch.tensor([[48833.0], [-16657.0]])  # from -16672, the next float16 below: 65505
    with pytest.raises(CacheError, match=r"span 65505 .* one bit.*take two bits"):
        coded(Codec(1, 1), "keys", rows, [2], NONE)
    coded(Codec(2, 2), "keys", rows, [2], NONE)


def test_outliers_reduce_the_range() -> None:
    rows = torch.rand(8, 10) - 0.5
    rows[3, 4], rows[6, 1] = 50.0, -70.0
    errors = []
    for share in (0.0, 2 / 80):
        held = coded(Codec(2, 2, 8, outliers=share), "keys", rows, [8], NONE)
        errors.append(
            (held.decoded(torch.arange(8), torch.zeros(8, dtype=torch.int64)) - rows).abs()
        )
    assert len(held.outliers) == 2 and sorted(held.outliers.tolist()) == [-70.0, 50.0]
    assert float(errors[1].max()) < 0.2 < 0.4 < float(errors[0].max())


@pytest.mark.parametrize(
    "wrong", [{"balance": -1.0}, {"balance": 0.5, "channels": 0.5}, {"balance": float("inf")}]
)
def test_bad_codecs_are_refused(wrong) -> None:
    with pytest.raises(BadParameter, match=r"codec\.(balance|channels) must be"):
        Codec(**wrong)
