"""A study that is killed and resumed has the same rows as an uninterrupted one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from larder import Conversation, Message
from larder.core import BudgetError, InputError, UsageError
from larder_bench.execution.resumable_run import RunProgress
from larder_bench.execution.runner import StudyRunner, validate_study
from larder_bench.measures.decode import Decode
from larder_bench.measures.forced import ForcedAnswers
from larder_bench.results.rows import TEXT_DIGEST_KEY, Row, read_rows, without_timings
from larder_bench.studies.cells import Cell
from larder_bench.studies.model_context import ModelContext
from larder_bench.studies.study import Study, StudyTask

RAG = 'rag_2k(segment=1, embedder="tokens")'
STUDY = Study(
    "tiny",
    (StudyTask("passkey()", (180,)),),
    models=("random:qwen3-tiny",),
    budgets=("1/2",),
    matched=("bytes",),
    files=2,
    controls=("full",),
)


def study(policies: Sequence[str], **changes: object) -> Study:
    values = vars(STUDY) | {"policies": tuple(policies)} | changes
    return Study(**values)


def run(bench: ModelContext, wanted: Study, out: Path, stop_after: int = -1) -> list[Row]:
    def stop_at(row: Row, pace: RunProgress) -> None:
        if pace.done == stop_after:
            raise KeyboardInterrupt

    running = StudyRunner(wanted, out, lambda model: bench, 1)
    try:
        running.run(stop_at)
    except KeyboardInterrupt:
        assert stop_after > 0
    return running.rows()


@pytest.mark.extended
def test_killed_study_resumes(bench: ModelContext, tmp_path: Path) -> None:
    wanted = study(("keydiff", "exact_question", RAG))
    whole = run(bench, wanted, tmp_path / "whole.jsonl")
    path = tmp_path / "halves.jsonl"
    cells = run(bench, wanted, path, stop_after=1)
    assert read_rows(path)[2:] == cells and read_rows(path)[1]["row"] == "budgets"
    with path.open("a") as file:
        file.write('{"schema": 1, "row": "ce')  # killed while writing
    halves = run(bench, wanted, path)
    assert list(map(without_timings, halves)) == list(map(without_timings, whole))
    assert len(whole) == 2 * 4 and all(row["items"] for row in whole)
    before = path.read_bytes()
    run(bench, wanted, path)
    assert path.read_bytes() == before
    names = [row["row"] for row in read_rows(path)]
    assert names == ["environment", "budgets", "cell", "budgets"] + ["cell"] * 7
    once = [row for row in read_rows(tmp_path / "whole.jsonl") if row["row"] != "environment"]
    assert list(map(without_timings, once)) == list(map(without_timings, read_rows(path)[1:]))
    assert {row["environment"] for row in whole} == {read_rows(path)[0]["id"]}
    shares = [row["bytes_share"] for row in whole if row["policy"] not in ("full", RAG)]
    assert len(shares) == 4 and 0.45 < min(shares) <= max(shares) <= 0.5


def test_equivalent_cells_are_measured_once(
    bench: ModelContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []
    measure = ForcedAnswers.measure

    def counted(
        self: ForcedAnswers, bench: ModelContext, cell: Cell, tokens_per_byte: float | None
    ) -> Row:
        measured.append(f"{cell.subject.name} {cell.matched.value}")
        return measure(self, bench, cell, tokens_per_byte)

    monkeypatch.setattr(ForcedAnswers, "measure", counted)
    wanted = study(("h2o", RAG), matched=("bytes", "tokens"), files=1)
    whole = run(bench, wanted, tmp_path / "whole.jsonl")
    assert measured == ["h2o bytes", f"{RAG} bytes", "full bytes", "h2o tokens"]
    assert len(validate_study(wanted)) == len(whole) == 6
    shared = [row for row in whole if "shared_with" in row]
    assert [(row["policy"], row["matched"]) for row in shared] == [
        (RAG, "tokens"),
        ("full", "tokens"),
    ]
    for one, other in zip(whole[1:3], shared, strict=True):
        same = {"matched": "tokens"}
        assert without_timings(one) | same == without_timings(other)
    halves = run(bench, wanted, tmp_path / "halves.jsonl", stop_after=4)
    halves = run(bench, wanted, tmp_path / "halves.jsonl")
    assert (
        list(map(without_timings, halves)) == list(map(without_timings, whole))
        and len(measured) == 8
    )


def test_duplicate_study_entries_are_measured_once() -> None:
    wanted = study(("h2o",))
    twice = replace(
        wanted,
        models=wanted.models * 2,
        tasks=wanted.tasks * 2,
        measure=("forced", "forced()"),
        matched=wanted.matched * 2,
        budgets=wanted.budgets * 2,
    )
    assert validate_study(twice) == validate_study(wanted)


@pytest.mark.extended
def test_rows_of_other_studies_are_ignored(bench: ModelContext, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    first = run(bench, study(("keydiff", "h2o")), path)
    # Taken up from another seed, the first guess is that of a file that holds nothing yet.
    lines = [
        row | ({"budget_tokens": 1} if row["seed"] == 0 else {}) for row in read_rows(path)[1:]
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in lines))
    wanted = study(("keydiff",), first_seed=1)
    running = StudyRunner(wanted, path, lambda model: bench, 1)
    running.run()
    fresh = run(bench, wanted, tmp_path / "fresh.jsonl")
    assert [row["seed"] for row in running.rows() if row["policy"] == "keydiff"] == [1, 2]
    assert len(first) == 6 and (len(running.rows()), running.num_other_cells()) == (4, 4)
    late = [without_timings(row) for row in running.rows() if row["seed"] == 2]
    assert late == [without_timings(row) for row in fresh if row["seed"] == 2]
    assert {(row["device"], row["dtype"]) for row in first} == {("cpu", "float32")}


def test_retrieved_passages_are_the_nearest_within_the_token_limit(bench: ModelContext) -> None:
    sentences = [f"The code of box {number} is {number}{number}." for number in range(30)]
    talk = Conversation("talk", tuple(Message("user", text) for text in sentences))
    passages = bench.passages(talk, "tokens", 1)
    ranked = passages.nearest("What is the code of box 7?", range(30))
    assert ranked[0] == 7
    made = passages.fitting([*ranked[:3], 2], 1000)
    assert [m.content for m in made.messages] == [sentences[n] for n in sorted({*ranked[:3], 2})]
    for tokens in (40, 80, 160):
        taken = len(
            bench.engine.tokenizer.encode_conversation(passages.fitting(ranked, tokens)).ids
        )
        assert tokens - 20 < taken <= tokens
    assert set(passages.episode("What is the code of box 7?", 3, 0)) < set(range(30))
    with pytest.raises(BudgetError, match="No segment of 1"):
        passages.fitting(ranked, 5)


def test_refused_cell_is_recorded(bench: ModelContext, tmp_path: Path) -> None:
    wanted = study(("snapkv",), budgets=("8",), matched=("tokens",), controls=(), files=1)
    [row] = run(bench, wanted, tmp_path / "rows.jsonl")
    assert "smaller than" in row["refused"] and "items" not in row


def test_missing_corpus_raises_instead_of_a_refused_row(
    bench: ModelContext, tmp_path: Path
) -> None:
    wanted = study(("snapkv",), tasks=(StudyTask("bookings()", (300,)),))
    with pytest.raises(UsageError, match="--corpus FOLDER"):
        run(bench, wanted, tmp_path / "rows.jsonl")
    assert not (tmp_path / "rows.jsonl").exists()


def test_generated_rows_have_answers_scores_and_latencies(
    bench: ModelContext, tmp_path: Path
) -> None:
    wanted = study(("h2o",), measure=("generated",), files=1)
    for row in run(bench, wanted, tmp_path / "rows.jsonl"):
        [item] = row["items"]
        assert {"exact", "f1", "f1_stemmed", "answer", "depth", "turn"} <= set(item)
        assert row["latency"]["token"]["p50"] <= row["latency"]["token"]["p95"]
        assert row["latency"]["first_token"]["p50"] > 0


def test_fidelity_of_the_full_cache_is_perfect(bench: ModelContext, tmp_path: Path) -> None:
    wanted = study(("random",), measure=("fidelity(following=8)",), files=1)
    random, full = run(bench, wanted, tmp_path / "rows.jsonl")
    assert (random["policy"], full["policy"]) == ("random", "full")
    assert all(i["kl"] < 1e-5 and i["same"] and i["mass"] > 1 - 1e-5 for i in full["items"])
    assert all(0 < item["mass"] < 1 - 1e-3 for item in random["items"])
    assert max(item["kl"] for item in random["items"]) > 1e-4


def test_decode_measure_fills_memory_with_more_sequences_of_smaller_caches(
    bench: ModelContext, tmp_path: Path
) -> None:
    tasks, measure = (StudyTask("passkey()", (256,)),), ("decode(steps=2, memory_mib=1)",)
    wanted = study(("h2o", "kv_direct"), tasks=tasks, measure=measure, files=1)
    h2o, again, full = run(bench, wanted, tmp_path / "rows.jsonl")
    assert "recomputes entries from their text" in again["refused"]
    assert h2o["batch"] > full["batch"] > 1
    assert h2o["kv_bytes"] < 0.51 * full["kv_bytes"] and h2o["budget_tokens"] < 128
    assert h2o["tokens_per_second"] > 0 and h2o["latency"]["token"]["p95"] > 0


def test_decode_measure_of_a_token_budget_runs_once_for_both_quantities(
    bench: ModelContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []

    def counted(
        self: Decode, bench: ModelContext, cell: Cell, tokens_per_byte: float | None
    ) -> Row:
        measured.append(f"{cell.budget} {cell.matched.value}")
        return {"items": []}

    monkeypatch.setattr(Decode, "measure", counted)
    wanted = study(("h2o",), measure=("decode",), budgets=("64", "1/2"), controls=(), files=1)
    rows = run(bench, replace(wanted, matched=("bytes", "tokens")), tmp_path / "rows.jsonl")
    assert measured == ["64 bytes", "1/2 bytes", "1/2 tokens"] and len(rows) == 4


def test_rows_of_different_texts_are_not_mixed(bench: ModelContext, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    first = run(bench, study(("random",), controls=()), path)
    assert [len(row[TEXT_DIGEST_KEY]) for row in first] == [12, 12] and first[0][
        TEXT_DIGEST_KEY
    ] != first[1][TEXT_DIGEST_KEY]
    assert len(run(bench, study(("random", "h2o"), controls=()), path)) == 4
    lines = [
        row | ({TEXT_DIGEST_KEY: "0" * 12} if TEXT_DIGEST_KEY in row else {})
        for row in read_rows(path)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in lines))
    with pytest.raises(InputError, match="same --corpus and --data as then, or another --out"):
        run(bench, study(("random", "keydiff"), controls=()), path)
    assert len(read_rows(path)) == len(lines)


def test_durations_are_estimated_from_rows_and_the_rest_is_measured(
    bench: ModelContext, tmp_path: Path
) -> None:
    """Twice the mean of a policy's rows for its two cells; without rows a cell is measured."""
    wanted, opened = study(("keydiff",)), list[str]()

    def load(model: str) -> ModelContext:
        opened.append(model)
        return bench

    running = StudyRunner(wanted, tmp_path / "none.jsonl", load, 1)
    heads = [cell.head({}) for cell in validate_study(wanted)]
    rows = [row | {"seconds": 1.0 + row["seed"]} for row in heads]
    shared = [row | {"seconds": 99.0, "shared_with": "bytes"} for row in heads]
    seconds = running.estimate(rows + shared)
    assert opened == []
    first = wanted.first_seed
    assert {group[-1]: each for group, each in seconds.items()} == pytest.approx(
        {"keydiff": 2 * (1.5 + first), "full": 2 * (1.5 + first)}
    )
    others = running.estimate([row for row in rows if row["policy"] == "full"])
    assert opened == ["random:qwen3-tiny"]
    assert {group[-1] for group in others} == {"keydiff", "full"}
