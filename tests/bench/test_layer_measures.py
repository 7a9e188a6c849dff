"""KL at the answers, and the profile of a model by layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from larder import Engine
from larder.core import BadParameter, Mode
from larder.models import BatchSegment as Tokens
from larder.models import SensitivityProfile, layer_similarities
from larder_bench.datasets.sources import TaskSources
from larder_bench.execution.runner import StudyRunner
from larder_bench.measures.similarity import SimilarityMeasure
from larder_bench.random_models import open_model
from larder_bench.results.rows import Row
from larder_bench.studies.model_context import ModelContext
from larder_bench.studies.study import Study, StudyTask
from larder_bench.tasks.base import BenchTask, parse_task

LIFELOG = StudyTask('lifelog(questions=3, kinds="single,list")', (260,))


@pytest.fixture(scope="module")
def bench() -> ModelContext:
    torch.manual_seed(0)
    engine = Engine(open_model("random:qwen3-tiny"), policy="full")
    return ModelContext(engine, TaskSources(engine.tokenizer.count_tokens))


def run(bench: ModelContext, out: Path, policies: tuple[str, ...], measure: str) -> list[Row]:
    changes = {"budgets": ("1/2",), "matched": ("tokens",), "files": 1, "controls": ()}
    result = {"models": ("random:qwen3-tiny",), "policies": policies, "measure": (measure,)}
    study = Study("tiny", (LIFELOG,), **changes, **result)  # pyright: ignore
    running = StudyRunner(study, out, lambda model: bench, 1)
    running.run()
    return running.rows()


def slowly(bench: ModelContext, policy: str, budget: str | None) -> list[tuple[float, float]]:
    """KL and agreement of each answer, from the two distributions at each of its tokens."""
    conversation = bench.conversation(_task(), 0, 260)
    memories = [
        bench.engine.read(conversation),
        bench.engine.under(policy, budget).read(conversation),
    ]
    found: list[tuple[float, float]] = []
    for question in conversation.questions:
        rows: list[torch.Tensor] = []
        for memory in memories:
            cache, _ = memory.activate_for(question.question)
            fork, given = cache.fork(), bench.engine.tokenizer.encode_question(question.question)
            answer = bench.engine.tokenizer.encode(question.answer)
            ids = given + answer
            wanted = range(len(given) - 1, len(ids))
            predict = bench.engine.loaded.decoder.forward_logits
            rows.append(predict([Tokens(fork, ids)], Mode.APPEND, wanted).softmax(-1).double())
        true, believed = rows
        nats = (true * (true / believed).log()).sum(-1).mean()
        same = (true.argmax(-1) == believed.argmax(-1)).double().mean()
        found.append((float(nats), float(same)))
    return found


def _task() -> BenchTask:
    return parse_task(LIFELOG.spelling)


def test_answer_kl_equals_its_reference_and_is_zero_for_the_full_cache(
    bench: ModelContext, tmp_path: Path
) -> None:
    rows = run(bench, tmp_path / "rows.jsonl", ("keydiff", "exact_question", "full"), "answer_kl")
    keydiff, asked, full = rows
    tokens = str(keydiff["budget_tokens"])
    for item, (nats, same) in zip(keydiff["items"], slowly(bench, "keydiff", tokens), strict=True):
        assert item["kl"] == pytest.approx(nats, abs=2e-5) and item["kl"] > 1e-5
        assert item["same"] == pytest.approx(same, abs=1e-4)
    assert all(item["kl"] < 1e-6 and item["same"] == 1.0 for item in full["items"])
    assert [item["question"] for item in asked["items"]] == [0, 1, 2]


def test_layers_are_profiled_under_the_full_cache(bench: ModelContext, tmp_path: Path) -> None:
    row, refused = run(bench, tmp_path / "rows.jsonl", ("full", "keydiff"), "similarity(blocks=3)")
    decoder, ids = (
        bench.engine.loaded.decoder,
        bench.engine.tokenizer.encode_conversation(bench.conversation(_task(), 0, 260)).ids,
    )
    true = layer_similarities(
        decoder, ids, SensitivityProfile(len(ids), 32, -(-len(ids) // 3), 0.5)
    )
    assert [item["similarity"] for item in row["items"]] == [round(one, 5) for one in true]
    assert [item["kind"] for item in row["items"]] == ["layer 0", "layer 1"]
    assert row["items"][1]["similarity"] < 1 == row["items"][0]["similarity"]
    assert "which keydiff does not change" in refused["refused"]


@pytest.mark.parametrize("parameters", [{"blocks": 1}, {"overlap": 1.5}, {"sinks": -1}])
def test_parameters_out_of_range_are_refused(parameters: dict[str, float]) -> None:
    with pytest.raises(BadParameter, match=f"similarity.{next(iter(parameters))} must be"):
        SimilarityMeasure(**parameters)  # pyright: ignore[reportArgumentType]


def test_turn_sequences_are_refused(bench: ModelContext, tmp_path: Path) -> None:
    changes = {"models": ("random:qwen3-tiny",), "policies": ("keydiff",), "controls": ()}
    study = Study(
        "tiny", (StudyTask("turns()", (260,)),), measure=("answer_kl",), files=1, **changes
    )  # pyright: ignore
    running = StudyRunner(study, tmp_path / "rows.jsonl", lambda model: bench, 1)
    running.run()
    assert all("asks each on its own" in row["refused"] for row in running.rows())
