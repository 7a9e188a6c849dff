"""Provider of the tokens with a question mark, of any script."""

from __future__ import annotations

from larder.policy.providers.base import VocabularyProvider

SIGNS = frozenset("?\uff1f\u061f\u037e\u055e\u1367")


class QuestionMarks(VocabularyProvider):
    """Token set `question_marks`."""

    def contains(self, text: str, is_special: bool) -> bool:
        return not is_special and not SIGNS.isdisjoint(text)


Part = QuestionMarks
