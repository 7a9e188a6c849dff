"""Provider of the tokens that are punctuation: signs alone, without letters, digits or symbols."""

from __future__ import annotations

import unicodedata

from larder.policy.providers.base import VocabularyProvider


class Punctuation(VocabularyProvider):
    """Token set `punctuation`; special tokens are not in it."""

    def contains(self, text: str, is_special: bool) -> bool:
        signs = text.strip()
        return bool(signs) and not is_special and all(map(_is_sign, signs))


def _is_sign(sign: str) -> bool:
    return unicodedata.category(sign).startswith("P")


Part = Punctuation
