"""An entry with log_count ln n weighs as n equal entries."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from torch import Tensor

from builders import Tokens, a_plan
from cache_stores import append, assert_close, attend, attend_held, extend
from larder.cache import CacheLayer
from larder.core import LOG_COUNT
from references.cache.loop import attend_one
from references.cache.ragged import RaggedLoop

Counts = list[list[int]]


def weighed(store: CacheLayer, loop: RaggedLoop, seed: int = 9) -> Counts:
    """Give every entry a count; the loop holds it as often."""
    source = Random(seed)
    counts = [[source.choice((1, 2, 5)) for _ in range(length)] for length in store.lengths]
    note(store, counts)
    repeat(loop, counts)
    return counts


def note(store: CacheLayer, counts: Counts) -> None:
    packed = torch.tensor([float(n) for head in counts for n in head])
    store.write_columns({LOG_COUNT: store.entries().unpack(packed.log())})


def repeat(loop: RaggedLoop, counts: Counts) -> None:
    loop.heads = [
        [entry for entry, n in zip(head, numbers, strict=True) for _ in range(n)]
        for head, numbers in zip(loop.heads, counts, strict=True)
    ]


def cut(subject, sections: tuple[int, ...]) -> Tokens:
    """Tokens behind 13 others, each section from the same position on."""
    new = subject.tokens(sum(sections), 13)
    positions = torch.tensor([13 + offset for part in sections for offset in range(part)])
    return Tokens(new.queries, new.keys, new.values, positions)


# Few queries and many: both kinds of kernel.
@pytest.mark.parametrize("sections", [(1,), (5,), (2, 3), (1, 1, 4), (11, 12)])
def test_counted_attention_equals_its_reference(remembering, sections) -> None:
    store, loop = remembering.filled()
    weighed(store, loop)
    new = cut(remembering, sections)
    assert_close(attend(store, new, sections), attend(loop, new, sections))


def held_by_loop(loop: RaggedLoop, queries: Tensor) -> Tensor:
    group, scaling = loop.layer.group, loop.layer.scaling
    return torch.stack(
        [
            torch.stack([attend_one(query, loop.heads[head // group], scaling) for query in asked])
            for head, asked in enumerate(queries)
        ]
    )


@pytest.mark.parametrize("queries", [1, 20])
def test_counted_attention_over_held_entries_equals_its_reference(remembering, queries) -> None:
    store, loop = remembering.filled()
    weighed(store, loop)
    new = remembering.tokens(queries, 13)
    assert_close(attend_held(store, new), held_by_loop(loop, new.queries))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extend_with_counts_equals_its_reference(remembering, dtype) -> None:
    store, loop = remembering.filled(13, dtype)
    weighed(store, loop)
    start = 13
    for size in (1, 4, 1, 1, 17):  # new entries count once
        new = remembering.stored(remembering.tokens(size, start), dtype)
        expected = attend(loop, new)
        assert_close(extend(store, new), expected)
        append(loop, new)
        start += size


def test_counts_move_with_their_entries(remembering, carry_out) -> None:
    store, loop = remembering.filled()
    for twin in (store, loop):
        append(twin, remembering.tokens(5, 13))
    chosen = remembering.losing(Random(10), store.lengths, 3)
    twin, repeated = store.fork(), remembering.loop()
    repeated.heads = loop.heads
    counts = weighed(store, repeated)
    carry_out(store, a_plan(chosen, store.lengths))
    loop.keep(chosen)
    repeat(loop, [[counts[h][s] for s in head] for h, head in enumerate(chosen)])
    new = remembering.tokens(3, 18)
    assert_close(attend(store, new), attend(loop, new))
    carry_out(twin, a_plan(chosen, twin.lengths))
    with pytest.raises(AssertionError):
        assert_close(attend(twin, new), attend(loop, new))


def test_fork_keeps_counts(remembering) -> None:
    store, loop = remembering.filled()
    weighed(store, loop)
    new = remembering.tokens(2, 13)
    assert torch.equal(attend(store.fork(), new), attend(store, new))
    assert_close(attend(store.fork(), new), attend(loop, new))


def test_plan_writes_counts(remembering, carry_out) -> None:
    store, loop = remembering.filled()
    store.allocate(2)
    chosen = [[*range(0, length, 2)] for length in store.lengths]
    plan = a_plan(chosen, store.lengths)
    counts = [[2 + s for s in range(len(head))] for head in chosen]
    logs = torch.tensor([float(n) for head in counts for n in head]).log()
    carry_out(store, replace(plan, columns={LOG_COUNT: logs}))
    loop.keep(chosen)
    repeat(loop, counts)
    new = remembering.tokens(3, 13)
    assert_close(extend(store, new), attend(loop, new))
