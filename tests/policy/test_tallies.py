"""Tallies: running columns equal to loops over all attention, and the scorers that read them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from builders import a_layer, a_plan, a_view, draw, layer_options
from larder.cache import RaggedLayer
from larder.core import LOG_COUNT, BadParameter, LayerSpec, Ledger, Observation, Phase
from larder.policy import TALLIES, LagKV, Recurrence, RoCo, Within
from references.tally_loop import AttentionHistory

LAYER = a_layer(kv_heads=2, group=2)
# What each pass reads, and which entries of each head stay after it; None keeps all.
BLOCK = (9, None)
CASES: dict[str, list[tuple[int, list[list[int]] | None]]] = {
    "one_block": [BLOCK],
    "blocks": [BLOCK, (5, [[0, 2, 3, 9, 13], [1, 4, 12]]), (4, None), (1, None)],
    "one_at_a_time": [(1, None)] * 4,
    "reading_then_generating": [
        (70, [[0, 5, 40, 69], list(range(30, 50))]),
        (3, [[0, 4, 5, 6], list(range(10, 23))]),
        (1, [[0, 1, 3, 4], list(range(1, 14))]),
        (1, None),
        (1, [[2, 4, 5], list(range(15))]),
        (2, None),
        (1, None),
    ],
    "a_head_loses_all": [(6, [[], [0, 5]]), (1, None), (1, [[1], [0, 1, 2, 3]]), (3, None)],
}


class Run:
    """A layer that reads pass after pass while tallies go on and a history observes all."""

    def __init__(
        self,
        tallies: list[Any],
        counted: bool,
        dtype: torch.dtype,
        sharp: float,
        layer: LayerSpec = LAYER,
    ) -> None:
        names = [name for tally in tallies for name in tally.columns]
        columns = [*names, LOG_COUNT] if counted else names
        self.store = RaggedLayer(LAYER, layer_options(dtype, ledger=Ledger(tuple(sorted(columns)))))
        self.history, self.position, self._layer = AttentionHistory(), 0, layer
        self._tallies, self._counted, self._dtype, self._sharp = tallies, counted, dtype, sharp

    def read(self, count: int) -> None:
        new = draw(LAYER, count, self.position, dtype=self._dtype)
        self.store.append(new.keys, new.values, new.positions)
        self.position += count
        entries = self.store.entries()
        phase = Phase.DECODE if count == 1 else Phase.PREFILL
        observation = Observation(
            self._layer,
            entries,
            queries=new.queries * self._sharp,
            query_positions=new.positions,
            length=self.position,
            span=(0, self.position),
            phase=phase,
        )
        self.history.observe(observation)
        for tally in self._tallies:
            self.store.write_columns(tally.update(observation))

    def keep(self, heads: list[list[int]]) -> None:
        held = self.store.lengths
        evicts = self.store.evict if self.position % 2 else self.store.apply
        evicts(a_plan(heads, held))
        if self._counted:
            source = torch.Generator().manual_seed(self.position)
            counts = torch.rand(len(self.store.entries().keys), generator=source).mul(3)
            self.store.write_columns({LOG_COUNT: counts})

    def remembered(self, loop: Any) -> Iterator[tuple[str, float, float]]:
        """Name, what the column holds and what the loop says, for every entry."""
        entries = self.store.entries()
        for head in range(LAYER.kv_heads):
            rows = entries.rows(head)
            for row in range(rows.start, rows.stop):
                history = self.history.records[head, int(entries.positions[row])]
                for name, number in loop.remembered(history).items():
                    yield name, float(entries.columns[name][row]), number


def run(tallies: list[Any], case: str, counted: bool = False, **how: Any) -> Run:
    layer = how.get("layer", LAYER)
    done = Run(tallies, counted, how.get("dtype", torch.float32), how.get("sharp", 1.0), layer)
    for count, kept in CASES[case]:
        done.read(count)
        if kept is not None:
            done.keep(kept)
    return done


def assert_remembers(done: Run, tally: Any, loop: Any, within: float = 1e-5) -> None:
    compared = list(done.remembered(loop))
    assert {name for name, _, _ in compared} == set(tally.columns)
    for name, got, expected in compared:
        assert got == pytest.approx(expected, rel=within, abs=within), name


def every_tally() -> list[Any]:
    return [TALLIES.load(name)() for name in TALLIES.names()]


@pytest.mark.parametrize("counted", [False, True], ids=["single", "counted"])
def test_tally_equals_its_reference(tally, loop_of, counted) -> None:
    assert_remembers(run([tally], "blocks", counted), tally, loop_of(tally))


@pytest.mark.parametrize("counted", [False, True], ids=["single", "counted"])
@pytest.mark.parametrize("case", CASES)
def test_concurrent_tallies_equal_their_references(loop_of, case, counted) -> None:
    done = run(every_tally(), case, counted)
    for tally in every_tally():
        assert_remembers(done, tally, loop_of(tally))


@pytest.mark.parametrize("variant", [{"softcap": 0.8}, {"sinks": (0.5, -1.0, 2.0, 0.0)}])
def test_tallies_with_softcap_and_sinks_equal_their_references(loop_of, variant) -> None:
    layer = replace(LAYER, **variant)
    done = run(every_tally(), "reading_then_generating", counted=True, layer=layer)
    for tally in every_tally():
        assert_remembers(done, tally, loop_of(tally))


def test_tallies_with_sharp_attention_equal_their_references(loop_of) -> None:
    """Most weights are next to nothing: entries go unneeded for long."""
    done = run(every_tally(), "reading_then_generating", sharp=12.0)
    for tally in every_tally():
        assert_remembers(done, tally, loop_of(tally))
        if "longest_gap" in tally.columns:
            compared = done.remembered(loop_of(tally))
            gaps = [got for name, got, _ in compared if name == "longest_gap"]
            assert min(gaps) == 0 and max(gaps) > 10


def test_half_precision_is_tallied_in_float32(loop_of) -> None:
    done = run(every_tally(), "reading_then_generating", dtype=torch.bfloat16)
    for tally in every_tally():
        assert_remembers(done, tally, loop_of(tally), 2e-4)


def test_tallies_have_distinct_column_names() -> None:
    names = [name for each in every_tally() for name in each.columns]
    assert len(names) == len(set(names))


def test_update_does_not_modify_its_inputs(tally) -> None:
    done = run([tally], "blocks")
    new = draw(LAYER, 2, done.position)
    done.store.append(new.keys, new.values, new.positions)
    length = done.position + 2
    observation = Observation(
        LAYER,
        done.store.entries(),
        queries=new.queries,
        query_positions=new.positions,
        length=length,
        span=(0, length),
    )
    before = {name: column.clone() for name, column in observation.entries.columns.items()}
    update = tally.update(observation)
    assert set(update) == set(tally.columns)
    assert all(torch.equal(before[name], observation.entries.columns[name]) for name in before)
    assert any(not torch.equal(before[name], update[name]) for name in before)


def test_comparison_detects_a_wrong_column(tally, loop_of) -> None:
    done = run([tally], "blocks")
    done.store.write_columns(
        {tally.columns[0]: done.store.entries().columns[tally.columns[0]] + 0.01}
    )
    with pytest.raises(AssertionError):
        assert_remembers(done, tally, loop_of(tally))


def test_tally_is_cited(tally) -> None:
    assert "arXiv:" in (inspect.getmodule(type(tally)).__doc__ or "")


def view_with_columns(**columns: list[float]) -> Observation:
    """One head whose columns hold these numbers, after 21 tokens."""
    count = len(next(iter(columns.values())))
    observation = a_view(a_layer(1, 1), [range(count)], 1)
    rows = {name: torch.tensor([*column, 0.0, 0.0]) for name, column in columns.items()}
    return replace(observation, entries=replace(observation.entries, columns=rows), length=21)


def test_due_entries_outrank_entries_never_needed_again() -> None:
    last, gap = [20.0, 12.0, 12.0, 12.0, 0.0], [1.0, 16.0, 4.0, 0.0, 0.0]
    scores = Recurrence().score(view_with_columns(last_needed=last, longest_gap=gap))
    assert scores.argsort(descending=True).tolist()[:3] == [0, 1, 2]
    assert scores[3] == scores[4] == 0.0
    assert float(scores[1]) == pytest.approx(2 / (1 + math.exp(1.5)), abs=1e-5)


def test_roco_protects_high_variance_entries_regardless_of_age() -> None:
    view = view_with_columns(
        moment_count=[20.0, 20.0, 2.0, 2.0],
        moment_mean=[0.1, 0.02, 0.2, 0.01],
        moment_spread=[0.2, 4.0, 0.02, 0.01],
    )
    assert RoCo(spared=0.25).score(view).tolist() == pytest.approx([0.1, 1.02, 0.2, 0.01])
    assert RoCo(spared=0.0).score(view).tolist() == pytest.approx([0.1, 0.02, 0.2, 0.01])


def test_lagkv_ranks_entries_evenly_within_each_partition() -> None:
    heads = a_view(a_layer(2, 1), [range(32), range(23)], 1)
    scores = LagKV(sinks=3, lag=5).score(heads)
    for part, partitions in zip(scores.split([32, 23]), (4, 3), strict=True):
        end = 3 + 5 * partitions
        for share in part[3:end].view(-1, 5):
            assert (share.sort().values * 5).long().tolist() == [0, 1, 2, 3, 4]
        assert part[:3].tolist() == [torch.inf] * 3
        assert float(part[end:].min()) >= 1 and bool((part[end:].diff() > 0).all())
    together = LagKV(sinks=3, lag=5, within=Within.HEAD).score(heads)[3:23].view(-1, 5)
    assert together.sum(1).tolist() == pytest.approx([1.0] * 4)


def test_lagkv_scores_of_constant_channels_are_equal() -> None:
    heads = a_view(a_layer(1, 1), [range(8)], 1)
    heads.entries.keys[:], heads.entries.values[:] = 1.0, 2.0
    scores = LagKV(sinks=0, lag=2, within=Within.HEAD).score(heads)
    assert scores[:6].tolist() == pytest.approx([0.5] * 6)


@pytest.mark.parametrize(
    "kind, value",
    [
        (LagKV, {"sinks": -1}),
        (LagKV, {"lag": 1}),
        (RoCo, {"spared": 1.5}),
        (RoCo, {"spared": -0.1}),
    ],
)
def test_parameters_out_of_range_are_refused(kind, value) -> None:
    [name] = value
    with pytest.raises(BadParameter, match=rf"\.{name} must be .*, got {value[name]}\."):
        kind(**value)
