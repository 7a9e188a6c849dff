"""Presets and scores against numbers worked out by hand from papers and released code."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from builders import a_layer, a_view
from larder import LarderError, Policy
from larder.core import (
    BadParameter,
    Entries,
    LatestQueries,
    LayerSpec,
    Observation,
    Phase,
    SpellingError,
)
from larder.policy import (
    CapKV,
    Criticality,
    CurDKV,
    Fusion,
    KeyCosine,
    LastQuery,
    Leverages,
    Morph,
    Norms,
    PersistenceTally,
    Pool,
    RecentAttention,
    Selection,
    SnapKV,
    Split,
    Strategy,
)
from references import criticality

NOTHING = 1e-9  # a weight that is as good as none


def attended(
    rows: Sequence[Sequence[Sequence[float]]], values: torch.Tensor | None = None
) -> Observation:
    """A layer of one kv head whose queries give these weights.

    Args:
        rows: of each query head, for each of its queries the weights of all entries; the last
            entries are the queries' own tokens, and later ones get nothing.
    """
    heads, queries, count = len(rows), len(rows[0]), len(rows[0][0])
    layer = LayerSpec(0, heads, 1, heads * queries, 1.0)
    keys = torch.empty(count, layer.head_dim)
    asked = torch.zeros(heads, queries, layer.head_dim)
    for head, own in enumerate(rows):
        for query, weights in enumerate(own):
            position = head * queries + query
            asked[head, query, position] = 1.0
            shown = [max(weight, NOTHING) for weight in weights]
            keys[:, position] = torch.tensor(shown).log()
    positions = torch.arange(count)
    held = torch.ones_like(keys) if values is None else values
    entries = Entries(keys, held, positions.int(), (0,), (count,))
    own = torch.zeros(1, queries, layer.head_dim)
    return Observation(layer, entries, asked, positions[-queries:], count, (0, count), keys=own)


PEAK = [0.0] * 4 + [1.0] + [0.0] * 5  # one entry has all of the weight; the last one is the query


@pytest.mark.parametrize("pool, expected", [(Pool.MEAN, 0.2), (Pool.MAX, 1.0)])
def test_pooling_spreads_a_peak_over_its_neighbors(pool, expected) -> None:
    scores = SnapKV(window=1, kernel=5, pool=pool).score(attended([[PEAK]])).tolist()
    assert scores[2:7] == pytest.approx([expected] * 5, abs=1e-6)
    assert scores[:2] == pytest.approx([0.0] * 2, abs=1e-6) and scores[-1] == math.inf


@pytest.mark.parametrize("preset", ["cake", "compresskv", "arkv"])
def test_average_pooling_methods_average_neighbors(preset) -> None:
    window = "window=8" if preset == "compresskv" else "window=32"
    policy = Policy.parse(str(Policy.parse(preset)).replace(window, "window=1", 1))
    observation = replace(attended([[PEAK]]), calibration={"retrieval": (1.0,)})
    scores = policy.planner.score(observation).tolist()
    assert scores[2:7] == pytest.approx([0.2] * 5, abs=1e-5)


@pytest.mark.parametrize("name", ["defensivekv", "layer_defensivekv", "cake", "compresskv"])
def test_whole_prompt_presets_protect_no_sinks_or_recent_tokens(name) -> None:
    sentence = str(Policy.parse(name))
    assert "whole() > protect(sinks=0, recent=0)" in sentence


def test_defensive_scores_hand_values() -> None:
    """Two query heads, two queries, eight entries of which the last two are the queries' own."""
    rows = [
        [[0.6, 0, 0, 0, 0, 0.2, 0.2, 0], [0.1, 0, 0, 0, 0, 0.4, 0.3, 0.2]],
        [[0.1, 0, 0.5, 0, 0, 0.1, 0.3, 0], [0.1, 0, 0, 0, 0.0, 0.1, 0.4, 0.4]],
    ]
    policy = Policy.parse(
        "whole() > snapkv(window=2, kernel=1) > defensive(kernel=1) > group_max() > pooled()"
    )
    scores = policy.planner.score(attended(rows)).tolist()
    floor = (0.6 + 0.5 + 0.4) / 6
    assert scores[:6] == pytest.approx([0.6, floor, 0.5, floor, floor, 0.4], abs=1e-5)
    assert scores[6:] == [math.inf] * 2


