"""A text that is read along lines of attention, over both tiers of a layer."""

from __future__ import annotations

import pytest
import torch

from builders import a_layer, a_plan, draw, layer_options
from cache_stores import append, assert_close, attend, extend
from larder import Policy
from larder.cache import SequenceCache, TieredLayer
from larder.core import AppendKind, BadParameter, CacheError, Mode, OffloadSpec
from larder.models import BatchSegment, Decoder, wrap_model
from larder.ops import FEWEST_QUERIES, head_lines
from larder.ops.attention import attention
from larder.recall import Rewatch
from model_runs import some_ids
from tiny_models import tiny

LAYER, COUNT = a_layer(2, 2), 41


def a_store(coverage: float) -> TieredLayer:
    parking = OffloadSpec(Rewatch(tokens=4, dense=0, coverage=coverage))
    store = TieredLayer(LAYER, layer_options(parking=parking))
    append(store, draw(LAYER, COUNT))
    store.apply(a_plan([[0, 3, COUNT - 1], [7, COUNT - 1]], [COUNT] * 2))
    store.expect(AppendKind.TEXT)
    return store


def test_block_attends_to_lines_of_both_tiers() -> None:
    held, new = draw(LAYER, COUNT), draw(LAYER, FEWEST_QUERIES, COUNT, 1)
    found, indices = extend(a_store(0.6), new), torch.arange(COUNT + FEWEST_QUERIES)
    positions, expected = indices[COUNT:], list[torch.Tensor]()
    for head, group in enumerate(new.queries.unflatten(0, (2, -1))):
        keys = torch.cat([held.keys[head], new.keys[head]])
        values = torch.cat([held.values[head], new.values[head]])
        lines = head_lines(group, keys, positions, indices, LAYER.scaling, 0.6)
        for own, line in zip(group, lines, strict=True):
            mask = line.mask(positions, indices)
            assert mask.float().mean() < 0.5
            expected.append(attention(own[None], keys, values, LAYER.scaling, mask)[0][0])
    assert_close(found, torch.stack(expected))


@pytest.mark.parametrize("queries", [FEWEST_QUERIES - 1, FEWEST_QUERIES])
def test_short_inputs_and_scratch_passes_are_exact(queries: int) -> None:
    new = draw(LAYER, queries, COUNT, 1)
    exact, some = a_store(1.0), a_store(0.6)
    assert_close(attend(some, new), attend(exact, new))
    outs = extend(some, new), extend(exact, new)
    assert torch.allclose(*outs, atol=1e-5) == (queries < FEWEST_QUERIES)


@pytest.mark.extended
def test_full_coverage_leaves_the_logits_unchanged() -> None:
    decoder, ids = wrap_model(tiny("qwen3", layers=2)), some_ids(FEWEST_QUERIES)
    logits = list[torch.Tensor]()
    for coverage in (1.0, 1 - 1e-9, 0.5):
        parking = OffloadSpec(Rewatch(tokens=4, dense=0, coverage=coverage))
        cache = SequenceCache(decoder.spec, "tiered", parking=parking)
        logits.append(append_logits(decoder, cache, ids))
    assert_close(logits[1], logits[0])
    assert not torch.allclose(logits[2], logits[0], atol=1e-3)


def append_logits(decoder: Decoder, cache: SequenceCache, ids: tuple[int, ...]) -> torch.Tensor:

    rows = [BatchSegment(cache, ids, append_kind=AppendKind.TEXT)]
    return decoder.forward_logits(rows, Mode.APPEND, [len(ids) - 1])


def test_options_conflicting_with_lines_are_refused() -> None:
    with pytest.raises(BadParameter, match="union must be open with coverage=0.9"):
        Rewatch(coverage=0.9, union=8)
    with pytest.raises(BadParameter, match=r"coverage must be in \(0, 1\]"):
        Rewatch(coverage=0.0)
    decoder = wrap_model(tiny("qwen3", layers=2))
    parking = OffloadSpec(Rewatch(tokens=4, dense=0, coverage=0.9), is_gapless=True)
    with pytest.raises(CacheError, match="use coverage=1, or leave compact"):
        SequenceCache(decoder.spec, "tiered", parking=parking)
    assert Policy.parse("loopserve_lines").recall == Rewatch(dense=0, coverage=0.955)
