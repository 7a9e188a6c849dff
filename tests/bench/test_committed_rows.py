"""A committed row is re-created, and what differs is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from larder.core import InputError, MissingWeights
from larder_bench.execution import committed_rows
from larder_bench.execution.committed_rows import (
    LONG_SECONDS,
    PlannedCheck,
    cheapest_check,
    check_cell,
    rounding_of,
)
from larder_bench.execution.row_comparison import (
    DIVERGENCE,
    LEAST,
    LOG_LIKELIHOOD,
    Rounding,
    differences,
    largest_deviation,
)
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


def _with(planned: PlannedCheck, **fields: Any) -> PlannedCheck:
    return replace(planned, row=planned.row | fields)


def test_committed_row_is_reproduced(bench: ModelContext, rows: list[Row]) -> None:
    planned = cheapest_check(STUDY, rows, ["snapkv"])
    assert planned.row["policy"] == "snapkv" and planned.is_sized
    assert check_cell(planned, lambda _: bench).differences == ()


def test_check_asks_the_first_question_only_where_each_has_its_own_prefill(
    bench: ModelContext, tmp_path: Path
) -> None:
    """The first of several questions gives the items and figures that it gave among them."""
    inside = replace(STUDY, tasks=(StudyTask("needles(needles=2)", (300,)),), question=("inside",))
    running = StudyRunner(inside, tmp_path / "one.jsonl", lambda _: bench, 1)
    running.run()
    planned = cheapest_check(inside, running.rows())
    assert planned.asked == 1 and len(planned.row["items"]) == 2
    assert planned.seconds < planned.row["seconds"]
    assert check_cell(planned, lambda _: bench).differences == ()
    first, second = planned.row["items"]
    of_first = _with(planned, items=[{**first, "log_likelihood": 1.0}, second])
    of_second = _with(planned, items=[first, {**second, "log_likelihood": 1.0}])
    assert len(check_cell(of_first, lambda _: bench).differences) == 1
    assert check_cell(of_second, lambda _: bench).differences == ()


def test_changed_score_is_found(bench: ModelContext, rows: list[Row]) -> None:
    planned = cheapest_check(STUDY, rows)
    assert planned.row["policy"] in STUDY.policies
    items = [{**planned.row["items"][0], "log_likelihood": 1.0}, *planned.row["items"][1:]]
    [only] = check_cell(_with(planned, items=items), lambda _: bench).differences
    assert only.startswith("items[0].log_likelihood: 1.0 committed, -")


def test_check_reports_another_text(bench: ModelContext, rows: list[Row]) -> None:
    planned = cheapest_check(STUDY, rows)
    [only] = check_cell(_with(planned, text_digest="0"), lambda _: bench).differences
    assert only.startswith("the text is another one: give the same --corpus")


def test_cell_that_is_refused_now_differs(
    bench: ModelContext, rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Row:
        raise InputError("No room.")

    monkeypatch.setattr(committed_rows, "measure_cell", refuse)
    planned = cheapest_check(STUDY, rows)
    assert check_cell(planned, lambda _: bench).differences == ("refused now: No room.",)


def test_check_of_a_cell_without_weights_raises(
    bench: ModelContext, rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Row:
        raise MissingWeights("No weights.")

    monkeypatch.setattr(committed_rows, "measure_cell", refuse)
    with pytest.raises(MissingWeights, match="No weights"):
        check_cell(cheapest_check(STUDY, rows), lambda _: bench)


def test_fallback_checks_are_the_cheapest_cells_of_other_policies(rows: list[Row]) -> None:
    slower = [{**row, "seconds": 1.0 + 10 * (row["policy"] == "snapkv")} for row in rows]
    found = cheapest_check(STUDY, [*slower, *({**row, "seconds": 100.0} for row in slower)])
    assert found.row["policy"] == "streaming_llm"
    [other] = found.others
    assert other.row["policy"] == "snapkv" and other.row["seconds"] == 11.0


def test_study_of_controls_only_is_checked_on_one_control(rows: list[Row]) -> None:
    planned = cheapest_check(replace(STUDY, policies=()), rows)
    assert planned.row["policy"] in STUDY.controls


def test_slow_policies_are_checked_by_controls(rows: list[Row]) -> None:
    costs = {"full": 1.0}
    long = [row | {"seconds": costs.get(row["policy"], 99 * LONG_SECONDS)} for row in rows]
    assert cheapest_check(STUDY, long).row["policy"] == "full"
    assert cheapest_check(STUDY, long, ["snapkv"]).row["policy"] == "snapkv"


def test_check_cost_includes_a_calibration_that_may_be_missing(
    bench: ModelContext, tmp_path: Path
) -> None:
    calibrated = replace(STUDY, policies=("random:sensitivity", "snapkv"))
    running = StudyRunner(calibrated, tmp_path / "one.jsonl", lambda _: bench, 1)
    running.run()
    rows = [row | {"seconds": 1.0 + (row["policy"] == "snapkv")} for row in running.rows()]
    assert cheapest_check(calibrated, rows).row["policy"] == "snapkv"


def test_missing_rows_are_named(rows: list[Row]) -> None:
    with pytest.raises(InputError, match="the study one can be measured again for h2o: take"):
        cheapest_check(STUDY, rows, ["h2o"])


def test_rows_of_another_processor_are_compared_by_their_means(
    bench: ModelContext, rows: list[Row]
) -> None:
    """One token's likelihood may move; the mean of a cell by no more than the tolerance."""
    planned = cheapest_check(STUDY, rows)
    first, *others = planned.row["items"]
    allowed = 0.9 * LOG_LIKELIHOOD * len(planned.row["items"])
    for moved, found in ((allowed, 0), (-allowed, 0), (1.3 * allowed, 1)):
        items = [{**first, "log_likelihood": first["log_likelihood"] + moved}, *others]
        moved_row = _with(planned, items=items)
        checked = check_cell(moved_row, lambda _: bench, Rounding.OTHER)
        assert len(checked.differences) == found
        assert checked.rounding is Rounding.OTHER
        assert checked.largest is not None and checked.largest.field == "log_likelihood"
        assert (checked.largest.share > 1) == bool(found)
        assert len(check_cell(moved_row, lambda _: bench).differences) == 1


