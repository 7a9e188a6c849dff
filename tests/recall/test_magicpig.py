"""LSH sampling equals the loop: what is drawn, with which weight, and what is attended to."""

from __future__ import annotations

import math

import pytest
import torch

from builders import HEAD_DIM, a_layer, draw, layer_options
from cache_stores import append
from index_recall import built, keys_of
from larder.cache import NewTokens, TieredLayer
from larder.core import BadParameter, Mode, OffloadSpec, Plan, RecallIndex
from larder.ops import attention as attention_ops
from larder.recall import MagicPig, MagicPigIndex
from references import magicpig as loop
from references.lloyd import mean
from slow_tiers import Tier
from without_kernels import reference

LAYER = a_layer(kv_heads=2, group=2)
SMALL = {"bits": 3, "tables": 8}


def tables_of(index: RecallIndex, part: MagicPig) -> list[list[list[float]]]:
    """Directions by table, as the loop takes them."""
    assert isinstance(index, MagicPigIndex)
    rows = index._directions.T.tolist()
    return [rows[at : at + part.bits] for at in range(0, len(rows), part.bits)]


@pytest.mark.parametrize(
    ("cosine", "bits", "tables", "hand"),
    [(0.0, 1, 2, 0.25), (0.5, 10, 150, 0.736), (0.0, 10, 150, 0.0097), (1.0, 10, 150, 1.0)],
)
def test_collision_probabilities_hand_values(cosine, bits, tables, hand) -> None:
    assert loop.chance(cosine, bits, tables) == pytest.approx(hand, abs=5e-4)
    part = MagicPig(bits=bits, tables=tables)
    tier, index = Tier(LAYER), part.index(LAYER)
    tier.grow((2, 2))
    away = math.sqrt(1 - cosine * cosine)
    for head in range(2):  # opposite keys: their mean is 0
        tier.keys[head][0] = torch.tensor([cosine, away] + [0.0] * (HEAD_DIM - 2))
        tier.keys[head][1] = -tier.keys[head][0]
    index.add(tier.entries())
    query = torch.zeros(4, HEAD_DIM)
    query[:, 0] = 3.0
    first = torch.zeros(4, dtype=torch.int64)
    _, weights = index._weighted(query, tier.entries(), torch.arange(4), first)
    assert (-weights).exp().tolist() == pytest.approx([hand] * 4, abs=5e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("growths", [[(40, 31)], [(20, 0), (19, 31), (1, 0)], [(16, 30), (24, 30)]])
def test_samples_equal_the_reference(growths, dtype) -> None:
    part = MagicPig(**SMALL)
    tier, index = built(part, LAYER, growths, 3, dtype)
    query, keys, tables = tier.queries(), keys_of(tier), tables_of(index, part)
    # The mean is that of the entries at the last build: at the first, and where they doubled.
    built_of = [int(n) for n in index.state()["made_of"]]
    found = index.find(query, tier.entries(), 30)
    for h, own in enumerate(query.tolist()):
        head = keys[h // 2]
        middle = mean(head[: built_of[h // 2]])
        hits = [n for n, key in enumerate(head) if _collides(own, key, middle, tables)]
        pages = [page for page in found.pages[h].tolist() if page >= 0]
        assert sorted(pages) == hits and 0 < len(hits) <= 30
        expected = [loop.log_weight(own, head[n], middle, 3, 8) for n in pages]
        assert found.log_weights[h, : len(pages)].tolist() == pytest.approx(expected, abs=1e-4)


def _collides(query, key, middle, tables) -> bool:
    shifted = loop.less(key, middle)
    return sum(loop.code(query, own) == loop.code(shifted, own) for own in tables) >= 2


def test_samples_are_centered_by_the_mean() -> None:
    part = MagicPig(**SMALL)
    tier, index = built(part, LAYER, [(40, 40)])
    query, keys, tables = tier.queries(), keys_of(tier), tables_of(index, part)
    found = index.find(query, tier.entries(), 39)
    for h, own in enumerate(query.tolist()):
        pages = [page for page in found.pages[h].tolist() if page >= 0]
        assert sorted(pages) == loop.drawn(own, keys[h // 2], tables)


def estimates(count: int, seeds: int) -> tuple[float, float]:
    """Mean over seeds of the weighted sum that is drawn, and the true sum of one query head."""
    layer = a_layer(kv_heads=1, group=1)
    tier = Tier(layer, 5)
    tier.grow((60,))
    query, sums = tier.queries(), []
    powers = (tier.keys[0] @ query[0] * layer.scaling).exp()
    for seed in range(seeds):
        index = MagicPig(bits=2, tables=4, seed=100 * seed).index(layer)
        index.add(tier.entries())
        found = index.find(query, tier.entries(), count)
        pages = found.pages[0][found.pages[0] >= 0]
        weights = found.log_weights[0, : len(pages)].exp()
        sums.append(float((powers[pages] * weights).sum()))
    return sum(sums) / seeds, float(powers.sum())


@pytest.mark.parametrize("count", [59, 8])
def test_sums_are_estimated_without_bias(count) -> None:
    """Also where more collide than there is room for."""
    about, true = estimates(count, 300)
    assert about == pytest.approx(true, rel=0.05)


def test_no_sampling_when_all_entries_fit() -> None:
    tier, index = built(MagicPig(**SMALL), LAYER, [(12, 40)])
    found = index.find(tier.queries(), tier.entries(), 12)
    for row in found.pages[:2].tolist():
        assert sorted(row) == list(range(12))
    assert found.log_weights[:2].tolist() == [[0.0] * 12] * 2
    assert bool((found.log_weights[2:][found.pages[2:] >= 0] != 0).all())


def test_query_without_samples_gets_a_page_of_zero_weight() -> None:
    tier, index = Tier(LAYER), MagicPig(bits=15, tables=2).index(LAYER)
    tier.grow((40, 40))
    index.add(tier.entries())
    found = index.find(tier.queries(), tier.entries(), 8)
    assert found.pages[:, 0].tolist() == [0] * 4
    assert found.log_weights[:, 0].tolist() == [-math.inf] * 4


@pytest.mark.parametrize("kernels", ["compiled", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_step_uses_the_sample_weights(kernels, dtype, monkeypatch) -> None:
    """Twice, since slots stay between steps and their weights do not."""
    recall = MagicPig(**SMALL, tokens=20, dense=0)
    store = TieredLayer(LAYER, layer_options(dtype, parking=OffloadSpec(recall)))
    append(store, draw(LAYER, 60, 0, 1, dtype))
    store.apply(Plan.from_mask(torch.arange(120) % 60 >= 55, store.lengths))
    if kernels == "torch":
        for module in ("larder.cache.offload.page_pool", "larder.cache.forms.ragged"):
            monkeypatch.setattr(
                f"{module}.ragged_attention", reference(attention_ops.ragged_attention)
            )
    for seed in (7, 8):
        step = draw(LAYER, 1, 53 + seed, seed, dtype)
        rows = step.queries, step.keys, step.values, step.positions
        out = store.attend(NewTokens(*rows, Mode.APPEND))
        held, fast = store.parked(), store.entries()
        found = store.fetcher.shared_index.index.find(step.queries[:, 0].float(), held, 20)
        for h, query in enumerate(step.queries[:, 0].float().tolist()):
            k = h // 2
            near = zip(fast.head_keys(k).tolist(), fast.head_values(k).tolist(), strict=True)
            entries = [(key, value, 0.0) for key, value in near]
            drawn = zip(found.pages[h].tolist(), found.log_weights[h].tolist(), strict=True)
            for page, weight in drawn:
                if page >= 0:
                    far = held.head_keys(k)[page].tolist(), held.head_values(k)[page].tolist()
                    entries.append((*far, weight))
            expected = loop.attended(query, entries, LAYER.scaling)
            close = 3e-2 if dtype is torch.bfloat16 else 1e-4
            assert out[h, 0].tolist() == pytest.approx(expected, abs=close)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"bits": 0}, "magicpig.bits must be from 1 to 15, got 0"),
        ({"bits": 16}, "magicpig.bits must be from 1 to 15, got 16"),
        ({"tables": 1}, "magicpig.tables must be at least 2, got 1"),
        ({"union": 8}, "magicpig.union must be open, got 8"),
        ({"layers": 2}, "magicpig.layers must be 1, got 2"),
    ],
)
def test_parameters_out_of_range_are_refused(wrong, message) -> None:
    with pytest.raises(BadParameter, match=message):
        MagicPig(**wrong)
