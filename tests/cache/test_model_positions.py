"""Positions of M-RoPE beside true positions."""

from __future__ import annotations

import torch

from larder.cache import ModelPositions, SequenceCache
from larder.core import LayerSpec, ModelSpec

# Two words, an image of two rows and two columns, two words.
TIMES, ROWS, COLUMNS = [0, 1, 2, 2, 2, 2, 4, 5], [0, 1, 2, 2, 3, 3, 4, 5], [0, 1, 2, 3, 2, 3, 4, 5]
GIVEN = torch.tensor([TIMES, ROWS, COLUMNS])


def at(known: ModelPositions, positions: list[int], length: int) -> list[list[int]]:
    return known.at(torch.tensor(positions), length).tolist()


def test_default_model_positions_are_true_positions() -> None:
    none = ModelPositions()
    assert at(none, [3, 4], 3) == [[3, 4]]
    assert none.extended(3, torch.tensor([[3, 4]] * 3)).are_true


def test_later_tokens_continue_from_the_highest_position() -> None:
    known = ModelPositions().extended(0, GIVEN)
    assert at(known, [5, 6, 7, 8, 9], 8) == [[2, 4, 5, 6, 7], [3, 4, 5, 6, 7], [3, 4, 5, 6, 7]]
    assert known.extended(8, torch.tensor([[6, 7]] * 3)) is known


def test_positions_before_and_after_an_image_hand_values() -> None:
    known = ModelPositions().extended(0, GIVEN)
    assert at(known, [6, 7], 6) == [[4, 5]] * 3  # behind the image
    assert at(known, [1, 2], 2) == [[1, 2]] * 3  # in front of it


def test_positions_of_an_image_after_generated_text_hand_values() -> None:
    known = ModelPositions().extended(0, GIVEN)
    longer = known.extended(10, torch.tensor([[8, 8], [8, 8], [8, 9]]))
    assert at(longer, [8, 9, 10, 11, 12], 12) == [
        [6, 7, 8, 8, 10],
        [6, 7, 8, 8, 10],
        [6, 7, 8, 9, 10],
    ]
    assert torch.equal(longer.truncated(8).known, GIVEN)


def test_model_positions_are_forked_saved_and_truncated() -> None:
    layers = (LayerSpec(0, 2, 1, 4, 0.5),)
    spec = ModelSpec(layers, torch.float32, torch.device("cpu"), "", 8)
    cache = SequenceCache(spec, "ragged")
    cache.model_positions = ModelPositions(GIVEN)
    restored = SequenceCache.restore(spec, cache.state(), cache.meta())
    assert torch.equal(restored.model_positions.known, GIVEN)
    assert cache.fork().model_positions is cache.model_positions
    cache.truncate(2)
    assert torch.equal(cache.model_positions.known, GIVEN[:, :2])
