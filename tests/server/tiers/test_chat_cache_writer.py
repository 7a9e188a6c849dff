"""Caches of the chat backend: written to the store and restored."""

from __future__ import annotations

from pathlib import Path

import pytest

from larder.models import LoadedModel
from larder.server import ChatMessage, Durability, chat_turn_demand
from larder.session import PRESETS
from server_chats import HISTORY, KINDS, REFUSED, SAID, TOKENS, WIDE, asked, ways
from server_core import Served, answered, characters, user
from server_stores import Stored

pytestmark = pytest.mark.usefixtures("loads")


@pytest.fixture(scope="session")
def deep() -> LoadedModel:
    """So many layers that presets which leave the first two alone park something."""
    return characters(layers=3)


def stored(
    loaded: LoadedModel,
    folder: Path,
    kind: str,
    durability: Durability = Durability.TURN,
    tokens: int = TOKENS,
    **options: object,
) -> Stored:
    return Stored(loaded, folder, durability, **asked(kind, tokens), **options)  # pyright: ignore


def unstored(loaded: LoadedModel, kind: str, tokens: int = TOKENS) -> Served:
    return Served(loaded, **asked(kind, tokens))  # pyright: ignore


def talk(
    served: Stored | Served, name: str = "x", questions: list[str] = SAID
) -> list[ChatMessage]:
    """Messages of a conversation, the last of them unanswered."""
    turns = [*HISTORY, user(questions[0])]
    for more in questions[1:]:
        turns = answered(turns, served.ask(turns, name, max_new_tokens=5), more)
    return turns


def blocks(served: Served, turns: list[ChatMessage]) -> tuple[str, int]:
    """The answer, and how many blocks were read for it."""
    before = served.core.scheduler.blocks
    text = served.ask(turns, "x").text
    return text, served.core.scheduler.blocks - before


@pytest.mark.extended
@pytest.mark.parametrize("kind", KINDS)
def test_restarted_server_continues_from_restored_caches(
    deep: LoadedModel, tmp_path: Path, kind: str
) -> None:
    first, never = stored(deep, tmp_path, kind), unstored(deep, kind)
    turns = talk(first)
    assert talk(never) == turns
    caches = first.core.find("a", "x").residency.chat_cache
    first.close()
    again = stored(deep, tmp_path, kind)
    assert again.tier() == "disk"
    assert again.core.find("a", "x").residency.saved_cache.caches == len(caches.caches)  # pyright: ignore
    last, expected = blocks(again.served, turns), blocks(never, turns)
    assert last == expected  # no block more than without the restart
    more = answered(turns, again.served.ask(turns, "x"), "And?")
    assert again.ask(more, "x").text == never.ask(more, "x").text
    assert again.core.tiers.restored["disk"] == 1 and again.disk.stats().rejected == {}
    assert again.core.scheduler.finisher.sums["recomputed_tokens"] == 0
    before = sum(each.tokens for each in again.core.find("a", "x").turns[:-2])
    assert again.core.scheduler.finisher.sums["restored_tokens"] == before
    sessions = [each.core.sessions.find("a", "x") for each in (again, never)]
    assert sessions[0].residency.occupancy == sessions[1].residency.occupancy
    assert (
        sessions[0].residency.position_maps == sessions[1].residency.position_maps
        and sessions[0].residency.rebuilt_turns == sessions[1].residency.rebuilt_turns
    )


@pytest.mark.extended
@pytest.mark.parametrize("name", ways(each for each in PRESETS if each not in REFUSED))
def test_caches_of_every_preset_are_restored(deep: LoadedModel, tmp_path: Path, name: str) -> None:
    tokens = 192 if name in WIDE else TOKENS
    first, never = (stored(deep, tmp_path, name, tokens=tokens), unstored(deep, name, tokens))
    turns, other = (talk(each, questions=SAID[:2]) for each in (first, never))
    assert turns == other
    first.close()
    again = stored(deep, tmp_path, name, tokens=tokens)
    last = again.ask(turns, "x")
    assert last.text == never.ask(turns, "x").text
    assert last.result.tier == "disk" and last.result.restored_tokens > 0
    assert last.result.recomputed_tokens == 0 and again.disk.stats().rejected == {}


