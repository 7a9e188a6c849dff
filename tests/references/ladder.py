"""`ladder`: tokens in three lists, those climbed, those of the rung at hand, and those ahead."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from references.choosing_loop import Ranked

SMALL = {"span": 0.4}  # parameters for small layers

Layers = dict[int, list[list[Ranked]]]
Measures = dict[int, tuple[float, ...]]


def layer_tokens(
    part: object, tokens: int, layers: int, least: int, most: int, sigma: object
) -> list[float]:
    return [float(tokens)] * layers


def choose(
    part: Any, layers: Layers, quotas: dict[int, int], measures: Measures
) -> dict[int, list[list[int]]]:
    out = {}
    for position, index in enumerate(sorted(quotas)):
        if index in layers:
            keeping = slots_kept(part, position, len(quotas))
            out[index] = [one_head(head, quotas[index], *keeping) for head in layers[index]]
    return out


def one_head(head: list[Ranked], quota: int, slots: int, kept: list[int]) -> list[int]:
    shielded = [index for index, (_, shield) in enumerate(head) if shield]
    if len(shielded) > quota:
        return shielded[:quota]
    climb = LadderHead(slots, kept, ahead=[i for i, (_, shield) in enumerate(head) if not shield])
    for _ in range(len(head) - quota):
        climb.lose_one()
    return sorted([*shielded, *climb.held()])


def slots_kept(part: Any, layer: int, layers: int) -> tuple[int, list[int]]:
    """Number of slots of a rung, and those that a layer keeps."""
    span = min(wanted(part.span, layers), layers)
    step = span - min(wanted(part.overlap, layers), span - 1)
    slots = 1
    while span + (slots - 1) * step < layers:  # the last slot must reach the last layer
        slots += 1
    run = 0
    while run * step < span:
        run += 1
    run = min(run, slots)
    if part.variant.value == "code":
        first = layer % (slots - run + 1)
        return slots, list(range(first, first + run))
    # A token at slot j is kept by layers j * step to j * step + span.
    own = [j for j in range(slots) if j * step <= layer < j * step + span]
    first = min(own[0], slots - run)
    return slots, list(range(first, first + run))


def wanted(given: float, layers: int) -> int:
    if isinstance(given, int):
        return given
    return next(n for n in range(layers + 1) if n >= given * layers)


@dataclass
class LadderHead:
    """One head of one layer."""

    slots: int
    kept: list[int]
    climbed: list[int] = field(default_factory=list)
    rung: list[tuple[int, int]] = field(default_factory=list)  # slot and token
    ahead: list[int] = field(default_factory=list)

    def held(self) -> list[int]:
        return [*self.climbed, *(token for _, token in self.rung), *self.ahead]

    def lose_one(self) -> None:
        if not self.rung and len(self.ahead) < self.slots:
            self.ahead, self.climbed = [*self.climbed, *self.ahead], []
        if not self.rung:
            if len(self.ahead) < self.slots or len(self.kept) == self.slots:
                self.ahead = [*self.climbed, *self.ahead][1:]
                self.climbed = []
                return
            self.rung = list(enumerate(self.ahead[: self.slots]))
            self.ahead = self.ahead[self.slots :]
        goes = next(slot for slot, _ in self.rung if slot not in self.kept)
        self.rung = [(slot, token) for slot, token in self.rung if slot != goes]
        if all(slot in self.kept for slot, _ in self.rung):
            self.climbed += [token for _, token in self.rung]
            self.rung = []