def test_defensive_smoothing_keeps_row_sums() -> None:
    row = [0.6, 0.0, 0.0, 0.0, 0.0, 0.3, 0.1]
    policy = Policy.parse(
        "whole() > snapkv(window=1, kernel=1) > defensive(kernel=3) > group_max() > pooled()"
    )
    scores = policy.planner.score(attended([[row]])).tolist()
    smooth = [0.2, 0.2, 0.0, 0.0, 0.1, 0.1]  # of .9, before it is brought back from .6
    floor = 0.9 / 6
    expected = [max(number * 0.9 / 0.6, floor) for number in smooth]
    assert scores[:6] == pytest.approx(expected, abs=1e-5)


WEIGHTS = [0.5, 0.3, 0.1, 0.05, 0.02, 0.03]  # of a single query, the last its own


def values_of_sizes(*sizes: float) -> torch.Tensor:
    return torch.tensor(sizes)[:, None]


def test_criticality_first_stage_ignores_values() -> None:
    observation = attended([[WEIGHTS]], values_of_sizes(0.0, 0.0, 1.0, 9.0, 30.0, 1.0))
    weights = torch.tensor([*WEIGHTS[:5], math.inf])
    plain = Criticality(epsilon=0.0).weigh(weights, observation).tolist()
    assert plain[:5] == pytest.approx([0.0, 0.0, 0.1, 0.45, 0.6])
    staged = Criticality(epsilon=0.0, first=0.5).weigh(weights, observation, Selection(4)).tolist()
    assert staged == [math.inf, *plain[1:5], math.inf]  # two of four; the window is one of them
    assert Criticality(first=0.0).weigh(weights, observation, Selection(4)).isinf().sum() == 1


def test_criticality_first_stage_stops_below_its_mass() -> None:
    observation = attended([[WEIGHTS]])
    weights = torch.tensor(WEIGHTS)
    scores = torch.tensor([*[0.1] * 5, math.inf])
    part = Criticality(epsilon=0.0, mass=0.9, norms=Norms.SHARE)
    for quota, stays in ((6, [0, 1, 5]), (2, [0, 5]), (1, [5])):  # .03 + .5 + .3, then .93
        weighed = part.weigh(scores, observation, Selection(quota, weights=weights))
        assert weighed.isposinf().nonzero().flatten().tolist() == stays
        first = criticality.first(part, WEIGHTS, [False] * 5 + [True], quota)
        assert [*first, 5] == stays


def test_criticality_first_stage_counts_protected_entries() -> None:
    seen, scores = attended([[WEIGHTS]]), torch.tensor(WEIGHTS)
    protected = torch.tensor([False, False, False, False, True, True])
    staged = Criticality(first=0.5).weigh(scores, seen, Selection(6, protected))
    assert staged.isposinf().nonzero().flatten().tolist() == [0]


def test_value_norms_are_after_the_output_projection(loop_of) -> None:
    source = torch.Generator().manual_seed(3)
    rows = [[WEIGHTS]] * 2
    observation = attended(rows, torch.randn(6, 2, generator=source))
    projection = torch.randn(2, 2, 3, generator=source)
    scores = torch.tensor([*WEIGHTS[:5], math.inf])
    for part in (Criticality(), Criticality(norms=Norms.SHARE)):
        arguments = [scores.tolist()], [observation.entries.values.tolist()], [projection.tolist()]
        got = part.weigh(scores, replace(observation, inputs={"projection": projection})).tolist()
        assert got == pytest.approx(loop_of(part).weighed(part, *arguments)[0], rel=1e-4)


