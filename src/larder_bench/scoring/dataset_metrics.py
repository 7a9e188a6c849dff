"""Answer metrics of public data sets, in addition to the scores that every task has.

LongBench: Yushi Bai et al. (2023), arXiv:2308.14508, table 1 and the released code. InfiniteBench:
Xinrong Zhang et al. (2024), arXiv:2402.13718, and the released code. ROUGE-L: Chin-Yew Lin, "ROUGE:
A Package for Automatic Evaluation of Summaries" (2004), as the package rouge-score has it, whose
words are lower-case letters and digits; LongBench's code takes another package. Chinese is compared
letter by letter, as InfiniteBench does; LongBench's code cuts it into words.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher

from larder.core.conversation import Question

AnswerMetric = Callable[[str, str], float]  # what was said, what is expected
NUMBER = re.compile(r"\d+(?:\.\d+)?")
CHOSEN = re.compile(r"(?i:answer|option)(?: is)?:?\s*\(?([A-D])\b")
LETTER = re.compile(r"\b([A-D])\b")
NOT_CODE = ("`", "#", "//")  # what a line of an answer that is no code has


def dataset_score(said: str, question: Question) -> float:
    """In [0, 1], against the expected answer or the nearest of several.

    Raises:
        KeyError: the question names a way to score that there is none of.
    """
    if question.scorer == "classes":
        return max(_classes(said, one, question.classes) for one in _expected(question))
    return max(SCORERS[question.scorer](said, one) for one in _expected(question))


def f1(said: str, expected: str) -> float:
    """F1 over words as in SQuAD; only ASCII signs are punctuation."""
    return _overlap(_words(said), _words(expected))


def f1_characters(said: str, expected: str) -> float:
    """F1 over characters, for scripts without spaces."""
    return _overlap(list(_letters(said)), list(_letters(expected)))


def rouge_l(said: str, expected: str) -> float:
    """F1 of the longest common subsequence of words."""
    return _rouge("rougeL", said, expected)


def rouge_l_sum(said: str, expected: str) -> float:
    """The same line by line: what each expected line has in common with any that was said."""
    return _rouge("rougeLsum", said, expected)


def rouge_l_characters(said: str, expected: str) -> float:
    """F1 of the longest common subsequence of letters."""
    return _rouge(
        "rougeL", " ".join(_letters(said)), " ".join(_letters(expected)), _WhitespaceTokenizer()
    )


def edit_similarity(said: str, expected: str) -> float:
    """How alike the first line of code is: the letters of matching blocks as a share of all."""
    lines = said.lstrip("\n").split("\n")
    code = next((line for line in lines if not any(sign in line for sign in NOT_CODE)), "")
    return SequenceMatcher(None, code, expected).ratio()


def share_of_numbers(said: str, expected: str) -> float:
    """How many of the numbers said are the one expected; of "Paragraph 7" that is 7."""
    numbers, [wanted, *_] = re.findall(r"\d+", said), [*re.findall(r"\d+", expected), ""]
    return numbers.count(wanted) / len(numbers) if numbers else 0.0


def first_digits(said: str, expected: str) -> float:
    """Test if the first digits of the answer are the expected ones."""
    found = re.search(r"\d+", said)
    return float(found is not None and found[0] == expected)


def first_number(said: str, expected: str) -> float:
    """Test if the first number of the answer is the expected one."""
    found = NUMBER.search(said)
    return float(found is not None and float(found[0]) == float(expected))


def last_number(said: str, expected: str) -> float:
    """Test if the last word of the answer is the expected number."""
    words = re.sub(r"[\n.`'\":]", " ", said).split()
    return float(bool(words) and words[-1] == expected)


def numbers_in_a_row(said: str, expected: str) -> float:
    """Share of the expected numbers before the first wrong one."""
    found, wanted = re.findall(r"\d+", said), re.findall(r"\d+", expected)
    pairs = [one == other for one, other in zip(found, wanted, strict=False)]
    right = pairs.index(False) if False in pairs else len(pairs)
    return right / len(wanted) if wanted else 0.0


def among_words(said: str, expected: str) -> float:
    """Test if the answer has the expected word, ignoring case."""
    words = re.sub(r"[\n:\"'.,?!{}]", " ", said).upper().split()
    return float(expected.upper() in words)


def choice(said: str, expected: str) -> float:
    """Whether the letter that is chosen is the expected one: the one behind "answer is", else the
    first that stands alone. An option's text is right where it was said instead.
    """
    if len(expected) != 1:
        return float(bool(said.strip()) and said.strip().startswith(expected))
    found = CHOSEN.search(said) or LETTER.search(said)
    return float(found is not None and found[1] == expected)


def _first_line(compare: AnswerMetric) -> AnswerMetric:
    """Only the first line that was said counts."""
    return lambda said, expected: compare(said.lstrip("\n").partition("\n")[0], expected)


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
}


def _classes(said: str, expected: str, classes: Sequence[str]) -> float:
    """One over the classes that the first line names, where the expected one is among them; one
    whose name is part of the expected one's is not counted.
    """
    line = said.lstrip("\n").partition("\n")[0]
    named = [one for one in classes if one in line and (one == expected or one not in expected)]
    return 1 / len(named) if expected in named else 0.0


def _expected(question: Question) -> tuple[str, ...]:
    return question.answer, *question.others


def _words(text: str) -> list[str]:
    bare = text.lower().translate(dict.fromkeys(map(ord, string.punctuation)))
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def _letters(text: str) -> str:
    return re.sub(r"[\W_]+", "", text.lower())


def _overlap(found: Sequence[str], wanted: Sequence[str]) -> float:
    common = (Counter(found) & Counter(wanted)).total()
    return 2 * common / (len(found) + len(wanted)) if common else 0.0


class _WhitespaceTokenizer:
    """Cuts at spaces alone."""

    def tokenize(self, text: str) -> list[str]:
        return text.split()


def _rouge(
    kind: str, said: str, expected: str, tokenizer: _WhitespaceTokenizer | None = None
) -> float:
    # Loaded here, for it loads NLTK.
    from rouge_score.rouge_scorer import RougeScorer

    scored = RougeScorer([kind], tokenizer=tokenizer).score(expected, said)
    return float(scored[kind].fmeasure)
