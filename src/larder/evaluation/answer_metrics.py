"""How well an answer agrees with the expected one.

`exact_match` and `token_f1` normalise case, punctuation, articles and spaces, as SQuAD introduced
it: Pranav Rajpurkar, Jian Zhang, Konstantin Lopyrev and Percy Liang, "SQuAD: 100,000+ Questions for
Machine Comprehension of Text" (2016), arXiv 1606.05250, section 6.1.

`stemmed_f1` is the scorer of LoCoMo: Adyasha Maharana et al., "Evaluating Very Long-Term
Conversational Memory of LLM Agents" (2024), arXiv 2402.17753, with the rules per category of its
released code. The two give the same answer different scores; a table names the one it holds.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence

ARTICLES = frozenset({"a", "an", "the"})
# LoCoMo drops "and" with the articles.
LOCOMO_STOPWORDS = ARTICLES | {"and"}
REFUSALS = ("no information available", "not mentioned")
# The reason some answers give after a semicolon is not expected of the model (category 3).
WITH_REASON = frozenset({"open_domain", "commonsense"})
MANY_PARTS = "multi_hop"
UNANSWERABLE = "adversarial"


def exact_match(prediction: str, expected: str) -> bool:
    """Whether both say the same words in the same order."""
    return normalized_words(prediction) == normalized_words(expected)


def token_f1(prediction: str, expected: str) -> float:
    """The harmonic mean of precision and recall of words, in [0, 1]."""
    found, wanted = normalized_words(prediction), normalized_words(expected)
    # An answer of articles alone, the grade "A" say, has no words left to share.
    return 1.0 if found == wanted else _overlap(found, wanted)


def stemmed_f1(prediction: str, expected: str, kind: str = "") -> float:
    """LoCoMo's F1 over word stems, in [0, 1], with the rule of the question's kind.

    `multi_hop`: both are cut at commas; each expected part counts with the predicted part that
    fits it best. `open_domain`, `commonsense`: what follows a semicolon is not expected.
    `adversarial`: 1 for a refusal, else 0, whatever is expected. Any other kind: as it is.
    """
    if kind == UNANSWERABLE:
        return float(any(refusal in prediction.lower() for refusal in REFUSALS))
    if kind in WITH_REASON:
        expected = expected.split(";")[0]
    if kind != MANY_PARTS:
        return _overlap(*_stems([prediction, expected]))
    found, wanted = _stems(prediction.split(",")), _stems(expected.split(","))
    return sum(max(_overlap(f, w) for f in found) for w in wanted) / len(wanted)


def normalized_words(text: str) -> list[str]:
    """The words that count: lower case, without punctuation and articles."""
    return [word for word in _strip_punctuation(text).split() if word not in ARTICLES]


def _strip_punctuation(text: str) -> str:
    """Lower case without punctuation: all that Unicode calls so, and ASCII signs such as $."""
    return "".join(
        letter
        for letter in text.lower()
        if not unicodedata.category(letter).startswith("P")
        and not (letter.isascii() and unicodedata.category(letter).startswith("S"))
    )


def _stems(texts: Iterable[str]) -> list[list[str]]:
    # Loaded here, because it takes a second or two and only LoCoMo's scorer needs it. LoCoMo stems
    # with NLTK's variant of Porter; the original groups 216 of the data's 16,374 words differently.
    from nltk.stem.porter import PorterStemmer

    stem = PorterStemmer().stem
    return [[stem(word) for word in _locomo_words(text)] for text in texts]


def _locomo_words(text: str) -> list[str]:
    """The words LoCoMo counts; only ASCII signs are punctuation to it, not that in "it’s"."""
    bare = text.lower().translate(dict.fromkeys(map(ord, string.punctuation)))
    return re.sub(rf"\b({'|'.join(sorted(LOCOMO_STOPWORDS))})\b", " ", bare).split()


def _overlap(found: Sequence[str], wanted: Sequence[str]) -> float:
    common = (Counter(found) & Counter(wanted)).total()
    return 2 * common / (len(found) + len(wanted)) if common else 0.0
