"""What measures leave behind for figures, on a tiny model with random weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from larder.bench.models import open_model
from larder.bench.rows import Row, results
from larder.bench.sources import Sources
from larder.bench.study import Study, TaskAt
from larder.bench.studying import Studying, measure_of
from larder.bench.workbench import Workbench
from larder.core.errors import BadParameter
from larder.engine.engine import Engine

LIFELOG = TaskAt('lifelog(questions=2, kinds="single")', (260,))
PROMPTS = 'prompts(utterances=2, step=50, embedder="tokens")'


@pytest.fixture(scope="module")
def bench() -> Workbench:
    torch.manual_seed(0)
    engine = Engine(open_model("random:qwen3-tiny"), "full")
    return Workbench(engine, Sources(engine.scribe.length))


def run(bench: Workbench, out: Path, policies: tuple[str, ...], **changes: object) -> list[Row]:
    """The cells of a study."""
    values: dict[str, object] = {
        "name": "tiny",
        "tasks": (LIFELOG,),
        "models": ("random:qwen3-tiny",),
        "policies": policies,
        "budgets": ("1/2",),
        "matched": ("tokens",),
        "files": 1,
        "controls": (),
    }
    running = Studying(Study(**(values | changes)), out, lambda model: bench, 1)  # pyright: ignore
    running.go()
    return running.rows()


def test_prompts_stand_in_the_place_of_the_question(bench: Workbench, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    asked, read = run(bench, out, ("exact_question",), measure=(PROMPTS, "forced"))
    near, far, exact = results([out]).shown("prompt")
    assert [row["percentile"] for row in (near, far, exact)] == [25.0, 75.0, None]
    assert exact["items"] == asked["items"] and len(asked["items"]) == 2
    bare = [{n: v for n, v in item.items() if n != "similarity"} for item in asked["items"]]
    assert bare == read["items"] and asked["budget_tokens"] == read["budget_tokens"]
    for one, other in zip(near["items"], far["items"], strict=True):
        assert 1 > one["similarity"] > other["similarity"]
        assert one["log_likelihood"] != other["log_likelihood"]


def test_what_has_no_prompt_to_replace_is_refused(bench: Workbench, tmp_path: Path) -> None:
    keydiff, many = (
        run(bench, tmp_path / f"{name}.jsonl", (name,), measure=(measure,))[0]["refused"]
        for name, measure in (
            ("keydiff", PROMPTS),
            ("exact_question", 'prompts(utterances=900, embedder="tokens")'),
        )
    )
    assert "keydiff does not judge by the question" in keydiff
    assert "fewer than the 900 of a prompt" in many
    with pytest.raises(BadParameter, match="step must be from 1 to 50"):
        measure_of("prompts(step=60)")
