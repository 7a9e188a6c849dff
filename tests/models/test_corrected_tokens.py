"""A model goes on with the latest tokens read once more, corrected by what the new one recalls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from larder.cache import SequenceCache
from larder.core import CacheError, FetchMode, Mode, OffloadSpec, Plan, RecallPart
from larder.models import BatchSegment, Decoder, wrap_model
from larder.recall import Flat
from memory_counts import checked_counts
from model_runs import some_ids
from tiny_models import tiny


@pytest.fixture(autouse=True)
def counted_memory() -> Iterator[None]:
    with checked_counts():
        yield


SOME, ALL = Flat(tokens=4, page=4, dense=1), Flat(tokens=40, page=4, dense=1)
LAYERS, READ, NEAR, STEPS = 3, 40, 4, 4
IDS = some_ids(READ + STEPS)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return wrap_model(tiny("qwen3", layers=LAYERS))


def a_cache(decoder: Decoder, recall: RecallPart, ids: tuple[int, ...] = IDS) -> SequenceCache:
    """All but the latest of each head parked, but for the first layer's."""
    cache = SequenceCache(decoder.spec, "tiered", parking=OffloadSpec(recall))
    decoder.read([BatchSegment(cache, ids[:READ])], Mode.APPEND)
    for layer in range(1, LAYERS):
        latest = torch.arange(READ - NEAR, READ)
        cache.apply(layer, Plan(torch.cat([latest, latest + READ]), (NEAR, NEAR)))
    return cache


def steps(decoder: Decoder, *caches: SequenceCache, ids: tuple[int, ...] = IDS) -> torch.Tensor:
    outs = []
    for token in ids[READ:]:
        rows = [BatchSegment(cache, (token,)) for cache in caches]
        outs.append(decoder.forward_logits(rows, Mode.APPEND, range(len(rows))))
    return torch.stack(outs)


def test_full_recall_corrects_nothing(decoder) -> None:
    plain, mended = (a_cache(decoder, replace(ALL, corrected=n)) for n in (0, 2))
    assert torch.allclose(steps(decoder, plain), steps(decoder, mended), atol=1e-4)
    assert mended.next_position == READ + STEPS
    for left, right in zip(plain.layers, mended.layers, strict=True):
        pair = left.entries().head_keys(1), right.entries().head_keys(1)
        assert torch.allclose(*pair, atol=1e-4)


def test_correction_reaches_the_layers_above(decoder) -> None:
    """Keys of a layer that parks nothing below it stay; those above are replaced."""
    plain, mended = (a_cache(decoder, replace(SOME, corrected=n)) for n in (0, 2))
    before, after = steps(decoder, plain), steps(decoder, mended)
    assert torch.allclose(before[0], after[0], atol=1e-5)  # there was nobody to correct yet
    assert not torch.allclose(before[-1], after[-1], atol=1e-3)
    pairs = [
        (left.entries().head_keys(0), right.entries().head_keys(0))
        for left, right in zip(plain.layers, mended.layers, strict=True)
    ]
    for left, right in pairs[:2]:
        assert torch.allclose(left, right, atol=1e-5)
    left, right = pairs[2]
    assert not torch.allclose(left[-STEPS:-1], right[-STEPS:-1], atol=1e-3)
    assert torch.allclose(left[:NEAR], right[:NEAR], atol=1e-5)  # what was read, not generated


@pytest.mark.parametrize("fetch", [FetchMode.IN_TURN, FetchMode.AHEAD])
def test_sequences_are_corrected_independently(decoder, fetch) -> None:
    recall, other = replace(SOME, corrected=2, fetch=fetch), some_ids(READ + STEPS, seed=4)
    texts = IDS, (*other[:READ], *IDS[READ:])
    alone = [steps(decoder, a_cache(decoder, recall, text)) for text in texts]
    together = steps(decoder, *(a_cache(decoder, recall, text) for text in texts))
    assert torch.allclose(torch.cat(alone, 1), together, atol=1e-4)


def test_interrupted_forward_pass_is_rolled_back(decoder) -> None:
    cache, twin = (a_cache(decoder, replace(SOME, corrected=1)) for _ in range(2))

    def refuse(row: int, layer: int, recorded: object) -> None:
        if layer == LAYERS - 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decoder.forward_logits([BatchSegment(cache, (IDS[READ],))], Mode.APPEND, [0], refuse)
    assert torch.allclose(steps(decoder, cache), steps(decoder, twin), atol=1e-5)


def test_sliding_window_model_is_refused() -> None:
    with (
        wrap_model(tiny("gemma3")) as held,
        pytest.raises(CacheError, match="has a sliding window and"),
    ):
        SequenceCache(held.spec, "tiered", parking=OffloadSpec(replace(SOME, corrected=1)))
