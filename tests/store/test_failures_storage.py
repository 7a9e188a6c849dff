"""Damage, crashes and bad disks: each ends in the exact cache, in its tokens, or in an error."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from larder.core.errors import LarderError, Refused, StoreError, Superseded
from larder.store.blobs import FOLDER as BLOBS
from larder.store.blobs import Ref, path_of
from larder.store.container import pack, peek, unpack
from larder.store.deadline import Patience
from larder.store.digests import digest_of
from larder.store.ledger import Tier
from larder.store.places import TEMPORARY, place_at
from store.caches import (
    IDS,
    SPEC,
    TALK,
    WHO,
    asking,
    blob_files,
    compressed,
    files,
    is_exact,
    load,
    read,
    save,
    snapshot,
    store_at,
)
from store.places import BROKEN, FULL, QUOTA, READ_ONLY, Faulty, refusing

pytestmark = pytest.mark.usefixtures("small_chunks")
LONGER = (*IDS, 5, 6, 7, 8, 9)
OTHERS = (BROKEN, READ_ONLY, QUOTA)
CUT = {
    "by a byte": lambda data: data[:-1],
    "by half": lambda data: data[: len(data) // 2],
    "to nothing": lambda data: b"",
    "longer": lambda data: data + b"\0",
    "a hole": lambda data: data[: len(data) // 2] + bytes(64) + data[len(data) // 2 + 64 :],
    "of zeros": lambda data: bytes(len(data)),
}


def cache_files(folder: Path) -> list[Path]:
    """Files of blobs that hold tensors: all but logs of tokens."""
    return [path for path in blob_files(folder) if b"kvm_digest" in path.read_bytes()]


def outcome(folder: Path) -> tuple[str, str]:
    """What becomes of the session in a process that is started now: as it was, or a reason."""
    store = store_at(folder)
    try:
        loaded = load(store)
    except Refused as error:
        assert store.parts.refusals.counts()[error.reason] == 1
        return "lost", error.reason
    assert is_exact(loaded)
    if loaded.reason:
        assert store.parts.refusals.counts()[loaded.reason] == 1
    return ("exact" if loaded.cache is not None else "tokens"), loaded.reason


def test_1_a_flipped_bit_in_any_tensor_is_noticed(tmp_path: Path) -> None:
    save(store_at(tmp_path))
    for path in cache_files(tmp_path):
        data = path.read_bytes()
        head = 8 + int.from_bytes(data[:8], "little")
        ends = [len(data), head]
        for tensor in unpack(data)[0].values():
            ends.append(ends[-1] + tensor.nbytes)
        for place in sorted({3, 20, *(end - 1 for end in ends)}):
            flipped = bytearray(data)
            flipped[place] ^= 1 << place % 8
            path.write_bytes(bytes(flipped))
            assert outcome(tmp_path) == ("tokens", "damaged")
            assert not path.exists()  # set aside
            path.write_bytes(data)
    assert outcome(tmp_path) == ("exact", "")


def test_1_a_flipped_bit_in_the_token_log_is_noticed(tmp_path: Path) -> None:
    save(store_at(tmp_path))
    [path] = set(blob_files(tmp_path)) - set(cache_files(tmp_path))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    assert outcome(tmp_path) == ("lost", "damaged")


@pytest.mark.parametrize("how", CUT)
def test_2_blobs_that_are_cut_or_overwritten_are_noticed(tmp_path: Path, how: str) -> None:
    save(store_at(tmp_path))
    path = cache_files(tmp_path)[-1]
    path.write_bytes(CUT[how](path.read_bytes()))
    assert outcome(tmp_path) == ("tokens", "damaged")


@pytest.mark.parametrize("how", CUT)
def test_2_a_manifest_that_is_cut_or_overwritten_is_built_again(tmp_path: Path, how: str) -> None:
    store = store_at(tmp_path)
    save(store)
    store.close()
    path = tmp_path / "home" / "manifest.sqlite"
    path.write_bytes(CUT[how](path.read_bytes()))
    for log in tmp_path.glob("home/manifest.sqlite-*"):
        log.unlink()
    assert outcome(tmp_path)[0] == "exact"
    found = store_at(tmp_path).prefixes.longest(WHO, LONGER, asking().identity, SPEC)
    assert found is not None and found.next_position == 20


def test_2_swapped_blobs_are_noticed(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    save(store)
    first, *_, last = cache_files(tmp_path)
    one, other = first.read_bytes(), last.read_bytes()
    first.write_bytes(other)
    last.write_bytes(one)
    assert outcome(tmp_path) == ("tokens", "damaged")


def test_a_damaged_blob_is_mended_by_the_next_saving(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    save(store)
    for path in cache_files(tmp_path):
        path.write_bytes(path.read_bytes()[:-1])
    assert load(store).reason == "damaged"
    save(store)
    while load(store).reason:  # one damaged blob is found at a time
        save(store)
    assert is_exact(load(store))


@pytest.mark.parametrize(
    ("error", "step"),
    [(FULL, step) for step in range(8)] + [(e, s) for e in OTHERS for s in (0, 3, 6)],
)
def test_4_a_disk_that_takes_no_more_leaves_what_was(tmp_path: Path, error: int, step: int) -> None:
    save(store_at(tmp_path))
    steps: list[str] = []

    def fail(what: str, path: str) -> None:
        if what in ("create", "replace"):
            steps.append(path)
            if len(steps) > step:
                raise OSError(error, os.strerror(error), path)

    place = Faulty(place_at(str(tmp_path / "store")), before=fail)
    store = store_at(tmp_path, place, patience=Patience(failures=100))
    text = tuple(range(50, 70))
    try:
        record = store.sessions.save(WHO, "new", text, snapshot(read(text)))
    except LarderError as said:
        assert isinstance(said, StoreError) and "untouched" in str(said)
        assert store.sessions.load(WHO, "new", asking()) is None
    else:
        assert record.spans == () or step > 6
        assert is_exact(load(store, "new"), text)
    assert is_exact(load(store)) and load(store).cache is not None
    assert outcome(tmp_path) == ("exact", "")


def test_4_a_disk_that_cannot_be_read_is_an_error_and_no_answer(tmp_path: Path) -> None:
    save(store_at(tmp_path))
    place = Faulty(place_at(str(tmp_path / "store")), refusing(BROKEN, "read"))
    store = store_at(tmp_path, place, patience=Patience(failures=100))
    with pytest.raises(Refused, match="disk or server is well"):
        load(store)
    assert store.prefixes.longest(WHO, LONGER, asking().identity, SPEC) is None
    assert outcome(tmp_path) == ("exact", "")


def test_5_a_blob_that_went_between_looking_and_loading(tmp_path: Path) -> None:
    save(store_at(tmp_path))
    for path in cache_files(tmp_path):
        data = path.read_bytes()
        path.unlink()
        assert outcome(tmp_path) == ("tokens", "damaged")
        path.write_bytes(data)
    victim = cache_files(tmp_path)[0]

    def vanish(what: str, path: str) -> None:
        if what == "read" and path.startswith(BLOBS) and victim.exists():
            victim.unlink()

    place = Faulty(place_at(str(tmp_path / "store")), before=vanish)
    assert load(store_at(tmp_path, place)).reason == "damaged"


def test_5_a_chunk_that_is_gone_is_forgotten_and_asked_for_once(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    store.prefixes.save(WHO, IDS, read(IDS), asking().identity)
    for path in cache_files(tmp_path):
        path.unlink()
    for _ in range(2):
        assert store.prefixes.longest(WHO, LONGER, asking().identity, SPEC) is None
    assert store.parts.refusals.counts() == {"damaged": 1}
    assert store.prefixes.save(WHO, IDS, read(IDS), asking().identity) == 20
    found = store.prefixes.longest(WHO, LONGER, asking().identity, SPEC)
    assert found is not None and found.next_position == 20


def test_6_a_disk_that_hangs_holds_nobody_up(tmp_path: Path) -> None:
    save(store_at(tmp_path))
    go_on, hanging = threading.Event(), threading.Event()

    def hang(what: str, path: str) -> None:
        if what == "replace" and hanging.is_set():
            go_on.wait()

    place = Faulty(place_at(str(tmp_path / "store")), before=hang)
    store = store_at(tmp_path, place, patience=Patience(seconds=0.3, failures=2, rest_seconds=0.3))
    hanging.set()
    with pytest.raises(StoreError, match="did not answer"):
        save(store, LONGER, name="new")
    assert is_exact(load(store)) and load(store).cache is not None  # others are served
    assert store.sessions.load(WHO, "new", asking()) is None
    hanging.clear()
    go_on.set()
    save(store, LONGER, name="new")
    assert is_exact(load(store, "new"), LONGER)


def test_7_reading_while_the_same_is_written(tmp_path: Path) -> None:
    store, stop = store_at(tmp_path), threading.Event()
    texts = {name: (*IDS, number) for number, name in enumerate("abc")}
    wrong: list[object] = []
    save(store, texts["a"], name="a")

    def write(name: str) -> None:
        for _ in range(4):
            try:
                save(store, texts[name], name=name)
            except Superseded:  # the other writer of the same session was quicker
                continue

    def look() -> None:
        while not stop.is_set():
            for name, ids in texts.items():
                loaded = store.sessions.load(WHO, name, asking())
                if loaded is not None and not is_exact(loaded, ids):
                    wrong.append(loaded)

    reader = threading.Thread(target=look)
    writers = [threading.Thread(target=write, args=(name,)) for name in [*texts, "a"]]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    reader.join()
    assert not wrong
    for name, ids in texts.items():
        assert is_exact(load(store, name), ids) and load(store, name).cache is not None
    assert store.parts.ledger.used(Tier.DISK) > 0


def test_10_another_version_is_left_in_place(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    store.sessions.save(WHO, TALK, IDS, snapshot(compressed(IDS)))
    [path] = cache_files(tmp_path)
    data = path.read_bytes().replace(b'\\"version\\":1', b'\\"version\\":2')
    assert data != path.read_bytes()
    with pytest.raises(Refused):
        peek(data)
    path.write_bytes(data)  # as a later larder would have written it, under its own digest
    later = tmp_path / "store" / path_of(digest_of(data))
    later.parent.mkdir(exist_ok=True)
    path.rename(later)
    _point_to(store, digest_of(data), len(data))
    loaded = load(store)
    assert loaded.reason == "format" and loaded.ids == IDS
    assert later.read_bytes() == data


def _point_to(store: object, digest: str, count: int) -> None:
    """Have the session's newest state refer to another blob."""
    parts = store.parts  # pyright: ignore[reportAttributeAccessIssue]
    head = load(store).record  # pyright: ignore[reportArgumentType]
    spans = (Ref(digest, count),)
    parts.heads.commit(replace(head, epoch=head.epoch + 1, spans=spans), head.epoch)


