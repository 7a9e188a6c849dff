"""Static code tables of quantized transform components, by their deviation over the step.

A component with deviation s, quantized with step q, has symbols of nearly the same distribution
wherever s / q is the same, so tables exist per class of s / q, four classes an octave. Components
of SmolLM2's keys and values have tails between those of a normal and a Laplace distribution; the
tables integrate Student's t with `FREEDOM` degrees of freedom, which loses under .01 bits a
component against the better one of five distributions chosen for each.

Above a ratio of `COARSEST_CELLS` the lowest bits of a symbol are nearly uniform and are coded as
they are, so any step works. A symbol that is too rare for a table is written out behind an escape
code: nothing is ever clipped.

The slots of a table are dealt out by the alias method (A. J. Walker, "An Efficient Method for
Generating Discrete Random Variables with General Distributions" (1977),
https://doi.org/10.1145/355744.355749): each of 64 buckets of 64 slots holds at most two codes, the
first one below the bucket's divider. So a table is 64 dividers and two rows of numbers, which fit
in the registers of a processor, where a code by slot would take 16 KiB.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from jaxtyping import Float, Int, UInt8, UInt16
from numpy import ndarray

from larder.core.codec import Coder

PROBABILITY_BITS = 12
TOTAL = 1 << PROBABILITY_BITS
CLASSES_PER_OCTAVE = 4
FIRST_OCTAVE, LAST_OCTAVE = -8, 24  # of the ratio of the first and the last class
NUM_CLASSES = (LAST_OCTAVE - FIRST_OCTAVE) * CLASSES_PER_OCTAVE + 1
COARSEST_CELLS = 8.0
MIDDLE = 32  # index of symbol 0
ESCAPE = 64  # index of the escape code
NUM_CODES = 65
ESCAPED_BITS = 32  # of a symbol behind an escape code
FREEDOM = 10.0
BUCKETS = 64
BUCKET_SLOTS = TOTAL // BUCKETS
TIER_ROW = NUM_CLASSES  # row of the tables that codes tiers
TIER_COUNTS = (512, 1024, 1024, 1024, 512)  # frequency of each tier, from the finest on
RARE = 0.75 / TOTAL  # symbols below this probability are escaped
MOST_WIDTH = 8  # bits of a component of fixed width
EXCEPTION_BITS = 64.0  # of a component that its fixed width cannot hold: index and symbol


@dataclass(frozen=True)
class AliasTables:
    """Buckets of slots, of all classes and of tiers.

    Args:
        dividers: slots of each bucket that hold its first code.
        frequencies, shifts, codes: of the first (0) and second (1) code of a bucket; a slot plus
            the shift, modulo 2^16, is its rank among the slots of its code.
    """

    dividers: UInt16[ndarray, "R B"]
    frequencies: UInt16[ndarray, "R 2 B"]
    shifts: UInt16[ndarray, "R 2 B"]
    codes: UInt16[ndarray, "R 2 B"]


@dataclass(frozen=True)
class SymbolModel:
    """Tables of all classes, the first ones with a row for tiers behind them.

    Args:
        starts: cumulative frequencies, out of `TOTAL`; the last column is `TOTAL`.
        slots: code of each of the `TOTAL` slots.
        ranks: rank of each slot among those of its code.
        places: slots by code, then by rank.
        alias: what slots and ranks are made from.
        raw_bits: lowest bits of a symbol that are written as they are.
        costs: bits of each code, raw and escaped bits included; of codes without a slot, those of
            an escape.
        widths: bits of a component of fixed width.
    """

    starts: UInt16[ndarray, "R N1"]
    slots: UInt8[ndarray, "R M"]
    ranks: UInt16[ndarray, "R M"]
    places: UInt16[ndarray, "R M"]
    alias: AliasTables
    raw_bits: UInt8[ndarray, " C"]
    costs: Float[ndarray, "C N"]
    widths: UInt8[ndarray, " C"]


def classes_of(deviations: Float[ndarray, " W"], step: float) -> Int[ndarray, " W"]:
    """Class of each component for a step; tier t adds -`CLASSES_PER_OCTAVE` t, within bounds."""
    ratios = np.maximum(np.asarray(deviations, dtype=np.float64) / step, 2.0**FIRST_OCTAVE)
    classes = np.rint((np.log2(ratios) - FIRST_OCTAVE) * CLASSES_PER_OCTAVE)
    return np.minimum(classes, NUM_CLASSES - 1).astype(np.int32)


@cache
def symbol_model() -> SymbolModel:
    """The tables; they depend on nothing, and take some milliseconds."""
    counts = np.zeros((NUM_CLASSES + 1, NUM_CODES), np.int64)
    raw_bits = np.zeros(NUM_CLASSES, np.uint8)
    widths = np.zeros(NUM_CLASSES, np.uint8)
    costs = np.zeros((NUM_CLASSES, NUM_CODES), np.float32)
    for index in range(NUM_CLASSES):
        ratio = 2.0 ** (FIRST_OCTAVE + index / CLASSES_PER_OCTAVE)
        raw = max(0, int(np.ceil(np.log2(ratio / COARSEST_CELLS))))
        own = counts[index] = _frequencies(ratio, raw)
        raw_bits[index], widths[index] = raw, _width(ratio)
        escape = np.log2(TOTAL / own[ESCAPE]) + ESCAPED_BITS
        bits = np.log2(TOTAL / np.maximum(own, 1)) + raw
        costs[index] = np.where(own > 0, bits, escape)
        costs[index, ESCAPE] = escape
    counts[TIER_ROW, : len(TIER_COUNTS)] = TIER_COUNTS
    starts = np.zeros((NUM_CLASSES + 1, NUM_CODES + 1), np.uint16)
    starts[:, 1:] = counts.cumsum(1)
    alias = _alias_tables(counts)
    slots, ranks = _codes_of_slots(alias)
    first = np.take_along_axis(starts.astype(np.int64), slots.astype(np.int64), 1)
    places = np.argsort(first + ranks, 1).astype(np.uint16)
    return SymbolModel(starts, slots, ranks, places, alias, raw_bits, costs, widths)


def mean_bits(coder: Coder) -> Float[ndarray, " C"]:
    """Expected bits of a component of each class."""
    if coder is Coder.WIDTHS:
        ratios = 2.0 ** (FIRST_OCTAVE + np.arange(NUM_CLASSES) / CLASSES_PER_OCTAVE)
        return np.array([_width_bits(ratio).min() for ratio in ratios])
    model = symbol_model()
    shares = np.diff(model.starts[:NUM_CLASSES].astype(np.float64)) / TOTAL
    return (shares * model.costs).sum(1)


def _alias_tables(counts: Int[ndarray, "C N"]) -> AliasTables:
    """Buckets of the slots of each row."""
    dealt = [_deal(count.tolist()) for count in counts]
    dividers = np.array([[bucket[0][0] for bucket in row] for row in dealt], np.uint16)
    parts = [
        np.array([[[bucket[k][side] for bucket in row] for side in range(2)] for row in dealt])
        for k in (1, 2, 3)
    ]
    return AliasTables(dividers, *(part.astype(np.uint16) for part in parts))


Pair = tuple[int, int]


def _deal(counts: list[int]) -> list[tuple[Pair, Pair, Pair, Pair]]:
    """Table of the buckets: slots, frequencies, shifts and codes of its first and second code."""
    held = [code for code, count in enumerate(counts) if count]
    left, dealt = {code: counts[code] for code in held}, dict.fromkeys(held, 0)
    small = [code for code in held if left[code] < BUCKET_SLOTS]
    large = [code for code in held if left[code] >= BUCKET_SLOTS]
    buckets = list[tuple[Pair, Pair, Pair, Pair]]()
    for slot in range(0, TOTAL, BUCKET_SLOTS):
        one = small.pop() if small else large[-1]
        other = large[-1] if large else one
        divider = min(left[one], BUCKET_SLOTS)
        first = dealt[one] - slot
        dealt[one], left[one] = dealt[one] + divider, left[one] - divider
        second, rest = dealt[other] - slot - divider, BUCKET_SLOTS - divider
        dealt[other], left[other] = dealt[other] + rest, left[other] - rest
        shifts = first & 0xFFFF, second & 0xFFFF
        buckets.append(((divider, rest), (counts[one], counts[other]), shifts, (one, other)))
        if large and left[large[-1]] < BUCKET_SLOTS:
            last = large.pop()
            small += [last] if left[last] else []
    return buckets


def _codes_of_slots(alias: AliasTables) -> tuple[UInt8[ndarray, "C M"], UInt16[ndarray, "C M"]]:
    """Code and rank of each slot."""
    slots = np.arange(TOTAL)
    buckets, within = slots // BUCKET_SLOTS, slots % BUCKET_SLOTS
    is_second = within >= alias.dividers[:, buckets]
    codes, shifts = (
        np.where(is_second, part[:, 1, buckets], part[:, 0, buckets])
        for part in (alias.codes, alias.shifts)
    )
    return codes.astype(np.uint8), (slots + shifts).astype(np.uint16)


def _frequencies(ratio: float, raw: int) -> Int[ndarray, " N"]:
    """Frequency of each code, out of `TOTAL`; 0 for codes that are escaped."""
    edges = ((np.arange(ESCAPE + 1) - MIDDLE) * 2.0**raw - 0.5) / ratio
    chances = np.diff(_cumulative(edges))
    counts = np.where(chances < RARE, 0, np.maximum(np.rint(chances * (TOTAL - 1)), 1))
    counts = np.append(counts, 1).astype(np.int64)
    counts[ESCAPE] = max(1, round(TOTAL * float(chances[chances < RARE].sum())))
    counts[np.argmax(counts[:ESCAPE])] += TOTAL - counts.sum()
    return counts


def _width(ratio: float) -> int:
    """Fixed width with the fewest expected bits."""
    return int(np.argmin(_width_bits(ratio)))


def _width_bits(ratio: float) -> Float[ndarray, " W"]:
    """Expected bits of a component by its fixed width, exceptions included."""
    widths = np.arange(MOST_WIDTH + 1)
    reach = np.where(widths == 0, 0, 2.0 ** (widths - 1) - 1)
    beyond = 2 * (1 - _cumulative((reach + 0.5) / ratio))
    return widths + beyond * EXCEPTION_BITS


@cache
def _distribution() -> tuple[Float[ndarray, " G"], Float[ndarray, " G"]]:
    """Grid, and cumulative Student's t of unit variance."""
    grid = np.linspace(-80, 80, 64001)
    density = (1 + grid**2 / (FREEDOM - 2)) ** (-(FREEDOM + 1) / 2)
    sums = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return grid, sums / sums[-1]


def _cumulative(numbers: Float[ndarray, " N"]) -> Float[ndarray, " N"]:
    return np.interp(numbers, *_distribution(), left=0.0, right=1.0)
