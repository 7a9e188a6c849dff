"""Index of a tenant's session names: lazy reads, isolation and retries."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from larder.core import StoreSlow
from larder.models import LoadedModel
from larder.server import StoreSessionPersistence
from larder.store import Record, Store
from server_core import Served, answered, box_question


class Index:
    """A keeper of the sessions `a/x` and `b/x`, whose index can be made to wait or to fail."""

    def __init__(self, loaded: LoadedModel, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.asked, self.opened, self.slow = threading.Event(), threading.Event(), ""
        self.reads = list[str]()
        self.error: StoreSlow | None = None
        served = Served(loaded, persistence=self._persistence(loaded, folder))
        for tenant in "ab":
            served.ask(box_question(1), "x", tenant=tenant)
        self.persistence = self._persistence(loaded, folder)
        self.served = Served(loaded, persistence=self.persistence)
        self._of = self.persistence._store.sessions.indexed_heads
        patch.setattr(self.persistence._store.sessions, "indexed_heads", self.of)

    def _persistence(self, loaded: LoadedModel, folder: Path) -> StoreSessionPersistence:
        return StoreSessionPersistence(
            Store(str(folder / "blobs"), folder / "home"), loaded.decoder.spec
        )

    def of(self, tenant: str) -> list[Record]:
        self.reads.append(tenant)
        if self.error is not None:
            raise self.error
        found = self._of(tenant)
        if tenant == self.slow:
            self.asked.set()
            assert self.opened.wait(30)
        return found

    def names(self, tenant: str) -> list[str]:
        return list(self.persistence.candidates(tenant, box_question(1)))


@pytest.fixture
def index(small: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    return Index(small, tmp_path, monkeypatch)


def test_named_session_needs_no_index_lookup(index: Index) -> None:
    turns = answered(box_question(1), index.served.ask(box_question(1), "x"), "Why?")
    index.served.ask(turns, "x")
    index.served.ask(box_question(2), "new")
    assert index.reads == []
    assert set(index.names("a")) == {"x"} and index.reads == ["a"]
    assert index.names("a") and index.reads == ["a"]


def test_slow_index_delays_only_its_tenant(index: Index) -> None:
    index.slow, found = "a", list[str]()
    asking = threading.Thread(target=lambda: found.extend(index.names("a")))
    asking.start()
    assert index.asked.wait(30)
    others = list[str]()
    beside = threading.Thread(target=lambda: others.extend(index.names("b")))
    beside.start()
    index.served.ask(box_question(1), "late")  # its turn is written, and not in what was read
    index.persistence.remove(index.served.core.find("a", "x")).result(30)  # pyright: ignore
    beside.join(10)
    is_stuck = beside.is_alive()
    index.opened.set()
    for each in (asking, beside):
        each.join(30)
    assert not is_stuck and others == ["x"]
    assert found == ["late"] == index.names("a")


def test_failed_index_read_is_retried(index: Index) -> None:
    index.error = StoreSlow("The disk is slow: see to it.")
    assert index.names("a") == []
    index.error = None
    assert index.names("a") == ["x"]