def test_criticality_preset_hand_values() -> None:
    """A first part by mean weight, then risk times the share of the value."""
    rows = [[[0.5, 0.02, 0.02, 0.02, 0.2, 0.04, 0.2]], [[0.1, 0.0, 0.3, 0.0, 0.3, 0.1, 0.2]]]
    values = torch.ones(7, 2)
    values[5] = 20.0
    observation = attended(rows, values)
    policy = Policy.parse(str(Policy.parse("defensivekv")).replace("window=32", "window=1"))
    planner = policy.planner
    scored = planner.with_protection(observation, planner.score(observation, 5, 5), 5)
    plan = planner.plan({0: scored}, {0: 5}, lambda index: observation.entries)[0]
    assert plan.kept.tolist() == [0, 2, 4, 5, 6]
    assert scored.scores.isposinf().nonzero().flatten().tolist() == [0, 4, 6]


def looked(observation: Observation, generating: bool, held: int) -> Observation:
    """Observation after a pass of the newest token; `held` queries before it are remembered."""
    count = observation.queries.shape[1]
    before = slice(count - 1 - held, count - 1)
    latest = LatestQueries(observation.queries[:, before], observation.query_positions[before])
    phase = Phase.DECODE if generating else Phase.PREFILL
    return replace(
        observation,
        queries=observation.queries[:, -1:],
        keys=observation.keys[:, -1:],
        query_positions=observation.query_positions[-1:],
        latest=latest if held else None,
        phase=phase,
    )


ROWS = [  # of two query heads, three queries each; what the last three entries get does not count
    [
        [0.4, 0.2, 0.1, 0.3, 0.0, 0.0],
        [0.1, 0.1, 0.1, 0.3, 0.4, 0.0],
        [0.0, 0.1, 0.9, 0.0, 0.0, 0.0],
    ],
    [
        [0.1, 0.1, 0.3, 0.5, 0.0, 0.0],
        [0.3, 0.2, 0.1, 0.2, 0.2, 0.0],
        [0.0, 0.9, 0.1, 0.0, 0.0, 0.0],
    ],
]


@pytest.mark.parametrize("fusion", Fusion)
def test_morph_scores_older_entries_by_recent_queries(fusion) -> None:
    """While text is generated two queries judge, without the newest; three entries stay."""
    observation = looked(attended(ROWS), generating=True, held=2)
    scores = Morph(window=2, fusion=fusion).score(observation).tolist()
    first = [max(4 / 7, 1 / 5), max(2 / 7, 1 / 5), max(1 / 7, 3 / 5)]
    second = [max(1 / 3, 3 / 6), max(1 / 3, 2 / 6), max(1 / 3, 1 / 6)]
    fuse = sum if fusion is Fusion.SUM else max
    expected = [fuse(pair) for pair in zip(first, second, strict=True)]
    assert scores[:3] == pytest.approx(expected, abs=1e-5)
    assert scores[3:] == [math.inf] * 3


def test_morph_of_one_query_ranks_as_last_query() -> None:
    observation = attended([[[0.3, 0.1, 0.2, 0.05, 0.35]]])
    ranks = Morph(window=1, fusion=Fusion.SUM).score(observation)[:-1].argsort().tolist()
    assert ranks == LastQuery().score(observation)[:-1].argsort().tolist() == [3, 1, 2, 0]


@pytest.mark.parametrize("held", [0, 1, 2])
@pytest.mark.parametrize("generating", [False, True])
def test_morph_with_held_queries_equals_its_reference(loop_of, generating, held) -> None:
    observation = looked(attended(ROWS), generating, held)
    for part in (Morph(2), Morph(2, Fusion.SUM), Morph(4)):
        got = part.score(observation).tolist()
        assert got == pytest.approx(loop_of(part).scores(part, observation)[0], abs=1e-5)


@pytest.mark.parametrize("held", [0, 1, 2])
def test_recent_attention_with_held_queries_equals_its_reference(loop_of, held) -> None:
    observation = looked(attended(ROWS), True, held)
    for part in (RecentAttention(1), RecentAttention(2), RecentAttention(4)):
        got = part.score(observation).tolist()
        assert got == pytest.approx(loop_of(part).scores(part, observation)[0], abs=1e-5)


