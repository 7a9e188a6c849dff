"""Contexts of requests: separate prefill, reuse within a tenant and eviction."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from larder.cache import ChunkEntries, ChunkProfile, SequenceCache
from larder.core import Mode
from larder.models import BatchSegment, LoadedModel
from larder.prefill import ChunkAnchor, ChunkVariant
from larder.server import (
    HOST_SHARE,
    ApiError,
    ChatMessage,
    HostChunks,
    HostTexts,
    Request,
    TenantChunks,
    chunk_id,
    context_prompts,
)
from larder.store import EVICTIONS, ByteBudgets, ByteLedger, Tier
from server_core import Served, user

ONE, TWO = "Box 7 holds 12 coins. " * 3, "Box 9 holds 4 keys. " * 3
ASKED = [user("What does box 7 hold?")]


@pytest.mark.parametrize("policy", ["cachecraft", "kvcomm"])
def test_variants_and_anchors_are_reused_by_their_tenant(small: LoadedModel, policy: str) -> None:
    served, plain = Served(small, policy), Served(small, "full")
    sizes = [len(text.rstrip()) + 2 for text in (ONE, TWO)]
    exact = plain.ask(ASKED, contexts=(ONE, TWO)).text
    first = served.ask(ASKED, contexts=(ONE, TWO))
    again = served.ask(ASKED, contexts=(ONE, chunk_id(TWO)))
    assert first.result.cached_tokens == 0 and first.text == exact
    # Behind the same contexts a variant and an anchor are what was computed there.
    assert again.result.cached_tokens == sum(sizes) and not again.result.recomputed_tokens
    assert again.text == exact and not again.result.lossless
    moved = served.ask(ASKED, contexts=(TWO, ONE)).result
    if policy == "cachecraft":  # what stood second is new in front
        assert moved.cached_tokens == sizes[0] > moved.recomputed_tokens > 0
    else:  # what stood first is not known behind the other
        assert (moved.cached_tokens, moved.recomputed_tokens) == (sum(sizes), sizes[0])
    other = served.ask(ASKED, tenant="b", contexts=(ONE, TWO))
    assert other.result.cached_tokens == 0 and other.text == exact
    assert served.core.ledger.used(Tier.DEVICE) == 0


def test_variants_and_anchors_are_held_in_host_memory(small: LoadedModel) -> None:
    source, spec = TenantChunks(HostChunks(ByteLedger(ByteBudgets())), "a"), small.decoder.spec
    sides = tuple(torch.ones(layer.kv_heads, 3, layer.head_dim) for layer in spec.layers)
    entries = ChunkEntries(sides, sides)
    source.add_variant((1,), (2,) * 3, ChunkVariant(entries, ChunkProfile((), (), (), ())))
    cache = SequenceCache(spec, "dense")
    small.decoder.read([BatchSegment(cache, (1, 2, 2, 2))], Mode.APPEND)
    source.add((1,), (2,) * 3, cache)
    source.add_anchor((1,), 1, ChunkAnchor((2,) * 3, ChunkEntries.of(cache, 1, 4), entries))
    elsewhere = replace(spec, device=torch.device("meta"))
    [variant] = source.variants(elsewhere, (1,), (2,) * 3)
    [anchor] = source.anchors(elsewhere, (1,), 1)
    for held in (variant.entries, anchor.base, anchor.change):
        assert held.keys[0].device.type == "cpu", "all would be on the device at once"


def test_anchor_is_charged_its_difference_only(small: LoadedModel) -> None:
    ledger, spec = ByteLedger(ByteBudgets()), small.decoder.spec
    source, cache = TenantChunks(HostChunks(ledger), "a"), SequenceCache(spec, "dense")
    small.decoder.read([BatchSegment(cache, (1, 2, 2, 2))], Mode.APPEND)
    base = ChunkEntries.of(cache, 1, 4)
    source.add_anchor((1,), 1, ChunkAnchor((2,) * 3, base, base))
    assert ledger.used(Tier.HOST) == 0, "nothing to be added to"
    source.add((1,), (2,) * 3, cache)
    for place in (1, 2):
        source.add_anchor((1,), place, ChunkAnchor((2,) * 3, base, base))
        assert ledger.used(Tier.HOST) == (1 + place) * base.nbytes
    [anchor] = source.anchors(spec, (1,), 2)
    held = source.find(spec, (1,), (2,) * 3)
    assert held is not None and anchor.base.keys[0] is held.keys[0]


def test_full_host_memory_evicts_variants(small: LoadedModel) -> None:
    served = Served(small, "cachecraft")
    served.ask(ASKED, contexts=(ONE, TWO))
    taken = served.core.ledger.used(Tier.HOST)
    tight = Served(small, "cachecraft", host=3 * taken)
    tight.ask(ASKED, contexts=(ONE, TWO))
    assert 0 < tight.core.ledger.used(Tier.HOST) < taken
    none = Served(small, "kvcomm", host=0)
    answers = [none.ask(ASKED, contexts=(ONE, TWO)).result.cached_tokens for _ in range(2)]
    assert answers == [0, 0] and none.core.ledger.used(Tier.HOST) == 0


@pytest.mark.parametrize("policy", ["cacheblend", "ape"])
def test_cached_contexts_are_reused_by_their_tenant_only(small: LoadedModel, policy: str) -> None:
    served = Served(small, policy)
    first = served.ask(ASKED, contexts=(ONE, TWO))
    again = served.ask(ASKED, contexts=(chunk_id(ONE), TWO))
    assert first.result.cached_tokens == 0
    assert again.result.cached_tokens == len(ONE.rstrip()) + len(TWO.rstrip()) + 4
    assert again.text == first.text and not again.result.lossless
    assert again.result.prompt_tokens == first.result.prompt_tokens > again.result.cached_tokens
    moved = served.ask([user("And box 9?")], contexts=(TWO, ONE))
    assert moved.result.cached_tokens == again.result.cached_tokens
    assert not list(served.core.sessions), "no session stays behind a blended cache"
    other = served.ask(ASKED, tenant="b", contexts=(ONE, TWO))
    assert other.result.cached_tokens == 0 and other.text == first.text
    with pytest.raises(ApiError, match="not known here") as refused:
        served.submit(ASKED, tenant="c", contexts=(chunk_id(ONE),))
    assert (refused.value.status, refused.value.code) == (404, "context_not_found")
    assert served.core.ledger.used(Tier.DEVICE) == 0


def test_document_tree_is_lossless_and_tenant_private(small: LoadedModel) -> None:
    served, plain = Served(small, "ragcache"), Served(small, "full")
    sizes = [len(text.rstrip()) + 2 for text in (ONE, TWO)]
    asked = [((ONE, TWO), 0), ((ONE, TWO), sum(sizes)), ((TWO, ONE), 0), ((ONE, "New."), sizes[0])]
    for contexts, cached in asked:
        client = served.ask(ASKED, contexts=contexts)
        assert client.result.cached_tokens == cached and client.result.lossless
        assert client.text == plain.ask(ASKED, contexts=contexts).text
    assert served.ask(ASKED, tenant="b", contexts=(ONE, TWO)).result.cached_tokens == 0
    assert served.ask([user("Hi?")]).text == plain.ask([user("Hi?")]).text


def tree(small: LoadedModel, room: int) -> tuple[HostChunks, TenantChunks, SequenceCache]:
    """Chunks of a tree with room for a number of chunks of four tokens, and a text of twelve."""
    cache = SequenceCache(small.decoder.spec, "dense")
    small.decoder.read([BatchSegment(cache, tuple(range(5, 17)))], Mode.APPEND)
    size = small.decoder.spec.full_bytes(4)
    ledger = ByteLedger(ByteBudgets({Tier.HOST: int((room + 0.5) * size / HOST_SHARE)}))
    chunks = HostChunks(ledger, EVICTIONS.load("gdsf")())
    return chunks, TenantChunks(chunks, "a"), cache


def test_document_tree_evicts_leaves_first(small: LoadedModel) -> None:
    chunks, own, cache = tree(small, 3)
    first, second, third = (tuple(range(n, n + 4)) for n in (5, 9, 13))
    for length, (before, ids) in ((4, ((), first)), (8, (first, second))):
        part = cache.fork()
        part.truncate(length)
        own.add(before, ids, part)
    own.add((*first, *second), third, cache)
    other = cache.fork()
    other.truncate(4)
    own.add((), (1, 2, 3, 4), other)  # takes the place of a leaf, however new it is
    known = [
        own.find(cache.spec, before, ids) is not None
        for before, ids in (
            ((), first),
            (first, second),
            ((*first, *second), third),
            ((), (1, 2, 3, 4)),
        )
    ]
    assert known == [True, True, False, True]


def test_ancestors_of_a_new_document_are_not_evicted(small: LoadedModel) -> None:
    chunks, own, cache = tree(small, 3)
    first, second, third = (tuple(range(n, n + 4)) for n in (5, 9, 13))
    for length, before, ids in ((4, (), first), (8, first, second), (4, (), (1, 2, 3, 4))):
        part = cache.fork()
        part.truncate(length)
        own.add(before, ids, part)
    for _ in range(9):
        own.find(cache.spec, (), (1, 2, 3, 4))
    own.add((*first, *second), third, cache)  # takes the place of another one, however often asked
    path = [((), first), (first, second), ((*first, *second), third)]
    assert [key for _, key in chunks._held] == path


def test_frequent_documents_stay_until_the_eviction_clock_passes(
    small: LoadedModel,
) -> None:
    chunks, own, cache = tree(small, 2)
    cache.truncate(4)

    def known(number: int) -> bool:
        return ("a", ((), (number,) * 4)) in chunks._held

    own.add((), (1,) * 4, cache)
    for _ in range(2):
        assert own.find(cache.spec, (), (1,) * 4) is not None  # used three times: 3 cost / size
    for number in (2, 3, 4, 5):
        own.add((), (number,) * 4, cache)  # 1 cost / size above the clock, which rises by as much
        assert known(1) == (number < 5) and known(number)


def test_contexts_are_plain_text_under_other_policies(small: LoadedModel) -> None:
    served = Served(small, "full")
    apart = served.ask(ASKED, contexts=(ONE, TWO))
    text = f"{ONE.rstrip()}\n\n{TWO.rstrip()}\n\n{ASKED[0].text}"
    whole = served.ask([user(text)])
    assert apart.text == whole.text and apart.result.lossless
    assert whole.result.session == apart.result.session
    exact = Served(small, "cacheblend").ask(ASKED, contexts=(ONE, TWO), exact=True)
    assert exact.text == whole.text and exact.result.lossless


def test_chunks_take_a_share_of_host_memory(small: LoadedModel) -> None:
    probe = Served(small, "ape")
    probe.ask(ASKED, contexts=(ONE, TWO))
    taken = probe.core.ledger.used(Tier.HOST)
    served = Served(small, "ape", host=3 * taken)
    served.ask(ASKED, contexts=(ONE, TWO))
    assert 0 < served.core.ledger.used(Tier.HOST) < taken
    again = served.ask(ASKED, contexts=(ONE, TWO))
    assert again.result.cached_tokens < len(ONE) + len(TWO)
    none = Served(small, "ape", host=0)
    assert none.ask(ASKED, contexts=(ONE, TWO)).text == again.text
    assert none.core.ledger.used(Tier.HOST) == 0


def test_contexts_without_a_question_are_refused(small: LoadedModel) -> None:
    served = Served(small, "ape")
    for turns, contexts in (
        ([ChatMessage("system", "Be short.")], (ONE,)),
        (ASKED, (" ",)),
        (ASKED, ("chunk-" + "0" * 64,)),
    ):
        with pytest.raises(ApiError):
            served.submit(turns, contexts=contexts)
    assert not list(served.core.sessions)


def test_chunks_of_all_tenants_stay_within_the_share(small: LoadedModel) -> None:
    cache = SequenceCache(small.decoder.spec, "dense")
    small.decoder.read([BatchSegment(cache, (5, 6, 7, 8))], Mode.APPEND)
    size = small.decoder.spec.full_bytes(4)
    ledger = ByteLedger(ByteBudgets({Tier.HOST: int(2 * size / HOST_SHARE)}))
    chunks = HostChunks(ledger)
    tenants = {name: TenantChunks(chunks, name) for name in "abc"}
    for _ in range(3):
        tenants["a"].add((), (5, 6, 7, 8), cache)
    assert ledger.used(Tier.HOST, "a") == ledger.used(Tier.HOST) == size
    tenants["b"].add((), (5, 6, 7, 8), cache)
    assert tenants["a"].find(cache.spec, (), (5, 6, 7, 8)) is not None
    tenants["c"].add((), (5, 6, 7, 8), cache)
    held = {name: ledger.used(Tier.HOST, name) for name in "abc"}
    assert held == {"a": size, "b": 0, "c": size} and chunks.nbytes == 2 * size
    assert tenants["b"].find(cache.spec, (), (5, 6, 7, 8)) is None


def test_texts_of_a_tenant_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_prompts, "TEXT_BYTES", 2000)
    ledger = ByteLedger(ByteBudgets({Tier.HOST: 16 * 5000}))
    texts = HostTexts(ledger)
    for text in ("a" * 400, "b" * 400, "a" * 400, "c" * 400, "d" * 2000):
        texts.add("one", text)
        assert 0 < texts.nbytes == ledger.used(Tier.HOST, "one") <= 2000
    found = [texts.find("one", chunk_id(sign * 400)) is not None for sign in "abc"]
    assert found == [True, False, True] and texts.find("one", chunk_id("d" * 2000)) is None
    assert texts.find("two", chunk_id("a" * 400)) is None
    monkeypatch.setattr(context_prompts, "MOST_TEXTS", 1)
    texts.add("one", "e")
    assert texts.find("one", chunk_id("c" * 400)) is None


def test_texts_of_all_tenants_are_charged_to_host_memory() -> None:
    budgets = ByteBudgets({Tier.HOST: 16 * 3000}, {Tier.HOST: 2000})
    ledger = ByteLedger(budgets)
    texts = HostTexts(ledger)
    for tenant in ("one", "one", "two", "two", "three"):
        texts.add(tenant, f"{ledger.used(Tier.HOST)}".ljust(400))
        assert 0 < texts.nbytes == ledger.used(Tier.HOST) <= 3000
    assert ledger.used(Tier.HOST, "one") == 0, "the oldest leave, whosever they are"
    with ledger.reserve(Tier.HOST, "four", 1000):
        texts.add("four", "x" * 600)
        assert texts.find("four", chunk_id("x" * 600)) is None, "beyond the tenant's quota"
    assert ledger.used(Tier.HOST, "three") > 0 < ledger.used(Tier.HOST, "two")


def test_contexts_of_a_refused_request_are_not_stored(small: LoadedModel) -> None:
    served = Served(small, "ape")
    long = "x" * 10**6
    with pytest.raises(ApiError, match="longer|characters"):
        served.submit(ASKED, contexts=(ONE, long))
    for text in (ONE, long):
        with pytest.raises(ApiError, match="not known here"):
            served.submit(ASKED, contexts=(chunk_id(text),))


@pytest.mark.parametrize("marker", ["0context0", "0mark00"])
def test_contexts_are_placed_before_a_user_message_with_marker_text(
    small: LoadedModel, marker: str
) -> None:
    core = Served(small, "ape").core
    turns = (ChatMessage("system", marker), user(f"{marker} What?"))
    text = core.contexts.prompt(Request("a", turns, contexts=(ONE,)))
    before, after = map(core.engine.tokenizer.decode, (text.prefix, text.suffix))
    assert marker in before and marker in after and "What?" in after
