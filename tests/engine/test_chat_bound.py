"""Budget bound of chats and answers, at rest and while a turn runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from budget_bounds import KEYDIFF, SENTENCES, held, most, peaks
from chats import interrupt, same, states
from larder import Chat, Conversation, Engine, Message
from larder.models import LoadedModel
from larder.prefill import PeakMemoryMeter, PrefillSequence, TurnReader
from larder.session import budget_tokens, prefill_reader
from model_runs import read_and_evict
from server_core import characters
from topic_embedder import TopicEmbedder

BUDGET, BLOCK = 96, 32
TURNS = [
    ("My dog is 7.", 6),
    ("The car is red. " * 3, 40),
    ("What car?", 1),
    ("My dog eats apples, and it is big.", 24),
]
HISTORY = Conversation(
    "two topics",
    tuple(
        Message(role, f"{text} {n}")
        for n in range(3)
        for role, text in (("user", "My dog eats."), ("assistant", "The car is red."))
    ),
)


@pytest.fixture(scope="module")
def small() -> LoadedModel:
    return characters(layers=3)


def under(loaded: LoadedModel, sentence: str, budget: int = BUDGET) -> Engine:
    engine = Engine(
        loaded, policy=sentence, budget=str(budget), block=None if "whole()" in sentence else BLOCK
    )
    engine.runtime = replace(engine.runtime, embedder=lambda name: TopicEmbedder())
    return engine


def peak_bound(chat: Chat) -> int:
    """The most entries of one cache while a turn runs."""
    cache = chat.memory.caches.activate(0)
    return most(chat.policy, cache, chat.figures.block_tokens)[1]


def check_rest(chat: Chat) -> None:
    caches = chat.memory.caches
    for number in range(len(caches)):
        cache = caches.activate(number)
        assert held(cache) <= most(chat.policy, cache, BLOCK)[0], f"cache {number} at rest"


def marked_sentences(*quick: str) -> list[object]:
    """Every sentence; those that are not named are slow tests."""
    slow = [pytest.mark.slow]
    return [pytest.param(name, marks=[] if name in quick else slow) for name in SENTENCES]


# Held by default in tests/server/test_budget_bound.py, whose sessions are chats.
ON_THE_SERVER = {"keydiff", "snapkv", "h2o_while_reading", "int4"}


@pytest.mark.extended
@pytest.mark.parametrize("name", marked_sentences(*(SENTENCES.keys() - ON_THE_SERVER)))
@pytest.mark.parametrize(
    "history", [pytest.param(None, marks=pytest.mark.slow), HISTORY], ids=["nothing", "history"]
)
def test_chat_holds_at_most_budget_plus_one_block(
    small: LoadedModel, monkeypatch: pytest.MonkeyPatch, name: str, history: Conversation | None
) -> None:
    chat = Chat(under(small, SENTENCES[name]), history=history)
    for text, tokens in TURNS:
        with peaks(monkeypatch) as peak:
            chat.say(text, max_new_tokens=tokens)
        assert peak.entries <= peak_bound(chat), text
        check_rest(chat)


@pytest.mark.slow
@settings(max_examples=24)
@given(
    name=st.sampled_from(["keydiff", "snapkv", "h2o", "icecache", "novelty", "kivi"]),
    budget=st.integers(72, 110),
    turns=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=4),
)
def test_budget_bound_holds_for_random_turns(
    small: LoadedModel, name: str, budget: int, turns: list[tuple[int, int]]
) -> None:
    chat = Chat(under(small, SENTENCES[name], budget))
    for length, tokens in turns:
        with pytest.MonkeyPatch.context() as patch, peaks(patch) as peak:
            chat.say("d" * length, max_new_tokens=tokens)
        assert peak.entries <= peak_bound(chat)
        check_rest(chat)


@pytest.mark.extended
@pytest.mark.parametrize(
    "name", marked_sentences("snapkv", "h2o_while_reading", "epicache", "icecache")
)
def test_answer_stays_within_the_bound_and_leaves_no_trace(
    small: LoadedModel, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    engine = under(small, SENTENCES[name])
    memory = engine.read(HISTORY)
    before = [cache.fork() for cache in memory.caches.copies()]
    with peaks(monkeypatch) as peak:
        answer = engine.ask(memory, "What does my dog eat?", max_new_tokens=48)
    cache = memory.caches.activate(0)
    block = memory.policy.schedule.block_tokens or min(512, budget_tokens(memory.policy))
    assert peak.entries <= most(memory.policy, cache, block)[1]
    for mine, theirs in zip(memory.caches.copies(), before, strict=True):
        result, kept = ({**each.state(), **each.meta()} for each in (mine, theirs))
        assert same(result, kept)
    again = engine.ask(memory, "What does my dog eat?", max_new_tokens=48)
    assert again.ids == answer.ids


def test_turn_equals_a_context_in_the_same_blocks(small: LoadedModel) -> None:
    engine = under(small, SENTENCES["snapkv"])
    chat, twin = (Chat(engine, history=HISTORY) for _ in range(2))
    chat.say("Hi.", max_new_tokens=2)
    [turn], cache = chat.turns, twin.memory.caches.activate(0)
    assert len(turn.ids) <= BLOCK
    length = cache.next_position + len(turn.ids)
    reader = prefill_reader(engine.runtime, twin.policy, length, PeakMemoryMeter())
    read_and_evict(reader, [PrefillSequence(cache, {})], turn.ids, turn.ids, cache.next_position)
    mine = chat.memory.caches.activate(0)
    assert mine.lengths() == cache.lengths() and mine.next_position == length
    for layer in range(len(mine.spec.layers)):
        pair = [each.entries(layer) for each in (mine, cache)]
        assert torch.equal(*(each.packed_positions() for each in pair))
        mine_keys, keys = (each.pack(each.keys) for each in pair)
        assert torch.allclose(mine_keys, keys, atol=1e-5)


@pytest.mark.extended
def test_rollback_recomputes_within_the_bound(
    small: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = Chat(under(small, KEYDIFF), history=HISTORY)
    for text, tokens in TURNS:
        chat.say(text, max_new_tokens=tokens)
    with peaks(monkeypatch) as peak:
        chat.roll_back()
    assert len(chat.turns) == len(TURNS) - 1
    assert peak.entries <= peak_bound(chat)
    check_rest(chat)
    assert chat.figures.peak_kv_bytes < chat.figures.full_kv_bytes


def test_turn_longer_than_a_block_is_undone_as_a_whole(small: LoadedModel) -> None:
    chat = Chat(under(small, KEYDIFF), history=HISTORY)
    chat.say("My dog is 7.", max_new_tokens=6)
    before, answers = states(chat), list[str]()

    def stop_late(text: str) -> None:
        answers.append(text)
        if len("".join(answers)) > 2 * BLOCK:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chat.say("The car is red. " * 3, stop_late, max_new_tokens=200)
    assert len(chat.turns) == 1
    assert all(same(a, b) for a, b in zip(states(chat), before, strict=True))


def test_interrupted_plan_is_completed_by_the_next_turn(
    small: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = Chat(under(small, KEYDIFF), history=HISTORY)
    with monkeypatch.context() as patch:
        patch.setattr(TurnReader, "_read_with_plans", interrupt)
        with pytest.raises(KeyboardInterrupt):
            chat.say("Hi.", max_new_tokens=2)
    assert len(chat.turns) == 1, "the turn stands"
    assert chat.say("And the car?", max_new_tokens=6).ids
    check_rest(chat)
    assert chat.memory.caches.activate(0).next_position == chat.figures.log_tokens


@pytest.mark.extended
def test_full_budget_evicts_nothing_in_a_chat(small: LoadedModel) -> None:
    limited, full = Chat(under(small, KEYDIFF, 512)), Chat(Engine(small, policy="full"))
    for text, tokens in TURNS:
        mine, theirs = (chat.say(text, max_new_tokens=tokens) for chat in (limited, full))
        assert mine.ids == theirs.ids


def test_bound_check_detects_an_excess(small: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = Chat(Engine(small, policy="full"))
    with peaks(monkeypatch) as peak:
        chat.say("The car is red. " * 3, max_new_tokens=80)
    cache = chat.memory.caches.activate(0)
    limited = Chat(under(small, KEYDIFF)).policy
    assert held(cache) > most(limited, cache, BLOCK)[0] and peak.entries == held(cache)
