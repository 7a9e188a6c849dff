"""Provider of the tokens that end a sentence, by their text; special tokens do."""

from __future__ import annotations

import re

from larder.policy.providers.base import VocabularyProvider

# Punctuation that ends a sentence, perhaps with a closing quote or bracket; or a line break.
SENTENCE_END = re.compile(r"""[.!?\u2026\u3002\uff01\uff1f]["')\]\u2019\u201d]*\s*$|\n""")


class SentenceEnds(VocabularyProvider):
    """Token set `sentence_ends`."""

    def contains(self, text: str, is_special: bool) -> bool:
        return is_special or bool(SENTENCE_END.search(text))


Part = SentenceEnds
