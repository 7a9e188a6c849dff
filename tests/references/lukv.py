"""`lukv`: entries go, a small part at a time, to the head whose curve rises most from there on."""

from __future__ import annotations

import math
from typing import Any

from references.choosing_loop import best
from references.sensitivity import shares
from references.uniform import Layers, Measures

POINTS = 16  # of a curve


def choose(
    part: Any, layers: Layers, quotas: dict[int, int], measures: Measures
) -> dict[int, list[list[int]]]:
    return {
        index: in_layer(heads, quotas[index], measures[index]) for index, heads in layers.items()
    }


def in_layer(heads: Any, quota: int, measure: tuple[float, ...]) -> list[list[int]]:
    count = min(quota * len(heads), sum(len(head) for head in heads))
    shields = [sum(shield for _, shield in head) for head in heads]
    left = count - sum(shields)
    if left <= 0:
        return of_all(heads, count)
    free = [len(head) - shield for head, shield in zip(heads, shields, strict=True)]
    deserved = [float(own) for own in free]
    if len(measure) % len(heads) == 0:
        each = len(measure) // len(heads)
        curves = [measure[h * each : (h + 1) * each] for h in range(len(heads))]
        given = greedy(curves, len(heads) * left / sum(free))
        deserved = [share * own for share, own in zip(given, free, strict=True)]
    parts = whole(shares(left, deserved, 0, free), left, free)
    return [
        best(head, shield + own) for head, shield, own in zip(heads, shields, parts, strict=True)
    ]


def of_all(heads: Any, count: int) -> list[list[int]]:
    flat = [(h, s) for h, head in enumerate(heads) for s in range(len(head))]
    chosen = best([heads[h][s] for h, s in flat], count)
    return [[flat[i][1] for i in chosen if flat[i][0] == h] for h in range(len(heads))]


def whole(parts: list[float], total: int, most: list[int]) -> list[int]:
    """Whole numbers: the remainder goes to the largest fractions, of equal ones to the earlier."""
    rounded = [int(own) for own in parts]
    while sum(rounded) < total:
        rests = [own - down for own, down in zip(parts, rounded, strict=True)]
        open_parts = [i for i in range(len(parts)) if rounded[i] < most[i]]
        rounded[max(open_parts, key=lambda i: (round(rests[i], 9), -i))] += 1
    return rounded


def layer_tokens(
    part: Any, tokens: int, layers: int, least: int, most: int, calibration: Any
) -> list[float]:
    if tokens >= most:
        return [float(tokens)] * layers
    numbers = calibration["utility"]
    curves = [numbers[at : at + POINTS] for at in range(0, len(numbers), POINTS)]
    each = len(curves) // layers
    given = greedy(curves, len(curves) * (tokens - least) / (most - least))
    deserved = [sum(given[layer * each : (layer + 1) * each]) for layer in range(layers)]
    total = layers * (tokens - least)
    return [least + own for own in shares(total, deserved, 0, most - least)]


def greedy(curves: Any, total: float) -> list[float]:
    """Each time the heads that gain most per entry up to a later point go there, or alike far."""
    given, left = [0.0] * len(curves), total
    while left > 1e-12:
        pairs = zip(curves, given, strict=True)
        gains = [best_step(curve, round(own * len(curve))) for curve, own in pairs]
        top = max(gain for gain, _ in gains)
        if top == -math.inf:
            break
        going = [head for head, (gain, _) in enumerate(gains) if top - gain <= 1e-9]
        part = min(1.0, left / sum(gains[head][1] for head in going))
        for head in going:
            given[head] += part * gains[head][1]
            left -= part * gains[head][1]
    return given


def best_step(curve: Any, now: int) -> tuple[float, float]:
    """Gain per share, and width, of the best step from a point of a curve."""
    steps, best = [0.0, *curve], (-math.inf, 0.0)
    for later in range(now + 1, len(steps)):
        width = (later - now) / len(curve)
        gain = (steps[later] - steps[now]) / width
        if gain > best[0] + 1e-9:
            best = gain, width
    return best
