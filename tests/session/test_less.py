"""Policies with a low-rank state of what they reject: budget, exactness, batches, generation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from larder.cache import LowRankLayer, SequenceCache
from larder.core import POSITION_BYTES, BudgetError, Mode, ModelError, ModelSpec, SpellingError
from larder.models import BatchSegment, Card, Decoder, LearnedWeights, wrap_model
from larder.ops import state_bytes
from larder.policy import PROVIDERS
from larder.prefill import PeakMemoryMeter
from larder.session import Policy, build_caches, entries_per_head
from low_rank_weights import give_maps
from model_runs import id_runtime, some_ids
from tiny_models import tiny

CONTEXT, TOKENS = 40, 20
KEYDIFF = "whole() > protect(sinks=2, recent=4) > keydiff() > uniform()"
LESS = f"{KEYDIFF} > less()"


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return wrap_model(tiny("qwen3"))


@pytest.fixture(autouse=True)
def maps(decoder: Decoder) -> None:
    give_maps(decoder.spec)


def compressed_cache(
    decoder: Decoder, sentence: str, tokens: int, ids: tuple[int, ...]
) -> SequenceCache:
    runtime = id_runtime(decoder)
    policy = Policy.parse(sentence).with_sizes(tokens, 8 if "blockwise" in sentence else None)
    return build_caches(runtime, policy, ids, [{}], PeakMemoryMeter()).activate(0)


def logits_after(decoder: Decoder, cache: SequenceCache, ids: tuple[int, ...]) -> Tensor:
    return decoder.forward_logits([BatchSegment(cache, ids)], Mode.SCRATCH, range(len(ids)))


def test_full_budget_is_exact(decoder: Decoder) -> None:
    ids = some_ids(CONTEXT + 6)
    cache = compressed_cache(decoder, LESS, CONTEXT + 4, ids[:CONTEXT])
    full = compressed_cache(decoder, "whole() > unlimited()", CONTEXT, ids[:CONTEXT])
    expected = logits_after(decoder, full, ids[CONTEXT:])
    torch.testing.assert_close(
        logits_after(decoder, cache, ids[CONTEXT:]), expected, atol=1e-4, rtol=0
    )
    evicting = compressed_cache(decoder, LESS, CONTEXT, ids[:CONTEXT])
    assert not torch.allclose(logits_after(decoder, evicting, ids[CONTEXT:]), expected, atol=1e-4)


def test_low_rank_state_counts_in_entries_and_bytes(decoder: Decoder) -> None:
    spec, ids = decoder.spec, some_ids(CONTEXT)
    policy = Policy.parse(LESS).with_sizes(TOKENS, None)
    assert entries_per_head(policy, spec) == TOKENS - 4
    assert entries_per_head(policy, replace(spec, dtype=torch.bfloat16)) == TOKENS - 8
    cache = compressed_cache(decoder, LESS, TOKENS, ids)
    assert set(cache.lengths()[0]) == {TOKENS - 4}
    assert entry_bytes(spec) * 4 == pytest.approx(state_bytes(spec.layers[0].head_dim), rel=0.05)
    plain = compressed_cache(decoder, KEYDIFF, TOKENS, ids)
    assert cache.nbytes <= 1.05 * plain.nbytes
    with pytest.raises(BudgetError, match=r"no room beside the state of less\(\), which takes 4"):
        compressed_cache(decoder, LESS, 4, ids)


def entry_bytes(spec: ModelSpec) -> int:
    return 2 * spec.layers[0].head_dim * spec.dtype.itemsize + POSITION_BYTES


def test_later_tokens_attend_to_the_state(decoder: Decoder) -> None:
    ids = some_ids(CONTEXT + 3)
    cache = compressed_cache(decoder, LESS, TOKENS, ids[:CONTEXT])
    layer = cache.layers[0]
    assert isinstance(layer, LowRankLayer) and bool(layer.low_rank_state[..., -1].all())
    bare = compressed_cache(decoder, KEYDIFF, TOKENS - 4, ids[:CONTEXT])
    assert bare.lengths() == cache.lengths()
    own, without = (logits_after(decoder, each, ids[CONTEXT:]) for each in (cache, bare))
    assert not torch.allclose(own, without, atol=1e-3)
    layer.low_rank_state.zero_()
    other = cache.layers[1]
    assert isinstance(other, LowRankLayer)
    other.low_rank_state.zero_()
    torch.testing.assert_close(logits_after(decoder, cache, ids[CONTEXT:]), without)


def test_batch_equals_single_sequences(decoder: Decoder) -> None:
    texts = [some_ids(CONTEXT + 2, seed=seed) for seed in (1, 2)]
    caches = [compressed_cache(decoder, LESS, TOKENS, ids[:CONTEXT]) for ids in texts]
    alone = [cache.fork() for cache in caches]
    for step in range(2):
        rows = [
            BatchSegment(cache, ids[CONTEXT + step :][:1])
            for cache, ids in zip(caches, texts, strict=True)
        ]
        together = decoder.forward_logits(rows, Mode.APPEND, [0, 1])
        for row, (cache, ids) in enumerate(zip(alone, texts, strict=True)):
            segment = BatchSegment(cache, ids[CONTEXT + step :][:1])
            one = decoder.forward_logits([segment], Mode.APPEND, [0])
            torch.testing.assert_close(together[row : row + 1], one, atol=1e-5, rtol=1e-5)


def test_blocks_add_to_the_state(decoder: Decoder) -> None:
    ids = some_ids(CONTEXT)
    sentence = LESS.replace("whole()", "blockwise()")
    cache = compressed_cache(decoder, sentence, TOKENS, ids)
    assert set(cache.lengths()[0]) == {TOKENS - 4}
    assert isinstance(cache.layers[0], LowRankLayer)
    assert bool(cache.layers[0].low_rank_state.any())


def test_lossy_storages_are_refused() -> None:
    with pytest.raises(SpellingError, match="leave the storage out, or take drop"):
        Policy.parse(f"{LESS} > quantized(bits=4)")


def test_convolution_slots_use_trained_weights(decoder: Decoder) -> None:
    ids, size = some_ids(CONTEXT + 3), 2 * decoder.spec.layers[0].head_dim
    source, sentence = torch.Generator().manual_seed(0), f"{KEYDIFF} > lococo()"
    plain = logits_after(
        decoder, compressed_cache(decoder, KEYDIFF, TOKENS, ids[:CONTEXT]), ids[CONTEXT:]
    )
    with pytest.raises(ModelError, match="larder train lococo"):
        compressed_cache(decoder, sentence, TOKENS, ids[:CONTEXT])
    for gamma, is_same in ((0.0, True), (0.5, False)):
        layer = {
            "kernel": torch.randn(4, size, 3, generator=source),
            "bias": torch.zeros(4),
            "gamma": torch.tensor(gamma),
        }
        learned = LearnedWeights(Card("lococo", (decoder.spec.fingerprint,)), (layer, layer))
        decoder.gates.put_tensors("lococo", PROVIDERS.load("lococo")(), learned)
        cache = compressed_cache(decoder, sentence, TOKENS, ids[:CONTEXT])
        assert set(cache.lengths()[0]) == {TOKENS}
        found = logits_after(decoder, cache, ids[CONTEXT:])
        assert torch.equal(found, plain) is is_same
