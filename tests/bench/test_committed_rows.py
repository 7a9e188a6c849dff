"""A committed row is re-created, and what differs is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from larder.core import InputError, MissingWeights
from larder_bench.execution import committed_rows
from larder_bench.execution.committed_rows import cheapest_cells, check_cell, rounding_of
from larder_bench.execution.row_comparison import LOG_LIKELIHOOD, Rounding, differences
from larder_bench.execution.runner import StudyRunner
from larder_bench.results.rows import Row
from larder_bench.studies.model_context import ModelContext
from larder_bench.studies.study import Study, StudyTask

STUDY = Study(
    name="one",
    tasks=(StudyTask("needles", (300,)),),
    models=("random:qwen3-tiny",),
    policies=("streaming_llm", "snapkv"),
    budgets=("1/2",),
    matched=("bytes",),
    files=1,
    controls=("full",),
)


@pytest.fixture(scope="module")
def rows(bench: ModelContext, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    running = StudyRunner(STUDY, tmp_path_factory.mktemp("rows") / "one.jsonl", lambda _: bench, 1)
    running.run()
    return running.rows()


def test_a_row_is_re_created(bench: ModelContext, rows: list[Row]) -> None:
    cell, row = cheapest_cells(STUDY, rows, ["snapkv"])[0]
    assert row["policy"] == "snapkv"
    assert check_cell(cell, row, lambda _: bench).differences == ()


def test_a_changed_score_is_found(bench: ModelContext, rows: list[Row]) -> None:
    cell, row = cheapest_cells(STUDY, rows)[0]
    assert row["policy"] in STUDY.policies
    items = [{**row["items"][0], "log_likelihood": 1.0}, *row["items"][1:]]
    [only] = check_cell(cell, {**row, "items": items}, lambda _: bench).differences
    assert only.startswith("items[0].log_likelihood: 1.0 committed, -")


def test_another_text_differs(bench: ModelContext, rows: list[Row]) -> None:
    cell, row = cheapest_cells(STUDY, rows)[0]
    [only] = check_cell(cell, {**row, "text_digest": "0"}, lambda _: bench).differences
    assert only.startswith("the text is another one: give the same --corpus")


def test_a_cell_that_is_refused_now_differs(
    bench: ModelContext, rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Row:
        raise InputError("No room.")

    monkeypatch.setattr(committed_rows, "measure_cell", refuse)
    cell, row = cheapest_cells(STUDY, rows)[0]
    assert check_cell(cell, row, lambda _: bench).differences == ("refused now: No room.",)


def test_a_cell_without_weights_is_no_difference(
    bench: ModelContext, rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Row:
        raise MissingWeights("No weights.")

    monkeypatch.setattr(committed_rows, "measure_cell", refuse)
    cell, row = cheapest_cells(STUDY, rows)[0]
    with pytest.raises(MissingWeights, match="No weights"):
        check_cell(cell, row, lambda _: bench)


def test_each_policy_has_its_cheapest_cell(rows: list[Row]) -> None:
    slower = [{**row, "seconds": row["seconds"] + 10 * (row["policy"] == "snapkv")} for row in rows]
    slower += [{**row, "seconds": row["seconds"] + 20} for row in slower]
    found = cheapest_cells(STUDY, slower)
    assert [row["policy"] for _, row in found] == ["streaming_llm", "snapkv"]
    assert found[1][1]["seconds"] < found[0][1]["seconds"] + 20


def test_a_study_of_controls_alone_is_checked_by_one_of_them(rows: list[Row]) -> None:
    _, row = cheapest_cells(replace(STUDY, policies=()), rows)[0]
    assert row["policy"] in STUDY.controls


def test_rows_that_are_not_there_are_named(rows: list[Row]) -> None:
    with pytest.raises(InputError, match="the study one can be measured again for h2o: take"):
        cheapest_cells(STUDY, rows, ["h2o"])


def test_rows_of_another_processor_are_compared_by_their_means(
    bench: ModelContext, rows: list[Row]
) -> None:
    """One token's likelihood may move; the mean of a cell by no more than the tolerance."""
    cell, row = cheapest_cells(STUDY, rows)[0]
    first, *others = row["items"]
    allowed = 0.9 * LOG_LIKELIHOOD * len(row["items"])
    for moved, found in ((allowed, 0), (-allowed, 0), (1.3 * allowed, 1)):
        items = [{**first, "log_likelihood": first["log_likelihood"] + moved}, *others]
        checked = check_cell(cell, {**row, "items": items}, lambda _: bench, Rounding.OTHER)
        assert len(checked.differences) == found
        assert checked.rounding is Rounding.OTHER
        assert len(check_cell(cell, {**row, "items": items}, lambda _: bench).differences) == 1


