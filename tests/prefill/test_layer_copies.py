"""Copies of keys for observations: as few as needed, and counted in bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from builders import a_layer, a_plan, draw, layer_options
from cache_stores import append, attend_held
from larder import Policy
from larder.cache import CompactLayer, SequenceCache
from larder.core import Plan
from larder.engine import SamplingParams, StoppingCriteria
from larder.engine.generate import generate
from larder.models import Decoder, wrap_model
from larder.prefill import DecodeEviction, PeakMemoryMeter
from larder.session import ModelRuntime, build_caches, decode_planner
from model_runs import id_runtime, some_ids
from tiny_models import tiny

LAYERS, M, CONTEXT, STEPS = 2, 12, 20, 6
JUDGED = {
    "attention": "protect(sinks=0, recent=2) > column_mass() > uniform()",
    "positions": "protect(sinks=2, recent=0) > sinks_and_window(sinks=2) > uniform()",
    "merging": "protect(sinks=0, recent=2) > column_mass() > uniform() > fold_ema()",
}


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return wrap_model(tiny("llama", layers=LAYERS))


def read(
    decoder: Decoder, policy: Policy, meter: PeakMemoryMeter
) -> tuple[ModelRuntime, SequenceCache]:
    runtime = id_runtime(decoder)
    return runtime, build_caches(runtime, policy, some_ids(CONTEXT), [{}], meter).activate(0)


def answer(
    decoder: Decoder, cache: SequenceCache, tended: DecodeEviction | None, steps: int
) -> None:
    assert tended is not None
    question = [some_ids(3, seed=1)]
    generate(
        decoder,
        [cache],
        question,
        SamplingParams(),
        StoppingCriteria(steps),
        make_observer=tended.observer,
    )


def counting(monkeypatch: Any, kind: type, name: str) -> list[Any]:
    """One entry for every time that a method is called from now on."""
    calls: list[Any] = []
    called: Callable[..., Any] = getattr(kind, name)

    def counted(self: Any, *args: Any) -> Any:
        calls.append(self)
        return called(self, *args)

    monkeypatch.setattr(kind, name, counted)
    return calls


@pytest.mark.parametrize("name", JUDGED)
def test_scored_step_rotates_keys_once(decoder, name, monkeypatch) -> None:
    sentence = f"blockwise(tokens=8) > {JUDGED[name]} > compact() > every_step()"
    policy = Policy.parse(sentence).with_sizes(M, None)
    runtime, cache = read(decoder, policy, PeakMemoryMeter())
    tended = decode_planner(runtime, policy, [cache])
    answer(decoder, cache, tended, 1)
    calls = counting(monkeypatch, CompactLayer, "_turned")
    answer(decoder, cache, tended, STEPS)
    steps = STEPS - 1  # the first token comes from the question, read as a whole
    turns = 2 if name == "merging" else 1  # merging turns what it merges again
    assert (steps + 1) * LAYERS <= len(calls) <= (turns * steps + 3) * LAYERS
    assert all(not store._kept for store in cache._layers)


def test_no_observation_without_a_plan(decoder, monkeypatch) -> None:
    policy = Policy.parse(
        "protect(sinks=0, recent=2) > snapkv(window=4) > uniform() > lagged(tokens=9)"
    ).with_sizes(M, None)
    runtime, cache = read(decoder, policy, PeakMemoryMeter())
    tended = decode_planner(runtime, policy, [cache])
    looks = counting(monkeypatch, SequenceCache, "entries")
    answer(decoder, cache, tended, 2)
    assert not looks


def test_copied_entries_are_counted_in_bytes() -> None:
    store = CompactLayer(a_layer(2, 2), layer_options())
    append(store, draw(store.layer, 9))
    store.allocate(5)
    held, shown = store.nbytes, store.entries()
    assert (
        store.entries_copy_bytes
        == store.attention_copy_bytes
        == shown.keys.nbytes + shown.rope_positions.nbytes
    )
    store.record_logits()
    new = draw(store.layer, 1, 9)
    store.append(new.keys, new.values, new.positions)
    attend_held(store, new)
    assert store.nbytes == held + store.entries_copy_bytes
    kept = store.entries()
    assert store.nbytes == held
    again = store.entries()
    assert torch.equal(kept.pack(kept.keys), again.pack(again.keys))  # slack may hold NaN


@pytest.mark.parametrize("change", ["append", "apply", "truncate", "compact", "allocate"])
def test_copied_keys_are_invalidated_by_changes(change) -> None:
    store = CompactLayer(a_layer(2, 2), layer_options())
    append(store, draw(store.layer, 9))
    new, more = draw(store.layer, 1, 9), draw(store.layer, 2, 10)
    store.record_logits()
    store.append(new.keys, new.values, new.positions)
    attend_held(store, new)
    change_it = {
        "append": lambda: append(store, more),
        "apply": lambda: store.apply(_all_but_first(store)),
        "truncate": lambda: store.truncate(7),
        "compact": store.compact,
        "allocate": lambda: store.allocate(9),
    }[change]
    change_it()
    shown, alike = store.entries(), store.fork().entries()
    assert len(shown.keys) >= sum(store.lengths)
    assert torch.equal(
        shown.pack(shown.effective_rope_positions), alike.pack(alike.effective_rope_positions)
    )
    for head in range(2):
        assert torch.equal(shown.head_keys(head), alike.head_keys(head))


class RecordingMeter(PeakMemoryMeter):
    """Notes what passed beside the caches, and what a look at them would have copied."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[int, int]] = []

    def observe(self, caches: Sequence[SequenceCache], passing_bytes: int) -> None:
        super().observe(caches, passing_bytes)
        copied = max(
            cache.layers[layer].entries_copy_bytes for cache in caches for layer in range(LAYERS)
        )
        self.noted.append((passing_bytes, copied))


def test_prefill_peak_counts_copied_entries(decoder) -> None:
    sentence = f"blockwise(tokens=8) > {JUDGED['positions']} > compact()"
    meter = RecordingMeter()
    read(decoder, Policy.parse(sentence).with_sizes(M, None), meter)
    layer = decoder.spec.layers[0]
    fullest = layer.kv_heads * (M + 8) * (layer.head_dim * 4 + 4)
    assert max(copied for _, copied in meter.noted) >= fullest
    assert any(passing >= copied >= fullest for passing, copied in meter.noted)


def _all_but_first(store: CompactLayer) -> Plan:
    return a_plan([range(1, length) for length in store.lengths], store.lengths)
