"""What requests make that begin as a session does and go on otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from larder.models.loading import Loaded
from larder.server.local_hub import LocalHub
from larder.server.request import Refusal
from server_core import answered, told, user
from server_hubs import ask, flip, hub_in

pytestmark = pytest.mark.usefixtures("unflushed")


def names(hub: LocalHub) -> set[str]:
    return {view.name for view in hub.sessions("a")}


def branched(folder: Path, loaded: Loaded, count: int = 3) -> None:
    with hub_in(folder, loaded) as hub:
        made = [ask(hub, told(number), "x").told.session for number in range(1, count + 1)]
        assert made == ["x", *(f"x~{number}" for number in range(2, count + 1))]


@pytest.mark.parametrize("gone", ["x", "x~2"])
def test_a_branch_behind_one_that_is_gone_is_gone_on_with(
    small: Loaded, tmp_path: Path, gone: str
) -> None:
    branched(tmp_path, small)
    with hub_in(tmp_path, small) as hub:
        hub.remove("a", gone)
    with hub_in(tmp_path, small) as hub:
        assert ask(hub, told(3), "x").told.session == "x~3"  # the very same question
        new = ask(hub, told(4), "x").told.session
        assert new == (gone if gone == "x" else "x~4")
    with hub_in(tmp_path, small) as hub:
        assert ask(hub, told(5), "x").told.session == "x~5" if gone == "x~2" else "x~4"
        assert ask(hub, told(3), "x").told.session == "x~3"


def test_a_branch_that_was_asked_for_first_hides_no_other(small: Loaded, tmp_path: Path) -> None:
    branched(tmp_path, small)
    with hub_in(tmp_path, small) as hub:
        hub.session("a", "x~2")
        assert ask(hub, told(3), "x").told.session == "x~3"
        assert ask(hub, told(1), "x~2").told.session == "x"
        assert ask(hub, told(4), "x").told.session == "x~4"
        assert hub.fork("a", "x").name == "x~5"


@pytest.mark.parametrize("damaged", ["x", "x~2"])
def test_branches_that_cannot_be_read_go_as_well(
    small: Loaded, tmp_path: Path, damaged: str
) -> None:
    branched(tmp_path, small)
    with hub_in(tmp_path, small) as hub:
        hub.fork("a", "x~3", "y~backup")
        hub.fork("a", "x~3", "x~backup")
    flip(tmp_path, small, damaged)
    with hub_in(tmp_path, small) as hub:
        with pytest.raises(Refusal):
            hub.session("a", damaged)
        assert hub.remove("a", "x", branches=True) == ()
        assert names(hub) == {"y~backup", "x~backup"}


def test_branches_that_stay_are_told_though_they_cannot_be_read(
    small: Loaded, tmp_path: Path
) -> None:
    branched(tmp_path, small)
    flip(tmp_path, small, "x~2")
    with hub_in(tmp_path, small) as hub:
        assert set(hub.remove("a", "x")) == {"x~2", "x~3"}
        assert names(hub) == {"x~2", "x~3"}
        hub.remove("a", "x~2")
        hub.remove("a", "x~3")
        assert names(hub) == set()
    assert not list((tmp_path / "blobs" / "families").rglob("*.json"))


def test_a_branch_of_a_session_that_is_in_memory_takes_no_name_that_is_kept(
    small: Loaded, tmp_path: Path
) -> None:
    branched(tmp_path, small)
    with hub_in(tmp_path, small) as hub:
        hub.session("a", "x")  # it alone is in memory
        # Asked as before, but for as many tokens as never before.
        again = ask(hub, told(1), "x", new=5)
        assert again.told.session == "x~4"


def test_a_branch_that_nobody_has_named_takes_no_name_that_is_kept(
    small: Loaded, tmp_path: Path
) -> None:
    with hub_in(tmp_path, small) as hub:
        first = answered(told(1), ask(hub, told(1), "x"), "Why?")
        ask(hub, first, "x")
        assert ask(hub, told(2), "x").told.session == "x~2"
    with hub_in(tmp_path, small) as hub:
        assert ask(hub, [*first[:-1], user("How?")]).told.session == "x~3"
