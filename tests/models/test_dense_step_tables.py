"""Decode steps over dense caches by tables that stay between steps, against layer by layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from larder.cache import MANY_SEGMENTS, DenseLayer, SequenceCache, divide, fork_prefix, seal
from larder.core import Mode, Plan
from larder.models import BatchSegment, Decoder
from larder.ops import c_library
from larder.ops.cpu import decoder_layer
from model_runs import some_ids
from tensor_memory import reachable_tensors, storage_bytes
from tiny_models import tiny

pytestmark = pytest.mark.skipif(
    not hasattr(c_library(), "larder_decoder_step"), reason="no C library, or an older one"
)
FLOAT32 = torch.float32
NUM_FIRST = 70  # tokens of the first cache: forks share storage of 64 and more


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(tiny("llama", dtype=FLOAT32, layers=3))


@pytest.fixture(autouse=True)
def kernel_is_taken(monkeypatch):
    monkeypatch.setattr(decoder_layer, "max_rows", lambda dtype: 16)


def read(decoder: Decoder, cache: SequenceCache, count: int, seed: int = 0) -> None:
    decoder.read([BatchSegment(cache, some_ids(count, seed=seed))], Mode.APPEND)


def a_cache(decoder: Decoder, count: int = NUM_FIRST) -> SequenceCache:
    cache = SequenceCache(decoder.spec, "dense")
    read(decoder, cache, count)
    return cache


def steps(decoder: Decoder, caches: list[SequenceCache], count: int = 1) -> list[torch.Tensor]:
    def step(token: int) -> torch.Tensor:
        segments = [BatchSegment(cache, (token + n,)) for n, cache in enumerate(caches)]
        return decoder.forward_logits(segments, Mode.APPEND, list(range(len(caches))))

    return [step(5 + number) for number in range(count)]


def evict(cache: SequenceCache) -> None:
    """Keep three of four entries of each layer."""
    for number, layer in enumerate(cache.layers):
        length = layer.lengths[0]
        rows = torch.tensor([row for row in range(length) if row % 4])
        heads = torch.arange(len(layer.lengths))[:, None] * length
        kept = (heads + rows).flatten()
        cache.apply(number, Plan(kept, (len(rows),) * len(layer.lengths)))


def release(caches: list[SequenceCache], number: int) -> None:
    if len(caches) > 1:
        del caches[number]


Change = Callable[[Decoder, list[SequenceCache], int], object]
# Changes of one cache of several, by what is done to it.
CHANGES: dict[str, Change] = {
    "step": lambda decoder, caches, n: steps(decoder, [caches[n]]),
    "batch": lambda decoder, caches, n: steps(decoder, caches, 2),
    "block": lambda decoder, caches, n: read(decoder, caches[n], 5, 3),
    "token": lambda decoder, caches, n: read(decoder, caches[n], 1, 4),
    "truncate": lambda decoder, caches, n: caches[n].truncate(caches[n].next_position - 3),
    "fork": lambda decoder, caches, n: caches.append(caches[n].fork()),
    "fork_prefix": lambda decoder, caches, n: caches.append(fork_prefix(caches[n], 66)),
    "divide": lambda decoder, caches, n: divide(caches[n], 67),
    "seal": lambda decoder, caches, n: seal(caches[n]),
    "evict": lambda decoder, caches, n: evict(caches[n]),
    "reserve": lambda decoder, caches, n: caches[n].reserve(9),
    "compact": lambda decoder, caches, n: caches[n].compact(),
    "release": lambda decoder, caches, n: release(caches, n),
}


def result(decoder: Decoder, changes: list[tuple[str, int]]) -> list[object]:
    """Everything that can be seen of caches after each change and a step of all of them."""
    caches, seen = [a_cache(decoder)], list[object]()
    for name, number in changes:
        CHANGES[name](decoder, caches, number % len(caches))
        seen += [logits.tolist() for logits in steps(decoder, caches)]
        for cache in caches:
            states = [layer.state() for layer in cache.layers]
            seen += [{key: own.tolist() for key, own in each.items()} for each in states]
            seen += [cache.nbytes, cache.lengths(), cache.next_position]
            seen += [layer.usage.entries for layer in cache.layers]
            seen.append(cache.managed_entries)
    return seen


def by_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps ask every layer for its storage."""
    monkeypatch.setattr(DenseLayer, "can_lay_out", False)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(sorted(CHANGES)), st.integers(0, 4)), max_size=7))
