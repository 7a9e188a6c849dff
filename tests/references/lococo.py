"""`lococo`: each slot becomes a mix of itself and of what a convolution picks, number by number."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from larder.core import Entries, LayerScores
from references.counted import protected_of, scores_of
from references.outcome import Outcome, key_of, untouched, value_of

CHANNELS, TAPS = 3, 3


def learned_tensors(head_dim: int, gamma: float = 0.4) -> dict[str, Tensor]:
    """Tensors that a layer is given."""
    source = torch.Generator().manual_seed(3)
    return {
        "lococo.kernel": torch.randn(CHANNELS, 2 * head_dim, TAPS, generator=source) / 4,
        "lococo.bias": torch.randn(CHANNELS, generator=source),
        "lococo.gamma": torch.tensor(gamma),
    }


def settle(part: Any, entries: Entries, scored: LayerScores, kept: list[list[int]]) -> Outcome:
    del part
    outcome = untouched(entries, kept)
    if scored.phase.value == "generating":
        return outcome
    for head, own in enumerate(kept):
        gone = [s for s in range(entries.lengths[head]) if s not in own]
        slots = slots_of(entries, scored, head, own)
        if not gone or not slots:
            continue
        others = sorted([*gone, *slots])
        held = {entry.kept: entry for entry in outcome.heads[head]}
        for channel, slot in enumerate(slots):
            weights = mixed(entries, scored, head, others, channel, slot)
            keys = [key_of(entries, head, s) for s in others]
            values = [value_of(entries, head, s) for s in others]
            held[slot].key = weighted(weights, keys)
            held[slot].value = weighted(weights, values)
    return outcome


def slots_of(entries: Entries, scored: LayerScores, head: int, kept: list[int]) -> list[int]:
    spared, scores = protected_of(entries, scored, head), scores_of(entries, scored, head)
    free = sorted((j for j in kept if not spared[j]), key=lambda j: (scores[j], j))
    return sorted(free[: min(CHANNELS, len(kept) // 2)])


def mixed(
    entries: Entries, scored: LayerScores, head: int, others: list[int], channel: int, slot: int
) -> list[float]:
    """Weight of each of the others in a slot."""
    logits = [logit(entries, scored, head, others, index, channel) for index in range(len(others))]
    peak = max(logits)
    raised = [math.exp(x - peak) for x in logits]
    gamma = float(scored.learned["lococo.gamma"])
    return [
        gamma * x / sum(raised) + (1 - gamma) * (s == slot)
        for s, x in zip(others, raised, strict=True)
    ]


def logit(
    entries: Entries, scored: LayerScores, head: int, others: list[int], index: int, channel: int
) -> float:
    kernel = scored.learned["lococo.kernel"].tolist()[channel]
    total = float(scored.learned["lococo.bias"][channel])
    for tap in range(TAPS):
        at = index + tap - TAPS // 2
        if 0 <= at < len(others):
            given = key_of(entries, head, others[at]) + value_of(entries, head, others[at])
            total += sum(kernel[e][tap] * x for e, x in enumerate(given))
    return total


def weighted(weights: list[float], rows: list[list[float]]) -> list[float]:
    return [
        sum(w * row[d] for w, row in zip(weights, rows, strict=True)) for d in range(len(rows[0]))
    ]