@pytest.mark.extended
def test_edit_before_the_latest_turn_of_a_restored_chat_is_prefilled_again(
    small: LoadedModel, tmp_path: Path
) -> None:
    first = stored(small, tmp_path, "keydiff")
    turns = talk(first)
    first.close()
    again = stored(small, tmp_path, "keydiff")
    edited = [*turns[:-3], user("And before that?")]  # in place of the latest turn
    last = again.ask(edited, "x").result
    assert (last.cached_tokens, last.restored_tokens) == (0, 0) < (last.recomputed_tokens, 1)
    kept = again.ask(turns, "x").result
    assert kept.tier == "disk" and kept.recomputed_tokens == 0


def flip(folder: Path, holding: bytes) -> None:
    """Damage the blobs that have these bytes in them."""
    found = [file for file in (folder / "blobs").rglob("*") if file.is_file()]
    found = [file for file in found if holding in file.read_bytes()]
    assert found
    for file in found:
        data = bytearray(file.read_bytes())
        data[-9] ^= 1
        file.write_bytes(data)


@pytest.mark.extended
@pytest.mark.parametrize("part", [b"session_snapshot", b'"base"'])
def test_damaged_chat_caches_are_recomputed(
    small: LoadedModel, tmp_path: Path, part: bytes
) -> None:
    first, never = stored(small, tmp_path, "epicache"), unstored(small, "epicache")
    turns = talk(first)
    talk(never)
    first.close()
    flip(tmp_path, part)
    again = stored(small, tmp_path, "epicache")
    last = again.ask(turns, "x")
    assert last.text == never.ask(turns, "x").text
    assert last.result.tier == "none" and last.result.restored_tokens == 0
    assert last.result.recomputed_tokens == sum(
        each.tokens for each in again.core.find("a", "x").turns[:-1]
    )
    assert again.disk.stats().rejected == {"damaged": 1}
    again.close()
    third = stored(small, tmp_path, "epicache")
    assert third.ask(answered(turns, last, "And?"), "x").result.restored_tokens > 0


