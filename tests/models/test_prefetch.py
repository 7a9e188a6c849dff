"""Pages are fetched ahead of their turn on a thread, and in turn where that fails."""

from __future__ import annotations

import threading
import warnings
from dataclasses import replace

import pytest
import torch

from larder.cache import PageFetcher, SequenceCache
from larder.core import FetchMode, Mode, OffloadSpec, Plan, RecallPart
from larder.models import BatchSegment, Decoder, attention_modules
from larder.recall import Flat
from memory_counts import assert_sequence_counted
from tiny_models import tiny

SOME = Flat(tokens=8, page=4, dense=1)
ALL = Flat(tokens=40, page=4, dense=1)
STEPS, LAYERS = 3, 4


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(tiny("qwen3", layers=LAYERS))


def a_cache(
    decoder: Decoder, recall: RecallPart, fetch: FetchMode, start: int = 1
) -> SequenceCache:
    """Forty tokens, all but the last four of each head parked, but for the first layer's."""
    parking = OffloadSpec(replace(recall, fetch=fetch))
    cache = SequenceCache(decoder.spec, "tiered", parking=parking)
    decoder.read([BatchSegment(cache, tuple(range(start, start + 40)))], Mode.APPEND)
    for layer in range(1, LAYERS):
        lengths = cache.lengths()[layer]
        kept = torch.cat([torch.arange(40 * (h + 1) - 4, 40 * (h + 1)) for h in range(2)])
        cache.apply(layer, Plan(kept, (4,) * len(lengths)))
    return cache


def steps(decoder: Decoder, *caches: SequenceCache, count: int = STEPS) -> torch.Tensor:
    """Logits of some steps, all caches in one pass each."""
    outs = []
    for token in range(50, 50 + count):
        rows = [BatchSegment(cache, (token,)) for cache in caches]
        outs.append(decoder.forward_logits(rows, Mode.APPEND, range(len(rows))))
        for cache in caches:
            assert_sequence_counted(cache)
    return torch.stack(outs)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "ahead" in thread.name]


def noting_threads(monkeypatch) -> list[tuple[int, bool]]:
    """The layer of each search, and whether a worker made it."""
    noted, find = [], PageFetcher._find_and_load

    def note(self: PageFetcher, *args: object):
        is_worker = threading.current_thread() is not threading.main_thread()
        noted.append((self.layer.index, is_worker))
        return find(self, *args)

    monkeypatch.setattr(PageFetcher, "_find_and_load", note)
    return noted


def test_full_recall_ahead_equals_in_turn(decoder, monkeypatch) -> None:
    expected = steps(decoder, a_cache(decoder, ALL, FetchMode.IN_TURN))
    noted = noting_threads(monkeypatch)
    got = steps(decoder, a_cache(decoder, ALL, FetchMode.AHEAD))
    assert torch.allclose(got, expected, atol=1e-5)
    assert sorted(noted) == sorted([(1, False), (2, True), (3, True)] * STEPS)
    assert not threads()


def test_batch_with_an_untiered_cache_is_not_prefetched(decoder, monkeypatch) -> None:
    def plain() -> SequenceCache:
        cache = SequenceCache(decoder.spec, "ragged")
        decoder.read([BatchSegment(cache, tuple(range(2, 42)))], Mode.APPEND)
        return cache

    expected = [steps(decoder, a_cache(decoder, ALL, FetchMode.IN_TURN)), steps(decoder, plain())]
    noted = noting_threads(monkeypatch)
    got = steps(decoder, a_cache(decoder, ALL, FetchMode.AHEAD), plain())
    assert torch.allclose(got, torch.cat(expected, 1), atol=1e-5)
    assert noted and not any(is_worker for _, is_worker in noted)


def test_only_searching_layers_prefetch(decoder, monkeypatch) -> None:
    """Of three layers that park, the first two share a search, the third has one of its own."""
    shared = replace(SOME, layers=2)
    fetch, asked = PageFetcher.fetch, {}

    def note(self: PageFetcher, *args: object) -> None:
        asked[self.layer.index] = threading.current_thread() is not threading.main_thread()
        fetch(self, *args)

    monkeypatch.setattr(PageFetcher, "fetch", note)
    cache = a_cache(decoder, shared, FetchMode.AHEAD)
    first = steps(decoder, cache, count=1)
    assert asked == {3: True}
    assert not cache.tiers[2].fetcher.shared_index.is_used
    again = steps(decoder, a_cache(decoder, shared, FetchMode.AHEAD), count=1)
    assert torch.equal(first, again)


