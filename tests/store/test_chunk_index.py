"""Index of prefix chunks: matches token by token, records and removal."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from larder.core import Damaged
from larder.store import (
    ChunkIndex,
    ChunkMatch,
    DeadlineExecutor,
    Manifest,
    PrefixChunk,
    PrefixDigest,
    chunk_record_path,
    open_file_system,
    prefix_digest,
    sealed_json,
    token_ids_from_bytes,
)
from larder.store.prefix import chunk_index as module
from references.store_chunks import longest
from store.records import SECRET, TENANT, a_ref

SIZE = 3
IDENTITY = "i" * 64


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_TOKENS", SIZE)


def chunks_at(folder: Path, home: str = "home") -> ChunkIndex:
    manifest = Manifest(folder / home / "manifest.sqlite", SECRET)
    return ChunkIndex(
        open_file_system(str(folder / "store")), DeadlineExecutor("disk"), manifest, SECRET
    )


def keep(chunks: ChunkIndex, ids: Sequence[int], tenant: str = TENANT) -> None:
    found = [
        each.chunk for each in chunks.match_prefix(tenant, IDENTITY, ids) if each.tokens == SIZE
    ]
    for stop in range(SIZE * (len(found) + 1), len(ids) + 1, SIZE):
        parent = found[-1] if found else None
        added = chunks.add(tenant, IDENTITY, parent, ids[:stop], a_ref(str(ids[:stop])))
        assert added is not None
        found.append(added)


def held(found: Sequence[ChunkMatch]) -> int:
    return sum(each.tokens for each in found)


def text_of(found: Sequence[ChunkMatch]) -> list[int]:
    return [
        token for each in found for token in token_ids_from_bytes(each.chunk.tokens)[: each.tokens]
    ]


TEXT = st.lists(st.integers(0, 2), max_size=13)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=10)
@given(st.lists(TEXT, max_size=8), st.lists(TEXT, min_size=1, max_size=5))
def test_prefix_match_equals_a_linear_scan(
    tmp_path_factory: pytest.TempPathFactory, kept: list[list[int]], asked: list[list[int]]
) -> None:
    chunks = chunks_at(tmp_path_factory.mktemp("chunks"))
    for text in kept:
        keep(chunks, text)
    for text in [*asked, *kept]:
        found = chunks.match_prefix(TENANT, IDENTITY, text)
        assert held(found) == longest(kept, text, SIZE)
        assert text_of(found) == text[: held(found)]
        for each in found:  # what a chunk follows is what it was made behind
            assert each.chunk.prefix == module.prefix_digest(_whole(each.chunk, found, text))


def _whole(chunk: PrefixChunk, found: Sequence[ChunkMatch], text: list[int]) -> list[int]:
    return text[: chunk.start] + token_ids_from_bytes(chunk.tokens)


@pytest.mark.failure(number=14)
def test_edited_text_matches_up_to_the_edit(tmp_path: Path) -> None:
    chunks = chunks_at(tmp_path)
    text = list(range(100, 111))  # three whole chunks, and two tokens that fill none
    keep(chunks, text)
    for ids, shared in (
        (text, 9),
        (text[:-1], 9),
        (text[:9], 9),
        (text[:8], 8),
        (text[:4], 4),
        (text[:1], 1),
        ([*text[:4], 0, *text[5:]], 4),
        ([0, *text[1:]], 0),
        ([0, *text], 0),
        ([*text[:9], 7, 7, 7, 7], 9),
        ([], 0),
    ):
        assert held(chunks.match_prefix(TENANT, IDENTITY, ids)) == shared


def test_chunks_are_not_shared_across_tenants_or_identities(tmp_path: Path) -> None:
    chunks = chunks_at(tmp_path)
    keep(chunks, [1, 2, 3])
    assert held(chunks.match_prefix(TENANT, IDENTITY, [1, 2, 3])) == 3
    assert chunks.match_prefix("0" * 64, IDENTITY, [1, 2, 3]) == []
    assert chunks.match_prefix(TENANT, "0" * 64, [1, 2, 3]) == []


@pytest.mark.failure(number=13)
def test_colliding_digests_are_distinguished_by_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "chunk_key", lambda *args: f"{0:064x}")
    monkeypatch.setattr(module, "prefix_digest", lambda ids: "0" * 64)
    chunks = chunks_at(tmp_path)
    texts = [[a, a, a, 9, 9, 9, b, b, b] for a in range(4) for b in range(3)]
    for text in texts:
        keep(chunks, text)
    blobs = set()
    for text in texts:
        found = chunks.match_prefix(TENANT, IDENTITY, text)
        assert text_of(found) == text
        blobs |= {each.chunk.ref for each in found}
    # Four beginnings, each with its own chunk of nines behind it, each with three ends.
    assert len(blobs) == 4 + 4 + 12
    assert held(chunks.match_prefix(TENANT, IDENTITY, [5, 5, 5, 9, 9, 9])) == 0


@pytest.mark.failure(number=8)
def test_another_machine_reads_the_chunk_records(tmp_path: Path) -> None:
    keep(chunks_at(tmp_path), list(range(9)))
    other = chunks_at(tmp_path, "another machine")
    assert held(other.match_prefix(TENANT, IDENTITY, list(range(9)))) == 9
    assert len(other.all()) == 3


def test_index_is_rebuilt_from_records(tmp_path: Path) -> None:
    first = chunks_at(tmp_path)
    for text in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8, 9], [4, 4, 4]):
        keep(first, text)
    again = chunks_at(tmp_path, "after damage")
    again.rebuild()
    assert len(again.all()) == len(first.all()) == 4
    assert {(c.prefix, c.ref) for _, c, *_ in again.all()} == {
        (c.prefix, c.ref) for _, c, *_ in first.all()
    }


def test_chunk_record_is_authenticated(tmp_path: Path) -> None:
    keep(chunks_at(tmp_path), [1, 2, 3])
    [path] = (tmp_path / "store" / "chunks").rglob("*.json")
    path.write_bytes(path.read_bytes().replace(b"[1,2,3]", b"[1,2,4]"))
    assert chunks_at(tmp_path, "other").match_prefix(TENANT, IDENTITY, [1, 2, 4]) == []
    path.write_bytes(b"no JSON")
    assert chunks_at(tmp_path, "other").match_prefix(TENANT, IDENTITY, [1, 2, 3]) == []


def test_dropping_a_chunk_drops_its_descendants(tmp_path: Path) -> None:
    chunks = chunks_at(tmp_path)
    keep(chunks, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    keep(chunks, [1, 2, 3, 0, 0, 0])
    middle = chunks.match_prefix(TENANT, IDENTITY, [1, 2, 3, 4, 5, 6])[-1].chunk
    assert [each.start for each in chunks.drop(middle, TENANT)] == [3, 6]
    assert held(chunks.match_prefix(TENANT, IDENTITY, [1, 2, 3, 4, 5, 6])) == 3
    assert held(chunks.match_prefix(TENANT, IDENTITY, [1, 2, 3, 0, 0, 0])) == 6


def test_prefix_digest_is_incremental() -> None:
    behind = PrefixDigest(range(20))
    for count in (3, 0, 9):
        assert behind.digest([1, 2]) == prefix_digest([*range(behind.start), 1, 2])
        behind.advance(range(behind.start, behind.start + count))
    assert behind.start == 12
    for wrong in (["a"], [-1], [None]):
        with pytest.raises(Damaged):
            behind.digest(wrong)


def test_chunk_behind_a_dropped_parent_is_not_added(tmp_path: Path) -> None:
    chunks = chunks_at(tmp_path)
    keep(chunks, [1, 2, 3])
    [first] = chunks.match_prefix(TENANT, IDENTITY, [1, 2, 3])
    chunks.remove_unreferenced(TENANT, [first.chunk])
    keep(chunks, [7, 8, 9])  # in the row of the one that is gone
    assert chunks.add(TENANT, IDENTITY, first.chunk, [1, 2, 3, 4, 5, 6], a_ref("late")) is None
    assert held(chunks.match_prefix(TENANT, IDENTITY, [7, 8, 9, 4, 5, 6])) == 3
    assert len(list((tmp_path / "store" / "chunks").rglob("*.json"))) == 1


def test_chunk_with_descendants_is_kept(tmp_path: Path) -> None:
    chunks = chunks_at(tmp_path)
    keep(chunks, [1, 2, 3, 4, 5, 6])
    [first, second] = [
        each.chunk for each in chunks.match_prefix(TENANT, IDENTITY, [1, 2, 3, 4, 5, 6])
    ]
    chunks.remove_unreferenced(TENANT, [first])
    assert held(chunks.match_prefix(TENANT, IDENTITY, [1, 2, 3, 4, 5, 6])) == 6
    chunks.remove_unreferenced(TENANT, [first, second])
    assert chunks.all() == []


def record_of(folder: Path, tokens: Sequence[int]) -> Path:
    """The file of the first chunk of a text."""
    [chunk] = [each.chunk for each in chunks_at(folder).match_prefix(TENANT, IDENTITY, tokens)]
    return folder / "store" / chunk_record_path(TENANT, chunk.key)


@pytest.mark.parametrize("damage", ["changed", "cut", "no JSON", "of another chunk"])
@pytest.mark.parametrize("is_read", [True, False], ids=["read", "not read"])
def test_damaged_chunk_record_is_quarantined_and_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str, is_read: bool
) -> None:
    lines = list[str]()
    log = logging.getLogger("larder.store")
    monkeypatch.setattr(log, "warning", lambda form, *arguments: lines.append(form % arguments))
    keep(chunks_at(tmp_path), [1, 2, 3])
    keep(chunks_at(tmp_path), [4, 5, 6])
    path, other = (record_of(tmp_path, ids) for ids in ([1, 2, 3], [4, 5, 6]))
    intact = path.read_bytes()
    damaged = {
        "changed": intact.replace(b"[1,2,3]", b"[1,2,7]"),
        "cut": intact[:-9],
        "no JSON": b"\0" * len(intact),
        "of another chunk": other.read_bytes(),
    }[damage]
    assert damaged != intact
    path.write_bytes(damaged)
    elsewhere = chunks_at(tmp_path, "other")
    if is_read:
        assert not elsewhere.match_prefix(TENANT, IDENTITY, [1, 2, 3])
        assert not path.exists()
    elsewhere.add(TENANT, IDENTITY, None, [1, 2, 3], a_ref("again"))  # read again, and stored
    third = chunks_at(tmp_path, "third")
    assert held(third.match_prefix(TENANT, IDENTITY, [1, 2, 3])) == 3
    [line] = lines
    assert line.startswith(f"damaged: the chunk record chunks/{TENANT}/") and "set aside" in line
    assert (tmp_path / "store" / "damaged" / path.name).read_bytes() == damaged


def test_chunk_record_of_another_version_is_kept(tmp_path: Path) -> None:
    keep(chunks_at(tmp_path), [1, 2, 3])
    path = record_of(tmp_path, [1, 2, 3])
    later = sealed_json(SECRET, "chunk", '{"schema":99}')
    path.write_bytes(later)
    elsewhere = chunks_at(tmp_path, "other")
    assert not elsewhere.match_prefix(TENANT, IDENTITY, [1, 2, 3])
    elsewhere.add(TENANT, IDENTITY, None, [1, 2, 3], a_ref("again"))
    assert path.read_bytes() == later
