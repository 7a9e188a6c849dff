"""Loads that wait for a cache write to release host memory."""

from __future__ import annotations

from pathlib import Path
from threading import Event

import pytest

from larder.models import LoadedModel
from larder.server import ChatMessage, SessionState
from larder.store import Tier
from server_core import Client, answered, box_question
from server_stores import Stored

NAMES = ("x", "y")


def crowded(loaded: LoadedModel, folder: Path, policy: str) -> tuple[Stored, list[ChatMessage]]:
    """A server whose host memory has no room for the load of x while y is written, and the next
    turns of x."""
    stored = Stored(loaded, folder, policy=policy)
    turns = box_question(1, 6)
    more = answered(turns, stored.ask(turns, "x"), "Why?")
    session = stored.core.sessions.find("a", "x")
    stored.core.tiers.save(session)
    stored.run()
    stored.core.tiers.drop(session)
    stored.ask(box_question(2, 6), "y", tenant="b")
    return stored, more


def writing(stored: Stored) -> Event:
    """Begin to write y, which ends with the event."""
    may_end, core = Event(), stored.core
    stored.disk._saving.submit(may_end.wait, 60.0)
    other, saved = core.sessions.find("b", "y"), core.sessions.find("a", "x").residency.saved_cache
    assert saved is not None and core.tiers.save(other) is not None
    core.ledger.lower(Tier.HOST, core.ledger.used(Tier.HOST) + saved.load_bytes - 1)
    return may_end


def step_until(stored: Stored, client: Client) -> None:
    """Step until an answer is complete, for some seconds at most."""
    for _ in range(2000):
        stored.served.step()
        if client.report is not None:
            return
        stored.served.news.wait(0.01)


@pytest.mark.extended
@pytest.mark.parametrize("policy", ["full", "limited"])
def test_load_waits_for_a_write_that_holds_host_memory(
    small: LoadedModel, tmp_path: Path, policy: str
) -> None:
    stored, turns = crowded(small, tmp_path, policy)
    may_end = writing(stored)
    waiting, _ = stored.served.submit(turns, "x")
    other, _ = stored.served.submit(box_question(3), "z", tenant="c")
    step_until(stored, other)
    assert waiting.report is None and other.result.new_tokens > 0
    may_end.set()
    stored.run()
    assert waiting.result.tier == "disk" and waiting.result.restored_tokens > 0
    assert waiting.result.recomputed_tokens == 0
    stored.close()


def test_load_waits_for_one_write_only(
    small: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, turns = crowded(small, tmp_path, "full")
    may_end, tiers = writing(stored), stored.core.tiers
    waiting, _ = stored.served.submit(turns, "x")
    assert not stored.served.step() and waiting.report is None

    def no_room(session: SessionState, count: int) -> None:
        monkeypatch.setattr(tiers, "awaitable_write", lambda *_: object())

    monkeypatch.setattr(tiers, "reserve_host", no_room)
    may_end.set()
    stored.run()
    assert waiting.result.restored_tokens == 0 and waiting.result.recomputed_tokens > 0
    stored.close()


def test_load_does_not_wait_for_a_write_slower_than_recomputing(
    small: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, turns = crowded(small, tmp_path, "full")
    monkeypatch.setattr(stored.disk, "seconds_to_read", lambda tokens: 1.0)
    stored.core.tiers._writer._bytes_per_second = 1e-3
    may_end = writing(stored)
    waiting, _ = stored.served.submit(turns, "x")
    step_until(stored, waiting)
    assert waiting.result.recomputed_tokens > 0
    may_end.set()
    stored.close()
