"""Answer metrics of public data sets, in addition to the scores that every task has.

LongBench: Yushi Bai et al. (2023), arXiv:2308.14508, table 1 and the released code. InfiniteBench:
Xinrong Zhang et al. (2024), arXiv:2402.13718, and the released code. RULER: Cheng-Ping Hsieh et al.
(2024), arXiv:2404.06654, section 4. ROUGE-L: Chin-Yew Lin, "ROUGE:
A Package for Automatic Evaluation of Summaries" (2004), as implemented by the package rouge-score,
whose words are lower-case letters and digits; LongBench's code uses another package. Chinese is
compared by characters, as InfiniteBench does; LongBench's code segments it into words.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher

from larder.core import Question
from larder.evaluation import string_match

AnswerMetric = Callable[[str, str], float]  # answer, expected answer
NUMBER = re.compile(r"\d+(?:\.\d+)?")
CHOSEN = re.compile(r"(?i:answer|option)(?: is)?:?\s*\(?([A-D])\b")
LETTER = re.compile(r"\b([A-D])\b")
PREFIX_SHARE = "prefix_share"
NOT_CODE = ("`", "#", "//")  # marks of lines that are not code


def dataset_score(answer: str, question: Question) -> float:
    """Score in [0, 1] against the expected answer, or the best of several.

    Raises:
        KeyError: the question names an unknown scorer.
    """
    if question.scorer == "classes":
        return max(_classes(answer, one, question.classes) for one in _expected(question))
    return max(SCORERS[question.scorer](answer, one) for one in _expected(question))


def f1(answer: str, expected: str) -> float:
    """F1 over words as in SQuAD; only ASCII punctuation is removed."""
    return _overlap(_words(answer), _words(expected))


def f1_characters(answer: str, expected: str) -> float:
    """F1 over characters, for scripts without spaces."""
    return _overlap(list(_letters(answer)), list(_letters(expected)))


def rouge_l(answer: str, expected: str) -> float:
    """F1 of the longest common subsequence of words."""
    return _rouge("rougeL", answer, expected)


def rouge_l_sum(answer: str, expected: str) -> float:
    """Summary-level ROUGE-L: the longest common subsequence of each expected line with any line of
    the answer.
    """
    return _rouge("rougeLsum", answer, expected)


def rouge_l_characters(answer: str, expected: str) -> float:
    """F1 of the longest common subsequence of characters."""
    return _rouge(
        "rougeL", " ".join(_letters(answer)), " ".join(_letters(expected)), _WhitespaceTokenizer()
    )


def edit_similarity(answer: str, expected: str) -> float:
    """Similarity of the first line of code: characters of matching blocks as a share of all."""
    lines = answer.lstrip("\n").split("\n")
    code = next((line for line in lines if not any(sign in line for sign in NOT_CODE)), "")
    return SequenceMatcher(None, code, expected).ratio()


def share_of_numbers(answer: str, expected: str) -> float:
    """Share of the answer's numbers that equal the expected one; for "Paragraph 7" that is 7."""
    numbers, [target, *_] = re.findall(r"\d+", answer), [*re.findall(r"\d+", expected), ""]
    return numbers.count(target) / len(numbers) if numbers else 0.0


def first_digits(answer: str, expected: str) -> float:
    """Test if the first digits of the answer are the expected ones."""
    match = re.search(r"\d+", answer)
    return float(match is not None and match[0] == expected)


def first_number(answer: str, expected: str) -> float:
    """Test if the first number of the answer is the expected one."""
    match = NUMBER.search(answer)
    return float(match is not None and float(match[0]) == float(expected))


def last_number(answer: str, expected: str) -> float:
    """Test if the last word of the answer is the expected number."""
    words = re.sub(r"[\n.`'\":]", " ", answer).split()
    return float(bool(words) and words[-1] == expected)


def numbers_in_a_row(answer: str, expected: str) -> float:
    """Share of the expected numbers before the first wrong one."""
    numbers, targets = re.findall(r"\d+", answer), re.findall(r"\d+", expected)
    pairs = [one == other for one, other in zip(numbers, targets, strict=False)]
    return leading(pairs) / len(targets) if targets else 0.0


def among_words(answer: str, expected: str) -> float:
    """Test if the answer has the expected word, ignoring case."""
    words = re.sub(r"[\n:\"'.,?!{}]", " ", answer).upper().split()
    return float(expected.upper() in words)


def prefix_share(answer: str, expected: str) -> float:
    """Share of the expected words before the first wrong one."""
    words, targets = answer.split(), expected.split()
    pairs = [one == other for one, other in zip(words, targets, strict=False)]
    return leading(pairs) / len(targets) if targets else 0.0


def leading(hits: Sequence[bool]) -> int:
    """Number of hits before the first miss."""
    return list(hits).index(False) if False in hits else len(hits)


def choice(answer: str, expected: str) -> float:
    """Test if the chosen letter is the expected one: the letter after "answer is", else the first
    that stands alone. For an expected text, test if the answer starts with it.
    """
    if len(expected) != 1:
        return float(bool(answer.strip()) and answer.strip().startswith(expected))
    match = CHOSEN.search(answer) or LETTER.search(answer)
    return float(match is not None and match[1] == expected)


def _first_line(compare: AnswerMetric) -> AnswerMetric:
    """Metric that compares only the first line of the answer."""
    return lambda answer, expected: compare(answer.lstrip("\n").partition("\n")[0], expected)


SCORERS: Mapping[str, AnswerMetric] = {
    "f1": f1,
    "f1_of_line": _first_line(f1),
    "f1_characters": f1_characters,
    "rouge_l": rouge_l,
    "rouge_l_of_line": _first_line(rouge_l),
    "rouge_l_sum": rouge_l_sum,
    "rouge_l_characters": rouge_l_characters,
    "edit_similarity": edit_similarity,
    "share_of_numbers": share_of_numbers,
    "first_digits": first_digits,
    "first_number": first_number,
    "last_number": last_number,
    "numbers_in_a_row": numbers_in_a_row,
    "among_words": among_words,
    "choice": choice,
    "string_match": string_match,
    PREFIX_SHARE: prefix_share,
}


def _classes(answer: str, expected: str, classes: Sequence[str]) -> float:
    """One over the number of classes that the first line names, if the expected one is among them;
    classes whose name is part of the expected one's are not counted.
    """
    line = answer.lstrip("\n").partition("\n")[0]
    names = [one for one in classes if one in line and (one == expected or one not in expected)]
    return 1 / len(names) if expected in names else 0.0


def _expected(question: Question) -> tuple[str, ...]:
    return question.answer, *question.others


def _words(text: str) -> list[str]:
    bare = text.lower().translate(dict.fromkeys(map(ord, string.punctuation)))
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def _letters(text: str) -> str:
    return re.sub(r"[\W_]+", "", text.lower())


def _overlap(answer: Sequence[str], expected: Sequence[str]) -> float:
    common = (Counter(answer) & Counter(expected)).total()
    return 2 * common / (len(answer) + len(expected)) if common else 0.0


class _WhitespaceTokenizer:
    """Tokenizer that splits at whitespace only."""

    def tokenize(self, text: str) -> list[str]:
        return text.split()


def _rouge(
    kind: str, answer: str, expected: str, tokenizer: _WhitespaceTokenizer | None = None
) -> float:
    # Imported here because it imports NLTK.
    from rouge_score.rouge_scorer import RougeScorer

    scored = RougeScorer([kind], tokenizer=tokenizer).score(expected, answer)
    return float(scored[kind].fmeasure)
