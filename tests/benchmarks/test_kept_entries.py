"""Agreement of kept entries with kvpress: the index, the shares to remove, and the page's table."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from larder import Policy
from larder_bench.results.rows import read_rows

ROOT = Path(__file__).parents[2]
PEERS = ROOT / "benchmarks" / "peers"


@pytest.fixture(autouse=True)
def among_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PEERS))


@pytest.mark.parametrize(
    "file", ["kept_entries", "kept_entries_informed", "kept_entries_thresholds"]
)
def test_page_has_the_table_of_the_measured_rows(file: str) -> None:
    rows = read_rows(PEERS / f"{file}.jsonl.zst")
    page = (ROOT / "docs" / "kvpress.md").read_text()
    table = list(import_module("kept_entries").table(rows))
    assert "\n".join(table) in page
    assert len(table) == 2 + len({row["press"] for row in rows})


def test_line_has_the_mean_and_the_least_of_its_texts() -> None:
    figures = [(1.0, 1.0), (0.7, 0.5), (0.4, 0.6)]
    rows = [{"press": "p", "policy": "q", "mean": m, "least": least} for m, least in figures]
    *_, line = import_module("kept_entries").table(rows)
    assert line == "| `p` | `q` | .700 | .500 |"


def test_agreement_is_the_jaccard_index_of_each_head() -> None:
    agreement = import_module("kept_entries").agreement
    theirs, ours = [[[0, 1, 2], []], [[5], [1, 2]]], [[[0, 1, 3], []], [[6], [1, 2]]]
    assert agreement(theirs, ours) == [0.5, 1.0, 0.0, 1.0]


@pytest.mark.parametrize("length", [1154, 1005, 97, 3])
def test_press_keeps_as_many_entries_as_asked(length: int) -> None:
    share = import_module("peer_worker").removed_share
    for kept in range(1, length):
        assert int(length * (1 - share(kept, length))) == kept


def test_pair_is_a_policy_with_a_name_of_its_own() -> None:
    pairs = import_module("_equal_pairs")
    every = [*pairs.EQUAL_PAIRS, pairs.pyramid_pair(288), *pairs.informed_pairs(575)]
    assert len({pair.peer for pair in every}) == len({pair.name for pair in every}) == len(every)
    assert all(Policy.parse(pair.ours).schedule for pair in every)


def test_presses_get_the_inputs_they_need() -> None:
    """A press whose share is an argument keeps it; a delimiter is in neither text."""
    inform = import_module("informed_presses").inform_press
    press: Any = SimpleNamespace()
    inform(press, "FinchPress(rerotate_keys=False)", {"ids": [0, 1, 3], "question": [2, 5]})
    assert press.delimiter_token_id == 4
    inform(press, "LUKVPress()", {"curve": [[0.5, 1.0]]})
    assert press._budget_curves.shape == (99, 1, 2)
    inform(press, "KnormPress()", {})
    assert set(vars(press)) == {"delimiter_token_id", "_budget_curves"}


def test_jobs_of_a_method_share_a_process() -> None:
    jobs = import_module("_jobs")
    runs: list[int] = []

    class Setting:
        options = type("Options", (), {"process": "policy"})

        def row(self, job: object, results: list[object]) -> dict[str, object]:
            return {"results": results}

    task = import_module("larder_bench.tasks.base").parse_task("lifelog()")
    made = [jobs.ComparisonJob(task, 400, seed, name, "1/4") for name in "ab" for seed in (0, 1)]
    runner = jobs.JobRunner(Setting(), made)

    def run(together: list[object]) -> None:
        runs.append(len(together))
        runner._results.update({job: [job] for job in together})

    object.__setattr__(runner, "_run", run)
    assert [runner.measure(job)["results"] for job in made] == [[job] for job in made]
    assert runs == [2, 2]
