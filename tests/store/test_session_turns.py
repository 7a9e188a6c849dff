"""Sessions that grow turn by turn under a cache that was saved once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from cache_stores import same_bits
from larder.core import Refused, Superseded
from larder.store import ByteBudgets, Record, SessionTurn, Store, Tier, open_file_system
from store.caches import IDS, TALK, WHO, asking, compressed, snapshot, store_at
from store.file_systems import Faulty

pytestmark = pytest.mark.usefixtures("small_chunks")
MORE = (*IDS, 40, 41, 42)


def say(store: Store, ids: Sequence[int], expected: int, name: str = TALK) -> Record:
    text = f"{len(ids)} tokens".encode()
    return store.sessions.append(
        WHO, name, SessionTurn(ids, text, {"turns": str(expected)}), expected
    )


def attach(store: Store, ids: Sequence[int], expected: int, name: str = TALK) -> Record:
    result = snapshot(compressed(ids))
    with store.sessions.stage(WHO, ids, result) as prepared:
        return store.sessions.attach(WHO, name, prepared, expected, {"settled": "3"})


def test_cache_is_kept_when_turns_are_appended(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    say(store, IDS, 0)
    assert store.sessions.load(WHO, TALK, asking()).reason == "tokens only"  # pyright: ignore
    attach(store, IDS[:-1], 1)
    written = say(store, MORE, 2)
    assert written.epoch == 3 and written.num_cached_tokens == len(IDS) - 1
    assert written.labels == {"turns": "2"} and store.sessions.has_cache(written)
    again = store_at(tmp_path)
    found = again.sessions.load(WHO, TALK, asking(), MORE)
    assert found is not None and found.cache is not None and found.ids == MORE
    assert same_bits(found.cache.state(), compressed(IDS[:-1]).state())
    assert again.sessions.read_transcript(WHO, TALK) == (written, b"24 tokens")


def test_cache_of_another_text_is_dropped(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    say(store, IDS, 0)
    attach(store, IDS, 1)
    assert say(store, (9, *MORE), 2).spans == ()
    with pytest.raises(Refused, match="does not begin"):
        attach(store, IDS, 3)
    with pytest.raises(Superseded):
        attach(store, (9, *IDS), 2)
    assert attach(store, (9, *IDS), 3).epoch == 4


def test_repeated_append_is_one_turn(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    first = say(store, IDS, 0)
    assert say(store, IDS, 0) == first
    with pytest.raises(Superseded):
        say(store, MORE, 0)


def test_labels_require_the_newest_epoch(tmp_path: Path) -> None:
    here, there = store_at(tmp_path), store_at(tmp_path, home="there")
    pinned = {"pinned": "yes"}
    say(here, IDS, 0)
    assert here.sessions.label(WHO, TALK, pinned, 1).epoch == 2
    assert here.sessions.label(WHO, TALK, pinned, 2).epoch == 2
    there.sessions.append(WHO, TALK, SessionTurn(MORE, b"more", pinned), 2)
    with pytest.raises(Superseded):
        here.sessions.label(WHO, TALK, pinned, 2)
    assert here.sessions.label(WHO, TALK, pinned, 3).num_tokens == len(MORE)


def test_labels_do_not_prune_epochs_or_change_recency(tmp_path: Path) -> None:
    now = [1.0]
    store = store_at(tmp_path, clock=lambda: now[0])
    for number in range(4):
        last = say(store, IDS[: 9 + number], number)
    attach(store, IDS[:12], 4)
    now[0] = 2.0
    for number in range(5, 11):
        labeled = store.sessions.label(WHO, TALK, {"pinned": "yes" if number % 2 else "no"}, number)
    assert labeled.epoch == 11 and labeled.made == last.made == 1.0
    assert store.sessions.has_cache(labeled)
    assert store.parts.manifest.epochs(last.key) == [2, 3, 4, 11]
    assert store.sessions.roll_back(WHO, TALK, 2).num_tokens == 10


def test_head_labeled_by_another_machine_during_its_read_is_found(tmp_path: Path) -> None:
    there = store_at(tmp_path, home="there")

    def label(what: str, path: str) -> None:
        if what == "read" and path.endswith("/2.json"):
            there.sessions.label(WHO, TALK, {"pinned": "yes"}, 2)

    here = store_at(
        tmp_path, Faulty(open_file_system(str(tmp_path / "store")), before=label), home="here"
    )
    for number in range(2):
        say(there, IDS[: 9 + number], number)
    found = here.sessions.read_transcript(WHO, TALK)
    assert found is not None and (found[0].epoch, found[1]) == (3, b"10 tokens")


def test_unattached_staged_cache_is_uncharged(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    say(store, IDS, 0)
    before = store.parts.ledger.used(Tier.DISK, store.parts.tenant(WHO))
    with store.sessions.stage(WHO, IDS, snapshot(compressed(IDS))):
        assert store.parts.ledger.used(Tier.DISK, store.parts.tenant(WHO)) > before
    assert store.parts.ledger.used(Tier.DISK, store.parts.tenant(WHO)) == before


def test_evicted_cache_is_dropped_from_every_epoch(tmp_path: Path) -> None:
    probe = store_at(tmp_path / "probe")
    say(probe, IDS, 0)
    size = attach(probe, IDS, 1).spans[0].bytes
    room = probe.parts.ledger.used(Tier.DISK) + 5 * 64 * 1024
    store = store_at(tmp_path, budgets=ByteBudgets({Tier.DISK: room + size}))
    say(store, IDS, 0)
    attach(store, IDS, 1)
    written = say(store, MORE, 2)
    store.parts.blobs.make_room(store.parts.tenant(WHO), room)
    assert not store.sessions.has_cache(written)
    assert store.sessions.read_transcript(WHO, TALK) is not None
    assert say(store, (*MORE, 5), 3).spans == ()


def test_sessions_are_listed_from_the_index_only(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    for number in range(3):
        say(store, IDS, 0, f"n{number}")
    store.sessions.remove(WHO, "n1")
    assert {record.name for record in store.sessions.indexed_heads(WHO)} == {"n0", "n2"}
    assert store.sessions.indexed_heads("somebody else") == []


def test_compaction_keeps_the_newest_epoch(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    say(store, IDS, 0)
    say(store, MORE, 1)
    assert store.sessions.compact(WHO, TALK) > 0
    [record] = store.sessions.indexed_heads(WHO)
    assert store.parts.manifest.epochs(record.key) == [2]
    assert store.sessions.read_transcript(WHO, TALK) == (record, b"24 tokens")


@pytest.mark.failure(number=20)
@pytest.mark.extended
def test_session_recreated_under_a_removed_name_is_distinct(
    tmp_path: Path,
) -> None:
    now = [1_700_000_000.0]
    here, there = (
        Store(str(tmp_path / "s"), tmp_path / home, secret=b"s" * 32, clock=lambda: now[0])
        for home in ("here", "there")
    )
    old = here.sessions.append(WHO, TALK, SessionTurn([1, 2, 3], b"old"), 0)
    there.sessions.remove(WHO, TALK)
    now[0] += 3600
    assert there.maintenance.forget_removed() == 1
    new = there.sessions.append(WHO, TALK, SessionTurn([7, 8], b"new"), 0)
    assert here.sessions.has_moved(WHO, TALK, old.epoch)
    with pytest.raises(Superseded):
        here.sessions.append(WHO, TALK, SessionTurn([1, 2, 3, 4], b"old and more"), old.epoch)
    assert (
        here.sessions.read_transcript(WHO, TALK)
        == there.sessions.read_transcript(WHO, TALK)
        == (new, b"new")
    )
    assert (
        there.sessions.append(WHO, TALK, SessionTurn([7, 8, 9], b"newer"), new.epoch).epoch
        > new.epoch
    )
    for number in range(3):  # one number stands for all of them
        there.sessions.append(WHO, f"n{number}", SessionTurn([number], b"x"), 0)
        there.sessions.remove(WHO, f"n{number}")
        now[0] += 3600
        there.maintenance.forget_removed()
    assert len(list((tmp_path / "s" / "forgotten").rglob("*.json"))) == 1
    here.close()
    there.close()
