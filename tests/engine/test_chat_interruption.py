"""Chats that are interrupted, refused, or come back: what is undone and what survives."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from chats import (
    BLOCK,
    BUDGET,
    EPISODES,
    HISTORY,
    POLICIES,
    interrupt,
    raising,
    same,
    states,
    under,
    within,
)
from larder import Chat, Engine
from larder.core import InputError, UsageError
from larder.models import LoadedModel, wrap_model
from larder.session import ChatLogFile, NearestEpisodeRouter, chat_log_path
from tiny_models import tiny

pytestmark = pytest.mark.usefixtures("read_once")


@pytest.mark.extended
@pytest.mark.parametrize("policy", ["episodes", "single"])
def test_resumed_chat_answers_as_the_original_one(loaded: LoadedModel, policy: str) -> None:
    engine = under(loaded, POLICIES[policy])
    chat = Chat(engine, "mine")
    while not chat.figures.refreshes:
        chat.say(f"My dog and the car are {len(chat.turns)} years old.", max_new_tokens=6)
        if policy == "single" and chat.figures.log_tokens > BUDGET // 2:
            break  # one cache is never refreshed; this one has not been cut down yet
    back = Chat(engine, "mine")
    assert back.turns == chat.turns and back.figures.log_tokens == chat.figures.log_tokens
    assert back.former_policy == str(chat.policy) == str(back.policy)
    if policy == "episodes":  # which were read again just now
        assert all(same(a, b) for a, b in zip(states(back), states(chat), strict=True))
    answers = [engine.ask(each.memory, "What is old?", max_new_tokens=6) for each in (back, chat)]
    assert answers[0].ids == answers[1].ids
    kept = ChatLogFile("mine").load()
    assert kept is not None and kept.log.turns == chat.turns


@pytest.mark.extended
def test_interrupted_refresh_is_completed_by_the_next_turn(engine: Engine) -> None:
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
    assert chat.figures.refreshes == 0 and within(chat), "the old memory stays within its budget"
    assert len(ChatLogFile("mine").load().log.turns) == len(chat.turns)  # pyright: ignore
    assert chat.memory.router.prompts() == memory.router.prompts()
    stop = False
    heard: list[int] = []
    chat.say("My dog?", on_text=lambda _: heard.append(chat.figures.refreshes), max_new_tokens=6)
    assert heard[0] == 1, "the refresh comes before the next answer"
    assert chat.figures.refreshes == 1 and within(chat)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("topic", ["dog", "star"])
def test_interrupted_turn_is_undone(engine: Engine, error: type[BaseException], topic: str) -> None:
    chat = Chat(engine, "mine", history=HISTORY)
    chat.say("My dog is old.", max_new_tokens=6)
    before, turns = states(chat), chat.turns
    file = chat_log_path("mine").read_bytes()
    with pytest.raises(error):
        chat.say(f"Tell me of the {topic}.", on_text=raising(error), max_new_tokens=6)
    assert chat.turns == turns and chat_log_path("mine").read_bytes() == file
    assert all(same(a, b) for a, b in zip(states(chat), before, strict=True))


def test_turn_that_cannot_be_assigned_or_saved_is_undone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = Chat(engine, "mine", history=HISTORY)
    before = states(chat)
    with monkeypatch.context() as patch:
        patch.setattr(NearestEpisodeRouter, "assign_turn", interrupt)
        with pytest.raises(KeyboardInterrupt):
            chat.say("Tell me of the star.", max_new_tokens=6)
    chat_log_path("mine").parent.mkdir(parents=True)
    chat_log_path("mine").write_text("someone else's")
    with pytest.raises(InputError, match="changed by someone else"):
        chat.say("Tell me of the star.", max_new_tokens=6)
    assert chat.turns == () and len(chat.episodes) == 2
    assert all(same(a, b) for a, b in zip(states(chat), before, strict=True))
    assert chat_log_path("mine").read_text() == "someone else's"


@pytest.mark.extended
def test_interrupted_turn_restores_sliding_windows(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tiny("gemma3", layers=3)
    module.resize_token_embeddings(len(loaded.tokenizer), mean_resizing=False)
    engine = under(LoadedModel(wrap_model(module), loaded.tokenizer, "tiny"), EPISODES)
    engine.stop_ids = frozenset()
    chat, twin = Chat(engine, history=HISTORY), Chat(engine, history=HISTORY)
    for each in (chat, twin):
        each.say("My dog is old.", max_new_tokens=4)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Chat, "_read_rest", interrupt)  # 40 tokens are through: five windows
        chat.say("Tell me of the dog.", max_new_tokens=40)
    assert all(same(a, b) for a, b in zip(states(chat), states(twin), strict=True))
    answers = [each.say("A star is far.", max_new_tokens=12) for each in (chat, twin)]
    assert answers[0].ids == answers[1].ids
    assert all(same(a, b) for a, b in zip(states(chat), states(twin), strict=True))


def test_file_is_written_after_every_turn(engine: Engine) -> None:
    chat = Chat(engine, "mine", history=HISTORY)
    assert not chat_log_path("mine").exists()
    for count in (1, 2):
        chat.say("My dog is old.", max_new_tokens=6)
        record = json.loads(chat_log_path("mine").read_text(encoding="utf-8"))
        assert len(record["turns"]) == count
    assert record["policy"] == str(chat.policy)
    assert record["model"]["fingerprint"] == engine.loaded.decoder.spec.fingerprint
    assert len(record["history"]["messages"]) == len(HISTORY.messages)


def test_session_of_another_model_is_refused(engine: Engine) -> None:
    Chat(engine, "mine").say("My dog is old.", max_new_tokens=4)
    path = chat_log_path("mine")
    record = json.loads(path.read_text(encoding="utf-8"))
    record["model"] = {"name": "other/model", "fingerprint": "0"}
    path.write_text(json.dumps(record), encoding="utf-8")
    before = path.read_bytes()
    with pytest.raises(InputError, match="take that model, or another session name") as caught:
        Chat(engine, "mine")
    assert str(path) in str(caught.value) and path.read_bytes() == before


@pytest.mark.extended
def test_session_keeps_its_history(engine: Engine) -> None:
    Chat(engine, "mine", history=HISTORY).say("My dog is old.", max_new_tokens=4)
    assert Chat(engine, "mine").history == HISTORY
    assert len(Chat(engine, "mine", history=HISTORY).turns) == 1
    with pytest.raises(UsageError, match="another history"):
        Chat(engine, "mine", history=replace(HISTORY, messages=HISTORY.messages[:2]))


def test_unnamed_chat_writes_no_files(engine: Engine, larder_home: Path) -> None:
    Chat(engine).say("My dog is old.", max_new_tokens=4)
    assert not larder_home.exists()


@pytest.mark.parametrize("text", ["", " \n", "dog " * 200, "half a \ud83d"])
def test_invalid_messages_are_refused(engine: Engine, text: str) -> None:
    chat = Chat(engine, history=HISTORY)
    with pytest.raises(InputError):
        chat.say(text)
    assert chat.turns == () and within(chat)


def test_question_aware_policy_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(UsageError, match="question"):
        Chat(under(loaded, "exact_question"))
