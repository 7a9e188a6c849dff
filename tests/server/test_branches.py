"""Branches of sessions: names, lookup and removal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from larder.core import StoreSlow, root_name
from larder.models import LoadedModel
from larder.server import (
    MAX_CANDIDATES,
    ApiError,
    ChatMessage,
    LocalEngineClient,
    Request,
    StoreSessionPersistence,
)
from server_core import LIMITED, answered, box_question, user
from server_engine_clients import SLOW, Waiting, ask, failing, flip, hub_in


def names(hub: LocalEngineClient) -> set[str]:
    return {view.name for view in hub.sessions("a")}


def branched(folder: Path, loaded: LoadedModel, count: int = 3) -> None:
    with hub_in(folder, loaded) as hub:
        made = [
            ask(hub, box_question(number), "x").result.session for number in range(1, count + 1)
        ]
        assert made == ["x", *(f"x~{number}" for number in range(2, count + 1))]


@pytest.mark.extended
@pytest.mark.parametrize("gone", ["x", "x~2"])
def test_branch_continues_after_an_earlier_one_is_removed(
    small: LoadedModel, tmp_path: Path, gone: str
) -> None:
    branched(tmp_path, small)
    with hub_in(tmp_path, small) as hub:
        hub.remove("a", gone)
    with hub_in(tmp_path, small) as hub:
        assert ask(hub, box_question(3), "x").result.session == "x~3"  # the very same question
        new = ask(hub, box_question(4), "x").result.session
        assert new == (gone if gone == "x" else "x~4")
    with hub_in(tmp_path, small) as hub:
        expected = "x~5" if gone == "x~2" else "x~4"
        assert ask(hub, box_question(5), "x").result.session == expected
        assert ask(hub, box_question(3), "x").result.session == "x~3"


def test_branch_loaded_first_does_not_hide_others(small: LoadedModel, tmp_path: Path) -> None:
    branched(tmp_path, small)
    with hub_in(tmp_path, small) as hub:
        hub.session("a", "x~2")
        assert ask(hub, box_question(3), "x").result.session == "x~3"
        assert ask(hub, box_question(1), "x~2").result.session == "x"
        assert ask(hub, box_question(4), "x").result.session == "x~4"
        assert hub.fork("a", "x").name == "x~5"


@pytest.mark.parametrize("damaged", ["x", "x~2"])
def test_unreadable_branches_are_removed_with_their_session(
    small: LoadedModel, tmp_path: Path, damaged: str
) -> None:
    branched(tmp_path, small)
    with hub_in(tmp_path, small) as hub:
        hub.fork("a", "x~3", "y~backup")
        hub.fork("a", "x~3", "x~backup")
    flip(tmp_path, small, damaged)
    with hub_in(tmp_path, small) as hub:
        with pytest.raises(ApiError):
            hub.session("a", damaged)
        assert hub.remove("a", "x", branches=True) == ()
        assert names(hub) == {"y~backup", "x~backup"}


@pytest.mark.extended
def test_removal_lists_unreadable_remaining_branches(small: LoadedModel, tmp_path: Path) -> None:
    branched(tmp_path, small)
    flip(tmp_path, small, "x~2")
    with hub_in(tmp_path, small) as hub:
        assert set(hub.remove("a", "x")) == {"x~2", "x~3"}
        assert names(hub) == {"x~2", "x~3"}
        hub.remove("a", "x~2")
        hub.remove("a", "x~3")
        assert names(hub) == set()
    assert not list((tmp_path / "blobs" / "families").rglob("*.json"))


def test_branch_of_a_resident_session_avoids_stored_names(
    small: LoadedModel, tmp_path: Path
) -> None:
    branched(tmp_path, small)
    with hub_in(tmp_path, small) as hub:
        hub.session("a", "x")  # it alone is in memory
        # Asked as before, but for as many tokens as never before.
        again = ask(hub, box_question(1), "x", new=5)
        assert again.result.session == "x~4"


def test_unnamed_branch_avoids_stored_names(small: LoadedModel, tmp_path: Path) -> None:
    with hub_in(tmp_path, small) as hub:
        first = answered(box_question(1), ask(hub, box_question(1), "x"), "Why?")
        ask(hub, first, "x")
        assert ask(hub, box_question(2), "x").result.session == "x~2"
    with hub_in(tmp_path, small) as hub:
        assert ask(hub, [*first[:-1], user("How?")]).result.session == "x~3"


def ask_exactly(hub: LocalEngineClient, turns: list[ChatMessage], name: str) -> str:
    client = Waiting()
    hub.submit(Request("a", tuple(turns), name, exact=True, max_new_tokens=2), client)
    assert client.over.wait(30)
    return client.result.session


def test_exact_branch_has_its_own_name(small: LoadedModel, tmp_path: Path) -> None:
    with hub_in(tmp_path, small, policy=LIMITED) as hub:
        first = ask(hub, box_question(1), "x")
        for number, more in enumerate(("Why?", "How?"), start=2):
            told_more = answered(box_question(1), first, more)
            assert ask_exactly(hub, told_more, "x") == f"x~{number}"
    with hub_in(tmp_path, small, policy=LIMITED) as hub:
        hub.session("a", "x")  # it alone, without its branches
        assert ask_exactly(hub, answered(box_question(1), first, "Where?"), "x") == "x~4"


@pytest.mark.extended
def test_branch_of_an_unnamed_session_has_its_own_name(small: LoadedModel, tmp_path: Path) -> None:
    with hub_in(tmp_path, small) as hub:
        first = ask(hub, box_question(1))
        root = first.result.session
        texts = [
            answered(box_question(1), first, f"Why {number}?")
            for number in range(MAX_CANDIDATES + 4)
        ]
        made = [ask(hub, text) for text in texts]
        assert len({each.result.session for each in made}) == len(texts)
        for text, each in zip(texts[:MAX_CANDIDATES], made, strict=False):  # those that began first
            ask(hub, answered(text, each, "Sure?"))
    with hub_in(tmp_path, small) as hub:
        new = ask(hub, answered(box_question(1), first, "Where?")).result.session
        assert root_name(new) == root and new not in {each.result.session for each in made}


def test_concurrent_identical_question_makes_a_branch(small: LoadedModel, tmp_path: Path) -> None:
    with hub_in(tmp_path, small) as hub:
        first = ask(hub, box_question(1))
        root = first.result.session
        ask(hub, answered(box_question(1), first, "Why?"))
        assert ask(hub, answered(box_question(1), first, "How?")).result.session == f"{root}~2"
    with hub_in(tmp_path, small) as hub:
        turns = [*hub.session("a", root).turns, user("And?")]
        [held] = hub.context.core.sessions
        held.usage.is_answering = True  # the same question, for somebody else
        assert ask(hub, turns).result.session == f"{root}~3"
        held.usage.is_answering = False
        assert ask(hub, turns).result.session == f"{root}~3"


@pytest.mark.extended
@pytest.mark.parametrize("damaged", ["x~2", "x~4"])
def test_fork_avoids_the_names_of_unreadable_branches(
    small: LoadedModel, tmp_path: Path, damaged: str
) -> None:
    branched(tmp_path, small, 4)
    flip(tmp_path, small, damaged)
    with hub_in(tmp_path, small) as hub:
        name = hub.fork("a", "x").name
        assert name == "x~5"
        assert ask(hub, box_question(7), "x").result.session == "x~6"
    with hub_in(tmp_path, small) as hub:
        assert hub.session("a", name).turns == hub.session("a", "x").turns


def test_branch_removal_with_an_unreadable_family_is_a_503(
    small: LoadedModel, tmp_path: Path
) -> None:
    branched(tmp_path, small)
    with hub_in(tmp_path, small) as hub:
        assert isinstance(hub.context.persistence, StoreSessionPersistence)
        with failing(hub.context.persistence._store.sessions, "branches", SLOW):
            with pytest.raises(ApiError, match="branches of session") as refused:
                hub.remove("a", "x", branches=True)
            assert refused.value.status == 503
            assert names(hub) == {"x", "x~2", "x~3"}
            assert ask(hub, box_question(1), "y").result.session == "y"  # who asks is answered
        assert hub.stats().passed_over == {"session_unreadable": 1}
        assert hub.remove("a", "x", branches=True) == ()
        assert names(hub) == {"y"}


def calls(hub: LocalEngineClient, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Calls to the model's thread from now on."""
    made, call = list[object](), hub.context.thread.call

    def counted(work: Callable[[], object]) -> object:
        made.append(work)
        return call(work)

    monkeypatch.setattr(hub.context.candidates, "_call", counted)
    monkeypatch.setattr(hub.context.thread, "call", counted)
    return made


