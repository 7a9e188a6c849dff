"""Entries of blocks of coded components equal those of whole blocks, decoded one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from larder.core import Coder
from larder.ops import transform_coder as coding

STEP, COUNT = 0.5, 7


@pytest.mark.parametrize("coder", [Coder.ENTROPY, Coder.PLANES, Coder.WIDTHS])
@given(
    seed=st.integers(0, 2**16), wanted=st.lists(st.integers(0, 4 * COUNT - 1)), rare=st.booleans()
)
def test_rows_are_those_of_whole_blocks(
    coder: Coder, seed: int, wanted: list[int], rare: bool
) -> None:
    held, deviations, expected = some_blocks(coder, seed, rare)
    places = np.array(wanted, np.int64)
    own = COUNT, places, deviations, STEP, coder
    for read in (expected.shape[1], 2):
        rows = coding.decoded_rows(*held, *own, read)
        assert np.array_equal(rows, expected[places, :read])


@pytest.mark.parametrize("coder", [Coder.ENTROPY, Coder.PLANES])
def test_rows_are_the_same_without_the_library(
    coder: Coder, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, deviations, expected = some_blocks(coder, seed=3, rare=True)
    places = np.array([9, 3, 25, 3], np.int64)
    monkeypatch.setattr(coding, "c_library", lambda: None)
    rows = coding.decoded_rows(*held, COUNT, places, deviations, STEP, coder, 4)
    assert np.array_equal(rows, expected[places, :4])


@pytest.mark.parametrize("place", [-1, 4 * COUNT])
def test_place_in_no_block_is_refused(place: int) -> None:
    held, deviations, _ = some_blocks(Coder.ENTROPY, seed=3, rare=False)
    wanted = COUNT, np.array([0, place]), deviations, STEP, Coder.ENTROPY, 4
    with pytest.raises(IndexError):
        coding.decoded_rows(*held, *wanted)


def some_blocks(
    coder: Coder, seed: int, rare: bool
) -> tuple[tuple[np.ndarray, ...], np.ndarray, np.ndarray]:
    """Payload, starts, sizes and heads of blocks of two heads, deviations, and all components.

    Args:
        rare: one number in each block fits no width.
    """
    source = np.random.default_rng(seed)
    deviations = np.exp(source.normal(size=(2, 6))).astype(np.float32)
    heads, payloads, whole = np.array([0, 1, 1, 0]), [np.full(3, 9, np.uint8)], list[np.ndarray]()
    for head in heads.tolist():
        numbers = (source.normal(size=(COUNT, 6)) * deviations[head]).astype(np.float32)
        if rare:
            numbers[source.integers(COUNT), source.integers(6)] *= 1e4
        tiers = source.integers(-2, 3, COUNT).astype(np.int8)
        own = deviations[head], STEP, coder
        payloads.append(coding.encoded(numbers, tiers, *own))
        whole.append(coding.decoded(payloads[-1], COUNT, *own)[0])
    sizes = np.array([len(each) for each in payloads[1:]])
    starts = 3 + sizes.cumsum() - sizes
    return (np.concatenate(payloads), starts, sizes, heads), deviations, np.concatenate(whole)
