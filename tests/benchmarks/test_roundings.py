"""Means under several kernels are those of the checks that `make smoke` makes."""

from __future__ import annotations

import json
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest

from larder_bench.cli.check import ROUNDINGS, check_label, known_means
from larder_bench.execution.committed_rows import cheapest_check
from larder_bench.reports.study_index import RESULTS
from larder_bench.results.rows import read_results, rows_file
from larder_bench.studies.study import read_study

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "roundings.py"
STUDIES = sorted(json.loads(ROUNDINGS.read_text()))


@pytest.mark.extended
@pytest.mark.parametrize("name", STUDIES)
def test_measured_means_are_of_the_check_of_a_study(name: str) -> None:
    """Rows that make another cell the cheapest need `benchmarks/roundings.py` again."""
    planned = cheapest_check(read_study(name), read_results([rows_file(RESULTS, name)]).cells)
    known = json.loads(ROUNDINGS.read_text())[name]
    assert known["check"] == check_label(planned)
    means = known_means(planned)
    count = len(known["kernels"]) + 1  # and the committed one
    assert means is not None and all(len(each) == count for each in means.values())


def test_means_of_another_check_are_dropped() -> None:
    merge: Any = run_path(str(SCRIPT))["merge"]
    known = dict[str, Any]()
    committed = {"kl": 0.22222222}
    record = {"study": "one", "check": "a", "means": {"kl": 0.12345678}}
    record |= {"committed_means": committed}
    merge(known, "plain", [record, {"study": "two", "check": "b", "means": {}}])
    merge(known, "avx2", [record])
    assert list(known) == ["one"] and known["one"]["kernels"]["plain"] == {"kl": 0.123457}
    assert known["one"]["committed"] == {"kl": 0.222222}
    assert set(known["one"]["kernels"]) == {"plain", "avx2"}
    merge(known, "plain", [record | {"check": "c"}])
    assert known["one"]["check"] == "c" and set(known["one"]["kernels"]) == {"plain"}


def test_limited_home_changes_row_limits_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = run_path(str(SCRIPT))
    (tmp_path / "kernels").mkdir()
    (tmp_path / "models").mkdir()
    choices = {"rows of bfloat16, one": 128, "rows of float32, one": 64}
    (tmp_path / script["CHOICES"]).write_text(json.dumps(choices))
    monkeypatch.setenv("LARDER_HOME", str(tmp_path))
    with script["limited_home"](16) as folder:
        limited = json.loads((folder / script["CHOICES"]).read_text())
        assert (folder / "models").is_symlink()
    assert limited == choices | {"rows of bfloat16, one": 16}
    assert json.loads((tmp_path / script["CHOICES"]).read_text()) == choices
