"""Groups of cells by conversation: dependencies, and rows that do not depend on the order."""

from __future__ import annotations

import random

import pytest

from larder_bench.execution.measured_cells import MeasuredCells
from larder_bench.execution.ray_executor import CellGroup, group_by_conversation, next_ready_group
from larder_bench.results.rows import Row
from larder_bench.studies.cells import Cell, cells_of
from larder_bench.studies.study import Study, StudyTask


def cells(files: int = 4, lengths: tuple[int, ...] = (180, 240)) -> list[Cell]:
    study = Study(
        "tiny",
        (StudyTask("passkey()", lengths),),
        budgets=("1/2", "1/4"),
        measure=("forced", "generated"),
        files=files,
        policies=("streaming_llm", "snapkv"),
        controls=("full",),
    )
    return cells_of(study, "seed")


def measured_row(cell: Cell, known: MeasuredCells) -> Row:
    """Row with the guess that it was measured with; snapkv is refused for the first
    conversation.
    """
    guess = known.tokens_per_byte(cell)
    if cell.subject.name == "snapkv" and cell.seed == 0:
        return {"refused": "too little"}
    number = hash((cell.setting, cell.seed, cell.measure)) % 997
    result = {"budget_tokens": number + 1, "active_kv_bytes": 1000, "kv_bytes": 1000}
    return result | {"guess": guess}


def measured_sequentially(wanted: list[Cell]) -> list[Row]:
    known, rows = MeasuredCells([]), list[Row]()
    for cell in wanted:
        rows.append(known.shared_row(cell) or measured_row(cell, known))
        known.learn(cell, rows[-1])
    return rows


def measured_in_parallel(wanted: list[Cell], seed: int) -> list[Row]:
    """Measure with several workers, each of which measures one cell at a time."""
    rng, known = random.Random(seed), MeasuredCells([])
    rows: list[Row] = [{} for _ in wanted]
    left, running = (
        group_by_conversation(wanted),
        dict[CellGroup, tuple[MeasuredCells, list[int]]](),
    )
    done: list[tuple[Cell, Row]] = []
    while left or running:
        while len(running) < 3:
            group = next_ready_group(left, list(running), wanted, known)
            if group is None:
                break
            left.remove(group)
            own = MeasuredCells([])
            for cell, row in done:
                if cell.setting[:2] == group.where and cell.seed <= group.seed:
                    own.learn(cell, row)
            running[group] = own, list(group.numbers)
        group = rng.choice(list(running))
        own, numbers = running[group]
        number = numbers.pop(0)
        cell = wanted[number]
        rows[number] = own.shared_row(cell) or measured_row(cell, own)
        own.learn(cell, rows[number])
        known.learn(cell, rows[number])
        done.append((cell, rows[number]))
        if not numbers:
            del running[group]
    return rows


@pytest.mark.extended
def test_rows_do_not_depend_on_the_group_order() -> None:
    wanted = cells()
    expected = measured_sequentially(wanted)
    assert any(row.get("guess") for row in expected)
    for seed in range(4):
        assert measured_in_parallel(wanted, seed) == expected


def test_conversations_are_measured_at_the_same_time() -> None:
    wanted = cells()
    groups, known = group_by_conversation(wanted), MeasuredCells([])
    assert [(group.where[1], group.seed) for group in groups][:5] == [
        ("180", 0),
        ("180", 1),
        ("180", 2),
        ("180", 3),
        ("240", 0),
    ]
    first = next_ready_group(groups, [], wanted, known)
    assert first == groups[0]
    second = next_ready_group(groups[1:], [first], wanted, known)
    assert second == groups[4]
    assert next_ready_group(groups[1:4], [first, second], wanted, known) is None
    for number in first.numbers:
        known.learn(wanted[number], {"budget_tokens": 5, "active_kv_bytes": 9, "kv_bytes": 9})
    third = next_ready_group(groups[1:], [second], wanted, known)
    assert third == groups[1]
    assert next_ready_group(groups[2:], [second, third], wanted, known) == groups[2]