def test_an_equal_row_of_another_processor_is_compared_exactly(
    bench: ModelContext, rows: list[Row]
) -> None:
    cell, row = cheapest_cells(STUDY, rows)[0]
    checked = check_cell(cell, row, lambda _: bench, Rounding.OTHER)
    assert (checked.differences, checked.rounding) == ((), Rounding.SAME)


@pytest.mark.parametrize("changed", ["processor", "torch", "accelerator", "kernels"])
def test_equal_processors_and_libraries_round_alike(changed: str) -> None:
    here = {"processor": "GenuineIntel amx_bf16", "torch": "2.13", "commit": "a", "kernels": "k"}
    assert rounding_of(here | {"commit": "b", "threads": 3}, here) is Rounding.SAME
    assert rounding_of(here | {changed: "other"}, here) is Rounding.OTHER
    for known in ("processor", "kernels"):
        unknown = {name: value for name, value in here.items() if name != known}
        assert rounding_of(unknown, unknown) is Rounding.OTHER


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ({"a": 1.0}, {"a": 1.0 + 1e-9}, []),
        ({"a": 0.0002}, {"a": 0.0003}, ["a: 0.0002 committed, 0.0003 measured"]),
        ({"a": 1000}, {"a": 1001}, ["a: 1000 committed, 1001 measured"]),
        ({"a": 1.0}, {"a": 1.001}, ["a: 1.0 committed, 1.001 measured"]),
        ({"a": True}, {"a": False}, ["a: True committed, False measured"]),
        ({"a": [1, 2]}, {"a": (1,)}, ["a: 2 values committed, 1 measured"]),
        ({"a": "x"}, {}, ["a: 'x' committed, None measured"]),
    ],
)
def test_differences(one: Any, other: Any, found: list[str]) -> None:
    assert list(differences(one, other, Rounding.SAME)) == found
    assert list(differences({"items": [one]}, {"items": [other]}, Rounding.SAME)) == [
        f"items[0].{text}" for text in found
    ]


def _answers(right: int, **more: Any) -> Row:
    items = [{"question": n, "exact": n < right, "answer": str(right)} for n in range(4)]
    return {"kv_bytes": 10_000, "items": items, **more}


@pytest.mark.parametrize(
    ("measured", "found"),
    [
        (_answers(2), []),
        (_answers(1), []),  # one answer of the cell
        (_answers(0), ["mean items.exact: 0.5 committed, 0 measured"]),
        (_answers(2, kv_bytes=10_090), []),
        (_answers(2, kv_bytes=10_200), ["kv_bytes: 10000 committed, 10200 measured"]),
        (_answers(2, tokens=1), ["tokens: None committed, 1 measured"]),
        (_answers(2, items=[]), ["items: 4 values committed, 0 measured"]),
    ],
)
def test_differences_on_another_processor(measured: Row, found: list[str]) -> None:
    assert list(differences(_answers(2), measured, Rounding.OTHER)) == found


def test_recall_on_another_processor_is_compared_by_its_mean() -> None:
    one = {"items": [{"recall_5": 0.98, "possible": 0.93112}] * 20}
    near = {"items": [{"recall_5": 0.96, "possible": 0.93114}] * 20}
    far = {"items": [{"recall_5": 0.9, "possible": 0.95}] * 20}
    assert list(differences(one, near, Rounding.OTHER)) == []
    assert [text.split(":")[0] for text in differences(one, far, Rounding.OTHER)] == [
        "mean items.possible",
        "mean items.recall_5",
    ]