def test_key_cosine_heads_beyond_the_share_score_zero() -> None:
    observation = a_view(a_layer(2, 1), [range(6), range(4)], 3)
    every = KeyCosine(kernel=1).score(observation)
    best = replace(observation, calibration={"needle_rank": (0.25, 0.0)})
    some = KeyCosine(kernel=1, share=0.2).score(best)
    assert some[:6].tolist() == [0.0] * 6 and torch.equal(some[6:], every[6:])
    assert float(every[:6].abs().min()) > 0
    calibration = {3: {"needle_rank": (0.25, 0.0)}, 5: {"needle_rank": (0.5, 0.75)}}
    assert KeyCosine(share=0.2).scored_layers(calibration) == {3}
    assert KeyCosine().scored_layers(calibration) is None
    with pytest.raises(BadParameter, match=r"key_cosine.share must be in \(0, 1\], got 0.0"):
        KeyCosine(share=0.0)


def test_morph_ignores_old_queries() -> None:
    """An entry that was looked at for long, but not lately, goes."""
    long_ago = [[0.97, 0.01, 0.01, 0.01, 0.0, 0.0]] * 2
    lately = [[0.01, 0.6, 0.2, 0.1, 0.09, 0.0], [0.01, 0.5, 0.2, 0.1, 0.1, 0.09]]
    observation = attended([long_ago + lately])
    scores = Morph(window=2).score(observation)
    assert int(scores.argmin()) == 0 and float(scores[0]) < 0.02


def test_scope_uses_separate_prefill_and_decode_scorers() -> None:
    policy = Policy.parse("scope")
    assert isinstance(policy.scorer, SnapKV) and policy.scorer.window == 8
    planner = Policy.parse(str(policy).replace("window=8", "window=1")).planner
    row = [0.0, 0.5, 0.1, 0.2, 0.15, 0.05]
    reading = attended([[row]])
    assert planner.score(reading).tolist()[:2] == pytest.approx([0.5, 0.5], abs=1e-5)  # smoothed
    generating = replace(reading, phase=Phase.DECODE)
    assert planner.score(generating).tolist() == pytest.approx(row, abs=1e-5)


def test_scope_decode_budget_hand_values() -> None:
    """8192 tokens are expected; 128 of 1024 entries are for the latest: 8064 // 896."""
    split = Split(reading=2 / 3, strategy=Strategy.ADAPTIVE, recent=128, expected=8192)
    filled = split.with_budget(3072)
    assert filled.every == 9 and filled.recent_tokens(3072) == 128
    rooms = [filled.quota(2048, 3072, step) - 2048 for step in (0, 8, 9, 18, 8063, 8064)]
    assert rooms == [128, 128, 129, 130, 1023, 1024]
    policy = Policy.parse("snapkv() > uniform() > split(reading=0.5, expected=900, recent=0.1)")
    assert isinstance(filled := policy.with_sizes(200, None).timing, Split)
    assert filled.every == (900 - 10) // 90


@pytest.mark.parametrize(
    "sentence, message",
    [
        ("last_quary()", "last_query"),
        ("last_query() > uniform()", "uniform has no place"),
        ("keydiff() > sum()", "uses no attention"),
        ("last_query() > group_mean() > sum()", "sum has no place"),
        ("last_query(", "does not parse"),
    ],
)
def test_decode_scorer_is_validated_at_parsing(sentence, message) -> None:
    with pytest.raises(LarderError, match=re.escape(message)):
        Policy.parse(f'snapkv() > split(scorer="{sentence}")')


def test_prompt_scorers_are_allowed_for_prefill_only() -> None:
    sentence = 'whole() > reconstruct() > uniform() > split(scorer="last_query()")'
    assert str(Policy.parse(sentence)) == str(Policy.parse(str(Policy.parse(sentence))))
    with pytest.raises(SpellingError, match="reconstruct.* judges by prompts"):
        Policy.parse("whole() > reconstruct() > uniform() > split()")
    with pytest.raises(SpellingError, match="judges by prompts"):
        Policy.parse('whole() > snapkv() > uniform() > split(scorer="reconstruct()")')


def test_below_uniform_attention_counts_as_unimportant() -> None:
    observation = attended([[[0.4, 0.05, 0.05, 0.5]]])
    column = observation.entries.with_columns({"unimportant": torch.tensor([8.0, 0.0, 4.0, 0.0])})
    [counts] = PersistenceTally().update(replace(observation, entries=column)).values()
    fading = 1 - 1 / 400
    assert counts.tolist() == pytest.approx([8 * fading, 1.0, 4 * fading + 1, 0.0])


