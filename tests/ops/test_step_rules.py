"""Eviction of a decode step by every rule, against a loop over heads and entries."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from larder.core import StepColumn, StepRule, StepScore, StepScoring, StepSpreading
from larder.ops import EvictionStorage, c_library, evict_step
from references.ops import step_rules

pytestmark = pytest.mark.skipif(c_library() is None, reason="the C kernels were not compiled")

DIM, REGION, STEPS = 8, 40, 12
NAMES = [*StepColumn, "joined"]
MOMENTS = (StepColumn.COUNT, StepColumn.MEAN, StepColumn.SPREAD)
RULES = {
    "h2o": StepRule(StepScoring(StepScore.MASS), None, {StepColumn.MASS: "mass"}),
    "tova": StepRule(StepScoring(StepScore.LAYER_MEAN), None, {}),
    "roco": StepRule(
        StepScoring(StepScore.RAISED_MEAN, spared=0.3), None, {each: "" for each in MOMENTS}
    ),
    "cam": StepRule(
        StepScoring(StepScore.POSITION, sinks=2),
        StepSpreading("joined", 3, seed=5),
        {StepColumn.NEWEST: ""},
    ),
    "expected cam": StepRule(
        StepScoring(StepScore.MASS),
        StepSpreading("joined", 4, seed=None),
        {StepColumn.NEWEST: "", StepColumn.MASS: ""},
    ),
}


class Storage:
    """Heads in flat storage, and the same entries one by one.

    Args:
        lengths: entries of each head at first.
    """

    def __init__(self, lengths: list[int], dtype: torch.dtype) -> None:
        rows = len(lengths) * REGION
        self.keys, self.values = torch.randn(2, rows, DIM).to(dtype)
        self.positions = torch.zeros(rows, dtype=torch.int32)
        self.columns = torch.zeros(len(NAMES), rows)
        self.starts = torch.arange(len(lengths)) * REGION
        self.lengths = torch.tensor(lengths)
        self.next = max(lengths)
        for start, length in zip(self.starts.tolist(), lengths, strict=True):
            positions = torch.randperm(self.next)[:length].sort().values
            self.positions[start : start + length] = positions.int()
        self.heads = [[self.entry(row) for row in self.rows(h)] for h in range(len(lengths))]

    def rows(self, head: int) -> range:
        start = int(self.starts[head])
        return range(start, start + int(self.lengths[head]))

    def entry(self, row: int) -> dict[Any, Any]:
        columns = {StepColumn.MASS: 0.0, StepColumn.NEWEST: 0.0, "joined": 0.0, "history": []}
        value = self.values[row].float().tolist()
        position, key = int(self.positions[row]), self.keys[row].tolist()
        return {"position": position, "key": key, "value": value, **columns}

    def append(self) -> None:
        for head, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            row = int(start + length)
            self.positions[row], self.columns[:, row] = self.next, 0
            self.heads[head].append(self.entry(row))
        self.lengths += 1
        self.next += 1

    def layer(self, rule: StepRule, logits: torch.Tensor, count: int) -> EvictionStorage:
        spreads = isinstance(rule.merging, StepSpreading)
        edges = tuple(range(0, len(self.keys) + 1, REGION))
        return EvictionStorage(
            keys=self.keys,
            values=self.values,
            positions=self.positions,
            starts=self.starts,
            lengths=self.lengths,
            edges=edges,
            columns=self.columns,
            updated={column: NAMES.index(column) for column in rule.columns},
            joined=NAMES.index("joined") if spreads else None,
            log_counts=None,
            thresholds=None,
            logits=logits,
            count=count,
            first=1,
            stop=self.next - 1,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("seed", range(3))
def test_many_steps_equal_the_reference(name: str, seed: int, dtype: torch.dtype) -> None:
    torch.manual_seed(seed)
    rule, count = RULES[name], 14 + seed
    ragged = [count + int(more) for more in torch.randint(-4, 2, (3,))]
    storage = Storage([count] * 3 if name == "tova" else ragged, dtype)
    if name == "tova":  # all heads hold the same positions
        storage.positions.view(3, REGION)[:] = torch.arange(REGION)
        storage.heads = [[storage.entry(row) for row in storage.rows(h)] for h in range(3)]
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for _ in range(STEPS):
        storage.append()
        # Few levels of logits, so that scores tie.
        logits = torch.randint(-2, 3, (2, len(storage.keys))).float()
        groups = [logits[:, list(storage.rows(h))].tolist() for h in range(3)]
        kept = step_rules.evict(storage.heads, groups, rule, count, 1, storage.next - 1)
        assert evict_step([storage.layer(rule, logits, count)], 4, rule) != [None]
        storage.heads = kept
        assert storage.lengths.tolist() == [len(own) for own in kept]
        for head, own in enumerate(kept):
            rows = list(storage.rows(head))
            assert storage.positions[rows].tolist() == [entry["position"] for entry in own]
            assert storage.keys[rows].tolist() == [entry["key"] for entry in own]
            expected = torch.tensor([entry["value"] for entry in own])
            assert torch.allclose(storage.values[rows].float(), expected, tolerance, tolerance)
            for number, column in enumerate(NAMES):
                if column in rule.columns or (column == "joined" and rule.merging):
                    numbers = torch.tensor([in_column(entry, column) for entry in own])
                    assert torch.allclose(storage.columns[number, rows], numbers, atol=1e-5)


def in_column(entry: dict[Any, Any], column: Any) -> float:
    if column in MOMENTS:
        return float(step_rules.moments(entry)[MOMENTS.index(column)])
    return entry[column]


def test_uneven_heads_fall_back_to_plans_under_layer_means() -> None:
    torch.manual_seed(0)
    storage = Storage([6, 6], torch.float32)
    storage.append()
    storage.positions[REGION] += 1
    logits = torch.randn(2, len(storage.keys))
    before = storage.keys.clone()
    assert evict_step([storage.layer(RULES["tova"], logits, 6)], 4, RULES["tova"]) == [None]
    assert storage.lengths.tolist() == [7, 7] and torch.equal(storage.keys, before)
