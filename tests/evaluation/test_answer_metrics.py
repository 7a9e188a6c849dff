"""Scores agree with values worked out by hand, and with slow obvious loops."""

from __future__ import annotations

import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from larder.core import DependencyError
from larder.evaluation import can_stem, exact_match, stemmed_f1, token_f1

ANSWERS = st.lists(st.sampled_from("red Blue, dog dogs the and a house.".split()), max_size=6).map(
    " ".join
)


def slow_f1(found: list[str], wanted: list[str]) -> float:
    left = list(wanted)
    common = 0
    for word in found:
        if word in left:
            left.remove(word)
            common += 1
    if not common:
        return 0.0
    precision, recall = common / len(found), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


@pytest.mark.parametrize(
    ("prediction", "expected", "same"),
    [
        ("The  Golden Lantern!", "golden lantern", True),
        ("an apple", "Apple", True),
        ("“Golden” lantern", "golden lantern", True),
        ("$967", "967", True),
        ("lantern golden", "golden lantern", False),
        ("nine", "9", False),
        ("another apple", "apple", False),
        ("", "apple", False),
    ],
)
def test_exact_match_hand_values(prediction: str, expected: str, same: bool) -> None:
    assert exact_match(prediction, expected) is same


@pytest.mark.parametrize(
    ("prediction", "expected", "score"),
    [
        ("the red ball", "a red ball", 1.0),
        ("red", "red ball", 2 / 3),  # precision 1, recall 1/2
        ("red red", "red ball", 1 / 2),  # the second red finds none left
        ("dogs", "dog", 0.0),
        ("salt and pepper", "pepper", 1 / 2),  # "and" is a word here
        ("A", "a", 1.0),
        ("the", "ball", 0.0),
        ("", "ball", 0.0),
    ],
)
def test_f1_hand_values(prediction: str, expected: str, score: float) -> None:
    assert token_f1(prediction, expected) == pytest.approx(score)


@given(ANSWERS, ANSWERS)
def test_f1_equals_its_reference(prediction: str, expected: str) -> None:
    def words(text: str) -> list[str]:
        plain = text.lower().replace(",", "").replace(".", "")
        return [word for word in plain.split() if word not in ("a", "an", "the")]

    found, wanted = words(prediction), words(expected)
    slow = slow_f1(found, wanted) if found != wanted else 1.0
    assert token_f1(prediction, expected) == pytest.approx(slow)
    assert token_f1(prediction, expected) == token_f1(expected, prediction)
    assert not exact_match(prediction, expected) or token_f1(prediction, expected) == 1.0


@pytest.mark.parametrize(
    ("prediction", "expected", "kind", "score"),
    [
        ("running dogs", "dog runs", "single_hop", 1.0),
        ("salt and pepper", "pepper, salt", "temporal", 1.0),  # no "and", no commas
        ("1,000 miles", "1000 mile", "single_hop", 1.0),
        ("it’s", "its", "", 0.0),
        ("is dying", "is die", "", 1.0),  # NLTK's variant, not the original Porter
        ("yes", "Yes; because he enjoys it", "open_domain", 1.0),
        ("yes", "Yes; because he enjoys it", "commonsense", 1.0),
        ("yes", "Yes; he does", "single_hop", 1 / 2),
        # Two parts: "tennis" found whole, "red cars" as cars of the part "fast cars" (1/2).
        ("fast cars, tennis", "tennis, red cars", "multi_hop", 3 / 4),
        ("fast cars, tennis", "tennis, red cars", "temporal", 2 / 3),  # 2 of 3 words both ways
        ("It is not mentioned anywhere.", "", "adversarial", 1.0),
        ("No information available", "x", "adversarial", 1.0),
        ("a dog", "a dog", "adversarial", 0.0),
        ("", "a dog", "multi_hop", 0.0),
    ],
)
def test_stemmed_f1_hand_values(prediction: str, expected: str, kind: str, score: float) -> None:
    assert math.isclose(stemmed_f1(prediction, expected, kind), score, abs_tol=1e-12)


@given(ANSWERS, ANSWERS)
def test_stemmed_f1_equals_its_reference(prediction: str, expected: str) -> None:
    def stems(text: str) -> list[str]:
        plain = text.lower().replace(",", "").replace(".", "")
        stemmed = {"dogs": "dog", "house": "hous"}
        counted = [word for word in plain.split() if word not in ("a", "an", "the", "and")]
        return [stemmed.get(word, word) for word in counted]

    slow = slow_f1(stems(prediction), stems(expected))
    assert stemmed_f1(prediction, expected) == pytest.approx(slow)
    best = [
        max(slow_f1(stems(part), stems(wanted)) for part in prediction.split(","))
        for wanted in expected.split(",")
    ]
    score = stemmed_f1(prediction, expected, "multi_hop")
    assert score == pytest.approx(sum(best) / len(best))


def test_without_nltk_stemming_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_stem()
    for name in ("nltk", "nltk.stem.porter"):
        monkeypatch.setitem(sys.modules, name, None)
    assert not can_stem()
    with pytest.raises(DependencyError, match=r"pip install 'larder\[bench\]'"):
        stemmed_f1("blue cats", "a cat")
