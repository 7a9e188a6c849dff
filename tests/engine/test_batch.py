"""Many requests offline: shared prefixes are read once, and each answer is that of its own."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import pytest
from hypothesis import given
from hypothesis import strategies as st

from larder.cache import SequenceCache
from larder.core import BudgetError, InputError, Mode
from larder.engine import (
    BatchRequest,
    BatchResult,
    BatchRunner,
    SamplingParams,
    StoppingCriteria,
    prefix_tree,
)
from larder.engine.generate import generate
from larder.models import BatchSegment, Decoder
from model_runs import some_ids
from tiny_models import tiny


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(tiny("llama"))


def requests(*prompts: tuple[int, ...], new: int = 3) -> list[BatchRequest]:
    return [BatchRequest(str(n), ids, max_new_tokens=new) for n, ids in enumerate(prompts)]


def run(
    decoder: Decoder, several: list[BatchRequest], max_bytes: int | None = None
) -> tuple[dict[str, BatchResult], dict[str, BudgetError], BatchRunner]:
    results, errors = dict[str, BatchResult](), dict[str, BudgetError]()
    runner = BatchRunner(
        decoder,
        lambda ids: " ".join(map(str, ids)),
        frozenset(),
        max_bytes,
        lambda result: results.__setitem__(result.request.name, result),
        lambda request, error: errors.__setitem__(request.name, error),
    )
    runner.run(several)
    return results, errors, runner


def single_answer(decoder: Decoder, request: BatchRequest) -> list[int]:
    cache = SequenceCache(decoder.spec, "dense")
    limits = StoppingCriteria(request.max_new_tokens)
    [ids] = generate(decoder, [cache], [request.ids], request.sampling, limits)
    return ids


def test_prefix_tree_hand_value() -> None:
    """Three requests of 10 tokens behind 100 that they share: 130 of 330 tokens are read."""
    shared = tuple(range(100))
    tree = prefix_tree(requests(*[(*shared, 100 + n, *range(9)) for n in range(3)]))
    assert tree.read_tokens() == 130
    assert [len(node.ids) for node in tree.walk()] == [0, 100]


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple), min_size=1, max_size=9)
)
def test_prefix_tree_equals_its_reference(prompts: list[tuple[int, ...]]) -> None:
    """Every distinct prefix is read once, but for the last token of each prompt."""
    tree = prefix_tree(requests(*prompts))
    nodes = list(tree.walk())
    assert sorted(r.name for node in nodes for r in node.requests) == sorted(
        str(n) for n in range(len(prompts))
    )
    assert all(r.ids[: len(node.ids)] == node.ids for node in nodes for r in node.requests)
    assert all(len(node.ids) < len(r.ids) for node in nodes for r in node.requests)
    ordered = sorted(prompts)
    kept = [
        max(
            (n for n in range(len(ids)) if any(o[:n] == ids[:n] and n < len(o) for o in others)),
            default=0,
        )
        for number, ids in enumerate(ordered)
        for others in [ordered[:number]]
    ]
    assert tree.read_tokens() == sum(map(len, ordered)) - sum(kept)


def test_batched_answers_equal_single_ones(decoder: Decoder) -> None:
    one, two = some_ids(12, seed=1), some_ids(5, seed=2)
    several = requests(one, (*one, *two), (*one, *two, 7), (*one, 9), two, one)
    several.append(BatchRequest("drawn", (*one, 3), SamplingParams(temperature=1.0, seed=5), 4))
    several.append(BatchRequest("stopped", (*one, 4), max_new_tokens=9, stop=(" ",)))
    results, errors, runner = run(decoder, several)
    assert not errors and len(results) == len(several)
    for request in several[:-1]:
        found = results[request.name]
        assert list(found.ids) == single_answer(decoder, request) and found.reason == "length"
    assert results["stopped"].reason == "stop" and " " not in results["stopped"].text
    assert results["2"].cached_tokens == 16 and results["4"].cached_tokens == 0
    assert runner.num_read_tokens == prefix_tree(several).read_tokens()


def test_batch_size_is_limited_by_memory(decoder: Decoder) -> None:
    prompts = [(*some_ids(8, seed=1), n) for n in range(6)]
    several = requests(*prompts)
    demand = decoder.spec.full_bytes(12)
    results, errors, _ = run(decoder, several, 4 * demand)
    assert not errors
    assert [results[r.name].ids for r in several] == [
        tuple(single_answer(decoder, r)) for r in several
    ]
    several.append(BatchRequest("long", some_ids(90, seed=4), max_new_tokens=2))
    results, errors, _ = run(decoder, several, 4 * demand)
    assert errors.keys() == {"long"} and len(results) == 6
    with pytest.raises(BudgetError, match="give it more memory"):
        raise errors["long"]


class PeakBytes:
    """Most bytes that the storage of all caches of a batch takes, each counted once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most, self.sizes = 0, list[int]()
        self._caches = WeakSet[SequenceCache]()
        fork, read, answer = SequenceCache.fork, BatchRunner._read, BatchRunner._answer_group

        def noted_fork(cache: SequenceCache) -> SequenceCache:
            copy = fork(cache)
            self._caches.add(copy)
            return copy

        def noted_read(runner: BatchRunner, cache: SequenceCache, ids: tuple[int, ...]) -> None:
            read(runner, cache, ids)
            self._note()

        def noted_answer(runner: BatchRunner, group: Any) -> None:
            self._note()
            answer(runner, group)
            self.sizes.append(len(group))
            self._note()

        monkeypatch.setattr(SequenceCache, "fork", noted_fork)
        monkeypatch.setattr(BatchRunner, "_read", noted_read)
        monkeypatch.setattr(BatchRunner, "_answer_group", noted_answer)

    def _note(self) -> None:
        stores = [store for cache in self._caches for store in cache.layers]
        held = [tensor.untyped_storage() for store in stores for tensor in store.tensors()]
        used = sum({each.data_ptr(): each.nbytes() for each in held}.values())
        self.most = max(self.most, used)