@pytest.mark.extended
def test_record_of_another_chat_is_rejected(
    small: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record that is whole, and yet of another chat."""
    first, never = stored(small, tmp_path, "epicache"), unstored(small, "epicache")
    monkeypatch.setattr(
        "larder.server.session_backend.chat_snapshot.encode_chat_state",
        lambda session: b'{"schema": 1}',
    )
    turns = talk(first)
    talk(never)
    first.close()
    again = stored(small, tmp_path, "epicache")
    last = again.ask(turns, "x")
    assert last.text == never.ask(turns, "x").text and last.result.restored_tokens == 0
    assert again.disk.stats().rejected == {"damaged": 1}
    again.served.check()


@pytest.mark.extended
@pytest.mark.parametrize("tier", ["disk", "device"])
def test_turns_after_the_stored_caches_are_prefilled_again(
    small: LoadedModel, tmp_path: Path, tier: str
) -> None:
    killed, never = stored(small, tmp_path, "epicache"), unstored(small, "epicache")
    turns = talk(killed, questions=SAID[:3])
    killed.core.tiers.save(killed.core.find("a", "x"))
    killed.run()
    turns = answered(turns, killed.ask(turns, "x", max_new_tokens=5), SAID[3])
    killed.store.close()  # it saves nothing any more
    assert talk(never) == turns
    again = stored(small, tmp_path, "epicache")
    *before, late = again.core.find("a", "x").turns
    if tier == "device":
        assert not again.core.admin.prefetch(again.core.idle("a", "x")).done()
        again.run()
    last = again.ask(turns, "x")
    assert last.text == never.ask(turns, "x").text and last.result.tier == tier
    assert last.result.cached_tokens == sum(each.tokens for each in before)
    assert last.result.restored_tokens == (last.result.cached_tokens if tier == "disk" else 0)
    assert last.result.recomputed_tokens == late.tokens
    more = answered(turns, last, "And?")
    assert again.ask(more, "x").text == never.ask(more, "x").text


@pytest.mark.extended
def test_strongest_durability_stores_the_caches(small: LoadedModel, tmp_path: Path) -> None:
    killed = stored(small, tmp_path, "epicache", Durability.SNAPSHOT)
    never = unstored(small, "epicache")
    turns = talk(killed)
    talk(never)
    killed.store.close()
    again = stored(small, tmp_path, "epicache")
    last = again.ask(turns, "x")
    assert last.text == never.ask(turns, "x").text and last.result.recomputed_tokens == 0
    assert last.result.restored_tokens > 0


@pytest.mark.extended
def test_many_chats_alternate_in_little_memory(small: LoadedModel, tmp_path: Path) -> None:
    measured = unstored(small, "epicache")
    talk(measured)
    [session] = measured.core.sessions
    size, limit = session.residency.nbytes, measured.core.reservations.peak
    own = stored(small, tmp_path, "epicache", device=limit, host=host_need(measured) + 4 * size)
    alone = unstored(small, "epicache")
    turns = {f"n{number}": [*HISTORY, user(SAID[number % 2])] for number in range(6)}
    for text in ("Why?", "Sure?"):
        for name, messages in turns.items():
            last, other = own.ask(messages, name), alone.ask(messages, name)
            assert last.text == other.text
            turns[name] = answered(messages, last, text)
    tiers = own.core.tiers
    assert tiers.parked["disk"] and tiers.restored["disk"] and not own.disk.stats().rejected
    assert not tiers.dropped
    assert any(not own.core.sessions.has("a", name) for name in turns)


@pytest.mark.extended
def test_request_cancelled_while_waiting_for_memory_releases_it(
    small: LoadedModel, tmp_path: Path
) -> None:
    measured = unstored(small, "epicache")
    turns = talk(measured)
    own = stored(small, tmp_path, "epicache", device=measured.core.reservations.peak * 8 // 7)
    assert talk(own) == turns
    own.core.admin.release(own.core.idle("a", "x"))
    own.run()
    busy, _ = own.served.submit([*HISTORY, user(SAID[0])], "y", max_new_tokens=40)
    while not busy.text:
        own.served.step()
    late, ticket = own.served.submit(turns, "x", max_new_tokens=5)
    own.served.step()
    assert len(own.core.scheduler.queue) == 1
    ticket.cancel()
    own.run()
    assert late.result.reason == "cancelled" and busy.result.new_tokens == 40
    session, tiers = own.core.find("a", "x"), own.core.tiers
    assert session.residency.reservation is None and session.key not in tiers.in_host
    assert tiers.offload(own.core.find("a", "y"))  # what is there is looked through for the store
    own.run()
    last = own.ask(turns, "x")
    assert last.text == measured.ask(turns, "x").text and last.result.tier == "disk"


def host_need(served: Served) -> int:
    """Host bytes that a turn may demand."""
    [session] = served.core.sessions
    return chat_turn_demand(session.serving, session.transcript.tokens + 64, 32, 5, 4).host


@pytest.mark.extended
def test_released_chat_is_prefetched_again(small: LoadedModel, tmp_path: Path) -> None:
    own, never = stored(small, tmp_path, "epicache"), unstored(small, "epicache")
    turns = talk(own)
    talk(never)
    done = own.core.admin.release(own.core.idle("a", "x"))
    own.run()
    assert done.result().residency.tier == "disk" == own.tier()
    assert not own.core.sessions.has("a", "x")
    back = own.core.admin.prefetch(own.core.idle("a", "x"))
    own.run()
    assert back.result().residency.tier == "device"
    last = own.ask(turns, "x")
    assert last.text == never.ask(turns, "x").text
    assert last.result.tier == "device" and last.result.recomputed_tokens == 0


@pytest.mark.extended
def test_request_during_a_cache_write_is_answered(small: LoadedModel, tmp_path: Path) -> None:
    """The write stores the caches as they were before the request."""
    own, never = stored(small, tmp_path, "epicache"), unstored(small, "epicache")
    turns = talk(own, questions=SAID[:3])
    assert talk(never, questions=SAID[:3]) == turns
    session = own.core.find("a", "x")
    assert own.core.tiers.offload(session)
    assert session.residency.is_saving and session.residency.tier == "host"
    last = own.ask(turns, "x", max_new_tokens=5)
    assert last.text == never.ask(turns, "x", max_new_tokens=5).text
    turns = answered(turns, last, SAID[3])
    own.store.close()
    again = stored(small, tmp_path, "epicache")
    assert again.ask(turns, "x").text == never.ask(turns, "x").text
    assert again.disk.stats().rejected == {} and again.core.tiers.restored["disk"] == 1
