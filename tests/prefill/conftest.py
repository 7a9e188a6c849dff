"""Readers over a tiny model that check themselves while they read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from larder.cache import SequenceCache
from larder.core import Mode, public_name
from larder.models import BatchSegment, Decoder, LayerActivations, wrap_model
from larder.policy import Planner
from larder.prefill import PeakMemoryMeter, PrefillReader, PrefillSequence
from learned_gates import give_gates
from measurements import made_up
from model_runs import some_ids
from tiny_models import tiny

PROMPTS = ("episode", "question", "summarize", "guidance", "task")
BOOK = {name: some_ids(5, seed=99) for name in PROMPTS}
BOOK["repeat"] = (5, 6)
SIGMA = (1.0, 0.8, 0.9, 0.7)
# Budgets whose layers share one pool.
SHARED_POOL = (
    "global",
    "fixed_threshold",
    "inverse_variance",
    "prefixkv",
    "dynamic",
    "cake",
    "composite",
)
# Budgets that may leave room.
THRESHOLDS = ("threshold", "fixed_threshold")


class PeakEntriesMeter(PeakMemoryMeter):
    """A meter that remembers the highest of each cache, layer by layer of every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.highest = 0

    def observe(self, caches: Any, passing_bytes: int) -> None:
        super().observe(caches, passing_bytes)
        self.highest = max(self.highest, *(cache.managed_entries for cache in caches))


class RecordingDecoder(Decoder):
    """A decoder that remembers every key and value that was appended, by its true position."""

    def _run(self, module: Any, rows: Any, mode: Mode, observer: Any, **options: Any) -> Any:
        def watch(row: int, layer: int, recorded: LayerActivations) -> None:
            if mode is Mode.APPEND:
                self.remember(rows[row], layer, recorded)
            if observer is not None:
                observer(row, layer, recorded)

        return super()._run(module, rows, mode, watch, **options)

    def remember(self, row: BatchSegment, layer: int, recorded: LayerActivations) -> None:
        appended = self.appended.setdefault(id(row.cache), {})
        keys, values = recorded.keys.clone().unbind(1), recorded.values.clone().unbind(1)
        for q, position in enumerate(recorded.positions.tolist()):
            appended[layer, position] = keys[q], values[q]


@dataclass(frozen=True)
class CheckedReader(PrefillReader):
    """A reader that checks the sum of survivors after every settlement."""

    wrong: list[str] = field(default_factory=list)

    def read_and_evict_steps(self, lanes: Any, ids: Any, block: Any, start: int) -> Iterator[None]:
        spec = self.decoder.spec
        before = [[sum(lengths) for lengths in lane.cache.lengths()] for lane in lanes]
        yield from super().read_and_evict_steps(lanes, ids, block, start)
        for lane, held in zip(lanes, before, strict=True):
            now = [sum(lengths) for lengths in lane.cache.lengths()]
            rows = [spec.layers[i].kv_heads for i in self.quotas]
            there = [held[i] + len(ids) * k for i, k in zip(self.quotas, rows, strict=True)]
            allowed = [q * k for q, k in zip(self.quotas.values(), rows, strict=True)]
            left = [now[i] for i in self.quotas]
            if public_name(type(self.planner.budget)) in SHARED_POOL:
                there, allowed, left = [sum(there)], [sum(allowed)], [sum(left)]
            expected = [min(a, b) for a, b in zip(there, allowed, strict=True)]
            if public_name(type(self.planner.budget)) in THRESHOLDS:
                left = [max(a, b) for a, b in zip(left, expected, strict=True)]
            if left != expected:
                self.wrong.append(f"{left} survive of {there}, allowed {allowed}")


@pytest.fixture(scope="session")
def watched() -> RecordingDecoder:
    """Three layers of two kv heads."""
    decoder = wrap_model(tiny("qwen3", layers=3))
    decoder.__class__ = RecordingDecoder
    decoder.appended = {}
    give_gates(decoder)
    return decoder


def a_reader(decoder: Decoder, planner: Planner, tokens: int, context: int) -> CheckedReader:
    layers = tuple(layer.index for layer in decoder.spec.managed)
    calibration = {**made_up(decoder.spec.managed), "sensitivity": SIGMA[: len(layers)]}
    quotas = planner.quotas(tokens, context, layers, calibration)
    return CheckedReader(
        decoder, planner.with_calibration(calibration, layers), tokens, quotas, PeakEntriesMeter()
    )


def a_lane(decoder: Decoder, planner: Planner | None = None, **prompts: Any) -> PrefillSequence:
    """A lane whose cache remembers what the planner asks for."""
    if planner is None:
        return PrefillSequence(SequenceCache(decoder.spec, "ragged"), BOOK | prompts)
    storage = planner.storage
    kept = planner.ledger, storage.codecs, storage.pairing
    return PrefillSequence(SequenceCache(decoder.spec, storage.form, *kept), BOOK | prompts)


@pytest.fixture(scope="session")
def reader_for() -> Any:
    return a_reader


@pytest.fixture(scope="session")
def lane_for() -> Any:
    return a_lane


def assert_true_entries(decoder: RecordingDecoder, cache: SequenceCache) -> None:
    """Every survivor is what was appended at its position, and positions ascend."""
    appended = decoder.appended[id(cache)]
    for layer in decoder.spec.managed:
        entries = cache.entries(layer.index)
        for head in range(layer.kv_heads):
            positions = entries.head_positions(head).tolist()
            assert positions == sorted(set(positions))
            for row, position in enumerate(positions):
                key, value = appended[layer.index, position]
                assert torch.equal(entries.head_keys(head)[row], key[head])
                assert torch.equal(entries.head_values(head)[row], value[head])


@pytest.fixture(scope="session")
def true_entries() -> Any:
    return assert_true_entries
