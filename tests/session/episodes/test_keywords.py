"""Words that tell episodes apart."""

from larder.session import episode_keywords


def test_words_common_to_all_episodes_are_no_keywords() -> None:
    texts = ["Ann said cat cat 12", "Ann said dog the the", "Ann said fish"]
    assert episode_keywords(texts) == [("cat",), ("dog",), ("fish",)]


def test_keywords_are_ranked_and_limited() -> None:
    one = "apple apple pear plum fig lime kiwi"
    found = episode_keywords([one, "stone"], count=3)
    assert found[0][0] == "apple" and len(found[0]) == 3


def test_single_or_stop_word_episodes_have_no_keywords() -> None:
    assert episode_keywords(["only one"]) == [()]
    assert episode_keywords(["the of", "12"]) == [(), ()]
