"""Recorded logits of a ragged store: those of the newest query, taken once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from builders import a_layer, draw, layer_options
from cache_stores import extend
from larder.cache import RaggedLayer
from larder.core import Plan


def a_store() -> RaggedLayer:
    """Nine entries per head, and room for more."""
    store, tokens = (
        RaggedLayer(a_layer(2, 2), layer_options()),
        draw(a_layer(2, 2), 9),
    )
    store.append(tokens.keys, tokens.values, tokens.positions)
    store.allocate(32)
    return store


def read_one(store: RaggedLayer, position: int) -> torch.Tensor:
    new = draw(store.layer, 1, position)
    extend(store, new)
    return new.queries


def test_logits_of_the_newest_query_are_taken_once() -> None:
    store = a_store()
    store.record_logits()
    queries, heard = read_one(store, 9), store.take_logits()
    assert heard is not None
    held = store.entries()
    for head in range(2):
        for r in range(2):
            expected = held.head_keys(head) @ queries[2 * head + r, 0] * store.layer.scaling
            torch.testing.assert_close(heard[r, held.rows(head)], expected)
    assert store.take_logits() is None


def test_logits_are_recorded_on_request_and_dropped_after_another_step() -> None:
    store = a_store()
    read_one(store, 9)
    assert store.take_logits() is None
    store.record_logits()
    read_one(store, 10)
    read_one(store, 11)
    assert store.take_logits() is None


@pytest.mark.parametrize("change", ["append", "apply", "evict", "lay out"])
def test_recorded_logits_are_dropped_when_entries_move(change) -> None:
    store = a_store()
    store.record_logits()
    read_one(store, 9)
    new = draw(store.layer, 2, 10)
    every = Plan(torch.arange(20), (10, 10))
    fewer = replace(every, kept=every.kept[every.kept % 10 > 0], lengths=(9, 9))
    {
        "append": lambda: store.append(new.keys, new.values, new.positions),
        "apply": lambda: store.apply(fewer),
        "evict": lambda: store.evict(fewer),
        "lay out": lambda: store.compact(),
    }[change]()
    assert store.take_logits() is None
