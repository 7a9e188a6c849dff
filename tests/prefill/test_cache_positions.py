"""Observations of compact layers: positions and queries as their attention has them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from builders import Tokens, a_layer, a_plan, draw, layer_options
from cache_stores import append, extend, new_tokens
from cache_stores import attend as attend_unindexed
from larder import Policy
from larder.cache import CompactLayer, SequenceCache
from larder.core import Mode, Observation
from larder.models import BatchSegment, wrap_model
from larder.ops.attention import attention
from larder.prefill import PeakMemoryMeter, rotate_to_cache_positions
from larder.session import build_caches
from model_runs import id_runtime, native_logits, read_on, some_ids
from tiny_models import tiny

HELD = 11


def a_store() -> CompactLayer:
    """Two heads that lost different entries."""
    store = CompactLayer(a_layer(2, 2), layer_options())
    append(store, draw(store.layer, HELD))
    store.apply(a_plan([[0, 3, 4, 9, 10], [1, 10]], [HELD, HELD]))
    return store


def shown(store: CompactLayer, new: Tokens, own: int) -> Observation:
    observation = Observation(
        layer=store.layer,
        entries=store.entries(),
        queries=new.queries,
        query_positions=new.positions,
        length=HELD + own,
        span=(0, HELD),
        keys=new.keys,
    )
    return rotate_to_cache_positions(observation, own)


def looked_at(observation: Observation, new: Tokens, head: int, own: int) -> torch.Tensor:
    """Attention of a head's queries to what they are shown, under a causal mask."""
    keys, values = observation.entries.head_keys(head), observation.entries.head_values(head)
    if not own:
        keys = torch.cat([keys, observation.keys[head]])
        values = torch.cat([values, new.values[head]])
    count = new.queries.shape[1]
    mask = torch.ones(count, len(keys)).tril(len(keys) - count).bool()
    group = observation.queries.unflatten(0, (2, 2))[head]
    return attention(group, keys, values, observation.layer.scaling, mask)[0]


@pytest.mark.parametrize("own", [0, 4])
def test_observation_reproduces_the_attention(own) -> None:
    store, new = a_store(), draw(a_layer(2, 2), 4, HELD)
    out = extend(store, new) if own else attend_unindexed(store, new)
    observation = shown(store, new, own)
    for head in range(2):
        expected = out.unflatten(0, (2, 2))[head]
        torch.testing.assert_close(
            looked_at(observation, new, head, own), expected, atol=2e-5, rtol=1e-4
        )
    assert not torch.allclose(observation.queries, new.queries, atol=0.1)


def test_cache_positions_follow_the_entries_of_each_head() -> None:
    store, new = a_store(), draw(a_layer(2, 2), 3, HELD)
    assert shown(store, new, 0).effective_rope_positions.tolist() == [[5, 6, 7], [2, 3, 4]]
    append(store, new)
    observation = shown(store, new, 3)
    assert observation.effective_rope_positions.tolist() == [[5, 6, 7], [2, 3, 4]]
    entries = observation.entries
    assert entries.pack(entries.effective_rope_positions).tolist() == [*range(8), *range(5)]


@pytest.mark.parametrize("shift", [7, -2, -4])
def test_shift_offsets_cache_positions_per_head(shift) -> None:
    store, new = a_store(), draw(a_layer(2, 2), 3, HELD + shift)
    out = store.attend(new_tokens(new, shift=shift))
    seen = shown(store, new, 0)
    firsts = [max(5 + shift, 0), max(2 + shift, 0)]
    assert seen.effective_rope_positions.tolist() == [
        [first, first + 1, first + 2] for first in firsts
    ]
    for head in range(2):
        expected = out.unflatten(0, (2, 2))[head]
        torch.testing.assert_close(looked_at(seen, new, head, 0), expected, atol=2e-5, rtol=1e-4)


def test_shift_without_evictions_equals_true_positions() -> None:
    ids, new = some_ids(20), some_ids(6, seed=1)
    expected: list[torch.Tensor] = []
    with wrap_model(tiny("llama", layers=2)) as decoder:
        for form in ("ragged", "compact"):
            cache = SequenceCache(decoder.spec, form)
            read_on(decoder, cache, ids, 20)
            for shift in (0, 30, -15):
                row = BatchSegment(cache, new, shift=shift)
                expected.append(decoder.forward_logits([row], Mode.SCRATCH, range(6)))
    near, far, early, *compact = expected
    assert (near - far).abs().max() > 1e-2
    assert (near - early).abs().max() > 1e-2
    torch.testing.assert_close(torch.stack(compact), torch.stack([near, far, early]))


def test_true_positions_are_unchanged() -> None:
    store, new = a_store(), draw(a_layer(2, 2), 3, HELD)
    entries = replace(store.entries(), rope_positions=torch.empty(0, dtype=torch.int32))
    observation = Observation(store.layer, entries, new.queries, new.positions, HELD, (0, HELD))
    assert rotate_to_cache_positions(observation, 0) is observation
    assert observation.effective_rope_positions.tolist() == [[11, 12, 13]] * 2
    assert observation.entries.effective_rope_positions is entries.positions


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral", "phi3"])
def test_compact_positions_equal_a_shorter_text(architecture) -> None:
    """In a model of one layer keys depend on their own token alone: gaps must leave no trace."""
    module = tiny(architecture, layers=1)
    ids = some_ids(60)
    kept, new = (*ids[:2], *ids[30:50]), ids[50:]
    expected = native_logits(module, (*kept, *new))[len(kept) :]
    sentence = "blockwise(tokens=9) > protect(sinks=2, recent=0) > sinks_and_window(sinks=2) > "
    caches = []
    with wrap_model(module) as decoder:
        for storage in ("compact", "exact"):
            policy = Policy.parse(f"{sentence} uniform(tokens=22) > {storage}()")
            runtime = id_runtime(decoder)
            session_caches = build_caches(
                runtime, policy.with_sizes(22, None), ids[:50], [{}], PeakMemoryMeter()
            )
            caches.append(session_caches.activate(0))
        compact, exact = (read_on(decoder, cache, new, 4) for cache in caches)
    assert caches[0].next_position == 60
    assert (compact - expected).abs().max() < 1e-4
    assert (exact - expected).abs().max() > 1e-2
