"""Provider of the tokens that end a paragraph: those with two line breaks; special tokens do."""

from __future__ import annotations

import re

from larder.policy.providers.base import VocabularyProvider

BLANK_LINE = re.compile(r"\n[ \t\r]*\n")


class BlankLines(VocabularyProvider):
    """Token set `blank_lines`."""

    def contains(self, text: str, is_special: bool) -> bool:
        return is_special or bool(BLANK_LINE.search(text))


Part = BlankLines
