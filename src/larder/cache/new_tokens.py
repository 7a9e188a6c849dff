"""New tokens of a sequence, as attention of one layer takes them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from larder.core.images import Span
from larder.core.types import Keys, Mode, Positions, Queries, Values


@dataclass(slots=True)  # one is made for each layer of each step: frozen ones take longer to make
class NewTokens:
    """Queries, keys and values of new tokens in one layer, and how they are attended to.

    Args:
        queries, keys, values: post-RoPE.
        positions: true positions, later than all cached ones unless `shift` is negative.
        mode: `APPEND` to append the tokens, `SCRATCH` for no side effects.
        sections: lengths that partition Q into texts that do not see each other; none for one.
        shift: offset of `positions` from the end of the sequence; negative for earlier ones.
        bidirectional: spans of tokens that see all of their span.
    """

    queries: Queries
    keys: Keys
    values: Values
    positions: Positions
    mode: Mode = Mode.SCRATCH
    sections: tuple[int, ...] = ()
    shift: int = 0
    bidirectional: tuple[Span, ...] = ()

    def __len__(self) -> int:
        return self.queries.shape[1]

    @property
    def is_step(self) -> bool:
        """True for a decode step: a single token that is appended."""
        return self.mode is Mode.APPEND and len(self) == 1

    @property
    def section_lengths(self) -> tuple[int, ...]:
        """Lengths of the sections, which is one where none are given."""
        return self.sections or (len(self),)

    @property
    def offset(self) -> int:
        """Offset of the first query from the end of the entries; a step is appended first."""
        return -1 if self.is_step else self.shift

    @property
    def has_gaps(self) -> bool:
        """True if tokens of one text are not consecutive, as where only some were chosen."""
        if len(self.sections) > 1 or not len(self):
            return False
        return int(self.positions[-1]) - int(self.positions[0]) >= len(self)

    def split(self, count: int) -> tuple[NewTokens, NewTokens]:
        """The first `count` tokens as one text, and the others with their sections and spans."""
        queries, keys, values = self.queries, self.keys, self.values
        return (
            NewTokens(
                queries[:, :count],
                keys[:, :count],
                values[:, :count],
                self.positions[:count],
                self.mode,
            ),
            replace(
                self,
                queries=queries[:, count:],
                keys=keys[:, count:],
                values=values[:, count:],
                positions=self.positions[count:],
            ),
        )