def test_requests_with_a_shared_prefix_reserve_their_suffix(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = some_ids(100, seed=1)
    several = requests(*[(*prefix, *some_ids(7, seed=2 + n)) for n in range(6)])
    cache = SequenceCache(decoder.spec, "dense")
    decoder.read([BatchSegment(cache, prefix)], Mode.APPEND)
    cache.compact()
    peak, own = PeakBytes(monkeypatch), decoder.spec.full_bytes(10)
    most = cache.nbytes + int(3.3 * own)  # with numbers of positions and of segments
    results, errors, _ = run(decoder, several, most)
    assert not errors and peak.sizes == [3, 3]  # one would fit if each took its whole text
    assert 0.9 * most < peak.most <= most
    assert [results[r.name].ids for r in several] == [
        tuple(single_answer(decoder, r)) for r in several
    ]


def branching_prompts(stems: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Pairs of prompts behind each stem and behind each two, with ends of their own."""
    begins = [*stems, *((*one, *two) for one in stems for two in stems if one is not two)]
    return [
        (*ids, *some_ids(5, seed=40 + 2 * index + n))
        for index, ids in enumerate(begins)
        for n in range(2)
    ]


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_memory_is_never_exceeded_beside_prefixes_that_waiting_requests_hold(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefixes beside each other and behind each other, some shorter than what forks share."""
    decoder = Decoder(tiny(architecture))
    prompts = branching_prompts([some_ids(count, seed=count) for count in (20, 70, 150)])
    several = requests(*prompts)
    expected = [tuple(single_answer(decoder, request)) for request in several]
    peak = PeakBytes(monkeypatch)
    most = 2 * decoder.spec.full_bytes(240)
    results, errors, _ = run(decoder, several, most)
    assert not errors and peak.most <= most
    assert len(peak.sizes) < len(several) / 2  # several run together
    assert [results[r.name].ids for r in several] == expected


def test_prefix_larger_than_the_memory_fails_without_prefill(decoder: Decoder) -> None:
    several = requests(*[(*some_ids(200, seed=1), n) for n in range(3)])
    results, errors, runner = run(decoder, several, decoder.spec.full_bytes(150))
    assert len(errors) == 3 and not results and not runner.num_read_tokens


def test_groups_with_long_answers_to_short_prompts_run_first() -> None:
    short = [BatchRequest(f"s{n}", (1, 1, n), max_new_tokens=50) for n in range(2)]
    long = [BatchRequest(f"l{n}", (*range(2, 40), n), max_new_tokens=2) for n in range(2)]
    order = [node.ids[:1] for node in prefix_tree([*long, *short]).walk()]
    assert order == [(), (1,), (2,)]
    with pytest.raises(InputError, match="no tokens"):
        prefix_tree([BatchRequest("x", ())])