@pytest.mark.parametrize("size", [2, 200])
def test_capkv_solves_for_two_query_heads_of_any_size(size: int) -> None:
    """Values along axes of their own have a capacity of 2 each; sizes above 128 on two threads."""
    layer = LayerSpec(0, 2, 1, size, 1.0, radians=(0.0,) * (size // 2))
    axes = torch.eye(size)[:2]
    entries = Entries(axes[:1].expand(2, -1), axes, torch.arange(2).int(), (0,), (2,))
    asked = axes[0].expand(2, 1, -1)
    seen = Observation(layer, entries, asked, torch.tensor([1]), 2, (0, 2), keys=asked[:1])
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        scores = CapKV(future=1, sinks=0).score(seen).tolist()
    finally:
        torch.set_num_threads(threads)
    assert scores == pytest.approx([1 / 2, 1 / 2], abs=1e-4)


@pytest.mark.parametrize("scale", [1e3, 1e6, 1e9, 1e12, 1e18])
@pytest.mark.parametrize("count", [1, 2])
def test_capkv_solves_for_values_beside_which_the_identity_is_lost(scale, count) -> None:
    """Orthogonal values of any large norm have all of their leverage."""
    layer, source = LayerSpec(0, 1, 1, 8, 1.0, radians=(0.0,) * 4), torch.Generator()
    values = scale * torch.linalg.qr(torch.randn(8, 8, generator=source.manual_seed(3)))[0][:count]
    keys = torch.eye(8)[:1].expand(count, -1)
    entries = Entries(keys, values, torch.arange(count).int(), (0,), (count,))
    newest = torch.tensor([count - 1])
    seen = Observation(
        layer, entries, keys[None, :1], newest, count, (0, count), keys=keys[None, :1]
    )
    scores = CapKV(future=1, sinks=0).score(seen).tolist()
    assert scores == pytest.approx([1.0] * count, abs=1e-4)


def stored(keys: list[list[float]], values: list[list[float]]) -> Observation:
    """One head with these entries, of which the newest asks with the query (1, 0)."""
    positions, count = torch.arange(len(keys)), len(keys)
    layer = LayerSpec(0, 1, 1, 2, 1.0, radians=(0.0,))
    entries = Entries(torch.tensor(keys), torch.tensor(values), positions.int(), (0,), (count,))
    asked = torch.tensor([[[1.0, 0.0]]])
    return Observation(layer, entries, asked, positions[-1:], count, (0, count), keys=asked)


def test_leverages_of_keys_and_values_hand_values() -> None:
    seen = stored([[1.0, 0.0], [1.0, 1.0], [2.0, 0.0]], [[1.0, 1.0], [1.0, 0.0], [0.0, 3.0]])
    scores = {by: CurDKV(window=2, sinks=0, by=by).score(seen) for by in Leverages}
    assert scores[Leverages.KEYS].tolist() == pytest.approx([1 / 6, 1 / 3, 1 / 2])
    assert scores[Leverages.VALUES].tolist() == pytest.approx([1 / 3, 1 / 6, 1 / 2])
    assert scores[Leverages.MEAN].tolist() == pytest.approx([1 / 4, 1 / 4, 1 / 2])
    assert scores[Leverages.PRODUCT].tolist() == pytest.approx([2 / 13, 2 / 13, 9 / 13])


def test_capkv_scores_repeated_values_lower() -> None:
    """Three keys alike: A is 1 + 2 along the value held twice, 1 + 1 along the other."""
    seen = stored([[1.0, 0.0]] * 3, [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    scores = CapKV(future=1, sinks=0).score(seen).tolist()
    assert scores == pytest.approx([1 / 3, 1 / 3, 1 / 2], abs=1e-4)
    away = stored([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]], [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    relevance = math.exp(-2 * 5)
    assert CapKV(future=1, sinks=0).score(away).tolist()[2] == pytest.approx(relevance, rel=0.05)
    assert CapKV(future=1, sinks=0, tau=0.0).score(away).tolist() == pytest.approx(scores, abs=1e-4)
