"""Words that tell episodes apart."""

from larder.session import episode_keywords


def test_a_word_that_all_have_names_none() -> None:
    texts = ["Ann said cat cat 12", "Ann said dog the the", "Ann said fish"]
    assert episode_keywords(texts) == [("cat",), ("dog",), ("fish",)]


def test_the_most_telling_comes_first_and_few_are_given() -> None:
    one = "apple apple pear plum fig lime kiwi"
    found = episode_keywords([one, "stone"], count=3)
    assert found[0][0] == "apple" and len(found[0]) == 3


def test_nothing_to_tell_apart() -> None:
    assert episode_keywords(["only one"]) == [()]
    assert episode_keywords(["the of", "12"]) == [(), ()]
