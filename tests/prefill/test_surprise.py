"""Entries know how surprising their tokens were, and the most surprising ones stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from larder import Policy
from larder.cache import SequenceCache
from larder.core import Mode
from larder.engine import SamplingParams, StoppingCriteria
from larder.engine.generate import generate
from larder.models import BatchSegment
from larder.prefill import Blockwise, DecodeEviction, Whole, no_progress, split_blocks
from model_runs import some_ids
from references.novelty import surprises

M, LENGTH, BLOCK = 12, 40, 8
NOVELTY = "protect(sinks=1, recent=2) > novelty(decay=0.9, turn=7) > uniform()"


def surprise_by_head(cache: SequenceCache) -> list[dict[int, float]]:
    """Surprise of the entries of each head of each layer, by position."""
    out = []
    for layer in cache.spec.managed:
        entries = cache.entries(layer.index)
        values, positions = entries.columns["surprise"], entries.positions
        for head in range(layer.kv_heads):
            rows = entries.rows(head)
            out.append(dict(zip(positions[rows].tolist(), values[rows].tolist(), strict=True)))
    return out


def likelihoods(decoder: Any, cache: SequenceCache, ids: tuple[int, ...]) -> list[list[float]]:
    logits = decoder.forward_logits([BatchSegment(cache, ids)], Mode.SCRATCH, range(len(ids)))
    return logits.log_softmax(-1).tolist()


def test_most_surprising_entries_of_every_block_are_kept(watched, reader_for, lane_for) -> None:
    planner = Policy.parse(f"blockwise(tokens=8) > {NOVELTY}").planner
    reader, lane = reader_for(watched, planner, M, LENGTH), lane_for(watched, planner)
    ids, expected, before = some_ids(LENGTH), dict[int, float](), list[float]()
    held = set[int]()
    for block in split_blocks(ids, BLOCK):
        start = lane.cache.next_position
        rows = likelihoods(watched, lane.cache, block)
        fresh = surprises(rows, list(block), before)
        expected |= {start + index: value for index, value in enumerate(fresh)}
        before, stop = rows[-1], start + len(block)
        Blockwise(BLOCK).read(reader, [lane], block, no_progress)
        held |= {*range(start, stop)}
        if len(held) > M:
            ranked = sorted(
                held - {0, stop - 2, stop - 1},
                key=lambda at: (-expected[at] * 0.9 ** ((stop - 1 - at) // 7), at),
            )
            held = {0, stop - 2, stop - 1, *ranked[: M - 3]}
        for head in surprise_by_head(lane.cache):
            assert set(head) == held
            assert head == pytest.approx({at: expected[at] for at in held}, abs=1e-3)
    assert reader.wrong == [] and reader.meter.highest <= 6 * (M + BLOCK)


def test_whole_prefill_surprise_uses_the_full_context(watched, reader_for, lane_for) -> None:
    planner = Policy.parse(f"whole() > {NOVELTY}").planner
    reader, lane = reader_for(watched, planner, M, LENGTH), lane_for(watched, planner)
    fresh = SequenceCache(watched.spec, lane.cache.cache_spec.form)
    rows = likelihoods(watched, fresh, some_ids(LENGTH))
    expected = surprises(rows, list(some_ids(LENGTH)), [])
    Whole().read(reader, [lane], some_ids(LENGTH), no_progress)
    for head in surprise_by_head(lane.cache):
        assert len(head) == M
        assert head == pytest.approx({at: expected[at] for at in head}, abs=1e-3)


@pytest.mark.parametrize("timing", ["every_step()", "lagged(tokens=3)"])
def test_generated_tokens_have_surprise(watched, reader_for, lane_for, timing) -> None:
    planner = Policy.parse(f"blockwise(tokens=8) > {NOVELTY} > {timing}").planner
    reader, lane = reader_for(watched, planner, M, 16), lane_for(watched, planner)
    Blockwise(BLOCK).read(reader, [lane], some_ids(16), no_progress)
    cache, question = lane.cache, some_ids(5, seed=3)
    providers = planner.token_providers
    row = BatchSegment(cache, question)
    [fresh] = watched.forward_token_numbers([row], Mode.SCRATCH, providers)
    expected = dict(enumerate(fresh["surprise"].tolist(), start=16))
    tending = DecodeEviction(planner, M, (reader.quotas,), (16,), watched.predict_token_numbers)
    logits, real = [], watched.forward_logits

    def overheard(*args: Any) -> Any:
        logits.append(real(*args))
        return logits[-1]

    object.__setattr__(watched, "forward_logits", overheard)
    try:
        [answer] = generate(
            watched,
            [cache],
            [question],
            SamplingParams(),
            StoppingCriteria(14),
            make_observer=tending.observer,
        )
    finally:
        object.__delattr__(watched, "forward_logits")
    for step, token in enumerate(answer):
        expected[21 + step] = -float(logits[step][0].log_softmax(-1)[token])
    seen = set[int]()
    for head in surprise_by_head(cache):
        assert len(head) <= M + (planner.timing.excess() or 0)
        new = {at for at in head if at >= 16}
        assert {at: head[at] for at in new} == pytest.approx(
            {at: expected[at] for at in new}, abs=1e-3
        )
        seen |= new
    assert len(seen) >= 4


def test_other_policies_compute_no_surprise(watched, reader_for, lane_for, monkeypatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError(args)

    for name in ("forward_token_numbers", "predict_token_numbers", "forward_logits"):
        monkeypatch.setattr(type(watched), name, refuse, raising=False)
    planner = Policy.parse("blockwise(tokens=8) > protect(sinks=1, recent=2) > keydiff()").planner
    reader, lane = reader_for(watched, planner, M, LENGTH), lane_for(watched, planner)
    Blockwise(BLOCK).read(reader, [lane], some_ids(LENGTH), no_progress)
    assert not len(lane.cache.latest.tail)


def test_infinipot_splits_the_budget_between_two_rankings() -> None:
    from builders import a_layer, a_view
    from larder.policy import InfiniPot
    from references.infinipot import chosen, listed

    observation = a_view(a_layer(1, 2), [list(range(40))])
    novelty = observation.entries.columns["surprise"][:40].tolist()
    looked = InfiniPot(novel=0.0).score(observation).tolist()
    for novel in (0.0, 0.3, 0.5, 1.0):
        scores = InfiniPot(novel=novel).score(observation)
        for room in (1, 8, 13, 39):
            top = set(torch.sort(scores, descending=True, stable=True).indices[:room].tolist())
            if novel in (0.0, 1.0):
                assert top == set(listed(novelty if novel else looked)[:room])
            else:
                assert abs(len(top ^ chosen(novelty, looked, novel, room))) <= 2
                assert set(listed(novelty)[: int(novel * room)]) <= top
                assert set(listed(looked)[: int((1 - novel) * room)]) <= top
