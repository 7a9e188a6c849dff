"""Contexts in a branch of attention of their own, held against a loop."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from builders import a_layer, a_plan, draw, layer_options
from cache_stores import attend, extend
from larder.cache import BlendedLayer, ParallelLayer
from larder.core import CacheError
from larder.ops import merge_attention
from references.cache.loop import Entry
from references.cache.parallel import context_weight, two_branches
from tensor_memory import reachable_tensors, storage_bytes

LAYER = a_layer(kv_heads=2, group=2)
PREFIX, ONE, TWO = draw(LAYER, 3), draw(LAYER, 5, 3, seed=1), draw(LAYER, 2, 3, seed=2)
NEW = draw(LAYER, 3, 8, seed=3)


def filled(temperature: float = 0.9, scale: float = 0.8, order: int = 1) -> ParallelLayer:
    store = ParallelLayer(LAYER, layer_options())
    store.append(PREFIX.keys, PREFIX.values, PREFIX.positions)
    contexts = [ONE, TWO][::order]
    sides = ([getattr(c, name) for c in contexts] for name in ("keys", "values", "positions"))
    store.hold_contexts(*sides, temperature, scale)
    return store


def entries(tokens: Any, head: int, count: int | None = None) -> list[Entry]:
    positions = tokens.positions.tolist()[:count]
    return [Entry(p, tokens.keys[head, n], tokens.values[head, n]) for n, p in enumerate(positions)]


def test_both_branches_equal_their_reference() -> None:
    found = attend(filled(), NEW)
    for head in range(LAYER.query_heads):
        kv = head // 2
        contexts = entries(ONE, kv) + entries(TWO, kv)
        for q in range(3):
            rest = entries(PREFIX, kv) + entries(NEW, kv, q + 1)
            numbers = LAYER.scaling, 0.9, 0.8
            expected = two_branches(NEW.queries[head, q], contexts, rest, *numbers)
            assert torch.allclose(found[head, q], torch.tensor(expected), atol=1e-4)


def test_context_weight_hand_value() -> None:
    """Log-sum-exps of 2 and 1 under S = T = .9: the contexts weigh .650."""
    assert context_weight(2.0, 1.0, 0.9, 0.9) == pytest.approx(0.650, abs=5e-4)
    outs, lses = torch.tensor([[[1.0]], [[0.0]]]), torch.tensor([[2.0 * 0.81], [1.0]])
    merged, _ = merge_attention(list(outs), list(lses))
    assert float(merged) == pytest.approx(0.650, abs=5e-4)


def test_single_tokens_equal_a_block_for_any_context_order() -> None:
    together = attend(filled(), NEW)
    store, apart = filled(order=-1), list[torch.Tensor]()
    for n in range(3):
        one = NEW.part(n, n + 1)
        apart.append(extend(store, one))
    assert torch.allclose(torch.cat(apart, 1), together, atol=1e-5)
    assert store.lengths == (13, 13) and store.step_storage() is None


def test_contexts_are_restored_and_truncated_by_position() -> None:
    store = filled()
    store.compact()
    before, held = attend(store, NEW), store.nbytes
    extend(store, NEW)
    copy = ParallelLayer.restore(LAYER, store.state())
    store.truncate(8)
    store.compact()
    assert torch.equal(attend(store, NEW), before) and store.nbytes == held
    assert copy.lengths == (13, 13) and copy.entries().lengths == (13, 13)
    assert len(copy.entries().keys) == 26 and copy.entries_copy_bytes == 26 * (2 * 8 * 4 + 4)
    copy.truncate(4)
    assert copy.lengths == (5, 5), "the prefix and the first token of each context"


def test_plans_are_refused_while_contexts_are_held() -> None:
    store = filled()
    for change in (store.apply, store.evict):
        with pytest.raises(CacheError, match="unlimited"):
            change(a_plan([[0], [0]], store.lengths))
    assert math.isfinite(float(attend(store, NEW).sum()))


def test_fork_holds_the_contexts_too() -> None:
    store = filled()
    store.compact()
    alone = store.nbytes
    assert store.shared_nbytes == 0
    copy = store.fork()
    assert type(copy) is ParallelLayer and copy.factors == store.factors
    assert copy.lengths == store.lengths and copy.nbytes == store.nbytes == alone
    assert copy.shared_nbytes == store.shared_nbytes == alone
    for _ in range(2):
        assert torch.equal(extend(copy, NEW), extend(store, NEW))
        assert copy.lengths == store.lengths and copy.usage.entries == store.usage.entries
        assert torch.equal(copy.entries().keys, store.entries().keys)
        assert copy.nbytes == storage_bytes(reachable_tensors(copy))
    store.truncate(4)
    assert copy.num_context_entries == 7 and store.num_context_entries == 2
    assert copy.shared_nbytes == 0


def test_fork_shares_entries_after_both_sides_append() -> None:
    store, long = filled(), draw(LAYER, 100, 8, seed=4)
    store.append(long.keys, long.values, long.positions)
    copy, more = store.fork(), draw(LAYER, 3, 108, seed=5)
    outs = [extend(each, more) for each in (copy, store)]
    assert torch.allclose(*outs, atol=1e-6) and 0 < copy.shared_nbytes < copy.nbytes
    assert copy.lengths == store.lengths == (113, 113)
    assert copy.usage.entries == store.usage.entries == 226
    copy.truncate(108)
    assert copy.lengths == copy.entries().lengths == (110, 110)
    assert torch.equal(copy.entries().keys[:7], store.entries().keys[:7])


def test_fork_of_a_blended_layer_attends_identically() -> None:
    store = BlendedLayer(LAYER, layer_options())
    store.append(ONE.keys, ONE.values, ONE.positions)
    copy = store.fork()
    assert type(copy) is BlendedLayer
    assert copy.lengths == store.lengths and copy.nbytes == store.nbytes
    assert torch.equal(attend(copy, NEW), attend(store, NEW))