def test_prefetch_queries_use_the_next_layers_projection(decoder, monkeypatch) -> None:
    """Recomputed by hand: the hidden states before each layer, its norm, the next projection."""
    asked, fetch = {}, PageFetcher.fetch

    def note(self: PageFetcher, queries: torch.Tensor, *args: object) -> None:
        asked[self.layer.index] = queries
        fetch(self, queries, *args)

    monkeypatch.setattr(PageFetcher, "fetch", note)
    model, entered, cache = decoder.module.base_model, {}, a_cache(decoder, SOME, FetchMode.AHEAD)
    hooks = [
        layer.input_layernorm.register_forward_hook(
            lambda module, given, out, i=i: entered.setdefault(i, out)
        )
        for i, layer in enumerate(model.layers)
    ]
    steps(decoder, cache, count=1)
    for hook in hooks:
        hook.remove()
    position = torch.tensor([[40]])
    cos, sin = model.rotary_emb(entered[1], position)
    for i in (1, 2):
        own = model.layers[i + 1].self_attn
        heads = own.q_norm(own.q_proj(entered[i]).view(1, 1, -1, own.head_dim)).transpose(1, 2)
        half = heads.shape[-1] // 2
        turned = torch.cat([-heads[..., half:], heads[..., :half]], -1)
        expected = heads * cos[:, None] + turned * sin[:, None]
        assert torch.allclose(asked[i + 1], expected[0], atol=1e-5)


def test_sequences_of_a_batch_get_their_own_pages(decoder) -> None:
    alone = [steps(decoder, a_cache(decoder, SOME, FetchMode.AHEAD, start)) for start in (1, 20)]
    together = steps(
        decoder, *(a_cache(decoder, SOME, FetchMode.AHEAD, start) for start in (1, 20))
    )
    assert torch.allclose(torch.cat(alone, 1), together, atol=1e-4)


def test_counting_agreement_changes_no_output(decoder) -> None:
    ahead, compared = (
        a_cache(decoder, SOME, fetch) for fetch in (FetchMode.AHEAD, FetchMode.COMPARED)
    )
    assert torch.equal(steps(decoder, ahead), steps(decoder, compared))
    assert [tier.fetcher.agreement for tier in ahead.tiers] == [(0, 0)] * LAYERS
    counts = [tier.fetcher.agreement for tier in compared.tiers]
    assert counts[:2] == [(0, 0)] * 2
    for pages, common in counts[2:]:
        assert pages == STEPS * 2 * SOME.pages  # of two kv heads
        assert 0 <= common <= pages
    full = a_cache(decoder, ALL, FetchMode.COMPARED)
    steps(decoder, full)
    assert all(pages == common for pages, common in (t.fetcher.agreement for t in full.tiers))


@pytest.mark.parametrize("fault", [RuntimeError("lost"), SystemExit(3), MemoryError()])
def test_failed_prefetch_worker_warns_once(decoder, monkeypatch, fault) -> None:
    expected = steps(decoder, a_cache(decoder, SOME, FetchMode.IN_TURN))
    cache, fetch = a_cache(decoder, SOME, FetchMode.AHEAD), PageFetcher.fetch

    def die(self: PageFetcher, queries: torch.Tensor, *args: object) -> None:
        fetch(self, -queries, *args)  # leaves the wrong pages, and then
        raise fault

    monkeypatch.setattr(PageFetcher, "fetch", die)
    with warnings.catch_warnings(record=True) as result:
        warnings.simplefilter("always")
        got = steps(decoder, cache)
    assert torch.allclose(got, expected, atol=1e-5)
    (one,) = result
    assert type(fault).__name__ in str(one.message)
    assert not threads()


def test_interrupted_pass_leaves_no_prefetch(decoder) -> None:
    cache = a_cache(decoder, SOME, FetchMode.AHEAD)

    def refuse(row: int, layer: int, recorded: object) -> None:
        if layer == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decoder.forward_logits([BatchSegment(cache, (50,))], Mode.APPEND, [0], refuse)
    assert not threads()
    assert all(tier.fetcher._arrived is None for tier in cache.tiers)
    hooks = [module._forward_pre_hooks for module in decoder.module.modules()]
    assert not any(hooks)
    fresh = a_cache(decoder, SOME, FetchMode.AHEAD)
    assert torch.allclose(steps(decoder, cache), steps(decoder, fresh), atol=1e-5)


def test_fork_continues_prefetching(decoder, monkeypatch) -> None:
    cache = a_cache(decoder, SOME, FetchMode.AHEAD)
    noted = noting_threads(monkeypatch)
    steps(decoder, cache.fork(), count=1)
    assert sorted(noted) == [(1, False), (2, True), (3, True)]


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "phi3"])
def test_attention_of_each_layer_is_found(architecture) -> None:
    found = attention_modules(tiny(architecture, layers=3).base_model)
    assert list(found) == [0, 1, 2]
    assert all(type(module).__name__.endswith("Attention") for module in found.values())
