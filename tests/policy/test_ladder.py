"""The ladder over a long text: what each layer keeps, and how the past thins out."""

from __future__ import annotations

from random import Random

import pytest
import torch

from larder.core import BadParameter, LayerScores, Variant
from larder.policy import Ladder
from references.ladder import LadderHead, slots_kept

SINKS, RECENT = 2, 3


class Layer:
    """The tokens that one head of one layer holds, and its scalars, as a cache keeps them."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.scalars: dict[str, torch.Tensor] = {}

    def scored(self, length: int) -> LayerScores:
        protected = [t < SINKS or t >= length - RECENT for t in self.tokens]
        return LayerScores(
            torch.zeros(len(protected)),
            torch.tensor(protected),
            (len(protected),),
            scalars=self.scalars,
        )


def streamed(part: Ladder, layers: int, quota: int, steps: list[int]) -> list[Layer]:
    """Tokens come in, and every layer is cut back to the quota."""
    held = [Layer() for _ in range(layers)]
    length = 0
    for count in steps:
        for layer in held:
            layer.tokens += range(length, length + count)
        length += count
        ready = {i: layer.scored(length) for i, layer in enumerate(held)}
        for index, plan in part.choose(ready, dict.fromkeys(range(layers), quota)).items():
            held[index].tokens = [held[index].tokens[i] for i in plan.kept.tolist()]
            held[index].scalars = dict(plan.scalars)
    return held


def climbed(part: Ladder, layer: int, layers: int, quota: int, steps: list[int]) -> list[int]:
    climb = LadderHead(*slots_kept(part, layer, layers))
    length = 0
    for count in steps:
        for token in range(length, length + count):
            if token - RECENT >= SINKS:
                climb.ahead.append(token - RECENT)
        length += count
        while SINKS + len(climb.held()) + RECENT > quota and length > quota:
            climb.lose_one()
    return [*range(SINKS), *climb.held(), *range(length - RECENT, length)]


@pytest.mark.parametrize("variant", [Variant.LARDER, Variant.CODE])
@pytest.mark.parametrize("span, overlap", [(3, 0), (3, 2), (2, 1), (0.5, 0), (0.3, 0.2), (1, 0)])
def test_many_rounds_equal_the_reference(variant, span, overlap) -> None:
    source = Random(3)
    steps = [20, *(source.randint(1, 4) for _ in range(50))]
    part = Ladder(span=span, overlap=overlap, variant=variant)
    for index, layer in enumerate(streamed(part, 6, 24, steps)):
        assert layer.tokens == climbed(part, index, 6, 24, steps)
        assert len(layer.tokens) == 24


def test_token_is_kept_by_successive_layers() -> None:
    held = streamed(Ladder(span=2, overlap=0), 6, 17, [29])  # 24 slots, 12 are to stay
    keeping = {t: [i for i, layer in enumerate(held) if t in layer.tokens] for t in range(2, 20)}
    assert [keeping[t] for t in range(2, 8)] == [[0, 1], [2, 3], [4, 5]] * 2
    assert all(layers == [0, 1, 2, 3, 4, 5] for t, layers in keeping.items() if t >= 20)


def test_code_variant_alternates_kept_tokens_between_layers() -> None:
    held = streamed(Ladder(span=3, overlap=0, variant=Variant.CODE), 6, 17, [29])
    parities = [{t % 2 for t in layer.tokens if 2 <= t < 20} for layer in held]
    assert parities[0] != parities[1] and parities[0] == parities[2] == parities[4]


def test_union_of_layers_reaches_further_than_a_window() -> None:
    held = streamed(Ladder(span=2), 6, 24, [20, *[3] * 50])
    oldest = [min(t for t in layer.tokens if t >= SINKS) for layer in held]
    assert max(oldest) < 170 - 24 * 2
    union = {t for layer in held for t in layer.tokens}
    assert len(union) > 1.5 * 24
    gaps = [
        b - a for a, b in zip(held[0].tokens[SINKS:], held[0].tokens[SINKS + 1 :], strict=False)
    ]
    assert sum(gaps[:6]) > sum(gaps[-6:])  # sparser with age


def test_oldest_entries_are_evicted_when_no_rung_fits() -> None:
    for part in (Ladder(span=6), Ladder(span=1)):
        (layer, *_) = streamed(part, 6, SINKS + RECENT + 2, [40, 1, 1])
        assert layer.tokens[:SINKS] == [0, 1]
        assert layer.tokens[SINKS:] == [37, 38, 39, 40, 41]


@pytest.mark.parametrize(
    "given, message",
    [
        ({"span": 0}, "ladder.span must be layers"),
        ({"span": 1.5}, "ladder.span must be layers"),
        ({"overlap": -1}, "ladder.overlap must be layers"),
        ({"overlap": 1.0}, "ladder.overlap must be layers"),
        ({"span": 3, "overlap": 3}, "ladder.overlap must be below span=3, got 3"),
    ],
)
def test_invalid_parameters_are_refused(given, message) -> None:
    with pytest.raises(BadParameter, match=message):
        Ladder(**given)
