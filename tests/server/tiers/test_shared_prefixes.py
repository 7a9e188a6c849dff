"""Device storage of prefixes shared by the sessions of a tenant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from larder.cache import SequenceCache
from larder.core import LarderError
from larder.models import LoadedModel
from larder.ops import c_library
from larder.server import ChatMessage, SessionState, SharedPrefixes, Ticket, cached_positions
from larder.store import Tier
from server_core import Client, Served, answered, user

pytestmark = pytest.mark.skipif(c_library() is None, reason="decode steps would copy the prefix")
PREFIX = "".join(f"Rule {number} of this house is known to all. " for number in range(20))


def question(number: int, prefix: str = PREFIX) -> list[ChatMessage]:
    return [user(f"{prefix}{number} coins are in box {number * 7}. What is in it?")]


def session_of(served: Served, name: str, tenant: str = "a") -> SessionState:
    return served.core.sessions.find(tenant, name)


def entry_storages(session: SessionState) -> dict[int, int]:
    """Bytes of the storages of entries, by address."""
    cache = session.residency.active
    tensors = () if cache is None else (t for each in cache.layers for t in each.tensors())
    held = [t.untyped_storage() for t in tensors if t.dtype is not torch.int64]
    return {each.data_ptr(): each.nbytes() for each in held if each.nbytes()}


def real_bytes(served: Served) -> int:
    """Bytes of all storage of entries, once each, and of the tables of each session."""
    sessions = list(served.core.sessions)
    entries = {place: n for each in sessions for place, n in entry_storages(each).items()}
    return sum(entries.values()) + sum(table_bytes(each.residency.active) for each in sessions)


def table_bytes(cache: SequenceCache | None) -> int:
    """Bytes of the tables of all storages of a cache."""
    tensors = () if cache is None else (t for each in cache.layers for t in each.tensors())
    return sum(t.untyped_storage().nbytes() for t in tensors if t.dtype is torch.int64)


def reserved_bytes(served: Served) -> int:
    """Bytes that the ledger has for caches, without those for a moment."""
    return served.core.ledger.used(Tier.DEVICE) - served.core.reservations.transient_bytes


def entry_bytes(served: Served) -> int:
    spec = served.core.serving.runtime.decoder.spec
    return sum(each.bytes_per_token(spec.dtype) + 4 for each in spec.layers)  # and a position


@pytest.mark.extended
def test_eight_sessions_store_a_prefix_once(small: LoadedModel) -> None:
    served, alone = Served(small), Served(small)
    cached = list[int]()
    for number in range(8):
        result = served.ask(question(number), f"n{number}")
        assert result.text == alone.ask(question(number), "x").text
        alone.core.remove("a", "x")
        cached.append(result.result.cached_tokens)
    assert cached[0] == 0 and min(cached[1:]) >= len(PREFIX)
    sessions = [session_of(served, f"n{number}") for number in range(8)]
    for each in sessions:
        assert cached_positions(each).tokens == len(each.residency.cached_ids)  # copies nothing
    own = [entry_storages(each) for each in sessions]
    common = set.intersection(*(set(each) for each in own))
    shared = sum(own[0][place] for place in common)
    assert shared == min(cached[1:]) * entry_bytes(served)
    tails = sum(sum(each.values()) - shared for each in own)
    assert reserved_bytes(served) == real_bytes(served)
    assert tails < 8 * 80 * entry_bytes(served)
    assert served.core.ledger.used(Tier.DEVICE) < 0.35 * sum(
        each.residency.device_bytes for each in sessions
    )


@pytest.mark.extended
def test_block_tables_of_a_fork_fit_their_reservation(
    small: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the storage of the source was divided for sessions that are gone."""
    served, grown, reserved = Served(small), list[int](), list[int]()
    fork = SharedPrefixes.fork

    def measured(self: SharedPrefixes, source: SessionState, *where: Any) -> SequenceCache:
        before = table_bytes(source.residency.active)
        reserved.append(self.table_bytes(source))
        copy = fork(self, source, *where)
        grown.append(table_bytes(source.residency.active) + table_bytes(copy) - before)
        return copy

    monkeypatch.setattr(SharedPrefixes, "fork", measured)
    served.ask(question(0), "source")
    served.ask(question(1, PREFIX[:80]), "short")  # while it is there, not all is joined
    for number in range(1, 7):
        served.ask(question(number, PREFIX[: 80 + 100 * number]), "other")
        served.core.remove("a", "other")
    assert len(grown) == 7 and max(grown) > 2 * min(grown)
    assert all(one <= most for one, most in zip(grown, reserved, strict=True))


def test_prefixes_are_not_shared_between_tenants(small: LoadedModel) -> None:
    served = Served(small)
    for tenant in "aab":
        served.ask(question(ord(tenant)), tenant=tenant)
    owners = {tenant: set[int]() for tenant in "ab"}
    for each in served.core.sessions:
        owners[each.tenant] |= set(entry_storages(each))
    assert owners["a"].isdisjoint(owners["b"]) and all(owners.values())
    ledger = served.core.ledger
    assert ledger.used(Tier.DEVICE, "b") >= len(PREFIX) * entry_bytes(served)


