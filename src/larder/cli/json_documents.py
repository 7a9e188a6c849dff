"""What `--json` prints, as plain dictionaries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from larder.cli.errors import SCHEMA, error_record
from larder.cli.evaluation import Evaluation, FileEvaluation
from larder.cli.question_run import QuestionOutcome, QuestionRun
from larder.engine.answer import Answer
from larder.engine.engine import Engine
from larder.evaluation.bootstrap import Bootstrap, Interval, questions_as_clusters

METRICS = ("exact", "f1", "f1_stemmed")


def run_document(sitting: QuestionRun) -> dict[str, Any]:
    """A conversation that was read, and everything that was asked about it."""
    figures = sitting.memory.figures
    return {
        "schema": SCHEMA,
        "policy": str(sitting.memory.policy),
        "model": sitting.engine.loaded.name,
        "context_tokens": figures.context_tokens,
        "budget_tokens": figures.budget_tokens,
        "full_kv_bytes": figures.full_kv_bytes,
        "kv_bytes": figures.kv_bytes,
        "active_kv_bytes": figures.active_kv_bytes,
        "layers": [asdict(each) | {"coverage": each.coverage.value} for each in figures.layers],
        "peak_kv_bytes": sitting.peak_kv_bytes,
        "prefill_seconds": figures.prefill_seconds,
        "setup_seconds": figures.setup_seconds,
        "answers": [answer_record(asked) for asked in sitting.asked],
        "summary": summary(sitting.asked),
    }


def answer_record(asked: QuestionOutcome) -> dict[str, Any]:
    """One question and what came of it; what is not known is left out."""
    question, answer = asked.question, asked.answer
    told: dict[str, Any] = {"question": question.question}
    if answer is not None:
        told["answer"] = answer.text
    told |= {"expected": question.answer} if question.answer else {}
    told |= {"kind": question.kind} if question.kind else {}
    told |= asdict(asked.scores) if asked.scores is not None else {}
    if answer is not None:
        told |= {} if answer.episode is None else {"episode": answer.episode}
        told |= {"decode_seconds": answer.decode_seconds, "new_tokens": answer.new_tokens}
        told |= recall_record([answer]) | rebuild_record([answer])
    if asked.error is not None:
        told["error"] = error_record(asked.error)
    return told


def summary(asked: Sequence[QuestionOutcome]) -> dict[str, Any]:
    """Counts, speed, and mean scores over all questions and per kind.

    A question that failed scores 0: it was not answered, and leaving it out would flatter.
    """
    answers = [one.answer for one in asked if one.answer is not None]
    tokens = sum(answer.new_tokens for answer in answers)
    spent = sum(answer.decode_seconds for answer in answers)
    told: dict[str, Any] = {
        "questions": len(asked),
        "errors": len(asked) - len(answers),
        "new_tokens": tokens,
        "decode_seconds": spent,
        "decode_tokens_per_second": tokens / spent if spent else 0.0,
    }
    told |= recall_record(answers) | rebuild_record(answers)
    kinds = sorted({one.question.kind for one in asked if one.question.kind})
    told |= mean_scores(asked)
    if kinds and scored_questions(asked):
        told["kinds"] = {
            kind: {"questions": len(of_kind), **mean_scores(of_kind)}
            for kind in kinds
            for of_kind in [[one for one in asked if one.question.kind == kind]]
        }
    return told


def recall_record(answers: Sequence[Answer]) -> dict[str, Any]:
    """Pages that answers fetched, and the share that lay there already; empty where none did."""
    asked = sum(answer.pages for answer in answers)
    if not asked:
        return {}
    moved = sum(answer.pages_moved for answer in answers)
    return {"pages_recalled": asked, "page_hit_rate": 1.0 - moved / asked}


def rebuild_record(answers: Sequence[Answer]) -> dict[str, Any]:
    """What was computed again for answers, over layers and steps; empty where nothing was."""
    tokens = sum(answer.tokens_rebuilt for answer in answers)
    if not tokens:
        return {}
    return {
        "tokens_rebuilt": tokens,
        "rebuild_operations": sum(answer.operations for answer in answers),
    }


def scored_questions(asked: Sequence[QuestionOutcome]) -> list[QuestionOutcome]:
    """The questions whose answer is known."""
    return [one for one in asked if one.question.answer]


def mean_scores(asked: Sequence[QuestionOutcome]) -> dict[str, float]:
    """The mean of every metric over the questions whose answer is known; empty without any."""
    scored = scored_questions(asked)
    if not scored:
        return {}
    return {name: sum(scores(scored, name)) / len(scored) for name in METRICS}


def scores(asked: Sequence[QuestionOutcome], metric: str) -> list[float]:
    """One score per question whose answer is known; 0 for one that failed."""
    return [
        0.0 if one.scores is None else float(asdict(one.scores)[metric])
        for one in scored_questions(asked)
    ]


def evaluation_document(examination: Evaluation) -> dict[str, Any]:
    """The document of one file alone; of several files, or of a comparison, all of them."""
    if examination.wanted == 1 and examination.comparison is None:
        [only] = examination.files
        assert only.sitting is not None  # without it the examination raised
        return run_document(only.sitting)
    asked = [one.asked for one in examination.files]
    told = {
        "schema": SCHEMA,
        "policy": str(examination.engine.policy),
        "model": examination.engine.loaded.name,
        "files": [_file_document(one) for one in examination.files],
        "summary": {
            "files": len(asked),
            **summary([one for of_file in asked for one in of_file]),
            **interval_records(asked),
        },
    }
    if examination.comparison is not None:
        told["summary"]["against"] = _comparison(examination, examination.comparison)
    return told


def interval_records(files: Sequence[Sequence[QuestionOutcome]]) -> dict[str, Any]:
    """Per metric the mean over all questions, with what resampling whole files makes of it."""
    return {name: asdict(interval) for name, interval in mean_intervals(files).items()}


def mean_intervals(files: Sequence[Sequence[QuestionOutcome]]) -> dict[str, Interval]:
    """The same as intervals; none where no answer is known."""
    if not any(scored_questions(asked) for asked in files):
        return {}
    return {name: Bootstrap().mean(_clusters(files, name)) for name in METRICS}


def paired_differences(
    pairs: Sequence[tuple[Sequence[QuestionOutcome], Sequence[QuestionOutcome]]],
) -> dict[str, Interval]:
    """Per metric how much better the first of each pair is, question by question."""
    if not any(scored_questions(one) for one, _ in pairs):
        return {}
    ones, others = [one for one, _ in pairs], [other for _, other in pairs]
    return {
        name: Bootstrap().difference(_clusters(ones, name), _clusters(others, name))
        for name in METRICS
    }


def _clusters(files: Sequence[Sequence[QuestionOutcome]], metric: str) -> list[list[float]]:
    """Scores by file; a file alone has only its questions to draw from."""
    return (
        questions_as_clusters(scores(files[0], metric))
        if len(files) == 1
        else [scores(a, metric) for a in files]
    )


def _file_document(one: FileEvaluation) -> dict[str, Any]:
    if one.sitting is not None:
        return {"file": str(one.path), **run_document(one.sitting)}
    assert one.error is not None  # a file is read or has an error
    return {"file": str(one.path), "schema": SCHEMA, "error": error_record(one.error)}


def _comparison(examination: Evaluation, rival: Engine) -> dict[str, Any]:
    asked = [one.asked for one in examination.others]
    return {
        "policy": str(rival.policy),
        **summary([one for of_file in asked for one in of_file]),
        **interval_records(asked),
        "difference": {n: asdict(i) for n, i in paired_differences(examination.pairs()).items()},
        "files": [_file_document(one) for one in examination.others],
    }
