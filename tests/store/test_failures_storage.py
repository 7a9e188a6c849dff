"""Damage, crashes and bad disks: each ends in the exact cache, in its tokens, or in an error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from larder.core import Refused
from larder.store import (
    TEMPORARY_FOLDER,
    BlobRef,
    blob_path,
    digest_of,
    pack_container,
    peek_metadata,
    unpack_container,
)
from store.caches import (
    IDS,
    LONGER,
    SPEC,
    TALK,
    WHO,
    asking,
    blob_files,
    cache_files,
    compressed,
    files,
    is_exact,
    load,
    outcome,
    save,
    snapshot,
    store_at,
)

pytestmark = pytest.mark.usefixtures("small_chunks")
CUT = {
    "by a byte": lambda data: data[:-1],
    "by half": lambda data: data[: len(data) // 2],
    "to nothing": lambda data: b"",
    "longer": lambda data: data + b"\0",
    "a hole": lambda data: data[: len(data) // 2] + bytes(64) + data[len(data) // 2 + 64 :],
    "of zeros": lambda data: bytes(len(data)),
}


@pytest.mark.failure(number=1)
@pytest.mark.extended
def test_flipped_bit_in_a_tensor_is_detected(tmp_path: Path) -> None:
    save(store_at(tmp_path))
    for path in cache_files(tmp_path):
        data = path.read_bytes()
        head = 8 + int.from_bytes(data[:8], "little")
        ends = [len(data), head]
        for tensor in unpack_container(data)[0].values():
            ends.append(ends[-1] + tensor.nbytes)
        for index in sorted({3, 20, *(end - 1 for end in ends)}):
            flipped = bytearray(data)
            flipped[index] ^= 1 << index % 8
            path.write_bytes(bytes(flipped))
            assert outcome(tmp_path) == ("tokens", "damaged")
            assert not path.exists()  # set aside
            path.write_bytes(data)
    assert outcome(tmp_path) == ("exact", "")


@pytest.mark.failure(number=1)
def test_flipped_bit_in_the_token_log_is_detected(tmp_path: Path) -> None:
    save(store_at(tmp_path))
    [path] = set(blob_files(tmp_path)) - set(cache_files(tmp_path))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    assert outcome(tmp_path) == ("lost", "damaged")


@pytest.mark.failure(number=2)
@pytest.mark.parametrize("how", CUT)
def test_truncated_or_overwritten_blobs_are_detected(tmp_path: Path, how: str) -> None:
    save(store_at(tmp_path))
    path = cache_files(tmp_path)[-1]
    path.write_bytes(CUT[how](path.read_bytes()))
    assert outcome(tmp_path) == ("tokens", "damaged")


@pytest.mark.failure(number=2)
@pytest.mark.parametrize("how", CUT)
def test_truncated_or_overwritten_manifest_is_rebuilt(tmp_path: Path, how: str) -> None:
    store = store_at(tmp_path)
    save(store)
    store.close()
    path = tmp_path / "home" / "manifest.sqlite"
    path.write_bytes(CUT[how](path.read_bytes()))
    for log in tmp_path.glob("home/manifest.sqlite-*"):
        log.unlink()
    assert outcome(tmp_path)[0] == "exact"
    found = store_at(tmp_path).prefixes.match_prefix(WHO, LONGER, asking().identity, SPEC)
    assert found is not None and found.next_position == 20


@pytest.mark.failure(number=2)
def test_swapped_blobs_are_detected(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    save(store)
    first, *_, last = cache_files(tmp_path)
    one, other = first.read_bytes(), last.read_bytes()
    first.write_bytes(other)
    last.write_bytes(one)
    assert outcome(tmp_path) == ("tokens", "damaged")


def test_damaged_blob_is_repaired_by_the_next_save(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    save(store)
    for path in cache_files(tmp_path):
        path.write_bytes(path.read_bytes()[:-1])
    assert load(store).reason == "damaged"
    save(store)
    while load(store).reason:  # one damaged blob is found at a time
        save(store)
    assert is_exact(load(store))


@pytest.mark.failure(number=10)
def test_blob_of_another_version_is_left_in_place(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    store.sessions.save(WHO, TALK, IDS, snapshot(compressed(IDS)))
    [path] = cache_files(tmp_path)
    data = path.read_bytes().replace(b'\\"version\\":1', b'\\"version\\":2')
    assert data != path.read_bytes()
    with pytest.raises(Refused):
        peek_metadata(data)
    path.write_bytes(data)  # as a later larder would have written it, under its own digest
    later = tmp_path / "store" / blob_path(digest_of(data))
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
    spans = (BlobRef(digest, count),)
    parts.epochs.commit(replace(head, epoch=head.epoch + 1, spans=spans), head.epoch)


@pytest.mark.parametrize(
    "change",
    [{"tenant": "0" * 64}, {"identity": "0" * 64}, {"kind": "x"}, {"policy": {"name": "y"}}],
)
def test_blob_of_another_tenant_identity_kind_or_policy_is_not_used(
    tmp_path: Path, change: dict[str, object]
) -> None:
    store = store_at(tmp_path)
    store.sessions.save(WHO, TALK, IDS, snapshot(compressed(IDS)))
    [path] = cache_files(tmp_path)
    tensors, result = unpack_container(path.read_bytes())
    ref = store.parts.blobs.files.put(pack_container(tensors, result | change))
    _point_to(store, ref.digest, ref.bytes)
    reason = {"kind": "kind"}.get(next(iter(change)), next(iter(change)))
    assert load(store).reason == reason and is_exact(load(store))


@pytest.mark.parametrize("codec", ["raw", "int4", "entropy"])
def test_span_larger_than_its_record_is_not_decoded(tmp_path: Path, codec: str) -> None:
    store = store_at(tmp_path)
    store.sessions.save(WHO, TALK, IDS, snapshot(compressed(IDS), codec))
    [path] = cache_files(tmp_path)
    tensors, result = unpack_container(path.read_bytes())
    tensors["0.extra"] = torch.zeros(10**5)
    ref = store.parts.blobs.files.put(pack_container(tensors, result))
    _point_to(store, ref.digest, ref.bytes)
    assert load(store).reason == "damaged"


@pytest.mark.failure(number=3)
def test_orphans_of_a_crash_are_swept(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    save(store)
    kept = set(files(tmp_path))
    store.parts.blobs.files.put(b"nobody refers to this")
    store.parts.file_system.replace(f"{TEMPORARY_FOLDER}/1-half", b"half")
    assert store.maintenance.sweep(grace_seconds=60.0) == 0
    assert store.maintenance.sweep(grace_seconds=-1.0) == 21 + 4
    assert set(files(tmp_path)) == kept and is_exact(load(store))


@pytest.mark.failure(number=13)
@pytest.mark.parametrize("other", [(0, *IDS[1:]), (*IDS[:4], 0, *IDS[5:])], ids=["before", "in it"])
def test_chunk_of_another_text_is_not_used(tmp_path: Path, other: tuple[int, ...]) -> None:
    store = store_at(tmp_path)
    save(store, other, name="other")
    save(store)
    theirs, ours = (load(store, name).record.spans for name in ("other", TALK))
    assert theirs[1] != ours[1]
    head = load(store).record
    spans = (ours[0], theirs[1], *ours[2:])
    store.parts.epochs.commit(replace(head, epoch=head.epoch + 1, spans=spans), head.epoch)
    assert load(store).reason == "tokens" and is_exact(load(store))
