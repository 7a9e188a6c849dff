"""Immutable objects by digest, on a local folder and on another file system."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from larder.core import Damaged, StoreError, StoreFull
from larder.store import (
    TEMPORARY_FOLDER,
    BlobRef,
    BlobStore,
    DeadlineExecutor,
    FileSystem,
    RemoteFileSystem,
    blob_path,
    digest_of,
    open_file_system,
)
from store.file_systems import FULL, READ_ONLY, Faulty, refusing

DATA = b"some bytes"


@pytest.fixture(params=["folder", "memory", "moved"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FileSystem]:
    """A folder; an object store; and one where objects are uploaded and then moved."""
    if request.param == "folder":
        yield open_file_system(str(tmp_path))
        return
    made = open_file_system(f"memory://{uuid4().hex}")
    if request.param == "moved":
        made._is_atomic = False  # pyright: ignore[reportAttributeAccessIssue]
    yield made
    for entry in made.list_files(""):
        made.remove(entry.path)


@pytest.fixture
def blobs(place: FileSystem) -> BlobStore:
    return BlobStore(place, DeadlineExecutor("disk"))


def test_put_blob_is_read_back(blobs: BlobStore) -> None:
    ref = blobs.put(DATA)
    assert ref == BlobRef(digest_of(DATA), len(DATA)) and blobs.has(ref)
    assert blobs.get(ref) == DATA
    assert blobs.sizes() == {ref.digest: len(DATA)}


def test_equal_blobs_are_stored_once(blobs: BlobStore, place: FileSystem) -> None:
    assert blobs.put(DATA) == blobs.put(DATA)
    assert [entry.path for entry in place.list_files("")] == [blob_path(digest_of(DATA))]


def test_damaged_blob_is_quarantined_and_rewritable(blobs: BlobStore, place: FileSystem) -> None:
    ref = blobs.put(DATA)
    place.replace(blob_path(ref.digest), DATA[:-1] + b"!")
    with pytest.raises(Damaged, match="not the 10 written"):
        blobs.get(ref)
    with pytest.raises(Damaged, match="missing"):
        blobs.get(ref)
    assert [entry.path for entry in place.list_files("damaged")] == [
        f"damaged/{ref.digest}.safetensors"
    ]
    assert blobs.get(blobs.put(DATA)) == DATA


def test_truncated_blob_is_overwritten(blobs: BlobStore, place: FileSystem) -> None:
    place.replace(blob_path(digest_of(DATA)), DATA[:4])
    assert blobs.get(blobs.put(DATA)) == DATA


def test_create_refuses_an_existing_path(place: FileSystem) -> None:
    place.create("a/b", b"1")
    with pytest.raises(FileExistsError):
        place.create("a/b", b"2")
    assert place.read("a/b") == b"1" and place.size("a/b") == 1
    assert [entry.path for entry in place.list_files("")] == ["a/b"]
    place.remove("a/b")
    place.remove("a/b")
    assert place.size("a/b") is None
    with pytest.raises(FileNotFoundError):
        place.read("a/b")


def test_sweep_deletes_old_orphans_only(blobs: BlobStore, place: FileSystem) -> None:
    kept, lost = blobs.put(DATA), blobs.put(DATA * 2)
    place.replace(f"{TEMPORARY_FOLDER}/1-half", b"half")
    assert blobs.sweep([kept.digest], grace_seconds=60.0) == 0
    assert blobs.sweep([kept.digest], grace_seconds=-1.0) == lost.bytes + 4
    assert blobs.sizes() == {kept.digest: kept.bytes}
    assert [entry.path for entry in place.list_files("")] == [blob_path(kept.digest)]


def test_orphan_put_again_restarts_its_grace_time(tmp_path: Path) -> None:
    blobs = BlobStore(open_file_system(str(tmp_path)), DeadlineExecutor("disk"))
    ref = blobs.put(DATA)
    os.utime(tmp_path / blob_path(ref.digest), (0, 0))
    blobs.put(DATA)
    assert blobs.sweep([], grace_seconds=60.0) == 0


def test_only_digests_become_paths(blobs: BlobStore, place: FileSystem) -> None:
    for name in ("../../etc/passwd", "", "A" * 64, "a" * 63, "a" * 64 + "\n"):
        with pytest.raises(Damaged, match="no digest"):
            blobs.get(BlobRef(name, 1))
    place.replace("blobs/aa/README", b"somebody else's")
    assert blobs.sizes() == {}


@pytest.mark.parametrize("error", [FULL, READ_ONLY])
def test_full_or_read_only_disk_raises_store_full(tmp_path: Path, error: int) -> None:
    place = Faulty(open_file_system(str(tmp_path)), refusing(error, "replace"))
    with pytest.raises(StoreFull, match="untouched"):
        BlobStore(place, DeadlineExecutor("disk")).put(DATA)


def test_failed_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(handle: int) -> None:
        raise OSError(FULL, "full")

    place = open_file_system(str(tmp_path))
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError):
        place.create("a/b", DATA)
    with pytest.raises(OSError):
        place.replace("a/b", DATA)
    assert list(place.list_files("")) == []


def test_address_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(StoreError, match="take a folder"):
        open_file_system("nowhere://bucket/folder")


def test_create_refuses_an_existing_path_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(1, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    test_create_refuses_an_existing_path(open_file_system(str(tmp_path)))


class ClientError(Exception):
    """Error like those of object-store clients, outside our hierarchy."""


@pytest.mark.parametrize("act", ["create", "replace", "read", "size", "remove", "list_files"])
def test_client_errors_become_store_errors(monkeypatch: pytest.MonkeyPatch, act: str) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise ClientError("Could not connect to the endpoint.")

    place = open_file_system(f"memory://{uuid4().hex}")
    assert isinstance(place, RemoteFileSystem)
    for name in ("pipe_file", "cat_file", "size", "rm_file", "find"):
        monkeypatch.setattr(place._system, name, fails)
    result = {"create": ("a", b"x"), "replace": ("a", b"x"), "list_files": ("a",)}
    with pytest.raises(StoreError, match="ClientError: Could not connect to the endpoint"):
        guard = DeadlineExecutor("disk")
        guard.call(lambda: list(getattr(place, act)(*result.get(act, ("a",))) or ()))
