"""The highest that is shown is the highest that was: every tensor, at every moment."""

from __future__ import annotations

from typing import Any

import pytest

from covering import covering
from larder import Policy
from larder.cache import RaggedLayer, SequenceCache
from larder.models import LayerActivations
from larder.prefill import Blockwise, Episodic, EvictionPass, Together, Whole, no_progress
from model_runs import some_ids
from tensor_memory import reachable_tensors

SCHEDULES = [Blockwise(9), Episodic(9, Together.ALL), Whole()]
APPENDED = ["snapkv(window=3) > pooled()", "keydiff() > global()"]
SCRATCHED = ['patched(prompt="episode") > pooled()', "reconstruct(chunk=8) > global()"]


class PeakCacheBytes:
    """Sums all caches whenever a layer's storage is laid out again, old and new together."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, caches: list[SequenceCache]) -> None:
        self.nbytes = 0
        lay_out = RaggedLayer._lay_out

        def spy(store: RaggedLayer, rows: Any, room: int) -> None:
            before = sum(cache.nbytes for cache in caches)
            lay_out(store, rows, room)
            self.nbytes = max(self.nbytes, before + store.nbytes)

        monkeypatch.setattr(RaggedLayer, "_lay_out", spy)


@pytest.mark.parametrize("schedule, sentence", covering(SCHEDULES, APPENDED + SCRATCHED))
def test_peak_equals_the_held_bytes(
    watched, reader_for, lane_for, monkeypatch, schedule, sentence
) -> None:
    planner = Policy.parse(f"protect(sinks=1, recent=2) > {sentence}").planner
    lanes = [lane_for(watched) for _ in range(3)]
    reader = reader_for(watched, planner, 14, 50)
    highest = PeakCacheBytes(monkeypatch, [lane.cache for lane in lanes])
    schedule.read(reader, lanes, some_ids(50), no_progress)
    scratch = 0
    if sentence in SCRATCHED:
        together = len(lanes) if isinstance(schedule, Episodic) else 1
        longest = max(
            len(each.ids)
            for start in (0, 9)
            for each in planner.scorer.scratch(some_ids(9), start, lanes[0].prompts)
        )
        scratch = together * longest * watched.spec.layers[0].bytes_per_token(watched.spec.dtype)
    # A Whole pass allocates before anything is read, and hands over one layer at a time.
    layer = max(lane.cache.largest_layer_bytes for lane in lanes)
    assert highest.nbytes <= reader.meter.peak_bytes <= highest.nbytes + scratch + layer
    if sentence in APPENDED and not isinstance(schedule, Whole):
        assert reader.meter.peak_bytes == highest.nbytes


def test_scratch_pass_counts_the_tokens_of_all_rows(watched, reader_for, lane_for) -> None:
    planner = Policy.parse(
        'protect(sinks=0, recent=0) > patched(prompt="episode") > uniform()'
    ).planner
    lanes = [lane_for(watched, episode=some_ids(n)) for n in (1000, 800, 700)]
    reader = reader_for(watched, planner, 10, 50)
    Episodic(5, Together.ALL).read(reader, lanes, some_ids(20), no_progress)
    in_flight = 2500 * watched.spec.layers[0].bytes_per_token(watched.spec.dtype)
    held = sum(lane.cache.nbytes for lane in lanes)
    assert in_flight + held <= reader.meter.peak_bytes < 2 * in_flight


def test_queries_are_not_held_after_their_layer(watched, reader_for, lane_for, monkeypatch) -> None:
    """A global budget waits for the last layer, but with scores, not with queries."""
    planner = Policy.parse("protect(sinks=1, recent=2) > keydiff() > global()").planner
    reader, lane = reader_for(watched, planner, 14, 50), lane_for(watched)
    held: list[bool] = []
    call = EvictionPass.__call__

    def spy(judge: EvictionPass, row: int, layer: int, recorded: LayerActivations) -> None:
        call(judge, row, layer, recorded)
        held.append(any(tensor is recorded.queries for tensor in reachable_tensors(judge)))

    monkeypatch.setattr(EvictionPass, "__call__", spy)
    Blockwise(9).read(reader, [lane], some_ids(50), no_progress)
    assert held and not any(held)
