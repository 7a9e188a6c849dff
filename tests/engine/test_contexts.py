"""Contexts of a prompt from Python: read apart, reused, and kept in a store of one tenant."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from larder import Engine
from larder.cache import ChunkEntries, SequenceCache
from larder.core import LOCAL_PRINCIPAL, BadParameter, InputError, StoreFull, UsageError
from larder.engine import StoreChunks
from larder.models import LoadedModel
from larder.prefill import ChunkAnchor, ChunkMemory
from larder.store import Store

CAT = "Mira is the cat of Vera. She sleeps on the red sofa. " * 3
BAKER = "Peter lives in Berlin and works as a baker. " * 3
ASKED = "Where does Peter live?"


@pytest.fixture(scope="module")
def plain(loaded: LoadedModel) -> Engine:
    return Engine(loaded, policy="full")


def test_contexts_are_one_document_under_any_policy(plain: Engine) -> None:
    memory = plain.read(contexts=[CAT, BAKER])
    assert memory.transcript.spans[-1][1] < memory.figures.context_tokens
    assert memory.reuse.cached == (False, False)
    assert "Berlin" in plain.ask(memory, ASKED, max_new_tokens=6).text
    evicted = plain.under("snapkv", 64).read(contexts=[CAT, BAKER])
    assert evicted.figures.kv_bytes < memory.figures.kv_bytes
    text, starts = plain.tokenizer.render_conversation(memory.conversation)
    assert CAT.rstrip() in text and len(starts) == len(memory.transcript.ids)


@pytest.mark.parametrize("policy", ["cacheblend", "ape"])
def test_cached_contexts_give_the_same_answers(plain: Engine, policy: str) -> None:
    engine, chunks = plain.under(policy), ChunkMemory()
    first = engine.read(contexts=[CAT, BAKER], chunks=chunks)
    again = engine.read(contexts=[CAT, BAKER], chunks=chunks)
    assert again.reuse.cached_tokens == sum(first.reuse.tokens) > 0
    answers = [engine.ask(memory, ASKED, max_new_tokens=6) for memory in (first, again)]
    assert answers[0].ids == answers[1].ids and "Berlin" in answers[0].text


@pytest.mark.extended
def test_stored_chunks_are_private_to_a_tenant(plain: Engine, tmp_path: Path) -> None:
    engine, loaded = plain.under("ape"), plain.loaded
    store = Store(str(tmp_path / "store"), tmp_path / "home")
    try:
        first = engine.read(contexts=[CAT, BAKER], chunks=StoreChunks(store, loaded))
        again = engine.read(contexts=[BAKER, CAT], chunks=StoreChunks(store, loaded))
        assert first.reuse.cached == (False, False) and again.reuse.cached == (True, True)
        answers = [engine.ask(memory, ASKED, max_new_tokens=4).ids for memory in (first, again)]
        assert answers[0] == answers[1]
        other = engine.read(contexts=[BAKER], chunks=StoreChunks(store, loaded, "another"))
        assert other.reuse.cached == (False,)
        blobs = [path for path in (tmp_path / "store" / "blobs").rglob("*") if path.is_file()]
        assert blobs
        for blob in blobs:
            blob.write_bytes(blob.read_bytes()[:-1] + b"?")
        damaged = engine.read(contexts=[BAKER, CAT], chunks=StoreChunks(store, loaded))
        assert damaged.reuse.cached == (False, False), "verified, or read again"
        assert engine.ask(damaged, ASKED, max_new_tokens=4).ids == answers[0]
    finally:
        store.close()


@pytest.mark.extended
@pytest.mark.parametrize("policy", ["cachecraft", "kvcomm"])
def test_variants_and_anchors_are_restored_from_the_store(
    plain: Engine, tmp_path: Path, policy: str
) -> None:
    engine, loaded, memory = plain.under(policy), plain.loaded, ChunkMemory()
    stores = [Store(str(tmp_path / "store"), tmp_path / "home") for _ in range(2)]
    asked = [[CAT, BAKER], [CAT, BAKER], [BAKER, CAT]]
    try:
        for number, contexts in enumerate(asked):
            store = stores[min(number, 1)]
            store.parts.throughput.initialize({"disk": 1e15})
            found = engine.read(contexts=contexts, chunks=StoreChunks(store, loaded))
            wanted = engine.read(contexts=contexts, chunks=memory)
            assert found.reuse == wanted.reuse
            one, other = (each.caches.activate(0).state() for each in (found, wanted))
            for name in one:
                torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-5)
        assert sum(found.reuse.cached) >= 1
        stranger = StoreChunks(stores[1], loaded, "another")
        assert not any(engine.read(contexts=[CAT, BAKER], chunks=stranger).reuse.cached)
    finally:
        for store in stores:
            store.close()


class AnchorList:
    """Anchors of one place in a store, two at most."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.store = Store(str(folder / "store"), folder / "home")
        self.chunks, self._spec = StoreChunks(self.store, engine.loaded), engine.loaded.decoder.spec
        self.sides = tuple(
            torch.randn(layer.kv_heads, 3, layer.head_dim) for layer in self._spec.layers
        )

    def add(self, *tokens: int) -> None:
        entries = ChunkEntries(self.sides, self.sides, 1)
        for token in tokens:
            cache = SequenceCache(self._spec, "dense")
            first = tuple(side[:, :1] for side in self.sides)
            ChunkEntries(first, first).append_to(cache)
            entries.append_to(cache)
            self.chunks.add((9,), (token,) * 3, cache)
            self.chunks.add_anchor((9,), 1, ChunkAnchor((token,) * 3, entries, entries))

    def found(self, position: int = 1) -> list[ChunkAnchor]:
        return self.chunks.anchors(self._spec, (9,), position)

    def tokens(self) -> list[int]:
        return [anchor.ids[0] for anchor in self.found()]