def test_equal_row_of_another_processor_is_compared_exactly(
    bench: ModelContext, rows: list[Row]
) -> None:
    planned = cheapest_check(STUDY, rows)
    checked = check_cell(planned, lambda _: bench, Rounding.OTHER)
    assert (checked.differences, checked.rounding) == ((), Rounding.SAME)


@pytest.mark.parametrize("changed", ["processor", "torch", "accelerator", "kernels"])
def test_equal_environments_have_the_same_rounding(changed: str) -> None:
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
def test_differing_values_are_named_with_both_values(
    one: Any, other: Any, found: list[str]
) -> None:
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
        (_answers(0), ["mean items.exact: 0.5 committed, 0 measured; 0.25 is allowed"]),
        (_answers(2, kv_bytes=10_090), []),
        (_answers(2, kv_bytes=10_200), ["kv_bytes: 10000 committed, 10200 measured"]),
        (_answers(2, tokens=1), ["tokens: None committed, 1 measured"]),
        (_answers(2, items=[]), ["items: 4 values committed, 0 measured"]),
    ],
)
def test_values_of_another_processor_differ_beyond_their_tolerance(
    measured: Row, found: list[str]
) -> None:
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


@pytest.mark.parametrize(
    ("measured", "share"),
    [(-1.0, 0.0), (-1.05, 0.5), (-1.2, 2.0), (-0.85, 0.75), (-0.7, 1.5)],
)
def test_means_may_differ_by_the_known_range(measured: float, share: float) -> None:
    """Between -1.0, which is committed, and -0.9 all is allowed, and .1 on either side."""
    one, other = ([{"log_likelihood": mean}] * 4 for mean in (-1.0, measured))
    known = {"log_likelihood": [-0.9, -0.95, -1.0]}
    found = largest_deviation(one, other, known)
    assert (found.share if found else 0.0) == pytest.approx(share, rel=1e-5)
    result = differences({"items": one}, {"items": other}, Rounding.OTHER, known=known)
    assert bool(list(result)) == (share > 1)


@pytest.mark.parametrize("added", [0.3, 3.0, 300.0])
def test_changed_committed_mean_has_the_fixed_tolerance(added: float) -> None:
    """The measured row lies among the known means, the changed one as far outside as it was moved.

    `added` is in nats; .025 is the fixed tolerance of a divergence.
    """
    committed, measured = ([{"kl": mean}] * 4 for mean in (0.05 + added, 0.04))
    known = {"kl": [0.03, 0.07, 0.05]}
    result = differences({"items": committed}, {"items": measured}, Rounding.OTHER, known=known)
    assert len(list(result)) == 1
    found = largest_deviation(committed, measured, known)
    assert found is not None and found.allowed == max(DIVERGENCE, LEAST * found.committed)