def test_requests_make_a_bounded_number_of_calls_to_the_model_thread(
    small: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_in(tmp_path, small) as hub:
        first = ask(hub, box_question(1), "x")
        made = calls(hub, monkeypatch)
        for name, turns, most in (
            ("x", answered(box_question(1), first, "Why?"), 1),  # it goes on
            ("new", box_question(1), 4),
            ("x", box_question(3), 4),  # a branch
            (None, box_question(4), 4),
        ):
            made.clear()
            ask(hub, turns, name)
            assert len(made) <= most, (name, len(made))


@pytest.mark.extended
def test_branch_of_a_large_family_loads_few_sessions(small: LoadedModel, tmp_path: Path) -> None:
    branched(tmp_path, small, count=14)
    with hub_in(tmp_path, small) as hub:
        assert ask(hub, box_question(99), "x").result.session == "x~15"
        assert len(hub.context.core.sessions) <= 10
        assert ask(hub, box_question(12), "x").result.session == "x~12"


@pytest.mark.extended
def test_branches_are_removed_after_their_root(small: LoadedModel, tmp_path: Path) -> None:
    branched(tmp_path, small)
    with hub_in(tmp_path, small) as hub:
        assert hub.remove("a", "x") == ("x~2", "x~3")
        assert hub.remove("a", "x", branches=True) == ()
        assert names(hub) == set()
        with pytest.raises(ApiError, match="no session"):
            hub.remove("a", "x", branches=True)


def test_failed_removal_ends_after_all_its_parts(
    small: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    branched(tmp_path, small)
    with hub_in(tmp_path, small) as hub:
        store = hub.context.persistence._store  # pyright: ignore[reportAttributeAccessIssue]
        remove, gone = store.sessions.remove, list[str]()

        def removed(tenant: str, name: str) -> int:
            if name == "x":
                raise StoreSlow("The disk sleeps.")
            gone.append(name)
            return remove(tenant, name)

        monkeypatch.setattr(store.sessions, "remove", removed)
        with pytest.raises(StoreSlow):
            hub.remove("a", "x", branches=True)
        assert gone == ["x~2", "x~3"] and not hub.context.removals.has("a", "x~3")
