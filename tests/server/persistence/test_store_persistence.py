"""Conversations over server restarts."""

from __future__ import annotations

from pathlib import Path

import pytest

from larder.core import StoreFull
from larder.models import LoadedModel
from larder.server import MAX_CANDIDATES, ApiError, ChatMessage, StoreSessionPersistence
from larder.store import Store
from server_core import Served, answered, box_question, user


def kept_in(folder: Path, loaded: LoadedModel) -> StoreSessionPersistence:
    store = Store(str(folder / "blobs"), folder / "home")
    return StoreSessionPersistence(store, loaded.decoder.spec)


def talk(served: Served, session: str = "x") -> list[ChatMessage]:
    turns = box_question(1)
    turns = answered(turns, served.ask(turns, session), "Why?")
    return answered(turns, served.ask(turns, session), "Sure?")


@pytest.mark.failure(number=8)
@pytest.mark.extended
def test_conversation_continues_after_a_restart(small: LoadedModel, tmp_path: Path) -> None:
    turns = talk(Served(small, "limited", persistence=kept_in(tmp_path, small)))
    other = Served(small, "limited")
    talk(other)
    again = Served(small, "limited", persistence=kept_in(tmp_path, small))
    last = again.ask(turns, "x")
    assert last.text == other.ask(turns, "x").text
    assert last.result.session == "x" and last.result.recomputed_tokens > 0
    third = Served(small, "limited", persistence=kept_in(tmp_path, small))
    assert third.ask([user("Yes?")], follows="x").result.new_tokens
    assert len(third.core.find("a", "x").turns) == 4
    with pytest.raises(ApiError):
        third.core.find("b", "x")


def test_forks_are_restored_with_their_session(small: LoadedModel, tmp_path: Path) -> None:
    served = Served(small, persistence=kept_in(tmp_path, small))
    talk(served)
    fork = served.ask(box_question(2), "x")
    again = Served(small, persistence=kept_in(tmp_path, small))
    more = answered(box_question(2), fork, "Why?")
    assert again.ask(more, "x").result.session == fork.result.session == "x~2"


@pytest.mark.failure(number=20)
def test_concurrent_writers_of_a_session_conflict(small: LoadedModel, tmp_path: Path) -> None:
    first = Served(small, persistence=kept_in(tmp_path, small))
    turns = talk(first)
    second = Served(small, persistence=kept_in(tmp_path, small))
    second.ask(turns, "x")
    late, _ = first.submit(turns[:-1] + [user("Or not?")], "x")
    first.run()
    assert isinstance(late.error, ApiError) and late.error.status == 409
    assert len(first.core.find("a", "x").turns) == 3  # what the other has written
    assert first.ask(turns, "x").result.session == "x"
    assert len(stored_turns(small, tmp_path)) == 3


def stored_turns(small: LoadedModel, folder: Path) -> list[object]:
    return list(Served(small, persistence=kept_in(folder, small)).core.find("a", "x").turns)


@pytest.mark.failure(number=21)
def test_removed_session_is_not_found_after_a_restart(small: LoadedModel, tmp_path: Path) -> None:
    served = Served(small, persistence=kept_in(tmp_path, small))
    talk(served)
    [gone] = served.core.remove("a", "x")
    assert gone.result(30) is None
    again = Served(small, persistence=kept_in(tmp_path, small))
    with pytest.raises(ApiError):
        again.core.find("a", "x")
    talk(again)
    assert len(stored_turns(small, tmp_path)) == 2


@pytest.mark.failure(number=4)
def test_full_disk_does_not_stop_answers(
    small: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    persistence = kept_in(tmp_path, small)
    served = Served(small, persistence=persistence)

    def full(*args: object, **kwargs: object) -> None:
        raise StoreFull("The disk is full: remove something.")

    with monkeypatch.context() as patch:
        patch.setattr(persistence._store.sessions, "append", full)
        turns = talk(served)
    assert persistence._store.parts.unwritten.counts() == {"full": 2}
    served.ask(turns, "x")
    assert len(stored_turns(small, tmp_path)) == 3


@pytest.mark.extended
def test_session_is_found_among_many_with_the_same_prefix(
    small: LoadedModel, tmp_path: Path
) -> None:
    served = Served(small, persistence=kept_in(tmp_path, small))
    texts = {}
    for name in (f"n{number:02}" for number in range(12)):
        turns = answered(
            box_question(1), served.ask(box_question(1), name), f"This is {name}, right?"
        )
        texts[name] = answered(turns, served.ask(turns, name), "Sure?")
    again = Served(small, persistence=kept_in(tmp_path, small))
    for name in ("n11", "n00", "n08"):
        assert again.ask(texts[name]).result.session == name  # others are in memory by now
        assert len(again.core.sessions) <= 1 + MAX_CANDIDATES


def test_removed_session_is_no_candidate(small: LoadedModel, tmp_path: Path) -> None:
    persistence, other = kept_in(tmp_path, small), kept_in(tmp_path, small)
    served = Served(small, persistence=persistence)
    turns = talk(served)
    talk(served, "y")
    for each in (persistence, other):
        assert set(each.candidates("a", turns)) == {"x", "y"}
    [gone] = served.core.remove("a", "x")
    assert gone.result(30) is None
    assert list(persistence.candidates("a", turns)) == ["y"]
    assert other.load("a", "x") is None
    assert list(other.candidates("a", turns)) == ["y"]
