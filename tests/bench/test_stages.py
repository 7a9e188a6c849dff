"""The stages of a long conversation add up, and only episodic policies have episode stages."""

from __future__ import annotations

from pathlib import Path

import pytest

from larder import Engine
from larder.core import BadParameter
from larder_bench.datasets.sources import TaskSources
from larder_bench.execution.runner import StudyRunner
from larder_bench.measures.stages import Stages
from larder_bench.plots.report import render_report
from larder_bench.random_models import open_model
from larder_bench.results.rows import read_results
from larder_bench.results.tables import markdown_report
from larder_bench.studies.model_context import ModelContext
from larder_bench.studies.study import Study, StudyTask

EPISODES = (
    'episodes(count=2, embedder="tokens") > blockwise() > patched(prompt="episode") > pooled()'
)


@pytest.mark.extended
def test_turn_seconds_are_the_sum_of_their_stages(tmp_path: Path) -> None:
    engine = Engine(open_model("random:qwen3-tiny"), policy="full")
    bench = ModelContext(engine, TaskSources(engine.tokenizer.count_tokens))
    study = Study(
        "tiny",
        (StudyTask('lifelog(questions=2, kinds="single")', (260,)),),
        models=("random:qwen3-tiny",),
        policies=(EPISODES, "keydiff", "exact_question"),
        controls=("full",),
        budgets=("1/2",),
        matched=("tokens",),
        files=1,
        measure=("stages(turns=10, stays=4, timed=2, answer=2)",),
    )
    out = tmp_path / "rows.jsonl"
    running = StudyRunner(study, out, lambda model: bench, 1)
    running.run()
    episodes, keydiff, asked, full = running.rows()
    for row in (episodes, keydiff, full):
        once = [row[f"{name}_seconds"] for name in ("embed", "cluster", "prefill")]
        each = row["match_seconds"] + row["decode_seconds"] + row["retrieve_seconds"] / 4
        assert row["turn_seconds"] == pytest.approx(sum(once) / 10 + each, abs=1e-4)
        total = row["prefill_seconds"] + row["decode_seconds"]
        assert row["uncached_turn_seconds"] == pytest.approx(total, abs=1e-4)
        assert row["decode_seconds"] > 0 and row["kv_bytes"] > 0
        is_episodic = row is episodes
        assert (row["embed_seconds"] > 0) == (row["retrieve_seconds"] > 0) == is_episodic
    assert "needs a prefill for each question" in asked["refused"]
    shown = read_results([out]).exhibits_of("breakdown")
    names = [part["name"] for part in shown[0]["parts"]]
    assert names == ["embed", "cluster", "prefill", "match", "retrieve", "decode"]
    assert "| a turn, all shared out |" in markdown_report({"all": [episodes, full]})
    assert "<th scope=col>a turn read anew</th>" in render_report([out])


@pytest.mark.parametrize("parameters", [{"turns": 0}, {"timed": 0}, {"answer": 0}, {"stays": 0.5}])
def test_parameters_out_of_range_are_refused(parameters: dict[str, int]) -> None:
    with pytest.raises(BadParameter, match=f"stages.{next(iter(parameters))} must be at least 1"):
        Stages(**parameters)