@pytest.fixture
def anchors(plain: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AnchorList]:
    monkeypatch.setattr("larder.engine.stored_variants.MOST_ITEMS", 2)
    made = AnchorList(plain, tmp_path)
    yield made
    made.store.close()


def test_oldest_variants_are_evicted(plain: Engine, anchors: AnchorList) -> None:
    anchors.add(1, 2, 3)
    assert anchors.tokens() == [2, 3]
    first = anchors.found()[0]
    assert first.base.start == 1 and torch.equal(first.base.keys[0], anchors.sides[0])
    assert torch.equal(first.change.keys[0], anchors.sides[0])
    spec = plain.loaded.decoder.spec
    assert anchors.found(2) == [] == anchors.chunks.variants(spec, (9,), (2,) * 3)


def test_failed_variant_saves_evict_nothing(
    anchors: AnchorList, monkeypatch: pytest.MonkeyPatch
) -> None:
    anchors.add(1, 2)
    before = len(anchors.store.sessions.heads())

    def full(*_: object) -> None:
        raise StoreFull("no room")

    with monkeypatch.context() as patch:
        patch.setattr(anchors.store.parts.writer, "snapshot", full)
        anchors.add(3, 4)
    assert anchors.tokens() == [1, 2]
    assert anchors.store.parts.unwritten.counts() == {"full": 2}
    assert len(anchors.store.sessions.heads()) == before
    anchors.add(3)
    assert anchors.tokens() == [2, 3]


def test_variants_removed_from_the_store_are_dropped(anchors: AnchorList) -> None:
    anchors.add(1, 2)
    sessions = anchors.store.sessions
    oldest = min(
        (record for record in sessions.heads() if record.spans), key=lambda record: record.made
    )
    sessions.remove(LOCAL_PRINCIPAL, oldest.name)
    assert anchors.tokens() == [2]
    anchors.add(3)
    assert anchors.tokens() == [2, 3]
    assert not anchors.store.parts.unwritten.counts()


def test_blended_caches_are_never_shared_as_prefixes(plain: Engine) -> None:
    from larder.store import is_lossless_cache

    memory = plain.under("cacheblend").read(contexts=[CAT, BAKER])
    assert not any(is_lossless_cache(cache) for cache in memory.caches.copies())
    exact = plain.read(contexts=[CAT, BAKER])
    assert all(is_lossless_cache(cache) for cache in exact.caches.copies())


def test_invalid_context_arguments_are_refused(plain: Engine) -> None:
    with pytest.raises(UsageError, match="one of the two"):
        plain.read("A text.", contexts=[CAT])
    for contexts in ([], [" "]):
        with pytest.raises(InputError, match=r"[Cc]ontext"):
            plain.read(contexts=contexts)
    with pytest.raises(BadParameter, match="contexts"):
        plain.read(contexts=CAT)
    with pytest.raises(BadParameter, match="conversation"):
        plain.read()
