"""From answers to scored items: one for most questions, one for each part of a long answer.

kind             of the question
question, turn   its place among the questions of the conversation, and in its sitting
item             which part of the answer; absent where it is scored as a whole
depth            where the needed fact stands, 0 to 1; null where several are needed
exact, f1, stemmed_f1, log_likelihood
                 null where the measure has no such number
own              the score of the public data set, by the way that `scored_by` names; absent
                 where there is none
counts           whether the answer is known
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from larder.core.conversation import Question
from larder.evaluation.answer_metrics import exact_match, stemmed_f1, token_f1
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter
from larder_bench.results.rows import Row
from larder_bench.scoring.answer_items import numbered_item_spans
from larder_bench.scoring.dataset_metrics import dataset_score
from larder_bench.scoring.teacher_forcing import AnswerLikelihood, split_by_spans

NUMBERED = re.compile(r"\d+: ")  # as against values that are numbers


@dataclass(frozen=True)
class NumberedQuestion:
    """A question in its place.

    Args:
        number: among all questions of the conversation.
        turn: in its sitting.
    """

    question: Question
    number: int
    turn: int

    def item(self, part: int | None = None) -> Row:
        """First fields of its items."""
        told: Row = {"kind": self.question.kind, "question": self.number, "turn": self.turn}
        told |= {} if part is None else {"item": part}
        return told | {"depth": self.question.depth}


def likelihood_items(
    posed: NumberedQuestion, forced: AnswerLikelihood, scribe: TokenizerAdapter
) -> list[Row]:
    """How the expected answer fared, read as if it had been said; only the first of several."""
    spans = posed.question.items
    if not spans:
        return [posed.item() | _likelihood_fields(forced, posed)]
    parts = split_by_spans(forced, scribe, spans)
    return [posed.item(n) | _likelihood_fields(part, posed) for n, part in enumerate(parts)]


def generated_items(posed: NumberedQuestion, text: str) -> list[Row]:
    """How an answer agrees with the expected one, or with the nearest of several.

    A part of an answer is right where any part of what was said is the same; numbers belong to
    their parts.
    """
    question = posed.question
    if not question.items:
        answers = (question.answer, *question.others)
        told = _generated_fields([text], answers, posed) | {"answer": text}
        return [posed.item() | told | _dataset_fields(text, question)]
    said = _parts(text)
    wanted = [_strip_part(question.answer[start:stop]) for start, stop in question.items]
    return [posed.item(n) | _generated_fields(said, [one], posed) for n, one in enumerate(wanted)]


def _likelihood_fields(forced: AnswerLikelihood, posed: NumberedQuestion) -> Row:
    return {
        "exact": forced.exact,
        "f1": None,
        "f1_stemmed": None,
        "log_likelihood": round(forced.log_likelihood, 4) if forced.hits else None,
        "counts": bool(posed.question.answer) and bool(forced.hits),
    }


def _generated_fields(said: Sequence[str], expected: Sequence[str], posed: NumberedQuestion) -> Row:
    kind = posed.question.kind

    def best(score: Callable[[str, str], float]) -> float:
        return round(max(float(score(one, other)) for one in said for other in expected), 4)

    return {
        "exact": bool(best(exact_match)),
        "f1": best(token_f1),
        "f1_stemmed": best(lambda one, other: stemmed_f1(one, other, kind)),
        "log_likelihood": None,
        "counts": bool(posed.question.answer),
    }


def _dataset_fields(text: str, question: Question) -> Row:
    if not question.scorer:
        return {}
    return {"own": round(dataset_score(text, question), 4), "scored_by": question.scorer}


def _parts(text: str) -> list[str]:
    """What was said, cut where items are numbered, else at commas."""
    spans = numbered_item_spans(text)
    if len(spans) > 1 or NUMBERED.match(text):
        return [_strip_part(text[start:stop]) for start, stop in spans]
    return list(_listed(text)) or [""]


def _listed(text: str) -> Iterator[str]:
    return (_strip_part(part) for part in text.split(","))


def _strip_part(part: str) -> str:
    return part.strip().rstrip(",").strip()