@pytest.mark.extended
@pytest.mark.parametrize("fate", ["delete", "offload", "drop"])
def test_prefix_bytes_are_charged_to_the_last_holder(small: LoadedModel, fate: str) -> None:
    served, alone = Served(small), Served(small)
    result: list[Client] = [served.ask(question(number), f"n{number}") for number in range(3)]
    for number in range(2):
        session = session_of(served, f"n{number}")
        own = set(entry_storages(session))
        others = {
            place
            for other in served.core.sessions
            if other is not session
            for place in entry_storages(other)
        }
        freed = sum(entry_storages(session)[place] for place in own - others)
        before = reserved_bytes(served)
        if fate == "delete":
            served.core.remove("a", f"n{number}")
        elif fate == "offload":
            assert served.core.tiers.offload(session)
        else:
            served.core.tiers.drop(session)
        served.check()
        assert reserved_bytes(served) == real_bytes(served)
        assert 0 <= before - reserved_bytes(served) - freed < 1000  # and tables
        assert served.core.ledger.used(Tier.DEVICE) >= len(PREFIX) * entry_bytes(served)
    turns = answered(question(2), result[2], "And in the next?")
    alone.ask(question(2), "n2")
    assert served.ask(turns, "n2").text == alone.ask(turns, "n2").text
    assert reserved_bytes(served) == real_bytes(served)
    served.core.remove("a", "n2")
    assert bool(list(served.core.sessions)) == (fate != "delete")
    for each in list(served.core.sessions):
        served.core.remove("a", each.name)
    assert served.core.ledger.used(Tier.DEVICE) == 0


@pytest.mark.extended
def test_session_truncated_into_a_prefix_reserves_its_new_tokens(
    small: LoadedModel,
) -> None:
    served, alone = Served(small), Served(small)
    for number in range(2):
        served.ask(question(number), f"n{number}")
    edited = question(5, PREFIX[: len(PREFIX) // 2] + "But now all is new. ")
    shorter = served.ask(edited, "n2").result.cached_tokens
    assert len(PREFIX) // 2 <= shorter < len(PREFIX)
    assert reserved_bytes(served) == real_bytes(served)
    assert served.ask(edited, "n3").text == alone.ask(edited, "n3").text
    held = [entry_storages(session_of(served, f"n{number}")) for number in range(4)]
    common = set.intersection(*map(set, held))
    assert sum(held[0][place] for place in common) == shorter * entry_bytes(served)
    assert reserved_bytes(served) == real_bytes(served)


MOVES = some.lists(
    some.tuples(
        some.sampled_from(
            ["ask", "ask", "ask", "step", "step", "run", "cancel", "delete", "offload", "drop"]
            + ["first", "again", "fork"]
        ),
        some.integers(0, 5),
    ),
    min_size=4,
    max_size=24,
)


class RandomRequests:
    """Requests whose sessions begin alike, on a device for a few of them."""

    def __init__(self, small: LoadedModel) -> None:
        size = 2600 * entry_bytes(Served(small))
        self.served, self.alone = Served(small, device=size, host=size), Served(small)
        self.asked = list[tuple[Client, Ticket, list[ChatMessage], int]]()

    def submit(
        self, turns: list[ChatMessage], name: str, count: int = 4, priority: int = 0
    ) -> None:
        options = {"max_new_tokens": count, "priority": priority}
        try:
            client, ticket = self.served.submit(turns, name, **options)  # pyright: ignore
        except LarderError:  # busy
            return
        self.asked.append((client, ticket, turns, count))

    def act(self, move: str, number: int) -> None:
        prefix = PREFIX[: len(PREFIX) * (3 + number % 3) // 5]
        if move == "ask":
            self.submit(question(number, prefix), f"n{number}")
        elif move == "first":
            self.submit(question(number + 10), f"p{number}", 30, -1)
        elif move == "again":
            self.submit(question(number, prefix[: 100 * (number + 1)] + "No. "), f"n{number}")
        elif move == "step":
            for _ in range(number + 1):
                self.served.step()
        elif move == "run":
            self.served.run()
            self.check_exact()
        elif move == "cancel" and self.asked:
            self.asked[number % len(self.asked)][1].cancel()
        else:
            self.act_on_idle(move, number)

    def act_on_idle(self, move: str, number: int) -> None:
        core = self.served.core
        idle = [each for each in core.sessions if each.is_idle]
        if not idle:
            return
        chosen = idle[number % len(idle)]
        if move == "fork":
            core.fork("a", chosen.name, None)
        elif move == "delete":
            core.remove("a", chosen.name)
        elif chosen.key in core.tiers.on_device:
            core.tiers.offload(chosen) if move == "offload" else core.tiers.drop(chosen)

    def check_exact(self) -> None:
        assert real_bytes(self.served) == reserved_bytes(self.served)

    def check_answers(self) -> None:
        expected = dict[tuple[str, int], str]()
        for client, _, turns, count in self.asked:
            if client.error is not None or client.result.reason == "cancelled":
                continue
            key = turns[0].text, count
            if key not in expected:
                expected[key] = self.alone.ask(turns, "x", max_new_tokens=count).text
                self.alone.core.remove("a", "x")
            assert client.text == expected[key]


@pytest.mark.slow
@given(moves=MOVES)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_reserved_bytes_equal_held_bytes_in_any_order(
    small: LoadedModel, moves: Sequence[tuple[str, int]]
) -> None:
    crowd = RandomRequests(small)
    for move in moves:
        crowd.act(*move)
        crowd.served.check()
    crowd.served.run()
    crowd.check_exact()
    crowd.check_answers()
    for each in list(crowd.served.core.sessions):
        crowd.served.core.remove("a", each.name)
    assert crowd.served.core.ledger.used(Tier.DEVICE) == 0
