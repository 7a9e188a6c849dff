"""Scored items of answers: one per question, or one per part of a long answer.

kind             of the question
question, turn   index among the questions of the conversation, and in its sequence
item             part of the answer; absent if the answer is scored as a whole
depth            position of the needed fact, 0 to 1; null if several are needed
exact, f1, stemmed_f1, log_likelihood
                 null if the measure has no such number
own              score of the public data set, by the scorer that `scored_by` names; absent without
                 one, and under teacher forcing, which has only `prefix_share`, by tokens
counts           whether the answer is known
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from larder.core import Question
from larder.evaluation import exact_match, stemmed_f1, token_f1
from larder.session import TokenizerAdapter
from larder_bench.results.rows import Row
from larder_bench.scoring.answer_items import numbered_item_spans
from larder_bench.scoring.dataset_metrics import PREFIX_SHARE, dataset_score, leading
from larder_bench.scoring.teacher_forcing import AnswerLikelihood, split_by_spans

NUMBERED = re.compile(r"\d+: ")  # in contrast to values that are numbers


@dataclass(frozen=True)
class NumberedQuestion:
    """Question with its numbers.

    Args:
        number: index among all questions of the conversation.
        turn: index in its sequence.
    """

    question: Question
    number: int
    turn: int

    def item(self, part: int | None = None) -> Row:
        """First fields of its items."""
        fields: Row = {"kind": self.question.kind, "question": self.number, "turn": self.turn}
        fields |= {} if part is None else {"item": part}
        return fields | {"depth": self.question.depth}


def likelihood_items(
    numbered: NumberedQuestion, forced: AnswerLikelihood, tokenizer: TokenizerAdapter
) -> list[Row]:
    """Items of the expected answer under teacher forcing; of several expected answers only the
    first.
    """
    spans = numbered.question.items
    if not spans:
        prefix = _prefix_fields(forced)
        return [numbered.item() | _likelihood_fields(forced, numbered) | prefix]
    parts = split_by_spans(forced, tokenizer, spans)
    return [numbered.item(n) | _likelihood_fields(part, numbered) for n, part in enumerate(parts)]


def generated_items(numbered: NumberedQuestion, text: str) -> list[Row]:
    """Items of a generated answer, compared with the expected one, or the best of several.

    An expected part is right if any part of the generated answer equals it; item numbers belong to
    their parts.
    """
    question = numbered.question
    if not question.items:
        answers = (question.answer, *question.others)
        fields = _generated_fields([text], answers, numbered) | {"answer": text}
        return [numbered.item() | fields | _dataset_fields(text, question)]
    parts = _parts(text)
    expected = [_strip_part(question.answer[start:stop]) for start, stop in question.items]
    return [
        numbered.item(n)
        | _generated_fields(parts, [one], numbered)
        | _dataset_fields(text, replace(question, answer=one))
        for n, one in enumerate(expected)
    ]


def _likelihood_fields(forced: AnswerLikelihood, numbered: NumberedQuestion) -> Row:
    return {
        "exact": forced.exact,
        "f1": None,
        "f1_stemmed": None,
        "log_likelihood": round(forced.log_likelihood, 4) if forced.hits else None,
        "counts": bool(numbered.question.answer) and bool(forced.hits),
    }


def _prefix_fields(forced: AnswerLikelihood) -> Row:
    """Share of the answer's tokens before the first wrong one, if that is the question's score."""
    if forced.question.scorer != PREFIX_SHARE or not forced.hits:
        return {}
    share = leading(forced.hits) / len(forced.hits)
    return {"own": round(share, 4), "scored_by": PREFIX_SHARE}


def _generated_fields(
    parts: Sequence[str], expected: Sequence[str], numbered: NumberedQuestion
) -> Row:
    kind = numbered.question.kind

    def best(score: Callable[[str, str], float]) -> float:
        return round(max(float(score(one, other)) for one in parts for other in expected), 4)

    return {
        "exact": bool(best(exact_match)),
        "f1": best(token_f1),
        "f1_stemmed": best(lambda one, other: stemmed_f1(one, other, kind)),
        "log_likelihood": None,
        "counts": bool(numbered.question.answer),
    }


def _dataset_fields(text: str, question: Question) -> Row:
    if not question.scorer:
        return {}
    return {"own": round(dataset_score(text, question), 4), "scored_by": question.scorer}


def _parts(text: str) -> list[str]:
    """Parts of a generated answer: numbered items, or else comma-separated values."""
    spans = numbered_item_spans(text)
    if len(spans) > 1 or NUMBERED.match(text):
        return [_strip_part(text[start:stop]) for start, stop in spans]
    return list(_listed(text)) or [""]


def _listed(text: str) -> Iterator[str]:
    return (_strip_part(part) for part in text.split(","))


def _strip_part(part: str) -> str:
    return part.strip().rstrip(",").strip()
