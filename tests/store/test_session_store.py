"""Sessions that outlive the process: saved, loaded, forked, rolled back, removed."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from cache_stores import same_bits
from larder.cache import SequenceCache
from larder.core import InputError, Superseded, UnknownName
from larder.store import (
    CODECS,
    GRACE_SECONDS,
    RECORD_SCHEMA,
    Tier,
    codec_named,
    decode_record,
    encode_record,
)
from store.caches import (
    IDS,
    LONGER,
    SECRET,
    SPEC,
    TALK,
    WHO,
    asking,
    blob_files,
    cache_files,
    compressed,
    files,
    go_on,
    is_exact,
    load,
    read,
    save,
    snapshot,
    store_at,
)

pytestmark = pytest.mark.usefixtures("small_chunks")


def test_restored_session_continues_identically(tmp_path: Path) -> None:
    first = store_at(tmp_path)
    first.sessions.save(WHO, TALK, IDS, snapshot(read(IDS)), transcript=b"said")
    first.close()
    loaded = load(store_at(tmp_path))
    assert is_exact(loaded) and loaded.transcript == b"said" and loaded.record.lossless
    assert loaded.cache is not None
    go_on(loaded.cache, LONGER[len(IDS) :], IDS)
    whole = read(IDS)
    go_on(whole, LONGER[len(IDS) :], IDS)
    assert same_bits(loaded.cache.state(), whole.state())


def test_compressed_cache_round_trips_bit_exactly(tmp_path: Path) -> None:
    store, cache = store_at(tmp_path), compressed(IDS)
    store.sessions.save(WHO, TALK, IDS, snapshot(cache))
    found = load(store).cache
    assert found is not None and same_bits(found.state(), cache.state())
    assert found.next_position == len(IDS) and found.meta() == cache.meta()
    assert store.prefixes.match_prefix(WHO, LONGER, asking().identity, SPEC) is None


@pytest.mark.failure(number=15)
@pytest.mark.parametrize("codec", CODECS.names())
def test_positions_are_exact_whatever_the_codec(tmp_path: Path, codec: str) -> None:
    store, cache = store_at(tmp_path), compressed(IDS)
    store.sessions.save(WHO, TALK, IDS, snapshot(cache, codec))
    loaded = load(store)
    assert loaded.cache is not None
    assert loaded.record.codec == (codec_named(codec).unstreamed or codec)
    assert loaded.record.lossless == (codec == "raw")
    state, found = cache.state(), loaded.cache.state()
    farthest = {"entropy_coarse": 0.8}.get(codec, 0.4)
    for name in state:
        if not name.endswith(("keys", "values")):
            assert same_bits({"": state[name]}, {"": found[name]})
        else:
            assert (state[name] - found[name]).abs().max() < farthest


def test_unchanged_blobs_are_not_rewritten(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    save(store)
    before = {path: path.stat().st_ino for path in blob_files(tmp_path)}
    save(store, LONGER)
    again = {path: path.stat().st_ino for path in blob_files(tmp_path)}
    assert {path: again.get(path) for path in before} == before
    save(store, LONGER, name="another")
    # All chunks are shared, and the rest of the cache; each session has a log of its own.
    [log] = set(blob_files(tmp_path)) - set(again)
    assert log not in cache_files(tmp_path) and set(again) < set(blob_files(tmp_path))


@pytest.mark.failure(number=17)
@pytest.mark.extended
def test_conversations_with_shared_chunks_both_load(tmp_path: Path) -> None:
    store, other = store_at(tmp_path), (*IDS[:-2], 1, 2)
    for turn in range(3):
        texts = {"a": (*IDS, *range(turn)), "b": (*other, *range(turn))}
        for name, ids in texts.items():
            save(store, ids, name=name)
        for name, ids in texts.items():
            assert is_exact(load(store, name), ids) and load(store, name).cache is not None


@pytest.mark.failure(number=18)
def test_repeated_save_is_idempotent(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    first = store.sessions.save(WHO, TALK, IDS, snapshot(read(IDS)), expected=0)
    again = store.sessions.save(WHO, TALK, IDS, snapshot(read(IDS)), expected=0)
    assert again == first and load(store).record.epoch == 1
    with pytest.raises(Superseded):
        store.sessions.save(WHO, TALK, LONGER, snapshot(read(LONGER)), expected=0)
    assert is_exact(load(store))


def test_fork_shares_caches_and_diverges(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    save(store)
    count, caches = len(blob_files(tmp_path)), cache_files(tmp_path)
    store.sessions.fork(WHO, TALK, "fork")
    assert len(blob_files(tmp_path)) == count + 1 and cache_files(tmp_path) == caches
    save(store, LONGER, name="fork")
    assert is_exact(load(store)) and is_exact(load(store, "fork"), LONGER)
    with pytest.raises(InputError, match="take another name"):
        store.sessions.fork(WHO, TALK, "fork")
    with pytest.raises(InputError, match="no session 'nobody'"):
        store.sessions.fork(WHO, "nobody", "x")


def test_rollback_is_a_new_epoch(tmp_path: Path) -> None:
    store = store_at(tmp_path, kept_epochs=3)
    for stop in (10, 14, 21):
        save(store, IDS[:stop])
    assert store.sessions.roll_back(WHO, TALK, 2).epoch == 4
    assert is_exact(load(store), IDS[:14])
    with pytest.raises(InputError, match="has no state 1: it has 2, 3, 4"):
        store.sessions.roll_back(WHO, TALK, 1)
    assert is_exact(load(store), IDS[:14])


@pytest.mark.failure(number=21)
@pytest.mark.extended
def test_removal_deletes_unshared_blobs(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    save(store)
    save(store, (*IDS[:12], 1, 2, 3), name="other")
    with_both = store.parts.ledger.used(Tier.DISK)
    assert store.sessions.remove(WHO, TALK) > 0
    assert store.sessions.load(WHO, TALK, asking()) is None
    assert is_exact(load(store, "other"), (*IDS[:12], 1, 2, 3))
    assert load(store, "other").cache is not None
    assert store.parts.ledger.used(Tier.DISK) < with_both
    with pytest.raises(InputError):
        store.sessions.remove(WHO, TALK)
    again = store_at(tmp_path, home="another machine")
    assert [record.name for record in again.sessions.heads()] == ["other"]
    save(store)
    assert is_exact(load(store))


@pytest.mark.failure(number=21)
@pytest.mark.extended
def test_chunks_are_deleted_with_their_last_session(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    save(store, name="stays")
    before = {*files(tmp_path, "store/blobs"), *files(tmp_path, "store/chunks")}
    counted = store.parts.blobs.index.bytes_by_tenant()
    save(store, (*IDS[:12], *range(40, 60)), name="one")
    save(store, (*IDS[:12], *range(40, 60)), name="two")
    store.sessions.remove(WHO, "one")
    assert len(load(store, "two").ids) == 32 and load(store, "two").cache is not None
    store.sessions.remove(WHO, "two")
    store.maintenance.forget_removed(-1.0)
    assert {*files(tmp_path, "store/blobs"), *files(tmp_path, "store/chunks")} == before
    assert is_exact(load(store, "stays")) and load(store, "stays").cache is not None
    assert store.parts.blobs.index.bytes_by_tenant() == counted


@pytest.mark.failure(number=21)
@pytest.mark.extended
def test_chunks_used_by_another_machine_stay_until_a_sweep(tmp_path: Path) -> None:
    now = [time.time()]  # of files, too
    store, other = (store_at(tmp_path, home=home, clock=lambda: now[0]) for home in ("a", "b"))
    save(store)
    text = (*IDS[:12], 1, 2, 3)
    save(other, text, name="other")
    store.sessions.remove(WHO, TALK)
    assert is_exact(load(other, "other"), text) and load(other, "other").cache is not None
    now[0] += 2 * GRACE_SECONDS
    store.maintenance.sweep()
    assert is_exact(load(other, "other"), text) and load(other, "other").cache is not None
    other.sessions.remove(WHO, "other")
    for each in (other, store):
        now[0] += 2 * GRACE_SECONDS
        each.maintenance.sweep(0.0)
        each.maintenance.sweep(0.0)
    assert files(tmp_path, "store/chunks") == [] and files(tmp_path, "store/blobs") == []


def test_late_writer_of_a_removed_session_is_superseded(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    save(store)
    store.sessions.remove(WHO, TALK)
    with pytest.raises(Superseded):
        store.sessions.save(WHO, TALK, LONGER, snapshot(read(LONGER)), expected=1)


@pytest.mark.extended
def test_tombstones_of_removed_sessions_are_deleted_later(tmp_path: Path) -> None:
    now = [1e9]
    store = store_at(tmp_path, clock=lambda: now[0])
    save(store, name="stays")
    before = files(tmp_path, "store/sessions")
    for name in ("one", "two", "one"):
        save(store, name=name)
        store.sessions.remove(WHO, name)
    assert len(files(tmp_path, "store/sessions")) == len(before) + 2
    assert store.maintenance.forget_removed() == 0
    now[0] += 60
    assert store.maintenance.forget_removed() == 2
    assert files(tmp_path, "store/sessions") == before
    assert len(list((tmp_path / "store" / "sessions").glob("*/*"))) == 1
    assert [record.name for record in store.sessions.heads()] == ["stays"]
    save(store, name="one")
    # One who still knows an epoch of the sessions that are gone finds that it has moved.
    assert is_exact(load(store, "one")) and load(store, "one").record.epoch == 5


def test_tenants_are_isolated(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    save(store)
    assert store.sessions.load("somebody else", TALK, asking()) is None
    assert store.prefixes.match_prefix(WHO, LONGER, asking().identity, SPEC) is not None
    assert store.prefixes.match_prefix("somebody else", LONGER, asking().identity, SPEC) is None
    with pytest.raises(InputError):
        store.sessions.remove("somebody else", TALK)
    assert len(store.sessions.heads(WHO)) == 1 and store.sessions.heads("somebody else") == []


def test_cache_not_matching_its_tokens_is_refused(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    with pytest.raises(InputError, match="has read 21 tokens, but 26"):
        store.sessions.save(WHO, TALK, LONGER, snapshot(read(IDS)))
    with pytest.raises(UnknownName, match="int4"):
        store.sessions.save(WHO, TALK, IDS, snapshot(read(IDS), "int5"))
    assert store.sessions.load(WHO, TALK, asking()) is None


def test_tokens_alone_can_be_kept(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    store.sessions.save(WHO, TALK, IDS)
    loaded = load(store)
    assert loaded.ids == IDS and loaded.cache is None and loaded.reason == "tokens only"


@pytest.mark.failure(number=14)
@pytest.mark.parametrize("length", [3, 4, 5, 8, 20])
def test_prefixes_match_completely_or_partly(tmp_path: Path, length: int) -> None:
    store = store_at(tmp_path)
    assert store.prefixes.save(WHO, IDS, read(IDS), asking().identity) == 20
    asked = (*IDS[:length], 99, 98, 97)
    found = store.prefixes.match_prefix(WHO, asked, asking().identity, SPEC)
    assert found is not None and same_bits(found.state(), read(IDS[:length]).state())
    go_on(found, asked[length:], asked[:length])
    assert same_bits(found.state(), _read_in_two(asked, length).state())


@pytest.mark.failure(number=16)
def test_prefix_match_leaves_the_last_token(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    store.prefixes.save(WHO, IDS, read(IDS), asking().identity)
    for length in (21, 20, 17, 2):
        found = store.prefixes.match_prefix(WHO, IDS[:length], asking().identity, SPEC)
        assert found is not None and found.next_position == min(length - 1, 20)
    for ids in (IDS[:1], ()):
        assert store.prefixes.match_prefix(WHO, ids, asking().identity, SPEC) is None


def _read_in_two(ids: tuple[int, ...], length: int) -> SequenceCache:
    cache = read(ids[:length])
    go_on(cache, ids[length:], ids[:length])
    return cache


def test_processes_of_one_machine_see_each_others_epochs(tmp_path: Path) -> None:
    one, other = store_at(tmp_path), store_at(tmp_path)
    save(one)
    assert is_exact(load(other)) and load(other).cache is not None
    save(other, LONGER)
    assert is_exact(load(one), LONGER)
    with pytest.raises(Superseded):
        one.sessions.save(WHO, TALK, IDS, snapshot(read(IDS)), expected=1)
    one.sessions.remove(WHO, TALK)
    assert other.sessions.load(WHO, TALK, asking()) is None


@pytest.mark.parametrize("is_indexed", [True, False])
def test_verify_reports_records_of_other_versions_unchanged(
    tmp_path: Path, is_indexed: bool
) -> None:
    store = store_at(tmp_path)
    save(store)
    [path] = (tmp_path / "store" / "sessions").rglob("*.json")
    written = replace(decode_record(path.read_bytes(), SECRET), schema=99)
    data = encode_record(written, SECRET)
    path.write_bytes(data)
    store.close()
    store = store_at(tmp_path, home="home" if is_indexed else "elsewhere")
    before = files(tmp_path)
    checked = store.maintenance.verify(store.sessions.heads())
    named = [problem for each in checked for problem in each.problems]
    assert len(checked) == is_indexed == len(named)
    refused = store.maintenance.refused_records()
    assert list(refused) == [path.relative_to(tmp_path / "store").as_posix()]
    for why in (*named, *refused.values()):
        assert f"is of schema 99, this larder reads {RECORD_SCHEMA}" in why
    assert store.maintenance.sweep(-1.0) == 0
    assert path.read_bytes() == data and files(tmp_path) == before


def test_verify_repairs_records_and_reports_losses(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    save(store)
    [path] = (tmp_path / "store" / "sessions").rglob("*.json")
    result = path.read_bytes()
    path.write_bytes(result[:-3])
    [checked] = store.maintenance.verify(store.sessions.heads())
    assert checked.problems == ("Its record beside the blobs was damaged and is written again.",)
    assert path.read_bytes() == result
    [checked] = store.maintenance.verify(store.sessions.heads())
    assert checked.problems == ()
