"""Writes that timed out and completed later."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import pytest

from larder.core import StoreError, StoreFull
from larder.models import LoadedModel
from larder.server import (
    ApiError,
    ChatMessage,
    LeasedSessionLocks,
    SessionLeases,
    StoreSessionPersistence,
)
from larder.store import Store, open_file_system
from server_core import Served, answered, box_question
from server_engine_clients import SLOW, ask, failing, hub_in, persistence_in, unacknowledged
from server_stores import Stored
from store.file_systems import Faulty, Hanging


def second_turn(served: Served | Stored) -> list[ChatMessage]:
    return answered(box_question(1), served.ask(box_question(1), "x"), "Why?")


def stored_turns(folder: Path, loaded: LoadedModel) -> list[object]:
    return list(
        Served(loaded, persistence=persistence_in(folder, loaded)).core.find("a", "x").turns
    )


def pin(served: Served, persistence: StoreSessionPersistence) -> None:
    session = served.core.find("a", "x")
    session.usage.is_pinned = True
    written = persistence.pin(session)
    assert written is not None
    written.result(30)


def assert_superseded(served: Served, text: list[ChatMessage]) -> None:
    late, _ = served.submit(text, "x")
    served.run()
    assert isinstance(late.error, ApiError) and late.error.code == "session_superseded"


@pytest.fixture
def persistence(small: LoadedModel, tmp_path: Path) -> StoreSessionPersistence:
    return persistence_in(tmp_path, small)


@pytest.fixture
def served(small: LoadedModel, persistence: StoreSessionPersistence) -> Served:
    return Served(small, persistence=persistence)


@pytest.mark.parametrize("turns", [1, 2])
def test_next_turn_continues_from_a_late_write(
    small: LoadedModel,
    tmp_path: Path,
    persistence: StoreSessionPersistence,
    served: Served,
    turns: int,
) -> None:
    text = second_turn(served) if turns == 2 else box_question(1)
    with unacknowledged(persistence):
        last = served.ask(text, "x")
    assert persistence._store.parts.unwritten.counts() == {"slow": 1}
    assert served.ask(answered(text, last, "Really?"), "x").result.session == "x"
    assert stored_turns(tmp_path, small) == served.core.find("a", "x").turns
    assert len(stored_turns(tmp_path, small)) == turns + 1


@pytest.mark.failure(number=6)
def test_shutdown_is_bounded_while_the_disk_hangs(small: LoadedModel, tmp_path: Path) -> None:
    place = Hanging(tmp_path, "replace", "blobs/")
    stored = Stored(small, tmp_path, place=place.place)
    text = second_turn(stored)
    place.armed.set()
    client, _ = stored.served.submit(text, "x")
    while not place.hangs.is_set():
        stored.core.step()
    before = time.monotonic()
    stored.core.close(seconds=0.05)
    assert time.monotonic() - before < 10 and client.result.durable is False
    stored.store.close()
    place.go.set()
    again = Stored(small, tmp_path, place=open_file_system(str(tmp_path / "store")))
    assert len(again.core.find("a", "x").turns) == 1


def test_turns_not_written_after_a_late_write_are_written_with_the_next(
    small: LoadedModel, tmp_path: Path, persistence: StoreSessionPersistence, served: Served
) -> None:
    text = second_turn(served)
    with unacknowledged(persistence):
        text = answered(text, served.ask(text, "x"), "And 1?")
        text = answered(text, served.ask(text, "x"), "And 2?")
    with failing(persistence._store.sessions, "append", StoreFull("No room: make some.")):
        text = answered(text, served.ask(text, "x"), "And 3?")
    assert len(stored_turns(tmp_path, small)) == 3
    served.ask(text, "x")
    assert len(stored_turns(tmp_path, small)) == 5


@pytest.mark.parametrize("method", ["append", "label"])
@pytest.mark.parametrize("turns", [1, 2])
def test_session_is_pinned_after_a_late_write(
    small: LoadedModel,
    tmp_path: Path,
    persistence: StoreSessionPersistence,
    served: Served,
    method: str,
    turns: int,
) -> None:
    text = box_question(1) if turns == 1 else second_turn(served)
    if method == "label":
        served.ask(text, "x")
        with (
            unacknowledged(persistence, "label"),
            pytest.raises(ApiError, match="cannot be written now"),
        ):
            pin(served, persistence)
    else:
        with unacknowledged(persistence):
            served.ask(text, "x")
    pin(served, persistence)
    assert (
        Served(small, persistence=persistence_in(tmp_path, small))
        .core.find("a", "x")
        .usage.is_pinned
    )
    assert len(stored_turns(tmp_path, small)) == turns


@pytest.mark.usefixtures("loads")
@pytest.mark.parametrize("method", ["attach", "label"])
def test_cache_is_attached_after_a_late_write(
    small: LoadedModel, tmp_path: Path, method: str
) -> None:
    stored = Stored(small, tmp_path)
    second_turn(stored)
    session = stored.core.find("a", "x")
    with unacknowledged(stored.persistence, method):
        if method == "label":
            session.usage.is_pinned = True
            written = stored.persistence.pin(session)
            assert written is not None and written.exception(30) is not None
        else:
            saving = stored.core.tiers.save(session)
            assert saving is not None and saving.exception(30) is not None
            stored.run()
            session.residency.failed_write_tokens = -1
    saving = stored.core.tiers.save(session)
    assert saving is not None and saving.exception(30) is None
    stored.run()
    assert session.residency.is_saved
    [view] = stored.persistence.list_sessions("a")
    assert view.tier == "disk" and view.pinned == (method == "label")


@pytest.mark.failure(number=21)
@pytest.mark.parametrize("turns", [1, 2])
def test_session_deleted_after_a_timed_out_write_stays_deleted(
    small: LoadedModel,
    tmp_path: Path,
    persistence: StoreSessionPersistence,
    served: Served,
    turns: int,
) -> None:
    text = second_turn(served) if turns == 2 else box_question(1)
    with unacknowledged(persistence):
        served.ask(text, "x")
    [gone] = served.core.remove("a", "x")
    assert gone.result(30) is None
    assert persistence.list_sessions("a") == [] and persistence.load("a", "x") is None
    assert persistence.candidates("a", box_question(1)) == []
    assert served.ask(box_question(1), "x").result.session == "x"
    assert len(stored_turns(tmp_path, small)) == 1


class LateCreate(Faulty):
    """File system that times out on a record, and creates it only on `go_on`."""

    is_slow = False
    given: tuple[str, bytes] = "", b""

    def create(self, path: str, data: bytes) -> None:
        if self.is_slow and path.startswith("sessions/"):
            self.is_slow, self.given = False, (path, data)
            raise SLOW
        super().create(path, data)

    def go_on(self) -> None:
        with suppress(FileExistsError):
            super().create(*self.given)


@pytest.mark.failure(number=21)
@pytest.mark.parametrize("turns", [1, 2])
def test_session_deleted_during_a_late_write_stays_deleted(
    small: LoadedModel, tmp_path: Path, turns: int
) -> None:
    place = LateCreate(open_file_system(str(tmp_path / "blobs")))
    store = Store(place, tmp_path / "home")
    served = Served(small, persistence=StoreSessionPersistence(store, small.decoder.spec))
    text = second_turn(served) if turns == 2 else box_question(1)
    place.is_slow = True
    served.ask(text, "x")
    [gone] = served.core.remove("a", "x")
    assert gone.result(30) is None
    place.go_on()
    for home in ("home", "another"):
        found = StoreSessionPersistence(Store(place, tmp_path / home), small.decoder.spec)
        assert found.load("a", "x") is None and found.list_sessions("a") == []


@pytest.mark.parametrize("error", [SLOW, StoreFull("No room: make some.")])
def test_unwritten_session_is_deleted_despite_store_errors(
    persistence: StoreSessionPersistence, served: Served, error: StoreError
) -> None:
    served.core.open("a", "x", ())
    with failing(persistence._store.sessions, "remove", error):
        [gone] = served.core.remove("a", "x")
        assert gone.result(30) is None
    with pytest.raises(ApiError, match="no session"):
        served.core.find("a", "x")


@pytest.mark.parametrize("is_heard", [True, False])
def test_deletion_on_a_slow_store_raises(
    persistence: StoreSessionPersistence, served: Served, is_heard: bool
) -> None:
    with unacknowledged(persistence, "label" if is_heard else "append"):
        served.ask(box_question(1), "x")
    with failing(persistence._store.sessions, "remove", SLOW):
        [gone] = served.core.remove("a", "x")
        assert gone.exception(30) is SLOW
    [gone] = served.core.remove("a", "x")  # from where it is kept
    assert gone.result(30) is None
    assert persistence.list_sessions("a") == []


@pytest.mark.failure(number=20)
def test_turn_after_a_rollback_by_another_server_is_superseded(
    small: LoadedModel, tmp_path: Path, persistence: StoreSessionPersistence, served: Served
) -> None:
    text = second_turn(served)
    text = answered(text, served.ask(text, "x"), "Really?")
    other = persistence_in(tmp_path, small)._store.sessions
    other.roll_back("a", "x", 1)
    assert_superseded(served, text)
    assert len(stored_turns(tmp_path, small)) == 1


@pytest.mark.failure(number=20)
def test_turn_after_another_server_recreated_the_session_is_superseded(
    small: LoadedModel, tmp_path: Path, persistence: StoreSessionPersistence, served: Served
) -> None:
    text = second_turn(served)
    text = answered(text, served.ask(text, "x"), "Really?")
    other = Served(small, persistence=persistence_in(tmp_path, small))
    [gone] = other.core.remove("a", "x")
    gone.result(30)
    second_turn(other)
    assert_superseded(served, text)
    assert len(stored_turns(tmp_path, small)) == 1


@pytest.mark.failure(number=20)
def test_rollback_by_another_server_supersedes_a_timed_out_write(
    small: LoadedModel, tmp_path: Path, persistence: StoreSessionPersistence, served: Served
) -> None:
    text = second_turn(served)
    with unacknowledged(persistence):
        text = answered(text, served.ask(text, "x"), "Really?")
    persistence_in(tmp_path, small)._store.sessions.roll_back("a", "x", 1)
    assert_superseded(served, text)
    assert len(stored_turns(tmp_path, small)) == 1


@pytest.mark.failure(number=20)
def test_label_by_another_server_supersedes_a_timed_out_write(
    small: LoadedModel, tmp_path: Path, persistence: StoreSessionPersistence, served: Served
) -> None:
    text = second_turn(served)
    with unacknowledged(persistence):
        text = answered(text, served.ask(text, "x"), "Really?")
    other = persistence_in(tmp_path, small)._store.sessions
    other.label("a", "x", {"pinned": "yes"}, 2)
    assert_superseded(served, text)
    assert served.core.find("a", "x").usage.is_pinned


def test_turns_are_kept_when_the_epoch_check_times_out(
    small: LoadedModel, tmp_path: Path, persistence: StoreSessionPersistence, served: Served
) -> None:
    text = second_turn(served)
    with unacknowledged(persistence):
        text = answered(text, served.ask(text, "x"), "Really?")
    with failing(persistence._store.sessions, "head", SLOW):
        text = answered(text, served.ask(text, "x"), "Sure?")
    assert persistence._store.parts.unwritten.counts() == {"slow": 2}
    served.ask(text, "x")
    assert len(stored_turns(tmp_path, small)) == 4


def test_late_write_under_session_leases_is_no_conflict(
    small: LoadedModel, tmp_path: Path, persistence: StoreSessionPersistence
) -> None:
    store = persistence._store
    locks = LeasedSessionLocks(store, SessionLeases(store.parts))
    persistence = StoreSessionPersistence(store, small.decoder.spec, locks)
    served = Served(small, persistence=persistence)
    text = second_turn(served)
    with unacknowledged(persistence):
        text = answered(text, served.ask(text, "x"), "Really?")
    assert served.ask(text, "x").result.recomputed_tokens == 0
    assert len(stored_turns(tmp_path, small)) == 3


def test_engine_client_pins_and_removes_after_a_late_write(
    small: LoadedModel, tmp_path: Path
) -> None:
    with hub_in(tmp_path, small) as hub:
        assert isinstance(hub.context.persistence, StoreSessionPersistence)
        with unacknowledged(hub.context.persistence):
            ask(hub, box_question(1), "x")
        assert hub.pin("a", "x").pinned
        with unacknowledged(hub.context.persistence):
            ask(hub, box_question(1), "y")
        for name in ("x", "y"):
            assert hub.remove("a", name) == ()
        assert hub.sessions("a") == ()
        with pytest.raises(ApiError, match="no session"):
            hub.session("a", "y")
