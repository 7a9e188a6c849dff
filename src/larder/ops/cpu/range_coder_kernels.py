"""Numba kernels of the coders of quantized transform components, compiled at their first call.

Range coder: asymmetric numeral systems with 32-bit states that are renormalized by 16 bits, and
static tables of 12 bits (`symbol_model`).

    state < 2^32      encode: emit 16 bits while state >= frequency << 20
    state >= 2^16     decode: take 16 bits while state < 2^16

A block has `LANES` states, or one per entry where it has fewer. Its words are those of the states,
then those that decoding takes: of the tiers of its entries, then of each component of all entries
in order of tiers. `LANES` entries are a group, one per lane; its lanes take words in turn, for
their codes first, for raw bits afterwards. So the lanes of a group are decoded at once, mostly with
one table for all: C does so where it was compiled (c/transform_attention.c), with the same words.
Symbols are encoded last to first.
"""

from __future__ import annotations

import numpy as np

from larder.ops.cpu.decode_attention_kernels import njit_exact

BITS, TOTAL = 12, 4096
LOWEST = 1 << 16
MIDDLE, ESCAPE = 32, 64
LAST_TIER = 2
LARGEST = 2.0**31
LANES = 32  # states of a block
ESCAPED_BITS = 32  # raw bits behind an escape
CHUNK_BITS = 8  # raw bits that are coded at once
MOST_CHUNKS = ESCAPED_BITS // CHUNK_BITS


@njit_exact
def class_at(base, tier, num_classes):
    """Class of a component in a tier, whose step is 2^tier times the common one."""
    return min(max(base - 4 * tier, 0), num_classes - 1)


@njit_exact
def count_bits(numbers, scales, tiers, bases, costs, raw_bits):
    """Bits that the range coder spends on some entries, tiers included.

    Args:
        scales: one over the step of each tier, from the finest on.
    """
    total = 0.0
    rows, width = numbers.shape
    for n in range(rows):
        tier = np.int64(tiers[n])
        total += 3.0 if abs(tier) == LAST_TIER else 2.0
        scale = scales[tier + LAST_TIER]
        for c in range(width):
            kind = class_at(bases[c], tier, costs.shape[0])
            number = np.rint(numbers[n, c] * scale)
            code = ESCAPE
            if abs(number) < LARGEST:
                code = (np.int64(number) >> np.int64(raw_bits[kind])) + MIDDLE
                if code < 0 or code >= ESCAPE:
                    code = ESCAPE
            total += costs[kind, code]
    return total


