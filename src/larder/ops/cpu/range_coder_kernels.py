"""Numba kernels of the coders of quantized transform components, compiled at their first call.

Range coder: asymmetric numeral systems with a 32-bit state that is renormalized by 16 bits, two
states in turn over the components of an entry, and static tables of 12 bits (`symbol_model`).

    state < 2^32      encode: emit 16 bits while state >= frequency << 20
    state >= 2^16     decode: take 16 bits while state < 2^16

Symbols are encoded last to first, so that they are decoded first to last.
"""

from __future__ import annotations

import numpy as np

from larder.ops.cpu.decode_attention_kernels import njit_exact

BITS, TOTAL = 12, 4096
LOWEST = 1 << 16
MIDDLE, ESCAPE = 32, 64
LAST_TIER = 2
LARGEST = 2.0**31
CHUNK_BITS = 8  # raw bits that are coded at once


@njit_exact
def tier_start(tier):
    """First slot of a tier -2 to 3: an eighth for the outer ones, a quarter for the others."""
    if tier <= -LAST_TIER:
        return 0
    if tier > LAST_TIER:
        return TOTAL
    return TOTAL // 8 + (tier + LAST_TIER - 1) * (TOTAL // 4)


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
def push(state, words, count, start, frequency):
    """State and number of emitted words after one code."""
    if state >= frequency << (32 - BITS):
        words[count] = state & 0xFFFF
        count += 1
        state >>= 16
    return ((state // frequency) << BITS) + state % frequency + start, count


@njit_exact
def push_bits(state, words, count, number, bits):
    """State and number of emitted words after raw bits, the highest of which are read first."""
    done = 0
    while done < bits:
        size = min(CHUNK_BITS, bits - done)
        part = (number >> done) & ((1 << size) - 1)
        state, count = push(state, words, count, part << (BITS - size), 1 << (BITS - size))
        done += size
    return state, count


@njit_exact
def push_symbol(state, words, count, symbol, kind, starts, raw_bits):
    """State and number of emitted words after a component."""
    raw = np.int64(raw_bits[kind])
    code = (symbol >> raw) + MIDDLE
    is_escaped = code < 0 or code >= ESCAPE
    if not is_escaped:
        is_escaped = starts[kind, code] == starts[kind, code + 1]
    if is_escaped:
        state, count = push_bits(state, words, count, symbol & 0xFFFFFFFF, 32)
        code = ESCAPE
    else:
        state, count = push_bits(state, words, count, symbol & ((1 << raw) - 1), raw)
    first = np.int64(starts[kind, code])
    return push(state, words, count, first, np.int64(starts[kind, code + 1]) - first)


@njit_exact
def encode(symbols, tiers, bases, starts, raw_bits, words):
    """Write the words of some entries in decoding order, and return their number."""
    rows, width = symbols.shape
    states = np.array([LOWEST, LOWEST], np.int64)
    count = 0
    for n in range(rows - 1, -1, -1):
        tier = np.int64(tiers[n])
        for c in range(width - 1, -1, -1):
            kind = class_at(bases[c], tier, starts.shape[0])
            symbol = np.int64(symbols[n, c])
            own = c & 1
            states[own], count = push_symbol(
                states[own], words, count, symbol, kind, starts, raw_bits
            )
        first = tier_start(tier)
        states[0], count = push(states[0], words, count, first, tier_start(tier + 1) - first)
    for own in range(1, -1, -1):
        words[count] = states[own] & 0xFFFF
        words[count + 1] = states[own] >> 16
        count += 2
    words[:count] = words[:count][::-1].copy()
    return count


@njit_exact
def pull_bits(state, words, place, bits):
    """Raw bits, and the state and place behind them."""
    number = np.int64(0)
    while bits > 0:
        size = bits % CHUNK_BITS
        if size == 0:
            size = CHUNK_BITS
        slot = state & (TOTAL - 1)
        number = (number << size) | (slot >> (BITS - size))
        state = ((state >> BITS) << (BITS - size)) + (slot & ((1 << (BITS - size)) - 1))
        if state < LOWEST and place < words.size:
            state = (state << 16) | words[place]
            place += 1
        bits -= size
    return number, state, place


@njit_exact
def decode(words, bases, starts, slots, raw_bits, step, components, tiers):
    """Write dequantized components and tiers; return the number of words that were read.

    Damaged words give other numbers, but reads stay within `words`.
    """
    rows, width = components.shape
    states = np.zeros(2, np.int64)
    states[0] = np.int64(words[0]) << 16 | words[1]
    states[1] = np.int64(words[2]) << 16 | words[3]
    place = 4
    for n in range(rows):
        slot = states[0] & (TOTAL - 1)
        tier = np.int64(-LAST_TIER)
        while slot >= tier_start(tier + 1):
            tier += 1
        first = tier_start(tier)
        states[0] = (tier_start(tier + 1) - first) * (states[0] >> BITS) + slot - first
        if states[0] < LOWEST and place < words.size:
            states[0] = (states[0] << 16) | words[place]
            place += 1
        tiers[n] = tier
        scale = np.float32(step * 2.0**tier)
        for c in range(width):
            kind = class_at(bases[c], tier, starts.shape[0])
            own = c & 1
            state = states[own]
            slot = state & (TOTAL - 1)
            code = np.int64(slots[kind, slot])
            first = np.int64(starts[kind, code])
            state = (np.int64(starts[kind, code + 1]) - first) * (state >> BITS) + slot - first
            if state < LOWEST and place < words.size:
                state = (state << 16) | words[place]
                place += 1
            raw = np.int64(raw_bits[kind])
            if code == ESCAPE:
                number, state, place = pull_bits(state, words, place, 32)
                symbol = number - (1 << 32) if number >= 1 << 31 else number
            elif raw > 0:
                number, state, place = pull_bits(state, words, place, raw)
                symbol = ((code - MIDDLE) << raw) | number
            else:
                symbol = code - MIDDLE
            states[own] = state
            components[n, c] = np.float32(symbol) * scale
    return place


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
