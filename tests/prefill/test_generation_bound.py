"""A cache holds no more than its budget under every policy, however much is generated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import runnable
from covering import one_in
from larder import Policy
from larder.cache import SequenceCache
from larder.core import POSITION_BYTES, BudgetError, spell
from larder.engine import SamplingParams, StoppingCriteria
from larder.engine.generate import generate
from larder.models import Card, Decoder, LayerActivations, LearnedWeights, wrap_model
from larder.policy import PROVIDERS
from larder.prefill import DecodeEviction, PeakMemoryMeter
from larder.session import FAMILIES, build_caches, decode_planner
from learned_gates import give_gates
from low_rank_weights import give_maps
from measurements import made_up
from model_runs import id_runtime, some_ids
from tiny_models import tiny

LAYERS, HEADS = 2, 2
STORE_BYTES = 400  # of a layer's bookkeeping


@dataclass
class EntryCounter:
    """Hands a policy's observers on, and finds the most that is held after a pass."""

    tending: DecodeEviction
    most: int
    over: list[int] = field(default_factory=list)
    passes: int = 0
    held: int = 0

    def __call__(self, numbers: Any, rows: Any, steps: Any) -> Any:
        inner = self.tending.observer(numbers, rows, steps)
        self.passes += 1

        def watch(row: int, layer: int, recorded: LayerActivations) -> None:
            inner(row, layer, recorded)
            if layer < LAYERS - 1:
                return
            held = self.held_by(rows[row].cache)
            self.held = held
            # Layers that this pass has not reached yet hold what they held, those behind it less.
            if held > self.most:
                self.over.append(held)

        return watch

    def held_by(self, cache: SequenceCache) -> int:
        """Counted quantity: entries."""
        return cache.managed_entries


# Storages without groups of entries: exact ones, and those whose bounds, or refusals of plans by
# entry, have tests of their own.
UNGROUPED = {"exact", "compact", "form", "transform", "aqua"}
# restorekv() reads the whole text, after it was scored.
COMPENSATIONS = sorted(set(FAMILIES["compensation"].names()) - {"restorekv"})
THRESHOLDS = {"threshold", "fixed_threshold"}  # budgets that may leave room


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    decoder = wrap_model(tiny("qwen3", layers=LAYERS))
    give_gates(decoder)
    source, width = torch.Generator().manual_seed(0), 2 * decoder.spec.layers[0].head_dim
    slots = {
        "kernel": torch.randn(4, width, 3, generator=source),
        "bias": torch.zeros(4),
        "gamma": torch.tensor(0.5),
    }
    learned = LearnedWeights(Card("lococo", (decoder.spec.fingerprint,)), (slots,) * LAYERS)
    decoder.gates.put_tensors("lococo", PROVIDERS.load("lococo")(), learned)
    return decoder


@pytest.fixture(autouse=True)
def maps(decoder: Decoder) -> None:
    give_maps(decoder.spec)


