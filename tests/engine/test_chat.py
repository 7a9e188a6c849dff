"""Chats under a small budget: kept, moved and recomputed entries."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chats import (
    BLOCK,
    BUDGET,
    EPISODES,
    HISTORY,
    POLICIES,
    SINGLE,
    STEPWISE,
    active,
    logits,
    same,
    state,
    states,
    under,
    within,
)
from larder import Chat, Conversation, Engine, Message
from larder.cache import SequenceCache
from larder.core import Mode
from larder.models import BatchSegment, LoadedModel

pytestmark = pytest.mark.usefixtures("read_once")
ALL_POLICIES = POLICIES | {f"stepwise {name}": policy for name, policy in STEPWISE.items()}


@pytest.mark.extended
@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_first_turn_equals_ask(loaded: LoadedModel, policy: str) -> None:
    engine = under(loaded, ALL_POLICIES[policy])
    question = "What is dog number 3 called?"
    asked = engine.ask(engine.read(HISTORY), question, max_new_tokens=12)
    answer = Chat(engine, history=HISTORY).say(question, max_new_tokens=12)
    assert (answer.text, answer.ids, answer.episode) == (asked.text, asked.ids, asked.episode)


@pytest.mark.extended
@pytest.mark.parametrize("max_new_tokens", [1, 3, 24], ids=["one", "cut", "ended"])
def test_turn_is_prefilled_to_its_end(engine: Engine, max_new_tokens: int) -> None:
    memory = engine.read(HISTORY)
    chat = Chat(engine, history=HISTORY)
    answer = chat.say("What is dog number 3 called?", max_new_tokens=max_new_tokens)
    [turn] = chat.turns
    closing = engine.tokenizer.end_of_turn_ids()
    assert turn.ids == engine.tokenizer.encode_question(answer.question) + answer.ids + closing
    cache, _ = memory.activate_for(answer.question)
    engine.loaded.decoder.read([BatchSegment(cache, turn.ids)], Mode.APPEND)
    mine = chat.memory.caches.activate(answer.episode or 0)
    assert mine.next_position == cache.next_position == chat.figures.log_tokens
    assert chat.episodes[answer.episode or 0].entries_per_head <= BUDGET
    for layer in range(len(mine.spec.layers)):  # a plan at the end of the turn keeps some of it
        kept, read = mine.entries(layer), cache.entries(layer)
        for head in range(len(kept.lengths)):
            where = read.head_positions(head)
            positions = torch.isin(where, kept.head_positions(head))
            assert torch.equal(kept.head_positions(head), where[positions])
            assert torch.allclose(kept.head_keys(head), read.head_keys(head)[positions], atol=1e-4)


def test_turns_of_an_empty_chat_equal_their_encoded_conversation(engine: Engine) -> None:
    chat = Chat(engine)
    chat.say("My dog is called Rex.", max_new_tokens=8)
    chat.say("And my dog is old.", max_new_tokens=8)
    messages = [
        Message(role, content)
        for turn in chat.turns
        for role, content in (("user", turn.question), ("assistant", turn.answer))
    ]
    ids = tuple(token for turn in chat.turns for token in turn.ids)
    assert ids == engine.tokenizer.encode_conversation(Conversation("same", tuple(messages))).ids


@pytest.mark.extended
def test_appended_turn_is_kept_when_its_episode_is_reactivated(engine: Engine) -> None:
    chat = Chat(engine, history=HISTORY)
    dogs = chat.say("My dog eats apples.", max_new_tokens=6).episode
    assert dogs is not None
    left = chat.memory.caches.activate(dogs).fork()
    before = state(left.fork())
    cars = chat.say("The car is slow.", max_new_tokens=6)
    assert cars.episode != dogs and chat.figures.write_backs == 1
    assert chat.memory.caches.active_number == cars.episode
    back = chat.memory.caches.activate(dogs)
    assert same(state(back.fork()), before)
    for text in ("What does my dog eat?", "Thank you."):
        assert torch.equal(logits(engine, back, text), logits(engine, left, text))
        ids = engine.tokenizer.encode_question(text)
        for cache in (back, left):
            engine.loaded.decoder.read([BatchSegment(cache, ids)], Mode.APPEND)


@pytest.mark.extended
def test_one_cache_is_active_and_all_bytes_are_counted(engine: Engine) -> None:
    chat = Chat(engine, history=HISTORY)
    for text in ("My dog eats.", "The car is slow.", "A dog again."):
        chat.say(text, max_new_tokens=6)
        views, figures = chat.episodes, chat.figures
        assert sum(view.is_active for view in views) == 1
        assert figures.kv_bytes == sum(view.kv_bytes for view in views)
        assert figures.active_kv_bytes == next(v.kv_bytes for v in views if v.is_active)
        assert figures.active_kv_bytes == chat.memory.caches.activate(active(chat)).nbytes
        assert figures.peak_kv_bytes >= figures.kv_bytes
        entries = [tensor for found in states(chat) for tensor in found.values()]
        held = sum(t.nbytes for t in entries if isinstance(t, torch.Tensor))
        assert 0 <= figures.kv_bytes - held < 1000, "beyond the entries there is only bookkeeping"


@pytest.mark.extended
def test_new_topic_is_answered_by_the_nearest_episode_then_gets_its_own(
    engine: Engine,
) -> None:
    chat = Chat(engine, history=HISTORY)
    before = states(chat)
    answer = chat.say("A star is far away.", max_new_tokens=6)
    assert answer.episode in (0, 1), "a question is always answered by the nearest episode"
    assert chat.outcome is not None and chat.outcome.is_new_episode
    assert chat.outcome.answered_by == answer.episode and chat.outcome.filed_in == 2
    after = states(chat)
    assert len(after) == 3
    assert all(same(a, b) for a, b in zip(after[:2], before, strict=True)), "the turn is taken out"
    assert chat.episodes[2].segments == 1
    assert chat.episodes[2].prompt_texts == (chat.turns[0].text,)
    again = chat.say("How far is the star?", max_new_tokens=6)
    assert again.episode == 2 and not chat.outcome.is_new_episode
    assert chat.episodes[2].next_position == chat.figures.log_tokens


@pytest.mark.extended
def test_new_episode_holds_sinks_and_its_turn(engine: Engine) -> None:
    twin = engine.read(HISTORY)
    chat = Chat(engine, history=HISTORY)
    answer = chat.say("A star is far away.", max_new_tokens=6)
    cache, _ = twin.activate_for(answer.question)
    mark = cache.next_position
    engine.loaded.decoder.read([BatchSegment(cache, chat.turns[0].ids)], Mode.APPEND)
    opened = chat.memory.caches.activate(2)
    assert opened.next_position == mark + len(chat.turns[0].ids)
    for layer in range(len(opened.spec.layers)):
        mine, theirs = opened.entries(layer), cache.entries(layer)
        for head in range(len(mine.lengths)):
            where = theirs.head_positions(head)
            keep = (where < 4) | (where >= mark)
            assert torch.equal(mine.head_positions(head), where[keep])
            expected = theirs.head_keys(head)[keep]
            assert torch.allclose(mine.head_keys(head), expected, atol=1e-4)
            expected = theirs.head_values(head)[keep]
            assert torch.allclose(mine.head_values(head), expected, atol=1e-4)


@pytest.mark.extended
def test_new_episode_begins_with_the_system_prompt(engine: Engine) -> None:
    rules = Message("system", "You are kind to animals and answer in very few words.")
    history = replace(HISTORY, messages=(rules, *HISTORY.messages))
    chat = Chat(engine, history=history)
    stop = chat.memory.transcript.spans[0][1]
    assert stop > 8 and history.messages[1].content.startswith("My dog")
    answer = chat.say("A star is far away.", max_new_tokens=6)
    assert chat.outcome is not None and chat.outcome.is_new_episode
    caches = chat.memory.caches
    found = [_first(caches.activate(number), stop) for number in (2, answer.episode or 0)]
    assert found[0] == found[1]
    assert any(position >= 4 for head in found[0] for position in head)


def _first(cache: SequenceCache, stop: int) -> list[list[int]]:
    """The positions before `stop` that each head of each layer holds."""
    return [
        [position for position in entries.head_positions(head).tolist() if position < stop]
        for layer in cache.spec.managed
        for entries in [cache.entries(layer.index)]
        for head in range(len(entries.lengths))
    ]


@pytest.mark.extended
def test_new_episode_without_sinks_begins_with_its_turn(loaded: LoadedModel) -> None:
    chat = Chat(under(loaded, EPISODES.replace("sinks=4", "sinks=0")), history=HISTORY)
    answer = chat.say("A star is far away.", max_new_tokens=6)
    caches = chat.memory.caches
    found = [_first(caches.activate(number), 1) for number in (2, answer.episode or 0)]
    assert found[0] == found[1]
    assert any(found[0])


def test_short_chat_opens_no_episode(engine: Engine) -> None:
    chat = Chat(engine)
    for text in ("My dog is old.", "The star is far."):
        chat.say(text, max_new_tokens=4)
    assert len(chat.episodes) == 1 and chat.figures.opened == 0


@pytest.mark.extended
def test_cache_beyond_its_bound_is_refreshed(engine: Engine) -> None:
    chat = Chat(engine, history=HISTORY)
    prompts = [view.prompt_texts for view in chat.episodes]
    while not chat.figures.refreshes:
        others = states(chat)
        answer = chat.say("My dog is big and my dog is old.", max_new_tokens=6)
    grown = answer.episode or 0
    view = chat.episodes[grown]
    assert view.entries_per_head <= BUDGET
    assert view.next_position == chat.figures.log_tokens
    assert view.prompt_texts != prompts[grown]
    assert view.segments == 10 + len(chat.turns)
    other = 1 - grown
    assert same(states(chat)[other], others[other]), "other episodes stay as they are"
    assert chat.episodes[other].prompt_texts == prompts[other]
    assert chat.outcome is not None and chat.outcome.refreshes == 1


@pytest.mark.extended
def test_chat_without_history_forms_episodes_later(engine: Engine) -> None:
    chat = Chat(engine)
    for n in range(20):
        chat.say(("My dog", "The car")[n % 2] + f" is number {n}.", max_new_tokens=6)
        if chat.figures.refreshes:
            break
    assert [view.segments for view in chat.episodes] == [(n + 2) // 2, (n + 1) // 2]
    assert all(view.next_position == chat.figures.log_tokens for view in chat.episodes)
    assert within(chat)


@pytest.mark.extended
@settings(max_examples=4)
@given(
    st.lists(
        st.tuples(st.sampled_from(["dog", "car", "sea", "star"]), st.integers(1, 9)),
        min_size=4,
        max_size=10,
    )
)
def test_bound_holds_after_every_turn(engine: Engine, turns: list[tuple[str, int]]) -> None:
    chat = Chat(engine)
    for topic, length in turns:
        chat.say(f"The {topic} " * length, max_new_tokens=4)
        assert within(chat)
        spec = engine.loaded.decoder.spec
        heads = sum(layer.kv_heads for layer in spec.managed)
        assert chat.figures.peak_entries <= heads * (BUDGET + BLOCK)
        assert max(v.next_position for v in chat.episodes) <= chat.figures.log_tokens


BRIEF = Conversation("a word", (Message("user", "Hello."), Message("assistant", "Hello.")))


@pytest.mark.extended
def test_turns_stay_within_the_byte_budget(loaded: LoadedModel) -> None:
    """More entries fit than tokens at full precision, but not while they are whole."""
    chat = Chat(under(loaded, f"{SINGLE} > quantized(bits=2, group=8)"), history=BRIEF)
    allowed = loaded.decoder.spec.full_bytes(BUDGET + BLOCK)
    text = "I have been told of a dog and of a red car in lot number "
    for turn in range(4):
        chat.say(f"{text}{turn}. " * 2, max_new_tokens=2)
        assert chat.figures.active_kv_bytes <= 1.02 * allowed
    assert chat.figures.refreshes == 0, "they are cut down in place"
    assert chat.figures.log_tokens > 1.2 * (BUDGET + BLOCK)
