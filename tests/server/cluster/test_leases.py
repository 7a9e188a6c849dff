"""Session leases of two servers over one store."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from larder.core import StoreSlow
from larder.models import LoadedModel
from larder.server import (
    ApiError,
    ChatMessage,
    LeasedSessionLocks,
    SessionLeases,
    StoreSessionPersistence,
)
from larder.server.cluster import leases
from larder.store import Store
from server_core import Client, Served, answered, box_question, user

SECRET = b"s" * 32


class Clock:
    """Clock that a test advances."""

    now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


class Machine:
    """A server with a home of its own."""

    def __init__(self, loaded: LoadedModel, folder: Path, name: str, clock: Clock) -> None:
        home = folder / name
        self.store = Store(str(folder / "blobs"), home, secret=SECRET, clock=clock)
        self.claims = SessionLeases(self.store.parts)
        self.locks = LeasedSessionLocks(self.store, self.claims)
        persistence = StoreSessionPersistence(self.store, loaded.decoder.spec, self.locks)
        self.served = Served(loaded, persistence=persistence)

    def ask(self, turns: list[ChatMessage], session: str | None = "x", **options: object) -> Client:
        return self.served.ask(turns, session, **options)


Two = tuple[Machine, Machine]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def two(small: LoadedModel, tmp_path: Path, clock: Clock) -> Two:
    return Machine(small, tmp_path, "one", clock), Machine(small, tmp_path, "two", clock)


def single_server_turns(loaded: LoadedModel, questions: int) -> list[ChatMessage]:
    """Turns of the same conversation with one undisturbed server."""
    served, turns = Served(loaded), box_question(1)
    for number in range(questions):
        turns = answered(turns, served.ask(turns, "x"), f"And {number}?")
    return turns


@pytest.mark.extended
def test_session_alternates_between_two_servers(small: LoadedModel, two: Two) -> None:
    turns = box_question(1)
    for number in range(5):
        last = two[number % 2].ask(turns)
        assert last.result.session == "x"
        turns = answered(turns, last, f"And {number}?")
    assert turns == single_server_turns(small, 5)
    assert len(two[0].served.core.find("a", "x").turns) == 5


def test_session_leased_by_a_running_answer_is_refused(two: Two) -> None:
    first, second = two
    turns = answered(box_question(1), first.ask(box_question(1)), "Why?")
    late, _ = first.served.submit(turns, "x")
    with pytest.raises(ApiError) as refused:
        second.served.submit(turns, "x")
    assert (refused.value.status, refused.value.code) == (409, "session_held")
    assert refused.value.retry_after == pytest.approx(6)
    first.served.run()
    assert second.ask(turns).text == late.text  # the same request again: the same answer again


def test_expired_lease_fences_its_former_holder(two: Two, clock: Clock) -> None:
    first, second = two
    turns = answered(box_question(1), first.ask(box_question(1)), "Why?")
    late, _ = first.served.submit(turns, "x")
    clock.now += 6.5
    soon, _ = second.served.submit(turns, "x")
    first.served.run()  # before the other has written anything
    assert isinstance(late.error, ApiError) and late.error.code == "session_superseded"
    assert not late.report
    second.served.run()
    assert soon.result.session == "x"
    again = first.ask(turns)
    assert again.text == soon.text and len(first.served.core.find("a", "x").turns) == 2


def test_renewed_lease_is_not_taken_over(two: Two, clock: Clock) -> None:
    first, second = two
    first.served.submit(box_question(1), "x")
    for _ in range(4):
        clock.now += 2
        first.claims.heartbeat()
    with pytest.raises(ApiError, match="another server"):
        second.served.submit(box_question(1), "x")
    first.claims.close()
    second.served.submit(box_question(1), "x")


def test_cancelled_answer_releases_its_lease(two: Two) -> None:
    first, second = two
    _, ticket = first.served.submit(box_question(1), "x")
    first.served.step()
    ticket.cancel()
    first.served.run()
    assert second.ask(box_question(1)).result.new_tokens


def test_session_removed_by_one_server_is_not_found_by_another(two: Two) -> None:
    first, second = two
    first.ask(box_question(1))
    [gone] = second.served.core.remove("a", "x")
    assert gone.result(30) is None
    with pytest.raises(ApiError, match="no session"):
        first.served.core.find("a", "x")
    assert first.ask(box_question(1)).result.session == "x"
    assert len(second.served.core.find("a", "x").turns) == 1


@pytest.mark.extended
def test_forks_of_two_servers_get_distinct_names(two: Two) -> None:
    first, second = two
    one = first.ask(box_question(1))
    fork = second.ask(box_question(2))
    assert (one.result.session, fork.result.session) == ("x", "x~2")
    third = first.ask(box_question(3))
    assert third.result.session == "x~3"
    more = answered(box_question(2), fork, "Why?")
    assert first.ask(more).result.session == "x~2"


def test_failing_lease_store_does_not_stop_answers(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*args: object) -> None:
        raise StoreSlow("The disk is slow: see to it.")

    first, _ = two
    for name in ("take", "release", "holds"):
        monkeypatch.setattr(first.claims, name, slow)
    monkeypatch.setattr(first.store.sessions, "has_moved", slow)
    warnings = list[str]()
    monkeypatch.setattr(leases.LOG, "warning", lambda text, *values: warnings.append(text % values))
    assert first.ask(box_question(1)).result.new_tokens
    assert "\n".join(warnings).count("Shared session store: The disk is slow") >= 2


def test_lease_record_with_a_wrong_signature_is_ignored(
    small: LoadedModel, two: Two, tmp_path: Path
) -> None:
    first, second = two
    first.served.submit(box_question(1), "x")
    [path] = (tmp_path / "blobs" / "claims").glob("*/*/*.json")
    path.write_bytes(path.read_bytes().replace(b"holder", b"h0lder"))
    second.served.submit([user("Hello.")], "x")  # what is no claim holds nobody up
    assert not first.claims.holds(first.locks._active[1])


def test_sweep_deletes_expired_leases(two: Two, clock: Clock, tmp_path: Path) -> None:
    first, second = two
    clock.now = time.time()
    first.served.submit(box_question(1), "x")
    second.served.submit(box_question(1), "y")
    clock.now += 7200
    second.claims.heartbeat()
    for file in (tmp_path / "blobs").rglob("*.json"):
        os.utime(file, (clock.now - 7100, clock.now - 7100))
    assert second.claims.sweep() == 2
    left = [
        len(list((tmp_path / "blobs" / name).rglob("*.json"))) for name in ("holders", "claims")
    ]
    assert left == [1, 1]


@pytest.mark.extended
def test_local_store_does_not_import_cluster_modules(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; import larder.server.persistence.store; "
        "from larder.store.store import Store; "
        f"Store({str(tmp_path / 'store')!r}, Path({str(tmp_path / 'home')!r})).close(); "
        "many = 'larder.server.cluster', 'larder.store.fs.remote'; "
        "print([name for name in many if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
