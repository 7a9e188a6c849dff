"""Checks are grouped so that few models are loaded twice, and all are run."""

from __future__ import annotations

from functools import partial

import pytest

from larder_bench.execution.check_queue import CheckGroup, CheckQueue, grouped
from larder_bench.execution.committed_rows import PlannedCheck, cheapest_check
from larder_bench.results.rows import Row
from larder_bench.studies.study import Study, StudyTask

STUDY = Study(
    name="one",
    tasks=(StudyTask("passkey", (1000,)), StudyTask("needles", (1000,))),
    policies=("snapkv",),
    matched=("tokens",),
    budgets=("1/4",),
)


def _check(model: str, task: str, seconds: float) -> PlannedCheck:
    [cell, other] = [cheapest_check(STUDY, [_row(name)]).cell for name in ("passkey", "needles")]
    chosen = cell if task == "passkey" else other
    row = {"model": model, "dtype": "float32", "task": task, "tokens": 1000, "seed": 0}
    return PlannedCheck(chosen, row | {"seconds": seconds})


def _row(task: str) -> Row:
    from larder_bench.execution.runner import validate_study

    cells = [cell.head({}) for cell in validate_study(STUDY) if cell.subject.name == "snapkv"]
    [head] = [row for row in cells if row["kind"] == task and row["seed"] == STUDY.first_seed]
    return head | {"seconds": 1.0, "items": [{"question": 0}]}


@pytest.fixture(scope="module")
def checks() -> list[PlannedCheck]:
    costs = {"a": (1.0, 2.0), "b": (20.0, 30.0), "c": (3.0, 5.0)}
    return [
        _check(model, task, seconds)
        for task, place in (("passkey", 0), ("needles", 1))
        for model, found in costs.items()
        for seconds in (found[place], found[place] / 2)
    ]


def test_checks_of_one_conversation_are_together(checks: list[PlannedCheck]) -> None:
    groups = grouped(checks)
    assert sorted(len(group) for group in groups) == [2] * 6
    assert {check for group in groups for check in map(id, group)} == set(map(id, checks))
    assert all(len({check.context for check in group}) == 1 for group in groups)


def test_longest_model_is_split_between_two_workers(checks: list[PlannedCheck]) -> None:
    models = [group[0].row["model"] for group in grouped(checks)]
    assert models in (["a", "a", "c", "c", "b", "b"], ["c", "c", "b", "b", "a", "a"])


def _names(group: CheckGroup, prefix: str) -> list[str]:
    return [f"{prefix}{check.row['model']} {check.row['task']}" for check in group]


@pytest.mark.extended
def test_all_groups_run_in_two_processes(checks: list[PlannedCheck]) -> None:
    queue = CheckQueue(grouped(checks), partial(_names, prefix="- "))
    expected = [f"- {check.row['model']} {check.row['task']}" for check in checks]
    assert sorted(queue.outcomes()) == sorted(expected)
