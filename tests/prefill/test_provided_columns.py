"""Captured numbers of tokens: recorded when read, and kept wherever the entry goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from larder.cache import SequenceCache
from larder.core import Family, Mode, Observation, Packed, Prompts, ScoreError, ScratchPrompt
from larder.models import BatchSegment
from larder.policy import Drop, EveryStep, Planner, Protect, Scorer, Uniform
from larder.policy.providers import base
from larder.prefill import Blockwise, DecodeEviction, no_progress
from model_runs import some_ids

M, LENGTH = 12, 24


@dataclass(frozen=True)
class LongestStates(Scorer):
    """Entries with the longest hidden states stay."""

    needs = frozenset({"length"})

    def score(self, observation: Observation) -> Packed:
        return observation.entries.column("length")


@dataclass(frozen=True)
class Drafting(Scorer):
    """Asks for drafts without naming who makes them."""

    def score(self, observation: Observation) -> Packed:
        return observation.entries.packed_positions().float()

    def scratch(
        self, block: tuple[int, ...], start: int, prompts: Prompts
    ) -> tuple[ScratchPrompt, ...]:
        return (ScratchPrompt((), (0, start + len(block)), drafts=2),)


@pytest.fixture
def planner(monkeypatch) -> Any:
    monkeypatch.setattr(base, "PROVIDERS", Family("provider", "sample_providers"))
    base._load.cache_clear()
    yield Planner(Protect(1, 2), LongestStates(), Uniform(), Drop(), timing=EveryStep())
    base._load.cache_clear()


def entering(decoder: Any) -> tuple[dict[tuple[int, int], float], Any]:
    """Length of what enters each layer's attention, by layer and position, by hooks of ours."""
    found: dict[tuple[int, int], float] = {}

    def note(module: Any, args: Any, named: Any) -> None:
        lengths = named["hidden_states"][0].norm(dim=-1).tolist()
        positions = named["larder"].positions()[0].tolist()
        found.update({(module.layer_idx, at): x for at, x in zip(positions, lengths, strict=True)})

    hooks = [
        layer.self_attn.register_forward_pre_hook(note, with_kwargs=True)
        for layer in decoder.module.model.layers
    ]
    return found, lambda: [hook.remove() for hook in hooks]


def columns(cache: SequenceCache) -> dict[tuple[int, int, int], float]:
    """The column of every entry, by layer, head and position."""
    out: dict[tuple[int, int, int], float] = {}
    for layer in cache.spec.managed:
        entries = cache.entries(layer.index)
        for head in range(layer.kv_heads):
            positions = entries.head_positions(head).tolist()
            values = entries.columns["length"][entries.rows(head)].tolist()
            pairs = zip(positions, values, strict=True)
            out |= {(layer.index, head, at): value for at, value in pairs}
    return out


def test_captured_column_stays_with_its_entry(planner, watched, reader_for, lane_for) -> None:
    reader, lane = reader_for(watched, planner, M, LENGTH), lane_for(watched, planner)
    found, stop = entering(watched)
    Blockwise(8).read(reader, [lane], some_ids(LENGTH), no_progress)
    eviction = DecodeEviction(planner, M, (reader.quotas,), (LENGTH,))
    for step, token in enumerate(some_ids(3, seed=5)):
        row = BatchSegment(lane.cache, (token,))
        watched.read([row], Mode.APPEND, eviction.observer([0], [row], [step]))
    stop()
    copies = [
        lane.cache,
        lane.cache.fork(),
        SequenceCache.restore(watched.spec, lane.cache.state(), lane.cache.meta()),
    ]
    for cache in copies:
        held = columns(cache)
        assert len(held) == 6 * M and (0, 0, LENGTH + 2) in held
        expected = {key: found[key[0], key[2]] for key in held}
        assert held == pytest.approx(expected, rel=1e-5)
    layers = {key[0] for key in columns(lane.cache)}
    for layer in layers:  # the longest of all were never evicted
        longest = max((at for at in range(3, LENGTH - 8)), key=lambda at: found[layer, at])
        assert (layer, 0, longest) in columns(lane.cache)


def test_scratch_pass_records_nothing(planner, watched, lane_for) -> None:
    cache = lane_for(watched, planner).cache
    watched.read([BatchSegment(cache, some_ids(4))], Mode.APPEND)
    before = columns(cache)
    watched.read([BatchSegment(cache, some_ids(4, seed=1))], Mode.SCRATCH)
    assert columns(cache) == before and len(set(before.values())) > 4


def test_column_bytes_are_counted(planner, watched, lane_for) -> None:
    plain = SequenceCache(watched.spec, "ragged")
    cache = lane_for(watched, planner).cache
    for each in (plain, cache):
        watched.read([BatchSegment(each, some_ids(9))], Mode.APPEND)
        each.compact()
    assert planner.ledger.columns == ("length",)
    assert cache.nbytes == plain.nbytes + 4 * 9 * 6


def test_drafts_without_a_provider_are_refused(watched, reader_for, lane_for) -> None:
    planner = Planner(Protect(1, 2), Drafting(), Uniform(), Drop())
    reader, lane = reader_for(watched, planner, 4, 16), lane_for(watched, planner)
    with pytest.raises(ScoreError, match="name one in its `needs`"):
        Blockwise(8).read(reader, [lane], some_ids(16), no_progress)
