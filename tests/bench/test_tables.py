"""Tables have the means of scored items, and pairs compare only what both have read."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from larder.cli.main import app
from larder.core import BadParameter, BudgetUnit, MemoryBudget, UsageError
from larder_bench.results.budget_labels import sort_budgets
from larder_bench.results.tables import SCALES, ScoreTable, markdown_report


def items(*scores: bool) -> tuple[dict[str, Any], ...]:
    return tuple({"exact": score, "f1": None, "counts": True} for score in scores)


def cell(
    policy: str, budget: str, file: str, scored: tuple[dict[str, Any], ...], share: float = 0.0
) -> dict[str, Any]:
    head = {"policy": policy, "budget": budget, "task": file, "tokens": 64, "seed": 0}
    return head | {"items": scored, "bytes_share": share}


ENTRIES = [
    cell("h2o", "1/8", "a", items(False, False), 0.12),
    cell("h2o", "1/4", "a", items(True, False), 0.25),
    cell("h2o", "1/4", "b", items(False, False), 0.23),
    cell("keydiff", "1/4", "a", items(True, True), 0.25),
    cell("keydiff", "1/4", "b", ()) | {"refused": "It is too small."},
    cell("full", "1/1", "a", items(True, True), 1.0),
]


def test_table_has_means_paired_differences_and_refusals() -> None:
    table = ScoreTable(ENTRIES)
    assert table.budgets == ["1/1", "1/4", "1/8"]
    [exact] = table.scales_with_data(SCALES)
    found = table.interval(exact, "h2o", "1/4")
    assert found is not None and found.mean == 0.25
    assert table.bytes_share("h2o", "1/4") == pytest.approx(0.24)
    assert table.refused("keydiff", "1/4") == 1
    assert table.interval(exact, "keydiff", "1/8") is None
    pair = table.difference(exact, "keydiff", "h2o", "1/4")
    assert pair is not None and pair.mean == 0.5  # on file a alone
    shown = markdown_report({"group": ENTRIES})
    assert "0.25 [0.00, 0.50] (0.240)" in shown and "(1 refused)" in shown


def test_count_label_names_policies_on_fewer_files() -> None:
    label = "2 files, 4 scored items (full on 1 file)."
    assert ScoreTable(ENTRIES).count_label() == label  # a refusal counts as measured
    assert ScoreTable(ENTRIES[1:-1]).count_label() == "2 files, 4 scored items."
    alone = cell("tova", "1/4", "c", items(True))
    shown = ScoreTable([*ENTRIES, alone]).count_label()
    assert (
        shown.startswith("3 files") and "(full, tova on 1 file; h2o, keydiff on 2 files)" in shown
    )


def test_share_of_dense_layers_is_reported() -> None:
    row = {"task": "text()", "tokens": 64, "seed": 0, "budget": "25%", "policy": "icecache"}
    bytes_of = {"bytes_share": 0.504, "full_kv_bytes": 600, "dense_kv_bytes": 204}
    result = row | bytes_of | {"items": list(items(True))}
    assert "(0.504, 0.340 in dense layers)" in markdown_report({"group": [result]})


def test_items_without_a_score_are_not_compared() -> None:
    blank: dict[str, Any] = {"exact": None, "counts": True}
    [exact] = ScoreTable(ENTRIES).scales_with_data(SCALES)
    one = cell("h2o", "1/4", "a", (*items(True, True), blank))
    other = cell("random", "1/4", "a", (*items(False), blank, *items(True)))
    pair = ScoreTable([one, other]).difference(exact, "h2o", "random", "1/4")
    assert pair is not None and pair.mean == 1.0  # of the first items alone
    assert (
        ScoreTable([one, cell("random", "1/4", "a", (blank,) * 3)]).difference(
            exact, "h2o", "random", "1/4"
        )
        is None
    )


def test_speeds_and_refusals_are_reported() -> None:
    head = {"task": "text()", "tokens": 64, "seed": 0, "budget": "1/4", "bytes_share": 0.25}
    fast = head | {"policy": "h2o", "items": [], "tokens_per_second": 12.34}
    none = head | {"policy": "rag_2k", "refused": "It has no cache."}
    shown = markdown_report({"group": [fast, none]})
    assert "1 file.\n\n- rag_2k at 1/4 refused: It has no cache.\n" in shown
    assert "### Tokens per second" in shown and "12.3 [12.3, 12.3] (0.250)" in shown
    assert "1 file, 2 scored items.\n" in markdown_report({"group": ENTRIES[-1:]})


def test_a_score_that_is_nan_is_refused_and_none_is_left_out() -> None:
    known, missing = ({"exact": score, "counts": True} for score in (1.0, None))
    table = ScoreTable([cell("h2o", "1/4", "a", (known, missing))])
    [exact] = table.scales_with_data(SCALES)
    found = table.interval(exact, "h2o", "1/4")
    assert found is not None and found.mean == 1.0
    broken = ScoreTable([cell("h2o", "1/4", "a", (known, known | {"exact": float("nan")}))])
    with pytest.raises(BadParameter, match="finite scores"):
        broken.interval(exact, "h2o", "1/4")


def test_seconds_are_means_over_files() -> None:
    head = {"task": "text()", "tokens": 64, "policy": "h2o", "budget": "1/4", "items": items(True)}
    cells = [
        head
        | {"seed": seed, "prefill_seconds": 1.0 + seed}
        | {"latency": {"token": {"p50": 0.25 + seed, "p95": 0.5}}}
        for seed in (0, 1)
    ]
    assert ScoreTable(cells).seconds("h2o", "1/4") == (
        {"prefill_seconds": 1.5, "token_p50": 0.75, "token_p95": 0.5}
    )
    shown = markdown_report({"group": cells})
    assert "| policy | budget | prefill | token, median | token, p95 |" in shown
    assert "| h2o | 1/4 | 1.5000 | 0.7500 | 0.5000 |" in shown
    assert "### Seconds" not in markdown_report({"group": ENTRIES})


def test_amounts_are_read_and_sorted() -> None:
    assert MemoryBudget.parse("1/8") == MemoryBudget(0.125, BudgetUnit.SHARE)
    assert MemoryBudget.parse("12.5%") == MemoryBudget(0.125, BudgetUnit.SHARE)
    assert MemoryBudget.parse("512") == MemoryBudget(512.0, BudgetUnit.TOKENS)
    assert MemoryBudget.parse("2MiB") == MemoryBudget(2.0 * (1 << 20), BudgetUnit.BYTES)
    assert (
        MemoryBudget.parse("1/4").tokens(1000, 1) == 250
        and MemoryBudget.parse("2KB").tokens(9, 100) == 20
    )
    assert (
        MemoryBudget.parse("1/4").bytes(1000, 1) == 250
        and MemoryBudget.parse("7").bytes(1000, 3) == 21
    )
    assert sort_budgets(["own", "64", "1/16", "1", "1/4", "512"]) == (
        ["1", "1/4", "1/16", "512", "64", "own"]
    )
    for wrong in ("1/0", "5/4", "0", "1.5", "-3", "1/8 MiB", "some"):
        with pytest.raises(UsageError, match="is not a size|above 0"):
            MemoryBudget.parse(wrong)


@pytest.mark.parametrize("name", ["msgspec", "polars"])
@pytest.mark.parametrize(
    "words", [("bench", "needles"), ("plot", "rows.jsonl"), ("report", "rows.jsonl")]
)
def test_missing_bench_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, words: tuple[str, str]
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr == (
        f"larder: 'larder {words[0]}' needs {name}: pip install 'larder[bench]'.\n"
    )
