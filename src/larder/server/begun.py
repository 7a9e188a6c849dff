"""A turn that a cache is about to read, pass by pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from larder.core.types import Coming, Mode
from larder.models.decoder import Decoder
from larder.models.passes import Row
from larder.prefill.tending import Tending
from larder.session.filing import Drawer

STEPS = 16  # tokens that are read one by one in place of a block


@dataclass(frozen=True)
class Begun:
    """A turn on its way.

    Args:
        drawer: the cache that reads it.
        tending: what keeps that within its budget meanwhile.
        chunks: of the prompt, that are yet to be read.
    """

    decoder: Decoder
    drawer: Drawer
    tending: Tending | None
    chunks: tuple[tuple[int, ...], ...]

    def read(self, ids: tuple[int, ...], coming: Coming, said: int = 0) -> None:
        """One pass.

        Args:
            said: tokens of the answer so far.
        """
        row, tending = Row(self.drawer.cache, ids, coming=coming), self.tending
        observer = None if tending is None else tending.observer([0], [row], [said])
        self.decoder.read([row], Mode.APPEND, observer)

    def speak(self, ids: tuple[int, ...]) -> Iterator[None]:
        """Read what was generated as it was then, with pauses: one by one where that matters."""
        recalls = any(tier.recalls for tier in self.drawer.cache.tiers)
        if self.tending is None and not recalls:
            for start in range(0, len(ids), STEPS):
                self.read(ids[start : start + STEPS], Coming.TEXT, start)
                yield
            return
        for number, token in enumerate(ids, start=1):
            self.read((token,), Coming.STEP, number)
            if number % STEPS == 0:
                yield
