"""Several contexts of one prompt: read apart, found again, blended or side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from larder.cache import ChunkEntries, SequenceCache
from larder.core import BadParameter, Mode, ModelError, UsageError
from larder.models import BatchSegment, Decoder
from larder.prefill import (
    Anchored,
    Blended,
    ChunkAnchor,
    ChunkMemory,
    ChunkSource,
    ContextReuse,
    ContextText,
    Crafted,
    NoChunks,
    Parallel,
    PeakMemoryMeter,
    PrefillReader,
    PrefillSequence,
    estimate,
    run_steps,
)
from larder.session import Policy, empty_cache
from model_runs import some_ids
from tiny_models import tiny

PREFIX, SUFFIX, ASKED = some_ids(4, seed=1), some_ids(3, seed=2), some_ids(5, seed=3)
ONE, TWO, THREE = some_ids(9, seed=4), some_ids(6, seed=5), some_ids(7, seed=6)
TREE = "document_tree() > unlimited()"
SMALL = "protect(sinks=2, recent=2) > snapkv(window=2) > uniform(tokens=12)"
TEXT = ContextText(PREFIX, (ONE, TWO, THREE), SUFFIX)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(tiny("llama", layers=4))


def read(
    decoder: Decoder, spelling: str, text: ContextText = TEXT, source: ChunkSource | None = None
) -> tuple[SequenceCache, ContextReuse]:
    policy = Policy.parse(spelling)
    policy = policy.with_sizes(policy.budget.tokens or len(text.ids), None)
    planner = policy.planner
    tokens, quotas = policy.budget.tokens or 0, dict[int, int]()
    if "unlimited" not in spelling:
        layers = tuple(layer.index for layer in decoder.spec.managed)
        quotas = planner.quotas(tokens, len(text.ids), layers, {})
    reader = PrefillReader(decoder, planner, tokens, quotas, PeakMemoryMeter())
    lane = PrefillSequence(empty_cache(policy, decoder.spec), {})
    steps = policy.schedule.context_steps(reader, lane, text, source or NoChunks())
    return lane.cache, run_steps(steps)


def logits(decoder: Decoder, cache: SequenceCache) -> Tensor:
    segment = BatchSegment(cache, ASKED)
    return decoder.forward_logits([segment], Mode.SCRATCH, range(len(ASKED)))


def full(decoder: Decoder, ids: Sequence[int]) -> Tensor:
    cache = SequenceCache(decoder.spec, "dense")
    decoder.read([BatchSegment(cache, tuple(ids))], Mode.APPEND)
    return logits(decoder, cache)


def test_full_recompute_equals_prefill(decoder: Decoder) -> None:
    cache, reuse = read(decoder, "blended(recompute=1.0) > unlimited()")
    assert torch.allclose(logits(decoder, cache), full(decoder, TEXT.ids), atol=1e-4)
    assert reuse == ContextReuse((9, 6, 7), (False,) * 3, recomputed_tokens=22)
    assert cache.cache_spec.form == "blended" and cache.next_position == len(TEXT.ids)


def test_first_context_equals_the_prefix_cache(decoder: Decoder) -> None:
    text = ContextText(PREFIX, (ONE,), SUFFIX)
    cache, _ = read(decoder, "blended(recompute=0.0) > unlimited()", text)
    assert torch.allclose(logits(decoder, cache), full(decoder, text.ids), atol=1e-4)


def test_error_decreases_with_recomputed_tokens(decoder: Decoder) -> None:
    whole, errors = full(decoder, TEXT.ids), list[float]()
    for share in (0.0, 0.4, 1.0):
        cache, _ = read(decoder, f"blended(recompute={share}) > unlimited()")
        errors.append(float((logits(decoder, cache) - whole).norm()))
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize("spelling", ["cacheblend", "ape"])
def test_cached_contexts_do_not_change_logits(decoder: Decoder, spelling: str) -> None:
    chunks = ChunkMemory()
    fresh, first = read(decoder, spelling, source=chunks)
    other = ContextText(PREFIX, (THREE, some_ids(4, seed=8), ONE), SUFFIX)
    _, later = read(decoder, spelling, other, chunks)
    again, last = read(decoder, spelling, source=chunks)
    assert first.cached == (False,) * 3 and last.cached == (True,) * 3
    assert later.cached == (True, False, True) and later.cached_tokens == 16
    assert torch.equal(logits(decoder, fresh), logits(decoder, again))
    _, behind = read(decoder, spelling, ContextText((1,), (ONE,), SUFFIX), chunks)
    assert behind.cached == (False,), "read behind another prefix, it is another chunk"


def test_single_parallel_context_equals_the_text(decoder: Decoder) -> None:
    text = ContextText(PREFIX, (ONE,), SUFFIX)
    plain = "parallel(temperature=1.0, scale=1.0) > unlimited()"
    cache, reuse = read(decoder, plain, text)
    assert torch.allclose(logits(decoder, cache), full(decoder, text.ids), atol=1e-4)
    assert reuse == ContextReuse((9,), (False,))
    warm, _ = read(decoder, "ape", text)
    assert not torch.allclose(logits(decoder, warm), full(decoder, text.ids), atol=1e-3)


def test_parallel_contexts_are_order_independent(decoder: Decoder) -> None:
    one, _ = read(decoder, "ape")
    other, _ = read(decoder, "ape", ContextText(PREFIX, (THREE, ONE, TWO), SUFFIX))
    assert torch.allclose(logits(decoder, one), logits(decoder, other), atol=1e-5)
    assert one.next_position == len(PREFIX) + len(ONE) + len(SUFFIX)
    copy = SequenceCache.restore(decoder.spec, one.state(), one.meta())
    assert torch.equal(logits(decoder, copy), logits(decoder, one))


def test_contexts_without_a_prefix_or_suffix_are_supported(decoder: Decoder) -> None:
    text = ContextText((), (ONE, TWO), ())
    for spelling in ("blended(recompute=1.0) > unlimited()", "ape"):
        cache, reuse = read(decoder, spelling, text)
        assert reuse.tokens == (9, 6) and bool(logits(decoder, cache).isfinite().all())
    cache, _ = read(decoder, "blended(recompute=1.0) > unlimited()", text)
    assert torch.allclose(logits(decoder, cache), full(decoder, text.ids), atol=1e-4)


def test_blended_contexts_are_cut_to_a_budget(decoder: Decoder) -> None:
    spelling = "blended() > protect(sinks=2, recent=2) > snapkv(window=2) > uniform(tokens=12)"
    cache, _ = read(decoder, spelling)
    assert all(sum(heads) <= 24 for heads in cache.lengths())
    assert cache.next_position == len(TEXT.ids)
    with pytest.raises(UsageError, match="observes every token"):
        read(decoder, "blended() > protect(recent=2) > column_mass() > uniform(tokens=12)")
    with pytest.raises(UsageError, match="cannot evict"):
        read(decoder, "parallel() > protect(recent=2) > keydiff() > uniform(tokens=12)")


def test_other_schedules_prefill_contexts_as_one_text(decoder: Decoder) -> None:
    cache, reuse = read(decoder, "full", source=(chunks := ChunkMemory()))
    assert torch.allclose(logits(decoder, cache), full(decoder, TEXT.ids), atol=1e-4)
    assert reuse.cached_tokens == 0 and not chunks.nbytes


def test_memory_drops_the_least_recently_used_chunk(decoder: Decoder) -> None:
    probe = ChunkMemory()
    read(decoder, "ape", ContextText((), (ONE, TWO), ()), probe)
    chunks = ChunkMemory(probe.nbytes)
    for contexts in ((ONE, TWO), (ONE,), (THREE,)):
        read(decoder, "ape", ContextText((), contexts, ()), chunks)
    assert chunks.nbytes <= probe.nbytes
    assert chunks.find(decoder.spec, (), THREE) and not chunks.find(decoder.spec, (), TWO)
    with pytest.raises(ModelError, match="one loaded model"):
        chunks.find(Decoder(tiny("llama", layers=3)).spec, (), ONE)


def test_cachecraft_is_exact_for_the_same_order(decoder: Decoder) -> None:
    chunks = ChunkMemory()
    fresh, first = read(decoder, "cachecraft", source=chunks)
    again, later = read(decoder, "cachecraft", source=chunks)
    assert torch.allclose(logits(decoder, fresh), full(decoder, TEXT.ids), atol=1e-4)
    assert torch.allclose(logits(decoder, again), full(decoder, TEXT.ids), atol=1e-4)
    assert first == ContextReuse((9, 6, 7), (False,) * 3)
    assert later == ContextReuse((9, 6, 7), (True,) * 3, recomputed_tokens=0)


def test_cachecraft_recomputes_the_profiled_tokens(decoder: Decoder) -> None:
    chunks, other = ChunkMemory(), ContextText(PREFIX, (TWO, ONE, THREE), SUFFIX)
    read(decoder, "cachecraft", source=chunks)
    expected = 0
    for index, ids in enumerate(other.contexts):
        [variant] = chunks.variants(decoder.spec, PREFIX, ids)
        share = variant.profile.share(other.contexts[:index], 1.0)
        expected += math.ceil(share * len(ids))
    cache, reuse = read(decoder, "crafted(renewed=1.0) > unlimited()", other, chunks)
    assert reuse == ContextReuse((6, 9, 7), (True,) * 3, expected) and 0 < expected < 22
    rotated, none = read(decoder, "crafted(alpha=0.0) > unlimited()", other, chunks)
    assert none.recomputed_tokens == 0
    every, most = read(decoder, "crafted(alpha=99.0, renewed=1.0) > unlimited()", other, chunks)
    assert most.recomputed_tokens >= expected
    whole = full(decoder, other.ids)
    errors = [float((logits(decoder, own) - whole).norm()) for own in (rotated, cache, every)]
    assert errors[0] > errors[1] > errors[2]


def test_recompute_beyond_the_limit_adds_a_variant(decoder: Decoder) -> None:
    chunks, other = ChunkMemory(), ContextText(PREFIX, (TWO, ONE, THREE), SUFFIX)
    read(decoder, "cachecraft", source=chunks)
    _, reuse = read(decoder, "crafted(renewed=0.0) > unlimited()", other, chunks)
    assert reuse.cached == (False, False, False)
    assert len(chunks.variants(decoder.spec, PREFIX, ONE)) == 2
    _, again = read(decoder, "crafted(renewed=0.0) > unlimited()", other, chunks)
    assert again.cached == (True,) * 3 and again.recomputed_tokens == 0
    _, plain = read(decoder, "cachecraft", other)
    assert plain.cached == (False,) * 3, "without a source that keeps them"


def test_kvcomm_is_exact_for_repeated_contexts(decoder: Decoder) -> None:
    chunks = ChunkMemory()
    fresh, first = read(decoder, "kvcomm", source=chunks)
    assert torch.allclose(logits(decoder, fresh), full(decoder, TEXT.ids), atol=1e-4)
    assert first == ContextReuse((9, 6, 7), (False,) * 3, recomputed_tokens=0)
    assert len(chunks.anchors(decoder.spec, PREFIX, 1)) == 1
    again, later = read(decoder, "kvcomm", source=chunks)
    assert torch.allclose(logits(decoder, again), full(decoder, TEXT.ids), atol=1e-4)
    assert later == ContextReuse((9, 6, 7), (True,) * 3, recomputed_tokens=0)


def test_anchor_is_charged_its_difference_only(decoder: Decoder) -> None:
    chunks = ChunkMemory()
    read(decoder, "kvcomm", source=chunks)
    size = decoder.spec.full_bytes(1)
    # The prefix, three contexts, and the changes of the second and the third.
    assert chunks.nbytes == size * (len(PREFIX) + len(ONE) + 2 * (len(TWO) + len(THREE)))
    [anchor] = chunks.anchors(decoder.spec, PREFIX, 1)
    assert anchor.base is chunks.find(decoder.spec, PREFIX, TWO)
    tight = ChunkMemory(size * (len(PREFIX) + len(ONE) + 2 * (len(TWO) + len(THREE))) - 1)
    for _ in range(2):
        read(decoder, "kvcomm", source=tight)
    for index, ids in ((1, TWO), (2, THREE)):
        held = tight.anchors(decoder.spec, PREFIX, index)
        assert not held or tight.find(decoder.spec, PREFIX, ids) is held[0].base


def test_estimate_is_a_similarity_weighted_mean_of_anchors(decoder: Decoder) -> None:
    source = torch.Generator().manual_seed(3)

    def some(count: int) -> ChunkEntries:
        sides = [torch.randn(2, count, 4, generator=source) for _ in range(4)]
        return ChunkEntries((sides[0], sides[1]), (sides[2], sides[3]))

    base, near, far = some(3), some(4), some(5)
    anchors = [ChunkAnchor((1, 2, 3, 4), near, some(4)), ChunkAnchor((5,) * 5, far, some(5))]
    got = estimate((7, 8, 9), base, anchors, entropy=1.0)
    for side in ("keys", "values"):
        for layer in range(2):
            own = getattr(base, side)[layer]
            for token in range(3):
                away = [
                    float((own[:, token] - getattr(a.base, side)[layer][:, token]).norm())
                    for a in anchors
                ]
                powers = [math.exp(-distance) for distance in away]
                added = sum(
                    power / sum(powers) * getattr(a.change, side)[layer][:, token]
                    for power, a in zip(powers, anchors, strict=True)
                )
                expected = own[:, token] + added
                torch.testing.assert_close(getattr(got, side)[layer][:, token], expected)
    assert estimate((7, 8, 9), base, anchors[:1], entropy=1.0) is None
    assert estimate((7, 8, 9), base, anchors, entropy=0.0) is None
    assert estimate((7,) * 5, some(5), anchors, entropy=1.0) is None, "one is as long"
    same = estimate((1, 2, 3, 4), near, anchors, entropy=0.0)
    assert same is not None
    torch.testing.assert_close(same.keys[0], near.keys[0] + anchors[0].change.keys[0])
    elsewhere = estimate((1, 2, 3, 4), near.to("meta"), anchors, entropy=0.0)
    assert elsewhere is not None and elsewhere.keys[0].device.type == "meta"


def test_changes_are_rotated_with_their_base(decoder: Decoder) -> None:
    chunks = ChunkMemory()
    read(decoder, "kvcomm", source=chunks)
    [anchor] = chunks.anchors(decoder.spec, PREFIX, 2)
    whole = SequenceCache(decoder.spec, "dense")
    decoder.read([BatchSegment(whole, TEXT.ids)], Mode.APPEND)
    there = ChunkEntries.of(whole, 19, 26)
    back = there.moved_to(4, decoder.spec)
    for layer in range(4):
        expected = anchor.base.keys[layer] + anchor.change.keys[layer]
        torch.testing.assert_close(expected, back.keys[layer], atol=1e-4, rtol=1e-3)
    assert float(anchor.change.values[0].abs().max()) < 1e-5, "the first layer sees no context"
    assert float(anchor.change.values[3].abs().max()) > 1e-3


def test_document_is_reused_after_the_same_documents_only(decoder) -> None:
    chunks = ChunkMemory()
    for contexts, known in (
        ((ONE, TWO, THREE), (False, False, False)),
        ((ONE, TWO), (True, True)),
        ((ONE, THREE, TWO), (True, False, False)),
        ((TWO, ONE), (False, False)),
        ((ONE, THREE, ONE), (True, True, False)),
    ):
        text = ContextText(PREFIX, contexts, SUFFIX)
        cache, reuse = read(decoder, TREE, text, chunks)
        assert torch.allclose(logits(decoder, cache), full(decoder, text.ids), atol=1e-5)
        assert reuse.cached == known and not reuse.recomputed_tokens
    with pytest.raises(UsageError, match="keeps every entry"):
        read(decoder, f"document_tree() > {SMALL}")


@pytest.mark.parametrize("spelling", ["cachecraft", "kvcomm"])
def test_empty_prefix_suffix_or_contexts_are_supported(decoder, spelling) -> None:
    for text in (ContextText((), (ONE, TWO), ()), ContextText(PREFIX, (), ()), TEXT):
        chunks = ChunkMemory()
        for _ in range(2):
            cache, reuse = read(decoder, spelling, text, chunks)
            assert torch.allclose(logits(decoder, cache), full(decoder, text.ids), atol=1e-4)
            assert reuse.tokens == tuple(map(len, text.contexts))
    budget = f"{Policy.parse(spelling).schedule.__class__.__name__.lower()}()"
    small = f"{budget} > protect(sinks=2, recent=2) > snapkv(window=2) > uniform(tokens=12)"
    cache, _ = read(decoder, small)
    assert all(sum(heads) <= 24 for heads in cache.lengths())


def test_bad_values_and_models_are_refused(decoder: Decoder) -> None:
    for make in (
        lambda: Blended(recompute=1.5),
        lambda: Parallel(temperature=0.0),
        lambda: Crafted(alpha=-1.0),
        lambda: Crafted(renewed=1.1),
        lambda: Anchored(entropy=2.0),
        lambda: Anchored(anchors=1),
        lambda: Parallel(scale=1.1),
        lambda: ChunkMemory(0),
    ):
        with pytest.raises(BadParameter):
            make()
    sliding = Decoder(tiny("gemma3", layers=3))
    for spelling in ("cacheblend", "ape", "cachecraft", "kvcomm", "ragcache"):
        with pytest.raises(ModelError, match="sliding windows"):
            read(sliding, spelling)


@pytest.mark.parametrize(
    ("spelling", "empty"),
    [("cachecraft", ()), ("cachecraft", ONE), ("kvcomm", ONE), (TREE, ()), (TREE, ONE)],
)
def test_empty_and_repeated_contexts_are_supported(decoder, spelling, empty) -> None:
    """A tokenizer may leave nothing of a text."""
    chunks = ChunkMemory()
    for contexts in ((ONE, empty, TWO, ONE), (empty, ONE), (empty, empty), (ONE, empty, TWO, ONE)):
        text = ContextText(PREFIX, contexts, SUFFIX)
        cache, reuse = read(decoder, spelling, text, chunks)
        assert reuse.tokens == tuple(map(len, contexts))
        assert cache.next_position == len(text.ids)
