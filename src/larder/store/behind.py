"""How far a text is restored: what stands behind it must have been made behind just this text."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from larder.core.errors import Damaged
from larder.store.wording import token_bytes


class PrefixDigest:
    """A place in a text. Its digest, as `chunks.prefix_of` makes it, grows as the place moves on.

    `start` is the true position of the next token.

    Args:
        ids: the text.
    """

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids, self.start = ids, 0
        self._digest = hashlib.sha256()

    def digest(self, tokens: Sequence[Any]) -> str:
        """Of the text up to here, and of some tokens behind it.

        Raises:
            Damaged: these are no tokens.
        """
        try:
            digest = self._digest.copy()
            digest.update(token_bytes(tokens))
        except (OverflowError, TypeError, ValueError) as error:
            raise Damaged("A chunk of the saved cache has tokens that are none.") from error
        return digest.hexdigest()

    def advance(self, tokens: Sequence[int]) -> None:
        """Go on behind them."""
        self._digest.update(token_bytes(tokens))
        self.start += len(tokens)
