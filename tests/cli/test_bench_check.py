"""`larder bench --check` says what it skipped, and fails if nothing was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_results import Run, complaint
from larder_bench.cli import check


def test_missing_rows_are_skipped_with_the_reason(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(check, "RESULTS", tmp_path)
    result = run("bench", "--check", "--study", "recital")
    assert result.exit_code == 1 and result.stdout.startswith("recital: skipped: ")


def test_a_task_is_refused(run: Run) -> None:
    assert "name a study, no task" in complaint(run("bench", "--check", "needles"), 2)
