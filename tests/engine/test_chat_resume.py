"""Chats that are restored, forked and rolled back: they go on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from chats import EPISODES, HISTORY, POLICIES, logits, same, states, under, within
from larder import Chat, Engine
from larder.core import BadParameter, UsageError
from larder.engine import StorePersistence
from larder.models import LoadedModel
from larder.session import ChatCache, chat_log_path
from larder.store import Store

pytestmark = pytest.mark.usefixtures("read_once")
STEPWISE = POLICIES["single"] + " > every_step()"


@pytest.fixture
def keeper(tmp_path: Path, loaded: LoadedModel) -> Iterator[StorePersistence]:
    store = Store(str(tmp_path / "store"), tmp_path)
    yield StorePersistence(store, loaded)
    store.close()


def equal(one: Chat, other: Chat) -> bool:
    alike = all(same(a, b) for a, b in zip(states(one), states(other), strict=True))
    routers = [each.memory.router.to_record() for each in (one, other)]
    return alike and one.turns == other.turns and routers[0] == routers[1]


@pytest.mark.extended
@pytest.mark.parametrize(
    "policy", [EPISODES, STEPWISE, "full"], ids=["episodes", "stepwise", "full"]
)
def test_restored_chat_continues_as_the_saved_one(
    loaded: LoadedModel, keeper: StorePersistence, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = under(loaded, policy)
    chat = Chat(engine, "mine", HISTORY, keeper=keeper)
    chat.say("My dog is old.", max_new_tokens=4)
    chat.say("A sea and a star.", max_new_tokens=4)
    assert chat.keep() == ""
    monkeypatch.setattr(ChatCache, "prefill", lambda *_: pytest.fail("read again"))
    back = Chat(engine, "mine", keeper=keeper)
    assert back.resumed.tokens == chat.figures.log_tokens and equal(back, chat)
    assert back.figures.opened == chat.figures.opened
    del chat._log_store  # only one of the two may write the file
    back.say("The star is far.", max_new_tokens=4)
    again = Chat(engine, "mine", keeper=keeper)
    assert again.turns == back.turns and len(again.episodes) == len(back.episodes)
    for number in range(len(back.episodes)):
        one, other = (
            logits(engine, each.memory.caches.activate(number), "Far?") for each in (back, again)
        )
        # What is decided token by token differs from what is decided for a turn at once.
        assert policy == STEPWISE or torch.allclose(one, other, atol=1e-3), "the turn is read"


@pytest.mark.extended
def test_damaged_state_is_recomputed(
    engine: Engine, keeper: StorePersistence, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = Chat(engine, "mine", HISTORY, keeper=keeper)
    chat.say("My dog is old.", max_new_tokens=4)
    for wrong in (b"[]", b'{"schema": 1, "turns": 9}'):
        with monkeypatch.context() as patch:
            name = "larder.engine.store_persistence.chat_state_record"
            patch.setattr(name, lambda state, wrong=wrong: wrong)
            assert chat.keep() == ""
        back = Chat(engine, "mine", keeper=keeper)
        assert back.resumed.reason == "damaged" and back.turns == chat.turns


@pytest.mark.extended
def test_fork_does_not_change_its_source(engine: Engine) -> None:
    chat = Chat(engine, "mine", HISTORY)
    chat.say("My dog is old.", max_new_tokens=4)
    before, file = states(chat), chat_log_path("mine").read_bytes()
    side = chat.fork()
    assert equal(side, chat)
    side.say("Name my dog.", max_new_tokens=4)
    assert chat_log_path("mine").read_bytes() == file and len(chat.turns) == 1
    assert all(same(a, b) for a, b in zip(states(chat), before, strict=True))
    named = side.fork("other")
    assert Chat(engine, "other").turns == named.turns == side.turns
    with pytest.raises(UsageError, match="'mine' exists already"):
        side.fork("mine")


@pytest.mark.extended
@pytest.mark.parametrize(
    "policy", [EPISODES, STEPWISE, POLICIES["full"]], ids=["episodes", "stepwise", "full"]
)
def test_rolled_back_turns_leave_no_trace(loaded: LoadedModel, policy: str) -> None:
    engine = under(loaded, policy)
    chat = Chat(engine, "mine", HISTORY)
    chat.say("My dog is old.", max_new_tokens=4)
    one = chat.fork()
    chat.say("My dog is big.", max_new_tokens=4)
    chat.say("A car is red.", max_new_tokens=4)
    chat.roll_back(2)
    assert chat.turns == one.turns == Chat(engine, "mine").turns
    assert policy != "full" or equal(chat, one), "cut off, not read again"
    assert within(chat)
    chat.roll_back(0)
    assert chat.turns == one.turns
    chat.say("My dog is big.", max_new_tokens=4)
    assert len(Chat(engine, "mine").turns) == 2
    with pytest.raises(BadParameter, match="0 to 2"):
        chat.roll_back(3)


@pytest.mark.extended
def test_rollback_removes_a_new_episode(engine: Engine) -> None:
    chat = Chat(engine, "mine", HISTORY)
    chat.say("A sea and a star.", max_new_tokens=4)
    assert chat.figures.opened == 1 and len(chat.episodes) == 3
    chat.roll_back()
    assert len(chat.episodes) == 2 and equal(chat, Chat(engine, None, HISTORY))
