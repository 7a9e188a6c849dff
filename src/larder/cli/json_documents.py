"""JSON documents of `larder ask`, `eval` and `demo`: answers, scores, cache sizes, intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from larder.cli.errors import SCHEMA, error_record
from larder.cli.question_run import QuestionOutcome, QuestionRun
from larder.engine.answer import Answer
from larder.engine.engine import Engine
from larder.prefill.base import ContextReuse

if TYPE_CHECKING:
    from larder.cli.evaluation import Evaluation, FileEvaluation
    from larder.evaluation.bootstrap import Interval

METRICS = ("exact", "contains", "f1", "f1_stemmed")


def metrics() -> tuple[str, ...]:
    """Names of the metrics that can be computed: `f1_stemmed` needs the extra `bench`."""
    from larder.evaluation.answer_metrics import can_stem

    return METRICS if can_stem() else METRICS[:-1]


def run_document(run: QuestionRun) -> dict[str, Any]:
    """Document of one run: cache sizes, answers, and their summary."""
    figures = run.memory.figures
    return {
        "schema": SCHEMA,
        "policy": str(run.memory.policy),
        "model": run.engine.loaded.name,
        "context_tokens": figures.context_tokens,
        "budget_tokens": figures.budget_tokens,
        "full_kv_bytes": figures.full_kv_bytes,
        "kv_bytes": figures.kv_bytes,
        "active_kv_bytes": figures.active_kv_bytes,
        "layers": [asdict(each) | {"coverage": each.coverage.value} for each in figures.layers],
        "peak_kv_bytes": run.peak_kv_bytes,
        "prefill_seconds": figures.prefill_seconds,
        "setup_seconds": figures.setup_seconds,
        **context_record(run.memory.reuse),
        "answers": [answer_record(outcome) for outcome in run.outcomes],
        "summary": summary(run.outcomes),
    }


def context_record(reuse: ContextReuse) -> dict[str, Any]:
    """Tokens of contexts and what was reused of them; empty without contexts."""
    if not reuse.tokens:
        return {}
    fields = {
        "tokens": reuse.tokens,
        "cached_tokens": reuse.cached_tokens,
        "recomputed_tokens": reuse.recomputed_tokens,
    }
    return {"contexts": fields}


def answer_record(outcome: QuestionOutcome) -> dict[str, Any]:
    """Record of one question; unknown values are left out."""
    question, answer = outcome.question, outcome.answer
    record: dict[str, Any] = {"question": question.question}
    if answer is not None:
        record["answer"] = answer.text
    record |= {"expected": question.answer} if question.answer else {}
    record |= {"kind": question.kind} if question.kind else {}
    if outcome.scores is not None:
        record |= {name: getattr(outcome.scores, name) for name in metrics()}
    if answer is not None:
        record |= {} if answer.episode is None else {"episode": answer.episode}
        record |= {"decode_seconds": answer.decode_seconds, "new_tokens": answer.new_tokens}
        record |= recall_record([answer]) | rebuild_record([answer])
    if outcome.error is not None:
        record["error"] = error_record(outcome.error)
    return record


def summary(outcomes: Sequence[QuestionOutcome]) -> dict[str, Any]:
    """Counts, speed, and mean scores over all questions and per kind.

    A failed question scores 0: leaving it out would raise the mean.
    """
    answers = [one.answer for one in outcomes if one.answer is not None]
    tokens = sum(answer.new_tokens for answer in answers)
    spent = sum(answer.decode_seconds for answer in answers)
    document: dict[str, Any] = {
        "questions": len(outcomes),
        "errors": len(outcomes) - len(answers),
        "new_tokens": tokens,
        "decode_seconds": spent,
        "decode_tokens_per_second": tokens / spent if spent else 0.0,
    }
    document |= recall_record(answers) | rebuild_record(answers)
    kinds = sorted({one.question.kind for one in outcomes if one.question.kind})
    document |= mean_scores(outcomes)
    if kinds and scored_questions(outcomes):
        document["kinds"] = {
            kind: {"questions": len(of_kind), **mean_scores(of_kind)}
            for kind in kinds
            for of_kind in [[one for one in outcomes if one.question.kind == kind]]
        }
    return document


def recall_record(answers: Sequence[Answer]) -> dict[str, Any]:
    """Number of recalled pages and their hit rate on the device; empty without recall."""
    requested = sum(answer.pages for answer in answers)
    if not requested:
        return {}
    moved = sum(answer.pages_moved for answer in answers)
    return {"pages_recalled": requested, "page_hit_rate": 1.0 - moved / requested}


def rebuild_record(answers: Sequence[Answer]) -> dict[str, Any]:
    """Tokens recomputed for answers, over layers and decode steps; empty if none."""
    tokens = sum(answer.tokens_rebuilt for answer in answers)
    if not tokens:
        return {}
    return {
        "tokens_rebuilt": tokens,
        "rebuild_operations": sum(answer.operations for answer in answers),
    }


def scored_questions(outcomes: Sequence[QuestionOutcome]) -> list[QuestionOutcome]:
    """Outcomes of questions with an expected answer."""
    return [one for one in outcomes if one.question.answer]


def mean_scores(outcomes: Sequence[QuestionOutcome]) -> dict[str, float]:
    """Mean of every metric over questions with an expected answer; empty without any."""
    scored = scored_questions(outcomes)
    if not scored:
        return {}
    return {name: sum(scores(scored, name)) / len(scored) for name in metrics()}


def scores(outcomes: Sequence[QuestionOutcome], metric: str) -> list[float]:
    """Score of each question with an expected answer; 0 for a failed one."""
    return [
        0.0 if one.scores is None else float(getattr(one.scores, metric))
        for one in scored_questions(outcomes)
    ]


def evaluation_document(evaluation: Evaluation) -> dict[str, Any]:
    """Document of an evaluation: of one file its run, otherwise all files and a summary."""
    if evaluation.num_files == 1 and evaluation.comparison is None:
        [only] = evaluation.files
        assert only.run is not None  # evaluate_files raises otherwise
        return run_document(only.run)
    outcomes = [one.outcomes for one in evaluation.files]
    document = {
        "schema": SCHEMA,
        "policy": str(evaluation.engine.policy),
        "model": evaluation.engine.loaded.name,
        "files": [_file_document(one) for one in evaluation.files],
        "summary": {
            "files": len(outcomes),
            **summary([one for of_file in outcomes for one in of_file]),
            **interval_records(outcomes),
        },
    }
    if evaluation.comparison is not None:
        document["summary"]["against"] = _comparison(evaluation, evaluation.comparison)
    return document


def interval_records(files: Sequence[Sequence[QuestionOutcome]]) -> dict[str, Any]:
    """Mean and bootstrap interval per metric, as JSON records."""
    return {name: asdict(interval) for name, interval in mean_intervals(files).items()}


def mean_intervals(files: Sequence[Sequence[QuestionOutcome]]) -> dict[str, Interval]:
    """Mean and bootstrap interval per metric; empty without expected answers."""
    if not any(scored_questions(requested) for requested in files):
        return {}
    from larder.evaluation.bootstrap import Bootstrap

    return {name: Bootstrap().mean(_clusters(files, name)) for name in metrics()}


def paired_differences(
    pairs: Sequence[tuple[Sequence[QuestionOutcome], Sequence[QuestionOutcome]]],
) -> dict[str, Interval]:
    """Mean difference per metric, first minus second, paired by question."""
    if not any(scored_questions(one) for one, _ in pairs):
        return {}
    from larder.evaluation.bootstrap import Bootstrap

    ones, others = [one for one, _ in pairs], [other for _, other in pairs]
    return {
        name: Bootstrap().difference(_clusters(ones, name), _clusters(others, name))
        for name in metrics()
    }


def _clusters(files: Sequence[Sequence[QuestionOutcome]], metric: str) -> list[list[float]]:
    """Scores by file; of a single file each question is a cluster of its own."""
    from larder.evaluation.bootstrap import questions_as_clusters

    return (
        questions_as_clusters(scores(files[0], metric))
        if len(files) == 1
        else [scores(a, metric) for a in files]
    )


def _file_document(one: FileEvaluation) -> dict[str, Any]:
    if one.run is not None:
        return {"file": str(one.path), **run_document(one.run)}
    assert one.error is not None  # a file has a run or an error
    return {"file": str(one.path), "schema": SCHEMA, "error": error_record(one.error)}


def _comparison(evaluation: Evaluation, baseline: Engine) -> dict[str, Any]:
    outcomes = [one.outcomes for one in evaluation.others]
    return {
        "policy": str(baseline.policy),
        **summary([one for of_file in outcomes for one in of_file]),
        **interval_records(outcomes),
        "difference": {n: asdict(i) for n, i in paired_differences(evaluation.pairs()).items()},
        "files": [_file_document(one) for one in evaluation.others],
    }
