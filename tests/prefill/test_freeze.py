"""Entries frozen at the end of their turn: in a text, in a chat, and after a restore."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from builders import a_layer, a_view
from chats import HISTORY, same, states, within
from larder import Chat, Engine, Policy
from larder.cache import SequenceCache
from larder.core import BadParameter, Mode, SpellingError
from larder.engine import StorePersistence
from larder.models import BatchSegment, Decoder, LoadedModel, wrap_model
from larder.policy import LagKV
from larder.prefill import PeakMemoryMeter, run_steps
from larder.session import build_caches_steps
from larder.store import Store
from model_runs import id_runtime, native_logits, some_ids
from references import freeze as loop
from references import lagkv
from server_core import characters
from tiny_models import tiny

ENDS = (100, 200, 300)
SENTENCE = "freeze({}) > protect(sinks=0, recent=0) > keydiff() > uniform()"
CHAT = "freeze(kept=0.5) > protect(sinks=2, recent=4) > {}"
SAID = ["My dog is 7.", "The car is red. " * 4, "What?", "My dog eats apples, and it is big."]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return wrap_model(tiny("qwen3"))


@pytest.fixture(scope="module")
def small() -> LoadedModel:
    return characters(layers=2)


def read(decoder: Decoder, sentence: str, ids: Any, tokens: int, ends: Any) -> SequenceCache:
    policy = Policy.parse(sentence).with_sizes(tokens, None, len(ids))
    steps = build_caches_steps(id_runtime(decoder), policy, ids, [{}], PeakMemoryMeter(), ends)
    return run_steps(steps).activate(0)


def in_turns(cache: SequenceCache, ends: Sequence[int] = ENDS) -> set[tuple[int, ...]]:
    """Number of entries of each turn in the heads."""
    counts = set[tuple[int, ...]]()
    for layer in cache.spec.layers:
        entries = cache.entries(layer.index)
        for head in range(len(entries.lengths)):
            edges = torch.tensor([0, *ends])
            own = torch.bucketize(entries.head_positions(head).long(), edges, right=True) - 1
            counts.add(tuple(torch.bincount(own, minlength=len(ends)).tolist()))
    return counts


def test_three_turns_of_a_hundred_keep_fifty_each(decoder) -> None:
    ids = some_ids(300)
    cache = read(decoder, SENTENCE.format("kept=0.5"), ids, 150, ENDS)
    turns = [range(0, 100), range(100, 200), range(200, 300)]
    first = lambda positions, count: list(positions)[:count]  # noqa: E731
    by_hand = tuple(len(turn) for turn in loop.frozen(turns, 0.5, first))
    assert in_turns(cache) == {by_hand} == {(50, 50, 50)}
    assert [len(turn) for turn in loop.judged_again(turns, 0.5, first)] == [12, 25, 50]
    assert cache.watermark == 300


def test_open_share_is_the_budget_over_the_text(decoder) -> None:
    cache = read(decoder, SENTENCE.format(""), some_ids(300), 75, ENDS)
    assert in_turns(cache) == {(25, 25, 25)}


@pytest.mark.parametrize("scorer", ["snapkv(window=8)", "keydiff()", "column_mass()", "lagkv()"])
def test_one_turn_equals_the_policy_without_freeze(decoder, scorer) -> None:
    ids, rest = some_ids(120), f"protect(sinks=2, recent=8) > {scorer} > uniform()"
    one = read(decoder, f"freeze() > {rest}", ids, 60, (120,))
    other = read(decoder, f"whole() > {rest}", ids, 60, ())
    assert all(torch.equal(one.state()[name], each) for name, each in other.state().items())


def test_turn_is_scored_by_its_own_entries_only(decoder) -> None:
    """Kept entries of the first turn do not depend on the second, as they do without `freeze`."""
    ids = some_ids(200)
    rest = "protect(sinks=2, recent=8) > keydiff() > pooled()"
    alone = read(decoder, f"freeze(kept=0.5) > {rest}", ids[:100], 100, (100,))
    both = read(decoder, f"freeze(kept=0.5) > {rest}", ids, 100, (100, 200))
    for layer in both.spec.layers:
        for head in range(layer.kv_heads):
            before, after = (each.entries(layer.index) for each in (alone, both))
            held, count = before.lengths[head], int((after.head_positions(head) < 100).sum())
            assert held == count
            assert torch.equal(after.head_positions(head)[:held], before.head_positions(head))
            assert torch.equal(after.head_keys(head)[:held], before.head_keys(head))


def test_short_turns_are_scored_together(decoder) -> None:
    """A turn of 10 tokens has no share that holds its 8 latest."""
    sentence = "freeze(kept=0.5) > protect(sinks=0, recent=8) > keydiff() > uniform()"
    cache = read(decoder, sentence, some_ids(40), 40, (10, 20, 30, 40))
    assert in_turns(cache, (20, 40)) == {(10, 10)}


def test_oldest_entries_are_evicted_beyond_the_budget(decoder) -> None:
    sentence = "freeze(kept=0.5) > protect(sinks=4, recent=0) > keydiff() > uniform()"
    cache = read(decoder, sentence, some_ids(300), 120, ENDS)
    for first, *rest in in_turns(cache):
        assert first <= 20 and rest == [50, 50]
    assert cache.managed_entries > 119 * 2 * len(cache.spec.layers)
    for layer in cache.spec.layers:
        entries = cache.entries(layer.index)
        for head in range(layer.kv_heads):
            assert entries.head_positions(head)[:4].tolist() == [0, 1, 2, 3]


def test_logits_without_evictions_equal_the_model(decoder) -> None:
    ids = some_ids(60)
    cache = read(decoder, SENTENCE.format("kept=1.0"), ids, 60, (20, 40, 60))
    rows = [BatchSegment(cache, some_ids(4, seed=5))]
    found = decoder.forward_logits(rows, Mode.SCRATCH, [3])
    expected = native_logits(tiny("qwen3"), (*ids, *some_ids(4, seed=5)))[-1:]
    assert torch.allclose(found, expected, atol=1e-3)


def chat(loaded: LoadedModel, rest: str, budget: int = 400, **options: Any) -> Chat:
    engine = Engine(loaded, policy=CHAT.format(rest), budget=str(budget))
    return Chat(engine, **options)


def held(chat: Chat, watermark: int) -> list[Any]:
    """Entries below a watermark, head by head."""
    cache, rows = chat.memory.caches.activate(0), list[Any]()
    for layer in cache.spec.layers:
        entries = cache.entries(layer.index)
        for head in range(layer.kv_heads):
            old = entries.head_positions(head) < watermark
            parts = entries.head_positions, entries.head_keys, entries.head_values
            rows.append([part(head)[old].clone() for part in parts])
    return rows


@pytest.mark.extended
@pytest.mark.parametrize(
    "rest",
    [
        "keydiff() > uniform()",
        "snapkv(window=4) > pooled()",
        "column_mass() > uniform()",
        "keydiff() > uniform() > park() > flat(dense=0, tokens=32)",
    ],
)
def test_kept_entries_of_a_turn_are_frozen_bit_exactly(small, rest) -> None:
    talk, marks = chat(small, rest, 1200, history=HISTORY), list[int]()
    for text in SAID:
        watermark = talk.memory.caches.activate(0).watermark
        before = held(talk, watermark)
        talk.say(text, max_new_tokens=12)
        for old, new in zip(before, held(talk, watermark), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))
        marks.append(talk.memory.caches.activate(0).watermark)
        assert within(talk)
    assert marks == sorted(marks) and len(set(marks)) > 1


def test_every_long_turn_keeps_its_share(small) -> None:
    talk = chat(small, "keydiff() > uniform()")
    edges = [0]
    for text in SAID:
        talk.say(text, max_new_tokens=12)
        cache = talk.memory.caches.activate(0)
        if cache.watermark == cache.next_position:
            edges.append(cache.watermark)
    counts = in_turns(cache, edges[1:])
    turns = [stop - start for start, stop in zip(edges, edges[1:], strict=False)]
    assert len(turns) > 2
    assert counts == {tuple(max(6, turn // 2) for turn in turns)}


def test_chat_over_its_budget_evicts_its_oldest_entries(small) -> None:
    talk = chat(small, "keydiff() > uniform()", budget=100)
    for text in SAID * 2:
        talk.say(text, max_new_tokens=6)
        assert within(talk)
    cache = talk.memory.caches.activate(0)
    positions = cache.entries(0).head_positions(0).tolist()
    assert positions[:2] == [0, 1] and positions[2] > 60


@pytest.mark.extended
def test_restored_chat_keeps_its_watermark(small, tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"), tmp_path)
    keeper = StorePersistence(store, small)
    talk = chat(small, "keydiff() > uniform()", name="x", keeper=keeper)
    for text in SAID[:2]:
        talk.say(text, max_new_tokens=12)
    watermark = talk.memory.caches.activate(0).watermark
    assert watermark and talk.keep() == ""
    again = chat(small, "keydiff() > uniform()", name="x", keeper=keeper)
    assert again.resumed.state is not None
    assert again.memory.caches.activate(0).watermark == watermark
    forks = [each.fork() for each in (talk, again)]
    for each in forks:
        each.say(SAID[3], max_new_tokens=12)
    assert all(same(a, b) for a, b in zip(*map(states, forks), strict=True))
    assert states(forks[0])[0]["watermark"] > states(talk)[0]["watermark"]
    store.close()


def test_lagkv_partitions_start_at_the_watermark() -> None:
    """So that none is judged twice."""
    part, heads = LagKV(sinks=1, lag=3), [list(range(20)), [0, 3, *range(6, 22)]]
    observation = replace(a_view(a_layer(), heads), watermark=5)
    scores = part.score(observation)
    for head in range(observation.layer.kv_heads):
        frozen = int((observation.entries.head_positions(head) < 5).sum())
        start = sum(observation.entries.lengths[:head])
        own = scores[start : start + observation.entries.lengths[head]]
        expected = lagkv.one_head(LagKV(sinks=max(1, frozen), lag=3), observation, head)
        assert own.tolist() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("sentence", "named"),
    [
        ("freeze() > column_mass() > uniform() > every_step()", "every_step"),
        ("freeze() > keydiff() > uniform() > quantized(bits=4)", "quantized"),
        ("freeze() > keydiff() > uniform() > fold_ema()", "fold_ema"),
        ("episodes() > freeze() > keydiff() > uniform()", "episodes"),
    ],
)
def test_parts_that_change_frozen_entries_are_refused(sentence, named) -> None:
    with pytest.raises(SpellingError, match=rf"never changes again .* but {named}\(\) would"):
        Policy.parse(sentence)


@pytest.mark.parametrize("kept", [0.0, 1.5])
def test_share_outside_zero_to_one_is_refused(kept) -> None:
    with pytest.raises(BadParameter, match=r"freeze.kept must be a share in \(0, 1\]"):
        Policy.parse(f"freeze(kept={kept}) > keydiff() > uniform()")
