"""Sessions that are loaded and deleted at the same time."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event, current_thread

import pytest

from larder.core import StoreSlow
from larder.models import LoadedModel
from larder.server import ApiError, SessionState, StoredSession, StoreSessionPersistence
from server_core import box_question
from server_engine_clients import SLOW, ask, failing, hub_in

READER = "reader"


@pytest.mark.failure(number=21)
@pytest.mark.parametrize("is_over", [True, False])
def test_read_finished_after_a_deletion_does_not_restore_the_session(
    small: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_over: bool
) -> None:
    """The read finishes after the store has removed the session, or just before."""
    with hub_in(tmp_path, small) as hub:
        ask(hub, box_question(1), "x")
    with hub_in(tmp_path, small) as hub, ThreadPoolExecutor(1, READER) as reader:
        is_read, goes_on = Event(), Event()
        recall, remove = hub.context.persistence.load, hub.context.persistence.remove

        def late(tenant: str, name: str) -> StoredSession | None:
            found = recall(tenant, name)
            if current_thread().name.startswith(READER) and not is_read.is_set():
                is_read.set()
                assert goes_on.wait(30)
            return found

        def removed(session: SessionState) -> None:
            if not is_over:
                goes_on.set()
                assert isinstance(read.exception(30), ApiError)
            future = remove(session)
            assert future is not None
            future.result(30)

        def removing(session: SessionState) -> Future[None]:
            return remover.submit(removed, session)

        with ThreadPoolExecutor(1) as remover:
            monkeypatch.setattr(hub.context.persistence, "load", late)
            monkeypatch.setattr(hub.context.persistence, "remove", removing)
            read = reader.submit(hub.session, "a", "x")
            assert is_read.wait(30)
            assert hub.remove("a", "x") == ()
            goes_on.set()
            assert isinstance(read.exception(30), ApiError)
        assert hub.sessions("a") == ()
        assert ask(hub, box_question(1), "x").result.session == "x"


def test_session_stays_readable_after_a_failed_deletion(small: LoadedModel, tmp_path: Path) -> None:
    with hub_in(tmp_path, small) as hub:
        assert isinstance(hub.context.persistence, StoreSessionPersistence)
        ask(hub, box_question(1), "x")
        with (
            failing(hub.context.persistence._store.sessions, "remove", SLOW),
            pytest.raises(StoreSlow),
        ):
            hub.remove("a", "x")
        assert len(hub.session("a", "x").turns) == 2
