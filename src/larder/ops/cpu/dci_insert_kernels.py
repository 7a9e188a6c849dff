"""Numba kernels of insertion into a tree of keys, compiled at their first call.

Only `larder.ops.cpu.dci` imports this module. `dci_kernels.py` documents the arrays.
"""

from __future__ import annotations

import math

import numpy as np

from larder.ops.cpu.dci_kernels import allocate, load_key, products, rows_of_page, tree_of_head
from larder.ops.cpu.decode_attention_kernels import njit_kernel
from larder.ops.cpu.search_kernels import insert_ranked


@njit_kernel
def add_lifted_products(stored, rows, count, tail, square, scratch, dots):
    """Add the product of the lifted dimension: keys on a sphere of squared radius `square`.

    A key outside of it is lifted by 0, and is farther away by what it is longer.
    """
    for at in range(count):
        key = load_key(stored, rows[at], scratch[0])
        total = np.float32(0.0)
        for d in range(key.size):
            total += key[d] * key[d]
        rest = square - total
        if rest > 0:
            dots[at] += tail * np.float32(math.sqrt(rest))
        else:
            dots[at] += rest / np.float32(2.0)


@njit_kernel
def quantize_mean(key, mean):
    """Write the int8 codes of a key into `mean`, and return their scale."""
    largest = np.float32(0.0)
    for d in range(mean.size):
        largest = max(largest, abs(key[d]))
    scale = largest / np.float32(127.0)
    for d in range(mean.size):
        mean[d] = np.int8(np.rint(key[d] / scale)) if scale > 0 else np.int8(0)
    return scale


@njit_kernel
def nearest_on_level(key, tail, square, stored, start, pages, cells, levels, target):
    """Cell of level `target` + 1 that is nearest to a key, of all."""
    members, fills, nexts = pages
    firsts, centers, scales, means = cells
    chosen, coming = np.zeros(firsts.size, np.int64), np.zeros(firsts.size, np.int64)
    rows, dots, scratch = allocate(members.shape[1], key.size)
    wide, nearest, best = 1, np.int64(-1), np.float32(0.0)
    for level in range(levels - 1, target, -1):
        found = 0
        for b in range(wide):
            page = firsts[chosen[b]]
            while page >= 0:
                fill = fills[page]
                if level == target + 1:
                    rows_of_page(members[page], fill, start, centers, level, rows)
                    products(key, stored, rows, fill, scratch, dots)
                    add_lifted_products(stored, rows, fill, tail, square, scratch, dots)
                for slot in range(fill):
                    cell = np.int64(members[page, slot])
                    coming[found] = cell
                    found += 1
                    if level == target + 1 and (
                        nearest < 0 or dots[slot] > best or (dots[slot] == best and cell < nearest)
                    ):
                        nearest, best = cell, dots[slot]
                page = nexts[page]
        chosen, coming = coming, chosen
        wide = found
    return nearest


@njit_kernel
def nearest_cell(key, square, stored, start, pages, cells, levels, target, beam):
    """Cell for a key of level `target`: that of the nearest lifted entry one level above."""
    members, fills, nexts = pages
    firsts, centers, scales, means = cells
    total = np.float32(0.0)
    for d in range(key.size):
        total += key[d] * key[d]
    tail = np.float32(math.sqrt(max(square - total, np.float32(0.0))))
    width = max(min(beam, firsts.size), 1)
    chosen, coming = np.zeros(width, np.int64), np.zeros(width, np.int64)
    values = np.empty(width, np.float32)
    rows, dots, scratch = allocate(members.shape[1], key.size)
    wide = 1
    for level in range(levels - 1, target, -1):
        found = 0
        for b in range(wide):
            page = firsts[chosen[b]]
            while page >= 0:
                fill = fills[page]
                rows_of_page(members[page], fill, start, centers, level, rows)
                products(key, stored, rows, fill, scratch, dots)
                add_lifted_products(stored, rows, fill, tail, square, scratch, dots)
                for slot in range(fill):
                    found = insert_ranked(dots[slot], members[page, slot], values, coming, found)
                page = nexts[page]
        if found == 0:  # cells opened since, all of them without entries below
            return nearest_on_level(key, tail, square, stored, start, pages, cells, levels, target)
        chosen, coming = coming, chosen
        wide = found
    return chosen[0]


@njit_kernel
def project(key, square, direction):
    """Projection of a lifted key on a direction [D + 1]."""
    total = dot = np.float32(0.0)
    for d in range(key.size):
        dot += key[d] * direction[d]
        total += key[d] * key[d]
    return dot + direction[key.size] * np.float32(math.sqrt(max(square - total, np.float32(0.0))))


