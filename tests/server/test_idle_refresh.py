"""Caches that have grown too large are rebuilt between two turns."""

from __future__ import annotations

import pytest

from larder.models import LoadedModel
from larder.server import ChatMessage, IdleRefresher, SessionState
from larder.session import ChatCache
from larder.store import Tier
from server_chats import HISTORY, asked
from server_core import Client, Served, answered, user

LONG = "The dog eats apples, and the car is red. " * 6  # more than M + M_block
LAST = "What car?"


def overdue(served: Served) -> tuple[SessionState, list[ChatMessage]]:
    """A session whose turn has just ended and has left a cache that must be rebuilt, and the
    messages of its next request."""
    turns = [*HISTORY[:2], user("My dog is 7.")]
    turns = answered(turns, served.ask(turns, "x"), LONG)
    client, _ = served.submit(turns, "x")
    while client.report is None:
        served.step()
    session = served.core.sessions.find("a", "x")
    assert session.residency.chat_cache is not None
    assert session.residency.chat_cache.is_overdue
    return session, answered(turns, client, LAST)


def last_turn(served: Served, turns: list[ChatMessage]) -> tuple[Client, int]:
    """The next turn, and the blocks that were read before its first token."""
    before = served.core.scheduler.blocks
    client, _ = served.submit(turns, "x", max_new_tokens=6)
    served.run()
    return client, client.steps[0] - before


@pytest.fixture
def served(small: LoadedModel) -> Served:
    return Served(small, **asked("epicache"))  # pyright: ignore


@pytest.fixture
def expected(small: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> tuple[Client, int]:
    """The last turn of a server that rebuilds at its beginning."""
    with monkeypatch.context() as without:
        without.setattr(IdleRefresher, "step", lambda self: False)
        served = Served(small, **asked("epicache"))  # pyright: ignore
        _, turns = overdue(served)
        return last_turn(served, turns)


def test_overdue_caches_are_rebuilt_before_the_next_turn(
    served: Served, expected: tuple[Client, int]
) -> None:
    session, turns = overdue(served)
    used = served.core.ledger.used(Tier.DEVICE)
    served.run()
    chat_cache = session.residency.chat_cache
    assert chat_cache is not None and session.residency.active is not None
    assert chat_cache.state.refreshes == 1 and not chat_cache.is_overdue
    assert session.residency.rebuilt_turns == 2
    assert served.core.reservations.bytes_of(session.key) <= used
    client, blocks = last_turn(served, turns)
    assert client.text == expected[0].text
    assert blocks < expected[1]


def test_early_turn_continues_the_rebuild(served: Served, expected: tuple[Client, int]) -> None:
    session, turns = overdue(served)
    chat_cache = session.residency.chat_cache
    assert chat_cache is not None
    steps = 0
    while not chat_cache.is_refreshing or steps < 2:
        assert served.step()
        steps += chat_cache.is_refreshing
    client, blocks = last_turn(served, turns)
    assert client.text == expected[0].text
    assert chat_cache.state.refreshes == 1
    assert blocks < expected[1], "steps of the rebuild between the turns are not repeated"


def rebuilding(served: Served) -> tuple[SessionState, list[ChatMessage], ChatCache]:
    """Session whose rebuild has begun, its turns, and its caches."""
    session, turns = overdue(served)
    chat_cache = session.residency.chat_cache
    assert chat_cache is not None
    while not chat_cache.is_refreshing:
        assert served.step()
    return session, turns, chat_cache


@pytest.mark.parametrize("leave", ["offload", "drop"])
def test_cache_that_leaves_the_device_drops_its_rebuild(
    served: Served, expected: tuple[Client, int], leave: str
) -> None:
    session, turns, chat_cache = rebuilding(served)
    getattr(served.core.tiers, leave)(session)
    assert session.residency.chat_cache is None or not chat_cache.is_refreshing
    assert served.core.ledger.used(Tier.DEVICE) == 0
    client, _ = last_turn(served, turns)
    assert client.text == expected[0].text


@pytest.mark.parametrize("action", ["prefetch", "compact"])
def test_cache_that_is_brought_back_drops_its_rebuild(
    served: Served, expected: tuple[Client, int], action: str
) -> None:
    """Its reservation is of the cache alone, without what the rebuild holds on the device."""
    session, turns, chat_cache = rebuilding(served)
    getattr(served.core.admin, action)(session).result(0)
    assert session.residency.active is not None and not chat_cache.is_refreshing
    served.run()
    assert chat_cache.state.refreshes == 1
    client, _ = last_turn(served, turns)
    assert client.text == expected[0].text


def test_rebuild_without_room_is_left_to_the_next_turn(
    served: Served, expected: tuple[Client, int]
) -> None:
    session, turns = overdue(served)
    held, ledger = served.core.ledger.used(Tier.DEVICE), served.core.ledger
    served.core.tiers.lower(Tier.DEVICE, held)
    served.run()
    chat_cache = session.residency.chat_cache
    assert chat_cache is not None and chat_cache.is_overdue and not chat_cache.is_refreshing
    assert ledger.used(Tier.DEVICE) <= held
    served.core.tiers.lower(Tier.DEVICE, 1 << 40)
    client, _ = last_turn(served, turns)
    assert client.text == expected[0].text


def test_request_of_another_session_goes_before_a_rebuild(served: Served) -> None:
    session, _ = overdue(served)
    chat_cache = session.residency.chat_cache
    assert chat_cache is not None
    while not chat_cache.is_refreshing:
        assert served.step()
    other, _ = served.submit([user("The sea is 5.")], "y")
    while other.report is None:
        served.step()
        assert chat_cache.is_refreshing
    served.run()
    assert chat_cache.state.refreshes == 1
