"""Static code tables of quantized transform components, by their deviation over the step.

A component with deviation s, quantized with step q, has symbols of nearly the same distribution
wherever s / q is the same, so tables exist per class of s / q, four classes an octave. Components
of SmolLM2's keys and values have tails between those of a normal and a Laplace distribution; the
tables integrate Student's t with `FREEDOM` degrees of freedom, which loses under .01 bits a
component against the better one of five distributions chosen for each.

Above a ratio of `COARSEST_CELLS` the lowest bits of a symbol are nearly uniform and are coded as
they are, so any step works. A symbol that is too rare for a table is written out behind an escape
code: nothing is ever clipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from jaxtyping import Float, Int, UInt8, UInt16
from numpy import ndarray

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
RARE = 0.75 / TOTAL  # symbols below this probability are escaped
MOST_WIDTH = 8  # bits of a component of fixed width
EXCEPTION_BITS = 64.0  # of a component that its fixed width cannot hold: index and symbol


@dataclass(frozen=True)
class SymbolModel:
    """Tables of all classes.

    Args:
        starts: cumulative frequencies, out of `TOTAL`; the last column is `TOTAL`.
        slots: code of each of the `TOTAL` slots.
        raw_bits: lowest bits of a symbol that are written as they are.
        costs: bits of each code, raw and escaped bits included; of codes without a slot, those of
            an escape.
        widths: bits of a component of fixed width.
    """

    starts: UInt16[ndarray, "C N1"]
    slots: UInt8[ndarray, "C M"]
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
    starts = np.zeros((NUM_CLASSES, NUM_CODES + 1), np.uint16)
    slots = np.zeros((NUM_CLASSES, TOTAL), np.uint8)
    raw_bits = np.zeros(NUM_CLASSES, np.uint8)
    widths = np.zeros(NUM_CLASSES, np.uint8)
    costs = np.zeros((NUM_CLASSES, NUM_CODES), np.float32)
    for index in range(NUM_CLASSES):
        ratio = 2.0 ** (FIRST_OCTAVE + index / CLASSES_PER_OCTAVE)
        raw = max(0, int(np.ceil(np.log2(ratio / COARSEST_CELLS))))
        counts = _frequencies(ratio, raw)
        starts[index, 1:] = counts.cumsum()
        slots[index] = np.repeat(np.arange(NUM_CODES), counts)
        raw_bits[index], widths[index] = raw, _width(ratio)
        escape = np.log2(TOTAL / counts[ESCAPE]) + ESCAPED_BITS
        bits = np.log2(TOTAL / np.maximum(counts, 1)) + raw
        costs[index] = np.where(counts > 0, bits, escape)
        costs[index, ESCAPE] = escape
    return SymbolModel(starts, slots, raw_bits, costs, widths)


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
    """Fixed width with the fewest expected bits, exceptions included."""
    widths = np.arange(MOST_WIDTH + 1)
    reach = np.where(widths == 0, 0, 2.0 ** (widths - 1) - 1)
    beyond = 2 * (1 - _cumulative((reach + 0.5) / ratio))
    return int(np.argmin(widths + beyond * EXCEPTION_BITS))


@cache
def _distribution() -> tuple[Float[ndarray, " G"], Float[ndarray, " G"]]:
    """Grid, and cumulative Student's t of unit variance."""
    grid = np.linspace(-80, 80, 64001)
    density = (1 + grid**2 / (FREEDOM - 2)) ** (-(FREEDOM + 1) / 2)
    sums = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return grid, sums / sums[-1]


def _cumulative(numbers: Float[ndarray, " N"]) -> Float[ndarray, " N"]:
    return np.interp(numbers, *_distribution(), left=0.0, right=1.0)
