"""Plans of a pass carried out together: the same entries, bit for bit, as one after the other."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import a_layer, a_spec
from larder import Policy
from larder.cache import BatchPlan, SequenceCache
from larder.core import CacheError, LayerPairing, Ledger, Mode, Plan
from larder.models import BatchSegment, wrap_model
from larder.ops import RemovalTable, removes_together
from larder.prefill import DecodeEviction, PeakMemoryMeter
from larder.session import build_caches, decode_planner
from model_runs import id_runtime, some_ids
from tiny_models import tiny

LAYERS, HEADS = 3, 2
DECODER = wrap_model(tiny("qwen3", layers=LAYERS))
LEDGER = Ledger(("mass",), ("mark",))
compiled = pytest.mark.skipif(not removes_together(), reason="the C kernel was not compiled")
# The policies whose plans the batch is for.
SENTENCES = [
    "lacache > every_step()",
    "elastic_cache",
    "scope",
    "morphkv",
    "whole() > protect(sinks=1, recent=2) > keydiff() > ada() > every_step()",
]


def a_cache(lengths: list[int], room: int, seed: int) -> SequenceCache:
    """Cache with ragged heads of those lengths, the same ones in all layers."""
    cache, most = SequenceCache(DECODER.spec, form="ragged", ledger=LEDGER), max(lengths)
    numbers = torch.Generator().manual_seed(seed)
    marks = torch.tensor([place < length for length in lengths for place in range(most)])
    for layer in cache.layers:
        shape = (HEADS, most, layer.layer.head_dim)
        keys, values = (torch.randn(shape, generator=numbers) for _ in range(2))
        layer.append(keys, values, torch.arange(most))
        plan = Plan.from_mask(marks, layer.lengths)
        mass = torch.rand(len(plan.kept), generator=numbers)
        layer.apply(Plan(plan.kept, plan.lengths, columns={"mass": mass}))
    cache.advance(most)
    cache.allocate(room)
    return cache


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[SequenceCache, list[Plan]]]:
    """Caches, the last ones forks of the first, with a plan for each layer."""
    sizes = st.lists(st.integers(0, 40), min_size=HEADS, max_size=HEADS).filter(any)
    rooms = st.sampled_from([0, 3, 40])
    caches = [a_cache(draw(sizes), draw(rooms), seed) for seed in range(draw(st.integers(1, 2)))]
    caches += [caches[0].fork() for _ in range(draw(st.integers(0, 2)))]
    return [(cache, [draw(plans(layer.lengths)) for layer in cache.layers]) for cache in caches]


@st.composite
def plans(draw: st.DrawFn, lengths: tuple[int, ...]) -> Plan:
    """Plan that keeps some entries, and writes numbers or not."""
    count = sum(lengths)
    least = draw(st.sampled_from([0, 1, 5, 9, 10]))
    tenths = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    plan = Plan.from_mask(torch.tensor([n < least for n in tenths], dtype=torch.bool), lengths)
    if not draw(st.booleans()):
        return plan
    mass, marks = torch.arange(float(len(plan.kept))), torch.arange(float(HEADS))
    return Plan(plan.kept, plan.lengths, columns={"mass": mass}, scalars={"mark": marks})


def assert_holds(cache: SequenceCache, expected: dict[str, torch.Tensor]) -> None:
    state = cache.state()
    assert state.keys() == expected.keys()
    for name, own in state.items():
        assert torch.equal(own.nan_to_num(nan=7.0), expected[name].nan_to_num(nan=7.0)), name


def assert_same(one: SequenceCache, other: SequenceCache) -> None:
    assert_holds(one, other.state())
    assert one.lengths() == other.lengths()
    assert one.managed_entries == other.managed_entries and one.nbytes == other.nbytes


@compiled
@settings(max_examples=60, deadline=None)
@given(batches())
def test_batch_equals_the_loop(batch: list[tuple[SequenceCache, list[Plan]]]) -> None:
    before = [cache.state() for cache, _ in batch]
    loop, together = ([cache.fork() for cache, _ in batch] for _ in range(2))
    collected = BatchPlan()
    for n, (_, own) in enumerate(batch):
        for layer, plan in enumerate(own):
            loop[n].evict(layer, plan)
            collected.add(together[n], layer, plan)
    with mock.patch.object(RemovalTable, "move", autospec=True, side_effect=RemovalTable.move) as m:
        collected.evict()
    assert m.call_count == 1
    for one, other, (cache, _), held in zip(together, loop, batch, before, strict=True):
        assert_same(one, other)
        assert_holds(cache, held)  # its forks leave it alone


def test_plan_that_does_not_fit_changes_nothing() -> None:
    caches = [a_cache([9, 4], 2, seed) for seed in range(2)]
    before, collected = [cache.state() for cache in caches], BatchPlan()
    for cache in caches:
        for layer in range(LAYERS):
            collected.add(cache, layer, Plan(torch.arange(5), (3, 2)))
    with pytest.raises(CacheError, match="kept entries of kv head 1"):
        collected.evict()
    for cache, held in zip(caches, before, strict=True):
        assert cache.plans == 0
        assert_holds(cache, held)


class Steps:
    """Decode steps over some caches of one policy, the last of which is a fork of the first."""

    def __init__(self, sentence: str, dtype: torch.dtype = torch.float32) -> None:
        decoder = wrap_model(tiny("qwen3", layers=LAYERS).to(dtype))
        runtime, policy = id_runtime(decoder), Policy.parse(sentence).with_sizes(48, None)
        prompts = [some_ids(90), some_ids(70)]
        built = [build_caches(runtime, policy, ids, [{}], PeakMemoryMeter()) for ids in prompts]
        self.caches = [each.activate(0) for each in built]
        self.caches.append(self.caches[0].fork())
        self.decoder, planner = decoder, decode_planner(runtime, policy, self.caches)
        assert planner is not None
        self._planner, self._count = planner, 0

    def run(self) -> torch.Tensor:
        """Logits of one step."""
        numbers = range(len(self.caches))
        segments = [BatchSegment(cache, (7 + n,)) for n, cache in enumerate(self.caches)]
        steps = [self._count] * len(segments)
        self._count += 1
        observer = self._planner.observer(numbers, segments, steps)
        return self.decoder.forward_logits(segments, Mode.APPEND, numbers, observer)


def by_loop(self: DecodeEviction, caches: Any) -> None:
    del self, caches


@pytest.mark.extended
@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("sentence", SENTENCES)
def test_steps_equal_those_of_the_loop(sentence: str, dtype: torch.dtype) -> None:
    loop, together, calls = Steps(sentence, dtype), Steps(sentence, dtype), 0
    for _ in range(24):
        with mock.patch.object(DecodeEviction, "_batch_plan", by_loop):
            expected = loop.run()
        with mock.patch.object(
            RemovalTable, "move", autospec=True, side_effect=RemovalTable.move
        ) as move:
            assert torch.equal(together.run(), expected)
        calls += move.call_count
        for one, other in zip(together.caches, loop.caches, strict=True):
            assert_same(one, other)
    assert calls > 0


def test_exception_between_layers_leaves_caches_usable() -> None:
    steps, twin = Steps(SENTENCES[-1]), Steps(SENTENCES[-1])
    for own in (steps, twin):
        own.run()
    before = [cache.state() for cache in steps.caches]
    add = BatchPlan.add

    def failing(self: BatchPlan, cache: SequenceCache, layer: int, plan: Plan) -> None:
        add(self, cache, layer, plan)
        if len(self) == LAYERS + 1:
            raise RuntimeError("interrupted")

    with (
        mock.patch.object(BatchPlan, "add", failing),
        pytest.raises(RuntimeError, match="interrupted"),
    ):
        steps.run()
    for cache, held in zip(steps.caches, before, strict=True):
        assert_holds(cache, held)
    steps._count -= 1
    assert torch.equal(steps.run(), twin.run())
    for one, other in zip(steps.caches, twin.caches, strict=True):
        assert_same(one, other)


def test_plans_of_layers_held_together_are_not_deferred_behind_a_window() -> None:
    spec = a_spec(*(a_layer(window=None if n else 8, index=n) for n in range(3)))
    assert BatchPlan.can_defer(SequenceCache(spec, form="ragged"))
    cache = SequenceCache(spec, form="paired", pairing=LayerPairing())
    assert not cache.layers[0].spans_layers and cache.layers[1].spans_layers
    assert not BatchPlan.can_defer(cache)
