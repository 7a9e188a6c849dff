"""`novelty`: what the column says, times decay for every whole turn since."""

from __future__ import annotations

from typing import Any

from larder.core import Observation
from references.attention_loop import heads_of, positions_of

SMALL = {"decay": 0.8, "turn": 3}  # parameters for small layers


def scores(part: Any, observation: Observation) -> list[list[float]]:
    out: list[list[float]] = []
    for head in heads_of(observation):
        start, row = observation.entries.starts[head], []
        for index, position in enumerate(positions_of(observation.entries, head)):
            value, left = (
                float(observation.entries.columns["surprise"][start + index]),
                observation.length - 1,
            )
            while left - position >= part.turn:
                value, left = value * part.decay, left - part.turn
            row.append(value)
        out.append(row)
    return out


def surprises(likelihoods: list[list[float]], ids: list[int], before: list[float]) -> list[float]:
    """-log p of each token, given log p of all tokens behind each and behind what came before.

    Args:
        likelihoods: log p [Q][V], of what follows each token.
        before: log p [V] of the first token; empty where nothing is known of it.
    """
    rows = [before, *likelihoods[:-1]]
    known = [-row[token] for row, token in zip(rows, ids, strict=True) if row]
    return known if before else [max(known, default=0.0), *known]
