"""Residency locks: sessions stay in memory until they are used."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from larder.models import LoadedModel
from larder.server import LocalEngineClient, ResidencyLocks
from server_core import box_question
from server_engine_clients import ask, flip, hub_in


def unload_after_each_install(hub: LocalEngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unload every session without a lock whenever one is installed."""
    take, core = hub.context.core.restorer.install, hub.context.core

    def taken(*args: object) -> object:
        made = take(*args)  # pyright: ignore
        for each in core.sessions:
            core._unload(each)
        return made

    monkeypatch.setattr(core.restorer, "install", taken)


@pytest.mark.parametrize(
    "act",
    [
        lambda hub: hub.session("a", "x").view.name,
        lambda hub: hub.fork("a", "x", "y").name,
        lambda hub: hub.compact("a", "x").name,
        lambda hub: hub.prefetch("a", "x").name,
        lambda hub: hub.pin("a", "x").name,
        lambda hub: ask(hub, box_question(1), "x").result.session,
        lambda hub: ask(hub, box_question(2), "x").result.session,
        lambda hub: ask(hub, box_question(3), "x").result.session,
        lambda hub: hub.remove("a", "x"),
    ],
)
def test_requested_session_is_not_unloaded_before_it_is_used(
    small: LoadedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    act: Callable[[LocalEngineClient], object],
) -> None:
    with hub_in(tmp_path, small) as hub:
        assert [ask(hub, box_question(n), "x").result.session for n in (1, 2)] == ["x", "x~2"]
        expected = act(hub)
    again = tmp_path / "again"
    with hub_in(again, small) as hub:
        assert [ask(hub, box_question(n), "x").result.session for n in (1, 2)] == ["x", "x~2"]
    with hub_in(again, small) as hub:
        unload_after_each_install(hub, monkeypatch)
        assert act(hub) == expected


def test_branch_does_not_reuse_the_name_of_an_unreadable_one(
    small: LoadedModel, tmp_path: Path
) -> None:
    with hub_in(tmp_path, small) as hub:
        assert [ask(hub, box_question(n), "x").result.session for n in (1, 2)] == ["x", "x~2"]
    flip(tmp_path, small, "x~2")
    with hub_in(tmp_path, small) as hub:
        assert ask(hub, box_question(3), "x").result.session == "x~3"


def test_nested_residency_locks_hold_until_the_last_release(
    small: LoadedModel, tmp_path: Path
) -> None:
    residency_locks = ResidencyLocks()
    with hub_in(tmp_path, small) as hub:
        ask(hub, box_question(1), "x")
        session = hub.context.thread.call(partial(hub.context.core.find, "a", "x"))
    with residency_locks.hold("a", "x~7", None):
        with pytest.raises(ValueError), residency_locks.hold("a", "x", "y"):
            assert residency_locks.is_held(session)
            raise ValueError
        assert residency_locks.is_held(session)
    assert not residency_locks.is_held(session)
    with residency_locks.hold("b", "x"), residency_locks.hold("a", "y"):
        assert not residency_locks.is_held(session)
