"""A chat under a small budget: what stays, what moves, what survives, what is undone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from larder.cache.sequence import SequenceCache
from larder.core.conversation import Conversation, Message
from larder.core.errors import InputError, UsageError
from larder.core.types import Mode
from larder.engine.chat import Chat
from larder.engine.engine import Engine
from larder.models.loading import Loaded, adopt, load
from larder.models.passes import Row
from larder.models.tiny import tiny
from larder.session.logbook import SessionFile, session_path
from larder.session.routing import NearestEpisode
from topics import TopicEmbedder

BUDGET, BLOCK = 96, 32
EPISODES = (
    "episodes(count=2, segment=1, representatives=2) > blockwise() > protect(sinks=4, recent=8)"
    ' > patched(prompt="episode") > pooled()'
)
SINGLE = "single() > blockwise() > protect(sinks=4, recent=8) > keydiff() > pooled()"
POLICIES = {"episodes": EPISODES, "single": SINGLE, "full": "full"}
HISTORY = Conversation(
    "two topics",
    tuple(
        Message(*told)
        for n in range(5)
        for told in (
            ("user", f"My dog number {n} is called Rex{n}."),
            ("assistant", f"A fine dog, number {n}."),
            ("user", f"The car in lot {n} is red."),
            ("assistant", f"I noted the car {n}."),
        )
    ),
)


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load()


@pytest.fixture(scope="module")
def engine(loaded: Loaded) -> Engine:
    return under(loaded, EPISODES)


def under(loaded: Loaded, policy: str) -> Engine:
    limited = policy != "full"
    engine = Engine(loaded, policy, *((str(BUDGET), BLOCK) if limited else (None, None)))
    engine.desk = replace(engine.desk, embedder=lambda name: TopicEmbedder())
    return engine


def state(cache: SequenceCache) -> dict[str, Any]:
    cache.compact()
    return {**cache.state(), **cache.meta()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[k], other[k]) if isinstance(one[k], torch.Tensor) else one[k] == other[k]
        for k in one
    )


def states(chat: Chat) -> list[dict[str, Any]]:
    """Every cache of a chat, on a copy of its shelf, so that nothing moves."""
    shelf = chat.memory.shelf
    active, found = shelf.active, []
    for number in range(len(shelf)):
        found.append(state(shelf.activate(number).fork()))
    if active is None:
        shelf.rest()
    else:
        shelf.activate(active)
    return found


def logits(engine: Engine, cache: SequenceCache, text: str) -> torch.Tensor:
    ids = engine.scribe.question(text)
    return engine.loaded.decoder.predict([Row(cache, ids)], Mode.SCRATCH, [len(ids) - 1])


def raising(error: type[BaseException]) -> Callable[[str], None]:
    def on_text(text: str) -> None:
        raise error(text)

    return on_text


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def within(chat: Chat, room: int = 0) -> bool:
    figures = chat.figures
    most = figures.budget_tokens + figures.block_tokens + room
    return all(view.entries_per_head <= most for view in chat.episodes)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_first_turn_says_what_asking_says(loaded: Loaded, policy: str) -> None:
    engine = under(loaded, POLICIES[policy])
    question = "What is dog number 3 called?"
    asked = engine.ask(engine.read(HISTORY), question, max_new_tokens=12)
    said = Chat(engine, history=HISTORY).say(question, max_new_tokens=12)
    assert (said.text, said.ids, said.episode) == (asked.text, asked.ids, asked.episode)


@pytest.mark.parametrize("max_new_tokens", [1, 3, 24], ids=["one", "cut", "ended"])
def test_the_whole_turn_is_read_to_its_end(engine: Engine, max_new_tokens: int) -> None:
    memory = engine.read(HISTORY)
    chat = Chat(engine, history=HISTORY)
    answer = chat.say("What is dog number 3 called?", max_new_tokens=max_new_tokens)
    [turn] = chat.turns
    closing = engine.scribe.closing()
    assert turn.ids == engine.scribe.question(answer.question) + answer.ids + closing
    cache, _ = memory.recall(answer.question)
    engine.loaded.decoder.read([Row(cache, turn.ids)], Mode.APPEND)
    mine = chat.memory.shelf.activate(answer.episode or 0)
    assert mine.next_position == cache.next_position == chat.figures.log_tokens
    assert mine.lengths() == cache.lengths()
    theirs = logits(engine, cache, "And the car?")
    assert torch.allclose(logits(engine, mine, "And the car?"), theirs, atol=1e-4)


def test_a_turn_behind_nothing_opens_the_conversation(engine: Engine) -> None:
    chat = Chat(engine)
    chat.say("My dog is called Rex.", max_new_tokens=8)
    chat.say("And my dog is old.", max_new_tokens=8)
    said = [
        Message(role, content)
        for turn in chat.turns
        for role, content in (("user", turn.question), ("assistant", turn.answer))
    ]
    ids = tuple(token for turn in chat.turns for token in turn.ids)
    assert ids == engine.scribe.write(Conversation("same", tuple(said))).ids


def test_what_was_appended_comes_back_when_the_topic_does(engine: Engine) -> None:
    chat = Chat(engine, history=HISTORY)
    dogs = chat.say("My dog eats apples.", max_new_tokens=6).episode
    assert dogs is not None
    left = chat.memory.shelf.activate(dogs).fork()
    before = state(left.fork())
    cars = chat.say("The car is slow.", max_new_tokens=6)
    assert cars.episode != dogs and chat.figures.write_backs == 1
    assert chat.memory.shelf.active == cars.episode
    back = chat.memory.shelf.activate(dogs)
    assert same(state(back.fork()), before)
    for text in ("What does my dog eat?", "Thank you."):
        assert torch.equal(logits(engine, back, text), logits(engine, left, text))
        ids = engine.scribe.question(text)
        for cache in (back, left):
            engine.loaded.decoder.read([Row(cache, ids)], Mode.APPEND)


def test_one_cache_is_active_and_all_bytes_are_counted(engine: Engine) -> None:
    chat = Chat(engine, history=HISTORY)
    for text in ("My dog eats.", "The car is slow.", "A dog again."):
        chat.say(text, max_new_tokens=6)
        views, figures = chat.episodes, chat.figures
        assert sum(view.is_active for view in views) == 1
        assert figures.kv_bytes == sum(view.kv_bytes for view in views)
        assert figures.active_kv_bytes == next(v.kv_bytes for v in views if v.is_active)
        assert figures.active_kv_bytes == chat.memory.shelf.activate(active(chat)).nbytes
        assert figures.peak_kv_bytes >= figures.kv_bytes
        entries = [tensor for found in states(chat) for tensor in found.values()]
        held = sum(t.nbytes for t in entries if isinstance(t, torch.Tensor))
        assert 0 <= figures.kv_bytes - held < 1000, "beyond the entries there is only bookkeeping"


def active(chat: Chat) -> int:
    [view] = [view for view in chat.episodes if view.is_active]
    return view.number


def test_a_new_topic_is_answered_by_the_nearest_episode_and_then_has_its_own(
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


def test_a_new_episode_holds_the_first_tokens_and_the_turn_as_it_was_read(engine: Engine) -> None:
    twin = engine.read(HISTORY)
    chat = Chat(engine, history=HISTORY)
    answer = chat.say("A star is far away.", max_new_tokens=6)
    cache, _ = twin.recall(answer.question)
    mark = cache.next_position
    engine.loaded.decoder.read([Row(cache, chat.turns[0].ids)], Mode.APPEND)
    opened = chat.memory.shelf.activate(2)
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


def test_without_enough_said_no_topic_is_new(engine: Engine) -> None:
    chat = Chat(engine)
    for text in ("My dog is old.", "The star is far."):
        chat.say(text, max_new_tokens=4)
    assert len(chat.episodes) == 1 and chat.figures.opened == 0


def test_a_cache_beyond_its_bound_is_read_anew(engine: Engine) -> None:
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


def test_a_chat_from_nothing_finds_its_topics_when_it_has_grown(engine: Engine) -> None:
    chat = Chat(engine)
    for n in range(20):
        chat.say(("My dog", "The car")[n % 2] + f" is number {n}.", max_new_tokens=6)
        if chat.figures.refreshes:
            break
    assert [view.segments for view in chat.episodes] == [(n + 2) // 2, (n + 1) // 2]
    assert all(view.next_position == chat.figures.log_tokens for view in chat.episodes)
    assert within(chat)


@pytest.mark.parametrize("policy", ["episodes", "single"])
def test_a_chat_that_comes_back_is_as_if_read_anew(loaded: Loaded, policy: str) -> None:
    engine = under(loaded, POLICIES[policy])
    chat = Chat(engine, "mine")
    while not chat.figures.refreshes:
        chat.say(f"My dog and the car are {len(chat.turns)} years old.", max_new_tokens=6)
    back = Chat(engine, "mine")
    assert back.turns == chat.turns and back.figures.log_tokens == chat.figures.log_tokens
    assert back.former_policy == str(chat.policy) == str(back.policy)
    assert all(same(a, b) for a, b in zip(states(back), states(chat), strict=True))
    said = [engine.ask(each.memory, "What is old?", max_new_tokens=6) for each in (back, chat)]
    assert said[0].ids == said[1].ids
    kept = SessionFile("mine").load()
    assert kept is not None and kept.log.exchanges == chat.turns


def test_an_interrupted_refresh_leaves_the_old_memory_and_is_made_up_for(engine: Engine) -> None:
    calls: list[int] = []

    def progress(done: int, total: int) -> None:
        calls.append(done)
        if stop and done > BLOCK:
            raise KeyboardInterrupt

    stop = False
    chat = Chat(engine, "mine", history=HISTORY, progress=progress)
    stop = True
    with pytest.raises(KeyboardInterrupt):
        while True:
            turns, memory = chat.turns, chat.memory
            chat.say("My dog is big and my dog is old.", max_new_tokens=6)
    assert len(chat.turns) == len(turns) + 1, "the turn was finished before the refresh"
    assert chat.figures.refreshes == 0 and not within(chat)
    assert within(chat, len(chat.turns[-1].ids))
    assert len(SessionFile("mine").load().log.exchanges) == len(chat.turns)  # pyright: ignore
    assert chat.memory.router.prompts() == memory.router.prompts()
    stop = False
    heard: list[int] = []
    chat.say("My dog?", on_text=lambda _: heard.append(chat.figures.refreshes), max_new_tokens=6)
    assert heard[0] == 1, "the refresh comes before the next answer"
    assert chat.figures.refreshes == 1 and within(chat)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("topic", ["dog", "star"])
def test_an_interrupted_turn_is_undone(
    engine: Engine, error: type[BaseException], topic: str
) -> None:
    chat = Chat(engine, "mine", history=HISTORY)
    chat.say("My dog is old.", max_new_tokens=6)
    before, turns = states(chat), chat.turns
    file = session_path("mine").read_bytes()
    with pytest.raises(error):
        chat.say(f"Tell me of the {topic}.", on_text=raising(error), max_new_tokens=6)
    assert chat.turns == turns and session_path("mine").read_bytes() == file
    assert all(same(a, b) for a, b in zip(states(chat), before, strict=True))


def test_a_turn_that_cannot_be_filed_or_kept_is_undone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = Chat(engine, "mine", history=HISTORY)
    before = states(chat)
    with monkeypatch.context() as patch:
        patch.setattr(NearestEpisode, "file", interrupt)
        with pytest.raises(KeyboardInterrupt):
            chat.say("Tell me of the star.", max_new_tokens=6)
    session_path("mine").parent.mkdir(parents=True)
    session_path("mine").write_text("someone else's")
    with pytest.raises(InputError, match="changed by someone else"):
        chat.say("Tell me of the star.", max_new_tokens=6)
    assert chat.turns == () and len(chat.episodes) == 2
    assert all(same(a, b) for a, b in zip(states(chat), before, strict=True))
    assert session_path("mine").read_text() == "someone else's"


def test_sliding_windows_come_back_whole_from_an_interrupted_turn(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tiny("gemma3", layers=3)
    module.resize_token_embeddings(len(loaded.tokenizer), mean_resizing=False)
    engine = under(Loaded(adopt(module), loaded.tokenizer, "tiny"), EPISODES)
    engine.stops = frozenset()
    chat, twin = Chat(engine, history=HISTORY), Chat(engine, history=HISTORY)
    for each in (chat, twin):
        each.say("My dog is old.", max_new_tokens=4)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Chat, "_finish", interrupt)  # 40 tokens are through: five windows
        chat.say("Tell me of the dog.", max_new_tokens=40)
    assert all(same(a, b) for a, b in zip(states(chat), states(twin), strict=True))
    said = [each.say("A star is far.", max_new_tokens=12) for each in (chat, twin)]
    assert said[0].ids == said[1].ids
    assert all(same(a, b) for a, b in zip(states(chat), states(twin), strict=True))


def test_the_file_is_written_after_every_turn(engine: Engine) -> None:
    chat = Chat(engine, "mine", history=HISTORY)
    assert not session_path("mine").exists()
    for count in (1, 2):
        chat.say("My dog is old.", max_new_tokens=6)
        record = json.loads(session_path("mine").read_text(encoding="utf-8"))
        assert len(record["turns"]) == count
    assert record["policy"] == str(chat.policy)
    assert record["model"]["fingerprint"] == engine.loaded.decoder.spec.fingerprint
    assert len(record["history"]["messages"]) == len(HISTORY.messages)


def test_a_session_of_another_model_is_not_gone_on_with(engine: Engine) -> None:
    Chat(engine, "mine").say("My dog is old.", max_new_tokens=4)
    path = session_path("mine")
    record = json.loads(path.read_text(encoding="utf-8"))
    record["model"] = {"name": "other/model", "fingerprint": "0"}
    path.write_text(json.dumps(record), encoding="utf-8")
    before = path.read_bytes()
    with pytest.raises(InputError, match="--model other/model") as caught:
        Chat(engine, "mine")
    assert str(path) in str(caught.value) and path.read_bytes() == before


def test_a_session_keeps_its_history(engine: Engine) -> None:
    Chat(engine, "mine", history=HISTORY).say("My dog is old.", max_new_tokens=4)
    assert Chat(engine, "mine").history == HISTORY
    assert len(Chat(engine, "mine", history=HISTORY).turns) == 1
    with pytest.raises(UsageError, match="another history"):
        Chat(engine, "mine", history=replace(HISTORY, messages=HISTORY.messages[:2]))


def test_a_chat_without_a_name_leaves_nothing(engine: Engine, larder_home: Path) -> None:
    Chat(engine).say("My dog is old.", max_new_tokens=4)
    assert not larder_home.exists()


@pytest.mark.parametrize("text", ["", " \n", "dog " * 200, "half a \ud83d"])
def test_messages_that_cannot_be_said(engine: Engine, text: str) -> None:
    chat = Chat(engine, history=HISTORY)
    with pytest.raises(InputError):
        chat.say(text)
    assert chat.turns == () and within(chat)


def test_a_policy_that_must_know_its_question_cannot_chat(loaded: Loaded) -> None:
    with pytest.raises(UsageError, match="question"):
        Chat(under(loaded, "exact_question"))


@settings(max_examples=4)
@given(
    st.lists(
        st.tuples(st.sampled_from(["dog", "car", "sea", "star"]), st.integers(1, 9)),
        min_size=4,
        max_size=10,
    )
)
def test_the_bound_holds_after_every_turn(engine: Engine, said: list[tuple[str, int]]) -> None:
    chat = Chat(engine)
    for topic, length in said:
        chat.say(f"The {topic} " * length, max_new_tokens=4)
        assert within(chat)
        spec = engine.loaded.decoder.spec
        heads = sum(layer.kv_heads for layer in spec.managed)
        turn = len(chat.turns[-1].ids)
        assert chat.figures.peak_entries <= heads * (BUDGET + BLOCK + turn) + heads * BLOCK
        assert max(v.next_position for v in chat.episodes) <= chat.figures.log_tokens