@dataclass
class ByteCounter(EntryCounter):
    """Counter like `EntryCounter`, of bytes, without the grids of groups that are not full."""

    def held_by(self, cache: SequenceCache) -> int:
        size, codecs = cache.spec.managed[0].head_dim, cache.cache_spec.codecs
        numbers = 4 * len(cache.cache_spec.ledger.columns) * cache.managed_entries
        grids = sorted(codec.group_bytes(size) + 16 for codec in codecs)
        entries = -(-cache.managed_entries // (LAYERS * HEADS))  # no more tiers of a head have any
        partial = sum(grids[-entries:]) if entries else 0
        spare = numbers + LAYERS * HEADS * partial + LAYERS * STORE_BYTES
        alone = cache.fork()
        alone.separate()  # without room to grow
        return -(-(alone.nbytes - spare) // (2 * size * 4 + POSITION_BYTES))


def generated(
    decoder: Decoder,
    sentence: str,
    tokens: int,
    context: int,
    steps: int,
    counter: type[EntryCounter] = EntryCounter,
) -> EntryCounter:
    policy = Policy.parse(sentence).with_sizes(tokens, None)
    calibration = made_up(decoder.spec.managed)
    runtime = id_runtime(decoder, calibration)
    book = dict.fromkeys(policy.scorer.required_prompts(), some_ids(3, seed=7))
    cache = build_caches(runtime, policy, some_ids(context), [book], PeakMemoryMeter()).activate(0)
    tending = decode_planner(runtime, policy, [cache])
    assert tending is not None
    counting = counter(tending, (tokens + (policy.timing.excess() or 0)) * HEADS * LAYERS)
    question = some_ids(4, seed=5)
    generate(
        decoder,
        [cache],
        [question],
        SamplingParams(),
        StoppingCriteria(steps),
        make_observer=counting,
    )
    assert counting.passes == steps
    return counting


def while_generating(slot: str) -> Iterator[str]:
    """Every part of a family that can act on single tokens."""
    for name in runnable(FAMILIES[slot].names()):
        part = FAMILIES[slot].load(name)
        if slot == "budget" and name == "unlimited":
            continue
        if slot == "scorer" and part().scratch(
            (1,), 0, dict.fromkeys(part().required_prompts(), (1,))
        ):
            continue  # judges by prompts of its own, which are not read while generating
        yield name


@pytest.mark.extended
@settings(max_examples=16)
@given(
    scorer=st.sampled_from(sorted(while_generating("scorer"))),
    budget=st.sampled_from(sorted(while_generating("budget"))),
    compensation=st.sampled_from(COMPENSATIONS),
    timing=st.sampled_from(
        ["every_step()", "lagged(tokens=3)", "split(reading=0.6)", "fixed_slot(distance=5)"]
    ),
    sinks=st.integers(0, 2),
    recent=st.integers(0, 3),
    context=st.integers(1, 50),
)
def test_bound_holds_at_every_step(
    decoder, scorer, budget, compensation, timing, sinks, recent, context
) -> None:
    few_sinks = dict.fromkeys(
        ("sinks_and_window", "lagkv", "expected", "capkv", "curdkv"), "sinks=2"
    )
    few_queries = dict.fromkeys(("morph", "recent_attention"), "window=2")
    small = {**few_sinks, **few_queries, "snapkv": "window=2, kernel=1"}.get(scorer, "")
    rest = "park() > dci(page=4, tokens=8)" if compensation == "park" else f"{compensation}()"
    parts = f"{scorer}({small}) > {budget}() > {rest} > {timing}"
    sentence = f"blockwise(tokens=8) > protect(sinks={sinks}, recent={recent}) > {parts}"
    # States and pages that are recalled have their share of the budget.
    tokens = {"park": 32, "less": 28}.get(compensation, 20)
    counting = generated(decoder, sentence, tokens, context, 16)
    assert counting.over == [], f"{spell(counting.tending.planner.budget)}: {counting.most}"


@pytest.mark.parametrize("budget", one_in(3, sorted(set(while_generating("budget")) - THRESHOLDS)))
def test_decode_budget_is_filled_by_generated_tokens(decoder, budget) -> None:
    parts = f"column_mass() > {budget}() > drop() > split(reading=0.6)"
    sentence = f"blockwise(tokens=8) > protect(sinks=1, recent=2) > {parts}"
    counting = generated(decoder, sentence, 20, 40, 14)
    assert counting.over == []
    assert counting.held > 0.9 * counting.most


@pytest.mark.extended
@settings(max_examples=4)
@given(
    storage=st.sampled_from(sorted(set(FAMILIES["storage"].names()) - UNGROUPED)),
    scorer=st.sampled_from(["column_mass", "keydiff", "sinks_and_window"]),
    budget=st.sampled_from(["uniform", "pooled", "pyramid", "inverse_variance", "global"]),
    compensation=st.sampled_from(["drop", "fold_ema", "cam", "chelsea", "razor"]),
    timing=st.sampled_from(["every_step()", "lagged(tokens=3)"]),
    context=st.integers(1, 90),
)
def test_byte_budget_holds_at_every_step_in_every_form(
    decoder, storage, scorer, budget, compensation, timing, context
) -> None:
    group = "recent=8" if storage == "minicache" else "group=8"
    parts = f"{scorer}() > {budget}() > {compensation}() > {storage}({group}) > {timing}"
    sentence = f"blockwise(tokens=8) > protect(sinks=1, recent=4) > {parts}"
    counting = generated(decoder, sentence, 60, context, 16, ByteCounter)
    assert counting.over == []
    assert counting.held > 0


def test_recent_tokens_beyond_the_decode_budget_are_refused(decoder) -> None:
    sentence = (
        "whole() > protect(sinks=0, recent=9) > column_mass() > uniform() > split(reading=0.6)"
    )
    with pytest.raises(BudgetError, match=r"leaves 8 of 20 entries for generated text, fewer than"):
        generated(decoder, sentence, 20, 40, 4)


def test_bound_check_detects_an_excess(decoder) -> None:
    sentence = "whole() > protect(sinks=1, recent=2) > keydiff() > uniform() > lagged(tokens=3)"
    counting = generated(decoder, sentence, 20, 30, 6)
    assert counting.over == []
    stricter = EntryCounter(counting.tending, counting.most - 1)
    cache = build_caches(
        id_runtime(decoder),
        Policy.parse(sentence).with_sizes(20, None),
        some_ids(30),
        [{}],
        PeakMemoryMeter(),
    ).activate(0)
    generate(
        decoder,
        [cache],
        [some_ids(4, seed=5)],
        SamplingParams(),
        StoppingCriteria(6),
        make_observer=stricter,
    )
    assert stricter.over


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h2o", "d2o_blockwise", "morphkv", "lazy_eviction"])
def test_bound_holds_for_8192_tokens_at_a_budget_of_512(decoder, name) -> None:
    assert generated(decoder, name, 512, 1024, 8192).over == []
