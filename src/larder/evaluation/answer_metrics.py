"""Answer metrics against an expected answer: exact match, string match, token F1, stemmed F1.

`string_match` is the score of RULER (Hsieh et al., 2024, arXiv 2404.06654), for models that answer
in sentences.

`exact_match` and `token_f1` normalize case, punctuation, articles and spaces as SQuAD does:
Pranav Rajpurkar, Jian Zhang, Konstantin Lopyrev and Percy Liang, "SQuAD: 100,000+ Questions for
Machine Comprehension of Text" (2016), arXiv 1606.05250, section 6.1.

`stemmed_f1` is the scorer of LoCoMo: Adyasha Maharana et al., "Evaluating Very Long-Term
Conversational Memory of LLM Agents" (2024), arXiv 2402.17753, with the rules per category of its
released code. The two F1 scores differ for the same answer; a table names the one it reports.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.util import find_spec

from larder.core.errors import DependencyError

ARTICLES = frozenset({"a", "an", "the"})
# LoCoMo drops "and" with the articles.
LOCOMO_STOPWORDS = ARTICLES | {"and"}
REFUSALS = ("no information available", "not mentioned")
# Expected answers with a reason after a semicolon, which is not scored (category 3).
WITH_REASON = frozenset({"open_domain", "commonsense"})
MANY_PARTS = "multi_hop"
UNANSWERABLE = "adversarial"


def exact_match(prediction: str, expected: str) -> bool:
    """Equality of the normalized words, in order."""
    return normalized_words(prediction) == normalized_words(expected)


def string_match(prediction: str, expected: str) -> bool:
    """Test if the answer contains the expected text, ignoring case."""
    return expected.lower() in prediction.lower()


def token_f1(prediction: str, expected: str) -> float:
    """Harmonic mean of word precision and recall, in [0, 1]."""
    predicted, target = normalized_words(prediction), normalized_words(expected)
    # An answer of articles alone, such as the grade "A", has no normalized words.
    return 1.0 if predicted == target else _overlap(predicted, target)


def stemmed_f1(prediction: str, expected: str, kind: str = "") -> float:
    """LoCoMo's F1 over word stems, in [0, 1], with the rule of the question's kind.

    `multi_hop`: mean over the comma-separated expected parts of the best F1 of any predicted part.
    `open_domain`, `commonsense`: the expected answer ends at the first semicolon.
    `adversarial`: 1 for a refusal, else 0, independent of `expected`. Other kinds: plain F1.

    Raises:
        DependencyError: the package nltk is missing; the extra `bench` brings it.
    """
    if kind == UNANSWERABLE:
        return float(any(refusal in prediction.lower() for refusal in REFUSALS))
    if kind in WITH_REASON:
        expected = expected.split(";")[0]
    if kind != MANY_PARTS:
        predicted, target = _stems([prediction, expected])
        return _overlap(predicted, target)
    predicted_parts, target_parts = _stems(prediction.split(",")), _stems(expected.split(","))
    best = [max(_overlap(part, target) for part in predicted_parts) for target in target_parts]
    return sum(best) / len(best)


def can_stem() -> bool:
    """True if the package nltk is installed, which `stemmed_f1` needs."""
    return find_spec("nltk") is not None


def normalized_words(text: str) -> list[str]:
    """Words in lower case, without punctuation and articles."""
    return [word for word in _strip_punctuation(text).split() if word not in ARTICLES]


def _strip_punctuation(text: str) -> str:
    """Lower-case text without Unicode punctuation and ASCII symbols such as $."""
    return "".join(
        letter
        for letter in text.lower()
        if not unicodedata.category(letter).startswith("P")
        and not (letter.isascii() and unicodedata.category(letter).startswith("S"))
    )


def _stems(texts: Iterable[str]) -> list[list[str]]:
    # Imported here: it takes a second or two, and only LoCoMo's scorer needs it. LoCoMo stems with
    # NLTK's variant of Porter; the original groups 216 of the data's 16,374 words differently.
    try:
        from nltk.stem.porter import PorterStemmer
    except ModuleNotFoundError as error:
        raise DependencyError(
            "F1 of word stems needs the package nltk: pip install 'larder[bench]'."
        ) from error

    stem = PorterStemmer().stem
    return [[stem(word) for word in _locomo_words(text)] for text in texts]


def _locomo_words(text: str) -> list[str]:
    """Words that LoCoMo counts; only ASCII punctuation is removed, not the apostrophe in "it’s"."""
    bare = text.lower().translate(dict.fromkeys(map(ord, string.punctuation)))
    return re.sub(rf"\b({'|'.join(sorted(LOCOMO_STOPWORDS))})\b", " ", bare).split()


def _overlap(predicted: Sequence[str], target: Sequence[str]) -> float:
    """F1 over word counts; 0 without a common word."""
    common = (Counter(predicted) & Counter(target)).total()
    return 2 * common / (len(predicted) + len(target)) if common else 0.0
