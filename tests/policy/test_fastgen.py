"""FastGen's kinds and recovery, and SimLayerKV's lazy layers, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from builders import a_layer, a_view
from larder.core import BadParameter, LayerScores
from larder.policy import Fastgen, LazyLayers, Recovery, TokenKindTally
from references import fastgen as fastgen_loop
from references import recovery as loop
from references.token_kind import kind


def judged(
    scores: list[float], shares: list[float], protected: tuple[int, ...] = ()
) -> LayerScores:
    marks = torch.tensor([s in protected for s in range(len(scores))])
    return LayerScores(torch.tensor(scores), marks, (len(scores),), tuple(shares))


# One entry of each kind, and two of the last.
SCORES = [4.1, 3.1, 2.1, 1.1, 0.2, 0.1]


def kept(heads: list[LayerScores], tokens: int) -> list[list[int]]:
    ready, quotas = dict(enumerate(heads)), dict.fromkeys(range(len(heads)), tokens)
    plans = Recovery().choose(ready, quotas)
    own = {
        i: [list(zip(h.scores.tolist(), h.protected.tolist(), strict=True))]
        for i, h in ready.items()
    }
    measures = {i: h.measure for i, h in ready.items()}
    expected = loop.choose(None, own, quotas, measures)
    assert {i: [plan.kept.tolist()] for i, plan in plans.items()} == expected
    return [plans[i].kept.tolist() for i in ready]


def test_head_recovered_by_special_tokens_leaves_budget_to_others() -> None:
    easy = judged(SCORES, [0.96, 0.97, 0.98, 0.99, 1.0])
    hard = judged(SCORES, [0.1, 0.2, 0.3, 0.95, 1.0])
    assert kept([easy, hard], 3) == [[0, 1], [0, 1, 2, 3]]
    assert kept([hard, hard], 6) == [[*range(6)]] * 2  # everything fits: threshold 1
    assert kept([easy, easy], 1) == [[0], [0]]


def test_remaining_budget_goes_to_the_best_entries() -> None:
    easy = judged(SCORES, [0.96, 0.97, 0.98, 0.99, 1.0], protected=(5,))
    hard = judged(SCORES, [0.1, 0.2, 0.3, 0.95, 1.0])
    assert kept([easy, hard], 3) == [[0, 5], [0, 1, 2, 3]]
    assert kept([easy, hard], 1) == [[0, 5], []]  # not even the first kind fits


def test_recovery_is_that_of_the_worst_query_head() -> None:
    observation = a_view(a_layer(1, 2), [range(8)], 3)
    scores, protected = torch.tensor([4.0, 3, 2, 1, 0, 0, 0, 0]), torch.zeros(8).bool()
    protected[7] = True
    shares = Recovery(window=1).inspect(observation, scores, protected)
    weights = torch.softmax(
        observation.queries[:, -1] @ observation.entries.head_keys(0).T * observation.layer.scaling,
        1,
    )
    for number, count in enumerate((1, 2, 3, 4)):
        own = weights[:, [*range(count), 7]].sum(1).min()
        assert shares[number] == pytest.approx(float(own), rel=1e-5)
    assert shares[4] == 1.0


def test_token_kinds_are_read_from_the_vocabulary() -> None:
    observation = a_view(a_layer(2, 1), [range(5), [0, 2, 3, 4]], 3)
    columns = {
        **observation.entries.columns,
        "token_kind": torch.full((len(observation.entries.keys),), 9.0),
    }
    special, signs = {7, 5}, {5, 6}
    observation = replace(
        observation,
        entries=observation.entries.with_columns(columns),
        ids=(5, 6, 3),
        lexicon={"special_tokens": frozenset(special), "punctuation": frozenset(signs)},
    )
    column = TokenKindTally().update(observation)["token_kind"]
    kinds = [kind(token, special, signs) for token in observation.ids]
    assert kinds == [3.0, 2.0, 1.0]
    for head in range(2):
        assert column[observation.entries.rows(head)].tolist() == [9.0] * (2 - head) + kinds


def test_scores_of_token_kinds_equal_their_reference() -> None:
    observation = a_view(a_layer(2, 2), [range(9), range(2, 9)], 3)
    kinds = torch.arange(len(observation.entries.keys)).float() % 4
    observation = replace(
        observation, entries=observation.entries.with_columns({"token_kind": kinds})
    )
    part = Fastgen(attended=0.4, latest=0.5, window=2)
    expected = [score for head in fastgen_loop.scores(part, observation) for score in head]
    found = part.score(observation).tolist()
    assert found == pytest.approx(expected, abs=1e-5)
    assert {int(score) for score in found} == {0, 1, 2, 3, 4}


def layer(laziness: float, count: int = 10) -> LayerScores:
    protected = torch.zeros(2 * count, dtype=torch.bool)
    protected[[0, count - 1, count, 2 * count - 1]] = True
    return LayerScores(torch.rand(2 * count), protected, (count, count), (laziness,))


def lengths(
    layers: list[LayerScores], tokens: int, threshold: float = 1.0
) -> list[tuple[int, ...]]:
    part = LazyLayers(threshold=threshold)
    plans = part.choose(dict(enumerate(layers)), dict.fromkeys(range(len(layers)), tokens))
    return [plans[index].lengths for index in range(len(layers))]


def test_laziest_layers_keep_sinks_and_recent_only() -> None:
    layers = [layer(0.5), layer(0.9), layer(0.7)]
    assert lengths(layers, 10) == [(10, 10)] * 3
    assert lengths(layers, 8) == [(10, 10), (4, 4), (10, 10)]  # six entries a head must go
    assert lengths(layers, 6) == [(10, 10), (2, 2), (6, 6)]
    assert lengths(layers, 2) == [(2, 2)] * 3
    assert lengths(layers, 1) == [(2, 2), (0, 0), (1, 1)]
    assert lengths(layers, 8, threshold=0.6) == [(10, 10), (2, 2), (2, 2)]


def test_laziness_is_the_attention_to_sinks_and_recent() -> None:
    observation = a_view(a_layer(2, 2), [range(7), range(3, 7)], 3)
    protected = torch.tensor([True, *[False] * 5, True, *[False] * 3, True])
    rows = []
    for h in range(4):
        keys = observation.entries.head_keys(h // 2)
        weights = torch.softmax(keys @ observation.queries[h, -1] * observation.layer.scaling, 0)
        rows.append(weights[protected[:7] if h < 2 else protected[7:]].sum())
    found = LazyLayers().inspect(observation, torch.zeros(11), protected)
    assert found == (pytest.approx(float(torch.stack(rows).mean()), rel=1e-5),)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Fastgen(attended=1.5),
        lambda: Fastgen(latest=-0.1),
        lambda: Fastgen(window=0),
        lambda: Recovery(window=0),
        lambda: LazyLayers(last=0),
        lambda: LazyLayers(threshold=0.0),
    ],
)
def test_parameters_out_of_range_are_refused(wrong) -> None:
    with pytest.raises(BadParameter, match="must be"):
        wrong()