@njit_kernel
def page_for(cell, level, along, pages, firsts, count):
    """Page of a cell for a projection, and the page count of the head; opens one if needed."""
    members, fills, versions, nexts, lows, tiers = pages
    page = firsts[cell]
    if page < 0:
        firsts[cell] = count
        fills[count], nexts[count], lows[count], tiers[count] = 0, -1, along, level
        return count, count + 1
    while nexts[page] >= 0 and lows[nexts[page]] <= along:
        page = nexts[page]
    return page, count


@njit_kernel
def split(page, number, along, level, stored, start, square, direction, pages, centers, count):
    """Split a full page and a new member into two halves by projection; returns the page count."""
    members, fills, versions, nexts, lows, tiers = pages
    size = members.shape[1]
    numbers = np.empty(size + 1, np.int64)
    alongs = np.empty(size + 1, np.float32)
    scratch = np.empty(stored.shape[1], np.float32)
    held = 0
    for slot in range(size + 1):
        member = members[page, slot] if slot < size else number
        if slot < size:
            entry = centers[member] if level > 0 else member
            at = project(load_key(stored, start + entry, scratch), square, direction)
        else:
            at = along
        held = insert_ranked(-at, member, alongs, numbers, held)
    kept = (size + 2) // 2
    changed = kept != size
    for slot in range(kept):
        changed = changed or members[page, slot] != numbers[slot]
        members[page, slot] = numbers[slot]
    for slot in range(size + 1 - kept):
        members[count, slot] = numbers[kept + slot]
    for slot in range(kept, size):
        members[page, slot] = -1
    fills[page], fills[count] = kept, size + 1 - kept
    lows[page], lows[count] = -alongs[0], -alongs[kept]
    nexts[count], nexts[page], tiers[count] = nexts[page], count, level
    versions[count] += 1
    if changed:
        versions[page] += 1
    return count + 1


@njit_kernel
def count_levels(count, ratios, most, sizes, levels, upcoming, targets):
    """Levels of the next `count` entries, when levels are filled by counting.

    Every level has a fixed ratio to the one below; a level is added when the one below it is full
    for the first time, up to `most` levels. Updates `sizes` in place. Returns the number of levels,
    and the level of the entry behind.
    """
    for entry in range(count):
        target = min(upcoming, most - 1)
        ratio = ratios[min(target, 1)]
        upcoming = 0
        if target == levels:
            levels += 1
        elif target == levels - 1:
            if sizes[target] + 1 == math.ceil(1 / ratio):
                upcoming = target + 1
        elif sizes[target] + 1 >= sizes[target + 1] / ratio:
            upcoming = target + 1
        sizes[target] += 1
        targets[entry] = target
    return levels, upcoming


@njit_kernel
def insert_one(entry, target, stored, start, sphere, pages, cells, levels, beam, counts):
    """Insert one entry; updates `counts`, the head's numbers of pages and cells."""
    members, fills, versions, nexts, lows, tiers = pages
    firsts, centers, scales, means = cells
    square, direction = sphere
    key = load_key(stored, start + entry, np.empty(stored.shape[1], np.float32))
    stop = counts[1]
    live = firsts[:stop], centers[:stop], scales[:stop], means[:stop]
    found = members, fills, nexts
    cell = nearest_cell(key, square, stored, start, found, live, levels, target, beam)
    number = entry
    if target > 0:
        number = counts[1]
        firsts[number], centers[number] = -1, entry
        scales[number] = quantize_mean(key, means[number])
        counts[1] += 1
    along = project(key, square, direction)
    page, counts[0] = page_for(cell, target, along, pages, firsts, counts[0])
    if fills[page] == members.shape[1]:
        counts[0] = split(
            page, number, along, target, stored, start, square, direction, pages, centers, counts[0]
        )
        return
    members[page, fills[page]] = number
    fills[page] += 1
    lows[page] = min(lows[page], along)
    versions[page] += 1


@njit_kernel
def insert(
    first,
    stop,
    targets,
    indexed,
    stored,
    starts,
    squares,
    direction,
    tree,
    bases,
    levels,
    beams,
    counts,
):
    """Insert the entries behind the first `indexed` of each of the heads [first, stop).

    `targets` are their levels, -1 behind the last.
    """
    for h in range(first, stop):
        pages, cells = tree_of_head(tree, bases, h)
        sphere = squares[h], direction
        for at in range(targets.shape[1]):
            if targets[h, at] >= 0:
                insert_one(
                    indexed[h] + at,
                    targets[h, at],
                    stored,
                    starts[h],
                    sphere,
                    pages,
                    cells,
                    levels[h],
                    beams[h],
                    counts[h],
                )


@njit_kernel
def parents(first, stop, entries, stored, square, pages, cells, levels, target, beam, found):
    """Cells of the entries [first, stop) of a list, by search in the tree."""
    scratch = np.empty(stored.shape[1], np.float32)
    for at in range(first, stop):
        key = load_key(stored, entries[at], scratch)
        found[at] = nearest_cell(key, square, stored, 0, pages, cells, levels, target, beam)
