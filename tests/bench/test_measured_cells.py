"""Measured cells give first guesses and results of equivalent cells."""

from __future__ import annotations

from dataclasses import replace

import pytest

from larder_bench.execution.measured_cells import MeasuredCells
from larder_bench.results.budget_labels import MatchedQuantity
from larder_bench.results.rows import EXHIBITS_KEY, Row
from larder_bench.studies.cells import Cell, cells_of
from larder_bench.studies.study import Study, StudyTask

TOLD: Row = {"model_fingerprint": "f", "device": "cpu", "dtype": "float32"}


def cell(policy: str, seed: int, matched: str = "bytes") -> Cell:
    study = Study("s", (StudyTask("passkey()", (99,)),), policies=(policy,), controls=())
    study = replace(study, budgets=("1/4",), matched=(matched,), files=1, first_seed=seed)
    [one] = cells_of(study, "seed")
    return one


def result_of(tokens: int) -> Row:
    return {"budget_tokens": tokens, "active_kv_bytes": 100, "kv_bytes": 400, "items": []}


@pytest.mark.parametrize("is_in_file", [True, False])
def test_guess_is_the_result_of_the_first_seed(is_in_file: bool) -> None:
    first, second = cell("h2o", 3), cell("h2o", 5)
    rows = [one.head(TOLD) | result_of(n) for one, n in ((first, 20), (second, 50))]
    known = MeasuredCells(rows if is_in_file else ())
    if not is_in_file:
        known.learn(second, result_of(50))
        known.learn(first, result_of(20))
    assert known.tokens_per_byte(cell("h2o", 7)) == 0.2 and known.tokens_per_byte(second) == 0.2
    assert known.tokens_per_byte(first) is None and known.tokens_per_byte(cell("h2o", 1)) is None
    assert known.tokens_per_byte(cell("snapkv", 7)) is None


def test_guess_of_the_total_uses_all_bytes() -> None:
    known = MeasuredCells([cell("h2o", 0, "total").head(TOLD) | result_of(20)])
    assert known.tokens_per_byte(cell("h2o", 1, "total")) == 0.05
    assert known.tokens_per_byte(cell("h2o", 1, "bytes")) is None
    known.learn(cell("snapkv", 0), {"refused": "too small"})
    assert known.tokens_per_byte(cell("snapkv", 1)) is None


def test_cells_without_a_budget_share_a_row() -> None:
    known = MeasuredCells(())
    full, other = cell("full", 0), cell("full", 0, "tokens")
    assert full.is_alike and not cell("h2o", 0).is_alike
    known.learn(full, result_of(99) | {EXHIBITS_KEY: ["a map"]})
    known.learn(cell("h2o", 0), result_of(20))
    assert known.shared_row(other) == result_of(99) | {"shared_with": MatchedQuantity.BYTES.value}
    assert known.shared_row(full) is None  # it is the one that was measured
    assert known.shared_row(cell("h2o", 0, "tokens")) is None
    assert known.shared_row(cell("full", 1, "tokens")) is None
    assert known.shared_row(replace(other, measure="generated")) is None
    known = MeasuredCells([full.head(TOLD) | result_of(99) | {"environment": "e"}])
    assert known.shared_row(other) == result_of(99) | {
        "environment": "e",
        "model_fingerprint": "f",
        "device": "cpu",
        "dtype": "float32",
        "shared_with": "bytes",
    }
