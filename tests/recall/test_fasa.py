"""FASA equals the loop: which pairs agree, and what they rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import HEAD_DIM, RADIANS, a_layer
from index_recall import assert_best, keys_of
from larder.core import BadParameter
from larder.recall import Fasa, contextual_agreement, rotary_pairs
from references import fasa as loop
from references.lloyd import dot
from slow_tiers import Tier

LAYER = a_layer(kv_heads=2, group=2)


@pytest.mark.parametrize("radians", [RADIANS, (), None, (1.0,) * 4])
def test_pairs_are_those_of_rope(radians) -> None:
    layer = replace(LAYER, radians=radians)
    wanted = loop.pairs(HEAD_DIM, len(radians or ()))
    assert [tuple(pair) for pair in rotary_pairs(layer).tolist()] == wanted


@pytest.mark.extended
@settings(max_examples=15)
@given(
    lengths=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    pairs=st.sampled_from([1, 2, 99]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_index_equals_its_reference(lengths, pairs, dtype, seed) -> None:
    tier = Tier(LAYER, seed, dtype)
    tier.grow(lengths)
    seen = torch.stack([tier.queries() for _ in range(3)], 1)
    index = Fasa(pairs=pairs, agreeing=5).index(LAYER)
    index.add(tier.entries(), seen)
    query, keys = tier.queries(), keys_of(tier)
    chosen, every = index.state()["chosen"].view(2, -1, 2), rotary_pairs(LAYER)
    scores, exact = [], []
    for h, own in enumerate(query.tolist()):
        head = keys[h // 2]
        asked = seen[h // 2 * 2 : h // 2 * 2 + 2].flatten(0, 1)
        merits = [loop.agreement(asked.tolist(), head, tuple(p), 5) for p in every.tolist()]
        assert contextual_agreement(asked, torch.tensor(head), every, 5).tolist() == pytest.approx(
            merits
        )
        own_pairs = [tuple(pair) for pair in chosen[h // 2].tolist()]
        taken = sorted((merits[every.tolist().index(list(p))] for p in own_pairs), reverse=True)
        assert taken == pytest.approx(sorted(merits, reverse=True)[:pairs])
        scores.append([loop.score(own, key, own_pairs) for key in head])
        exact.append([dot(own, key) for key in head])
    assert_best(index.find(query, tier.entries(), 6).pages, scores, 6)
    assert_best(index.exact(query, tier.entries(), 6).pages, exact, 6)


def test_channel_pairs_are_selected_at_the_first_queries() -> None:
    tier = Tier(LAYER)
    tier.grow((40, 0))
    index, whole = (Fasa(pairs=1, agreeing=5).index(LAYER) for _ in range(2))
    tier.keys[0][:, 2] *= 9
    index.add(tier.entries())
    assert index.state()["chosen"][0].tolist() == [2, 5]
    tier.grow((9, 3))
    seen = torch.stack([tier.queries() for _ in range(3)], 1)
    seen[..., [2, 5]] = 0.0  # so that another pair agrees
    for each in (index, whole):
        each.add(tier.entries(), seen)
    chosen = index.state()["chosen"]
    assert chosen[0].tolist() != [2, 5]
    for name, stated in index.state().items():
        assert torch.equal(stated, whole.state()[name])
    tier.grow((100, 100))
    index.add(tier.entries(), -seen.flip(0))
    assert torch.equal(index.state()["chosen"], chosen)


@pytest.mark.parametrize("name", ["pairs", "agreeing"])
def test_parameters_out_of_range_are_refused(name) -> None:
    with pytest.raises(BadParameter, match=f"fasa.{name} must be at least 1"):
        Fasa(**{name: 0})