@pytest.mark.parametrize(
    "change",
    [{"tenant": "0" * 64}, {"identity": "0" * 64}, {"kind": "x"}, {"policy": {"name": "y"}}],
)
def test_a_blob_that_is_somebody_elses_is_not_used_whoever_refers_to_it(
    tmp_path: Path, change: dict[str, object]
) -> None:
    store = store_at(tmp_path)
    store.sessions.save(WHO, TALK, IDS, snapshot(compressed(IDS)))
    [path] = cache_files(tmp_path)
    tensors, told = unpack(path.read_bytes())
    ref = store.parts.blobs.put(pack(tensors, told | change))
    _point_to(store, ref.digest, ref.bytes)
    reason = {"kind": "kind"}.get(next(iter(change)), next(iter(change)))
    assert load(store).reason == reason and is_exact(load(store))


@pytest.mark.parametrize("codec", ["raw", "int4", "entropy"])
def test_a_part_that_claims_more_than_was_saved_is_not_decoded(tmp_path: Path, codec: str) -> None:
    store = store_at(tmp_path)
    store.sessions.save(WHO, TALK, IDS, snapshot(compressed(IDS), codec))
    [path] = cache_files(tmp_path)
    tensors, told = unpack(path.read_bytes())
    tensors["0.extra"] = torch.zeros(10**5)
    ref = store.parts.blobs.put(pack(tensors, told))
    _point_to(store, ref.digest, ref.bytes)
    assert load(store).reason == "damaged"


def test_3_orphans_of_a_crash_are_swept(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    save(store)
    kept = set(files(tmp_path))
    store.parts.blobs.put(b"nobody refers to this")
    store.parts.place.replace(f"{TEMPORARY}/1-half", b"half")
    assert store.upkeep.sweep(grace_seconds=60.0) == 0
    assert store.upkeep.sweep(grace_seconds=-1.0) == 21 + 4
    assert set(files(tmp_path)) == kept and is_exact(load(store))
