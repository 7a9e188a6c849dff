"""Coder of keys and values by levels: what is held, in how many bytes, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from larder.core import CacheError
from larder.ops import LevelCoder, bytes_per_entry
from references import kvquant as reference

LEVELS = np.array([[-0.9, -0.3, 0.2, 0.8], [-1.0, -0.4, 0.3, 0.7]])


def numbers(entries: int, width: int, seed: int = 0) -> np.ndarray:
    source = np.random.default_rng(seed)
    return source.standard_t(4, (entries, 2 * width)).astype(np.float32)


@pytest.mark.parametrize("share", [0.0, 0.05, 0.2])
def test_decoded_block_equals_its_reference(share: float) -> None:
    given = numbers(7, 10)
    coder = LevelCoder(LEVELS, 2, share)
    held = coder.decoded(coder.encoded(given), 7, 20)
    keys, values = given[:, :10].tolist(), given[:, 10:].tolist()
    np.testing.assert_allclose(
        held[:, :10], reference.held_keys(keys, LEVELS[0].tolist(), share), atol=1e-6
    )
    expected = [reference.held_value(value, LEVELS[1].tolist(), share) for value in values]
    np.testing.assert_allclose(held[:, 10:], expected, atol=2e-6)


def test_coded_block_hand_values() -> None:
    # Two entries of four channels; at most one in four numbers of keys and of a value apart.
    keys = [[0.1, -5.0, 0.6, 3.0], [-0.25, 0.0, 1.5, -0.7]]
    values = [[0.0, 2.0, 1.0, 9.0], [4.0, 4.0, 4.0, 4.0]]
    coder = LevelCoder(LEVELS, 2, 0.25)
    payload = coder.encoded(np.concatenate([keys, values], 1))
    held = coder.decoded(payload, 2, 8)
    assert held[0].tolist() == pytest.approx([0.2, -5.0, 0.8, 3.0, 0.0, 1.7, 1.3, 9.0])
    assert held[1].tolist() == pytest.approx([-0.3, 0.2, 0.8, -0.9, 4.0, 4.0, 4.0, 4.0])
    # A count, two ranges, two bytes of codes an entry, two key outliers, one channel each.
    assert len(payload) == 4 + 2 * 4 + 2 * 2 + 2 * 4 + 2 * 3


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_bytes_are_within_the_estimate(bits: int) -> None:
    levels = np.stack([np.linspace(-1, 1, 1 << bits)] * 2)
    coder, given = LevelCoder(levels, bits, 0.01), numbers(100, 64)
    payload = coder.encoded(given)
    assert len(payload) == pytest.approx(4 + 100 * bytes_per_entry(bits, 0.01, 64))
    few = coder.encoded(np.clip(given, -1, 1))
    assert len(few) == 4 + 100 * (2 * 8 * bits + 4 + 3)


def test_reencoded_keys_are_unchanged() -> None:
    coder, given = LevelCoder(LEVELS, 2, 0.1), numbers(9, 16)
    held = coder.decoded(coder.encoded(given), 9, 32)
    again = coder.decoded(coder.encoded(held), 9, 32)
    assert np.array_equal(again[:, :16], held[:, :16])


@pytest.mark.parametrize("share", [0.0, 0.1])
@pytest.mark.parametrize("bits", [2, 4])
def test_values_reencoded_with_their_ranges_are_unchanged(bits: int, share: float) -> None:
    levels = np.stack([np.linspace(-0.7, 0.8, 1 << bits)] * 2)  # no level reaches the extremes
    coder, given = LevelCoder(levels, bits, share), numbers(9, 16)
    payload = coder.encoded(given)
    held, ranges = coder.decoded(payload, 9, 32), coder.ranges_of(payload, 9, 32)
    assert np.array_equal(coder.encoded(held, ranges), payload)
    assert not np.array_equal(coder.encoded(held), payload)
    other = held.copy()
    other[4, 16:] = numbers(1, 16, seed=1)[0, 16:]
    found = coder.decoded(coder.encoded(other, ranges), 9, 32)
    alone = coder.decoded(coder.encoded(other[4:5]), 1, 32)
    assert np.array_equal(found[4, 16:], alone[0, 16:])
    assert np.array_equal(np.delete(found, 4, 0)[:, 16:], np.delete(held, 4, 0)[:, 16:])


@pytest.mark.parametrize("number", [np.inf, np.nan, 7e4])
def test_values_beyond_float16_are_refused(number: float) -> None:
    given = numbers(3, 4)
    given[1, 6] = number
    with pytest.raises(CacheError, match="full precision"):
        LevelCoder(LEVELS, 2, 0.1).encoded(given)


def test_oversized_block_is_refused() -> None:
    with pytest.raises(CacheError, match="take blocks of 1024 entries"):
        LevelCoder(LEVELS, 2, 0.1).encoded(np.zeros((1025, 128)))


@pytest.mark.parametrize("cut", [0, 3, 4, 11, 30, -4])
def test_payload_of_another_size_is_refused(cut: int) -> None:
    coder = LevelCoder(LEVELS, 2, 0.25)
    payload = coder.encoded(numbers(5, 8))
    with pytest.raises(CacheError, match="build the cache again"):
        coder.decoded(payload[:cut], 5, 16)


def test_outliers_beyond_their_block_are_refused() -> None:
    coder, given = LevelCoder(LEVELS, 2, 0.25), np.full((2, 8), 5.0, np.float32)
    payload = coder.encoded(given)
    first = 4 + 2 * 4 + 2 * 2  # of the places of two key outliers, whose numbers follow
    channels = first + 2 * 4
    for at in (first + 1, channels):
        damaged = payload.copy()
        damaged[at] = 255
        with pytest.raises(CacheError, match="build the cache again"):
            coder.decoded(damaged, 2, 8)
