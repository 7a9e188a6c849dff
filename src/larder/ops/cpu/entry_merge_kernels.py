"""Numba kernels of entry merging, compiled at their first call.

Only `larder.ops.cpu.entry_merge` imports this module, when it calls a kernel. Operations are
exact as written, so that numbers are rounded as in torch.
"""

from __future__ import annotations

import numpy as np

from larder.ops.cpu.decode_attention_kernels import load_row, njit_exact


@njit_exact
def update_means(numbers, groups, before, rate, rest, moved):
    """Running means moved by `rate` (`rest` is 1 - rate) towards the mean of each group."""
    sums = np.zeros(before.size, np.float32)
    counts = np.zeros(before.size, np.int64)
    for f in range(numbers.size):
        sums[groups[f]] += numbers[f]
        counts[groups[f]] += 1
    for k in range(before.size):
        moved[k] = before[k]
        if counts[k] > 0:
            mean = sums[k] / np.float32(counts[k])
            if np.isnan(before[k]):
                moved[k] = mean
            elif not np.isnan(mean):
                moved[k] = rate * mean + rest * before[k]


@njit_exact
def distinct(targets):
    """Distinct targets, ascending."""
    into = np.sort(targets)
    count = 0
    for f in range(into.size):
        if f == 0 or into[f] != into[count - 1]:
            into[count] = into[f]
            count += 1
    return into[:count]


@njit_exact
def normalize_folds(sources, targets, given, counted, own):
    """Sources, targets and weights of the folds, those of the targets themselves last."""
    into = distinct(targets)
    folds, count = sources.size, into.size
    froms = np.empty(folds + count, np.int64)
    intos = np.empty(folds + count, np.int64)
    weights = np.empty(folds + count, np.float32)
    totals = np.full(count, own)
    slots = np.searchsorted(into, targets)
    for f in range(folds):
        totals[slots[f]] += counted[f]
    for f in range(folds):
        froms[f], intos[f] = sources[f], targets[f]
        weights[f] = given[f] / totals[slots[f]]
    for n in range(count):
        froms[folds + n] = intos[folds + n] = into[n]
        weights[folds + n] = own / totals[n]
    return froms, intos, weights


@njit_exact
def threshold_folds(
    sources, targets, heads, likeness, given, before, rate, rest, slack, own, moved
):
    """Update the thresholds, and return the folds of sources whose similarity is above them."""
    alike = targets >= 0
    update_means(likeness[alike], heads[alike], before, rate, rest, moved)
    for f in range(alike.size):
        alike[f] = alike[f] and likeness[f] >= moved[heads[f]] - slack
    shares = given[alike]
    return normalize_folds(sources[alike], targets[alike], shares, shares, own)


@njit_exact
def merge_probability(mass, around):
    """Ratio of a mass to the mean mass `around`, in [0, 1]; of zero over zero 0."""
    if around > 0:
        return min(max(mass / around, np.float32(0.0)), np.float32(1.0))
    return np.float32(1.0) if mass > 0 else np.float32(0.0)


@njit_exact
def spread_folds(gone, kept, starts, lengths, new_lengths, mass, window, drawn):
    """Sources, targets, and weights of keys and of values, those of the targets themselves last."""
    ends, stops = np.cumsum(lengths), np.cumsum(new_lengths)
    heads = np.searchsorted(ends, gone, side="right")
    firsts = np.searchsorted(kept, gone)
    froms = np.empty(2 * gone.size * window, np.int64)
    intos = np.empty(froms.size, np.int64)
    weights = np.zeros((2, froms.size), np.float32)
    folds = 0
    for f in range(gone.size):
        h = heads[f]
        first, stop = firsts[f], min(firsts[f] + window, stops[h])
        ahead = starts[h] - ends[h] + lengths[h]  # from packed entries to rows
        around = 0.0
        for i in range(first, stops[h]):
            around += mass[kept[i] + ahead]
        around = np.float32(around / max(stops[h] - first, 1))
        share = merge_probability(mass[gone[f] + ahead], around)
        if drawn.size:
            share = np.float32(1.0) if drawn[f] < share else np.float32(0.0)
        if share > 0:
            for i in range(first, stop):
                froms[folds], intos[folds] = gone[f], kept[i]
                weights[1, folds] = share / np.float32(stop - first)
                folds += 1
    into = distinct(intos[:folds])
    for n in range(into.size):
        froms[folds + n] = intos[folds + n] = into[n]
        weights[:, folds + n] = 1.0
    folds += into.size
    return froms[:folds], intos[:folds], weights[0, :folds], weights[1, :folds]


@njit_exact
def add_row(stored, row, weight, scratch, sums):
    """Add a weighted stored row; a row of weight 0 is not read."""
    if weight != 0:
        numbers = load_row(stored, row, scratch)
        for d in range(sums.size):
            sums[d] += weight * numbers[d]


@njit_exact
def sum_rows(keys, values, starts, lengths, sources, targets, key_weights, value_weights):
    """Distinct targets, and the sums of their sources' keys and values."""
    into = distinct(targets)
    slots = np.searchsorted(into, targets)
    ends = np.cumsum(lengths)
    heads = np.searchsorted(ends, sources, side="right")
    key_sums = np.zeros((into.size, keys.shape[1]), np.float32)
    value_sums = np.zeros((into.size, keys.shape[1]), np.float32)
    scratch = np.empty(keys.shape[1], np.float32)
    for f in range(sources.size):
        h = heads[f]
        row = sources[f] - (ends[h] - lengths[h]) + starts[h]
        add_row(keys, row, key_weights[f], scratch, key_sums[slots[f]])
        add_row(values, row, value_weights[f], scratch, value_sums[slots[f]])
    return into, key_sums, value_sums
