"""Results in the form of kvpress' leaderboard."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from larder.core import InputError
from larder_bench.reports.kvpress_leaderboard import main
from larder_bench.results.rows import append_rows
from result_rows import ENVIRONMENT, cell

# Of EvaluationConfig in kvpress 0.5.4, which saves all but threshold and head_compression_ratio.
FIELDS = """dataset data_dir model device press_name compression_ratio
key_channel_compression_ratio fraction max_new_tokens max_context_length query_aware needle_depth
compression_interval target_size hidden_states_buffer_size output_dir log_level model_kwargs
press_init_command seed fp8""".split()


def answered(policy: str, seed: int, scores: list[float], **more: Any) -> dict[str, Any]:
    """Cell with an answer per score, half of them of another kind."""
    items = [
        {
            "kind": ("niah_kv", "niah_magic")[number % 2],
            "question": number,
            "answer": f'said "{number}",\nand more',
            "own": score,
            "scored_by": "string_match",
            "counts": True,
        }
        for number, score in enumerate(scores)
    ]
    unscored = {"kind": "other", "question": 9, "counts": False}
    row = cell(policy, seed=seed, measure="generated", kind="needles")
    return {**row, "question": "after", **more, "items": [*items, unscored]}


def test_runs_are_folders_as_kvpress_writes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        ENVIRONMENT,
        answered("snapkv", 0, [1.0, 0.5], model="Qwen/Qwen3-8B", bytes_share=0.2),
        answered("snapkv", 1, [0.0, 1.0], model="Qwen/Qwen3-8B", bytes_share=0.3),
        answered("kvzip:int4", 0, [1.0], bytes_share=1.01),
        answered("kvzip:int4", 0, [0.5], bytes_share=0.75, question="inside", budget="3/4"),
        cell("h2o"),  # forced, without answers
        {**answered("random", 0, [1.0]), "refused": "too little"},
    ]
    append_rows(tmp_path / "bench.jsonl", rows)
    main([str(tmp_path / "bench.jsonl"), "--out", str(tmp_path / "out")])
    names = [Path(line).name for line in capsys.readouterr().out.splitlines()]
    assert names == [
        "larder_needles__1000__Qwen--Qwen3-8B__larder_snapkv__0.75",
        "larder_needles__1000__seed__larder_kvzip_int4__0.00",
        "larder_needles__1000__seed__larder_kvzip_int4__0.25__query_aware",
    ]
    folder = tmp_path / "out" / names[0]
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert sorted(config) == sorted(FIELDS)
    assert config["compression_ratio"] == 0.75 and config["query_aware"] is False
    assert (config["model"], config["press_init_command"]) == ("Qwen/Qwen3-8B", "snapkv()")
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics == {"niah_kv": {"string_match": 50.0}, "niah_magic": {"string_match": 75.0}}
    with (folder / "predictions.csv").open(newline="") as file:
        answers = list(csv.DictReader(file))
    assert [(row["task"], row["seed"], row["score"]) for row in answers] == [
        ("niah_kv", "0", "1.0"),
        ("niah_magic", "0", "0.5"),
        ("niah_kv", "1", "0.0"),
        ("niah_magic", "1", "1.0"),
    ]
    assert answers[1]["predicted_answer"] == 'said "1",\nand more'


def test_two_runs_of_one_name_are_kept_apart(tmp_path: Path) -> None:
    rows = [
        ENVIRONMENT,
        *(answered("snapkv", 0, [n], dtype=d) for n, d in ((1.0, "a"), (0.0, "b"))),
    ]
    append_rows(tmp_path / "bench.jsonl", rows)
    main([str(tmp_path), "--out", str(tmp_path / "out")])
    name = tmp_path / "out" / "larder_needles__1000__seed__larder_snapkv__0.75"
    for folder, score in ((name, 100.0), (name / "1", 0.0)):
        metrics = json.loads((folder / "metrics.json").read_text())
        assert metrics == {"niah_kv": {"string_match": score}}
    with pytest.raises(InputError, match="holds results already"):
        main([str(tmp_path), "--out", str(tmp_path / "out")])


def test_results_without_answers_are_refused(tmp_path: Path) -> None:
    append_rows(tmp_path / "bench.jsonl", [ENVIRONMENT, cell("h2o")])
    with pytest.raises(InputError, match="no generated answers"):
        main([str(tmp_path), "--out", str(tmp_path / "out")])