@njit_exact
def push(state, words, count, places, start, size):
    """State and number of emitted words after one code."""
    if state >= size << (32 - BITS):
        words[count] = state & 0xFFFF
        count += 1
        state >>= 16
    return ((state // size) << BITS) + np.int64(places[start + state % size]), count


@njit_exact
def push_bits(state, words, count, part, bits):
    """State and number of emitted words after a chunk of raw bits."""
    if state >= 1 << (32 - bits):
        words[count] = state & 0xFFFF
        count += 1
        state >>= 16
    rest = BITS - bits
    return ((state >> rest) << BITS) + (part << rest) + (state & ((1 << rest) - 1)), count


@njit_exact
def pull(state, words, offset):
    """State with a word taken, if it needs one, and the next place; missing words are 0."""
    if state >= LOWEST:
        return state, offset
    word = np.int64(words[offset]) if offset < words.size else np.int64(0)
    return (state << 16) | word, offset + 1


@njit_exact
def pull_code(state, words, offset, row, starts, slots, ranks):
    """Code in a row of the tables, and state and place behind it."""
    slot = state & (TOTAL - 1)
    code = np.int64(slots[row, slot])
    size = np.int64(starts[row, code + 1]) - np.int64(starts[row, code])
    state, offset = pull(size * (state >> BITS) + np.int64(ranks[row, slot]), words, offset)
    return code, state, offset


@njit_exact
def code_of(symbol, kind, starts, raw_bits):
    """Code of a symbol, and the number of raw bits behind it."""
    raw = np.int64(raw_bits[kind])
    code = (symbol >> raw) + MIDDLE
    if code < 0 or code >= ESCAPE or starts[kind, code] == starts[kind, code + 1]:
        return ESCAPE, ESCAPED_BITS
    return code, raw


@njit_exact
def chunk_bits(bits, chunk):
    """Size of a chunk of raw bits; chunk 0 has the lowest ones."""
    return min(max(bits - chunk * CHUNK_BITS, 0), CHUNK_BITS)


@njit_exact
def order_of(tiers):
    """Entries in order of tiers."""
    order = np.empty(tiers.size, np.int64)
    count = 0
    for tier in range(-LAST_TIER, LAST_TIER + 1):
        for n in range(tiers.size):
            if tiers[n] == tier:
                order[count] = n
                count += 1
    return order


@njit_exact
def push_group(states, words, count, symbols, kinds, starts, places, raw_bits):
    """Number of emitted words after one component of a group of lanes."""
    codes, extras = np.empty(symbols.size, np.int64), np.empty(symbols.size, np.int64)
    for lane in range(symbols.size):
        codes[lane], extras[lane] = code_of(symbols[lane], kinds[lane], starts, raw_bits)
    for chunk in range(MOST_CHUNKS):
        for lane in range(symbols.size - 1, -1, -1):
            size = chunk_bits(extras[lane], chunk)
            if size > 0:
                part = ((symbols[lane] & 0xFFFFFFFF) >> (chunk * CHUNK_BITS)) & ((1 << size) - 1)
                states[lane], count = push_bits(states[lane], words, count, part, size)
    for lane in range(symbols.size - 1, -1, -1):
        kind, code = kinds[lane], codes[lane]
        start = np.int64(starts[kind, code])
        size = np.int64(starts[kind, code + 1]) - start
        states[lane], count = push(states[lane], words, count, places[kind], start, size)
    return count


@njit_exact
def encode(symbols, tiers, bases, starts, places, raw_bits, words):
    """Write the words of some entries in decoding order, and return their number."""
    rows, width = symbols.shape
    classes = starts.shape[0] - 1
    states = np.full(min(rows, LANES), LOWEST, np.int64)
    own, kinds = np.empty(LANES, np.int64), np.empty(LANES, np.int64)
    order = order_of(tiers)
    last_group = (rows - 1) // LANES * LANES
    count = 0
    for c in range(width - 1, -1, -1):
        for first in range(last_group, -1, -LANES):
            size = min(LANES, rows - first)
            for lane in range(size):
                n = order[first + lane]
                kinds[lane] = class_at(bases[c], np.int64(tiers[n]), classes)
                own[lane] = symbols[n, c]
            group = own[:size], kinds[:size]
            count = push_group(states, words, count, *group, starts, places, raw_bits)
    for n in range(rows - 1, -1, -1):
        code = np.int64(tiers[n]) + LAST_TIER
        start = np.int64(starts[classes, code])
        size = np.int64(starts[classes, code + 1]) - start
        state = states[n % LANES]
        states[n % LANES], count = push(state, words, count, places[classes], start, size)
    for lane in range(states.size - 1, -1, -1):
        words[count] = states[lane] & 0xFFFF
        words[count + 1] = states[lane] >> 16
        count += 2
    words[:count] = words[:count][::-1].copy()
    return count


@njit_exact
def pull_group(states, words, offset, symbols, kinds, starts, slots, ranks, raw_bits):
    """Place behind one component of a group of lanes, whose symbols are written."""
    extras = np.empty(symbols.size, np.int64)
    most = np.int64(0)
    for lane in range(symbols.size):
        kind = kinds[lane]
        code, states[lane], offset = pull_code(
            states[lane], words, offset, kind, starts, slots, ranks
        )
        symbols[lane] = 0 if code == ESCAPE else code - MIDDLE
        extras[lane] = ESCAPED_BITS if code == ESCAPE else np.int64(raw_bits[kind])
        most = max(most, extras[lane])
    for chunk in range((most - 1) // CHUNK_BITS, -1, -1):
        for lane in range(symbols.size):
            size = chunk_bits(extras[lane], chunk)
            if size > 0:
                slot, rest = states[lane] & (TOTAL - 1), BITS - size
                symbols[lane] = (symbols[lane] << size) | (slot >> rest)
                state = ((states[lane] >> BITS) << rest) + (slot & ((1 << rest) - 1))
                states[lane], offset = pull(state, words, offset)
    for lane in range(symbols.size):
        if extras[lane] == ESCAPED_BITS and symbols[lane] >= 1 << 31:
            symbols[lane] -= 1 << 32
    return offset


@njit_exact
def decode(words, bases, starts, slots, ranks, raw_bits, step, components, tiers):
    """Write dequantized components and tiers; return the number of words that were read.

    Damaged words give other numbers, but reads stay within `words`.
    """
    rows, width = components.shape
    classes = starts.shape[0] - 1
    states = np.empty(min(rows, LANES), np.int64)
    symbols, kinds = np.empty(LANES, np.int64), np.empty(LANES, np.int64)
    offset = 0
    for lane in range(states.size):
        high, low = np.int64(words[offset]), np.int64(words[offset + 1])
        states[lane] = high << 16 | low
        offset += 2
    for n in range(rows):
        code, states[n % LANES], offset = pull_code(
            states[n % LANES], words, offset, classes, starts, slots, ranks
        )
        tiers[n] = code - LAST_TIER
    order = order_of(tiers)
    for c in range(width):
        for first in range(0, rows, LANES):
            size = min(LANES, rows - first)
            for lane in range(size):
                tier = np.int64(tiers[order[first + lane]])
                kinds[lane] = class_at(bases[c], tier, classes)
            group = symbols[:size], kinds[:size]
            offset = pull_group(states, words, offset, *group, starts, slots, ranks, raw_bits)
            for lane in range(size):
                n = order[first + lane]
                scale = np.float32(step * 2.0 ** np.int64(tiers[n]))
                components[n, c] = np.float32(symbols[lane]) * scale
    return offset


@njit_exact
def pack_widths(symbols, tiers, bases, widths, packed, places, numbers):
    """Write components of fixed widths, and list those that do not fit; returns both counts.

    Args:
        packed: bytes, all zeros.
        places, numbers: index and symbol of each exception.
    """
    rows, width = symbols.shape
    bit = 0
    missed = 0
    for n in range(rows):
        for c in range(width):
            size = np.int64(widths[class_at(bases[c], np.int64(tiers[n]), widths.size)])
            symbol = np.int64(symbols[n, c])
            reach = (1 << (size - 1)) - 1 if size > 0 else 0
            if abs(symbol) > reach:
                places[missed] = n * width + c
                numbers[missed] = symbol
                missed += 1
                symbol = 0
            number = symbol + reach
            for b in range(size):
                packed[bit >> 3] |= ((number >> b) & 1) << (bit & 7)
                bit += 1
    return bit, missed


@njit_exact
def unpack_widths(packed, bit, tiers, bases, widths, step, components):
    """Write dequantized components of fixed widths from a bit on; exceptions are 0."""
    rows, width = components.shape
    for n in range(rows):
        scale = np.float32(step * 2.0 ** np.int64(tiers[n]))
        for c in range(width):
            size = np.int64(widths[class_at(bases[c], np.int64(tiers[n]), widths.size)])
            reach = (1 << (size - 1)) - 1 if size > 0 else 0
            number = 0
            for b in range(size):
                number |= ((np.int64(packed[bit >> 3]) >> (bit & 7)) & 1) << b
                bit += 1
            components[n, c] = np.float32(number - reach) * scale
    return bit