def test_tables_equal_layers_after_any_changes(decoder: Decoder, changes) -> None:
    with pytest.MonkeyPatch.context() as patched:
        by_layers(patched)
        expected = result(decoder, changes)
    assert result(decoder, changes) == expected


def test_tables_stay_while_steps_alone_change_the_cache(decoder: Decoder) -> None:
    cache = a_cache(decoder)
    tables = cache.step_layout(FLOAT32)
    assert tables is not None and cache.step_layout(torch.bfloat16) is None
    rooms = {layer.room for layer in cache.layers if isinstance(layer, DenseLayer)}
    steps(decoder, [cache], rooms.pop() - 1)
    assert cache.step_layout(FLOAT32) is tables and not rooms
    steps(decoder, [cache])
    assert cache.step_layout(FLOAT32) is not tables


@pytest.mark.parametrize("name", ["block", "truncate", "evict", "reserve", "compact", "divide"])
def test_other_changes_end_the_tables(decoder: Decoder, name: str) -> None:
    cache = a_cache(decoder)
    steps(decoder, [cache])
    tables = cache.step_layout(FLOAT32)
    if name == "reserve":
        cache.reserve(500)
    else:
        CHANGES[name](decoder, [cache], 0)
    assert cache.step_layout(FLOAT32) is not tables


def test_storage_beside_a_shared_prefix_is_in_the_tables(decoder: Decoder) -> None:
    cache = a_cache(decoder)
    forked = fork_prefix(cache, 66)
    steps(decoder, [forked])
    tables = forked.step_layout(FLOAT32)
    steps(decoder, [cache, forked], 3)
    assert tables is not None and forked.step_layout(FLOAT32) is tables
    assert all(layer.num_storages == 2 for layer in forked.layers)


def test_tables_hold_no_tensors(decoder: Decoder) -> None:
    cache = a_cache(decoder)
    steps(decoder, [cache], 2)
    assert storage_bytes(reachable_tensors(cache)) == cache.nbytes


@pytest.mark.parametrize("is_first", [True, False])
def test_no_tables_are_made_beside_a_cache_without(
    decoder: Decoder, monkeypatch, is_first: bool
) -> None:
    source = SequenceCache(decoder.spec, "ragged")
    read(decoder, source, NUM_FIRST)
    caches = [a_cache(decoder), source.fork()]  # one storage of the second is shared
    caches = caches if is_first else caches[::-1]
    made, start = list[int](), DenseLayer.start_steps
    monkeypatch.setattr(
        DenseLayer,
        "start_steps",
        lambda own, position: (made.append(position), start(own, position))[1],
    )
    steps(decoder, caches, 3)
    assert not made
    source.truncate(0)
    caches[is_first].separate()
    steps(decoder, caches, 3)
    assert len(made) == len(decoder.spec.layers)


def test_failed_step_leaves_the_cache_as_it_was(decoder: Decoder, monkeypatch) -> None:
    cache, other = a_cache(decoder), a_cache(decoder)
    steps(decoder, [cache])
    steps(decoder, [other])

    def fail(self, *_) -> None:
        raise MemoryError

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(decoder_layer, "_check", fail)
        steps(decoder, [cache])
    assert cache.lengths() == other.lengths()
    for ours, theirs in zip(steps(decoder, [cache], 3), steps(decoder, [other], 3), strict=True):
        assert torch.equal(ours, theirs)


def test_joined_segments_end_the_tables(decoder: Decoder) -> None:
    cache, forks = a_cache(decoder), list[SequenceCache]()
    for _ in range(MANY_SEGMENTS + 1):
        forks.append(cache.fork())
        seal(cache)
        read(decoder, cache, NUM_FIRST)
    forks.clear()
    steps(decoder, [cache])
    tables = cache.step_layout(FLOAT32)
    num_storages = [layer.num_storages for layer in cache.layers]
    divide(cache, 0)
    assert [layer.num_storages for layer in cache.layers] < num_storages
    assert cache.step_layout(FLOAT32) is not tables
