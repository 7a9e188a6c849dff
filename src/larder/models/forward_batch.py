"""One pass of token rows through a model, each row over a cache of its own.

A batch is packed, not padded: rows lie end to end along Q, and every token carries its true
position. Rows do not see each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from larder.cache.sequence import SequenceCache
from larder.core.errors import ModelError
from larder.core.types import AppendKind, Keys, Mode, Queries, Values, empty_tensor


@dataclass(frozen=True)
class BatchSegment:
    """Tokens to read over one cache.

    Args:
        cache: what they continue.
        ids: the tokens.
        sections: lengths that partition `ids` into texts that each continue the cache alone, as
            several questions in scratch mode; one section by default.
        shift: how much later than the cache's next position it is read, below 0 earlier; for
            scratch mode.
        coming: what the tokens are, for append mode.
        again: tokens of the cache that are read once more in front of `ids`.
        reread_start: true position of the first of them.
    """

    cache: SequenceCache
    ids: tuple[int, ...]
    sections: tuple[int, ...] = ()
    shift: int = 0
    coming: AppendKind = AppendKind.STEP
    again: tuple[int, ...] = ()
    reread_start: int = 0

    @property
    def parts(self) -> tuple[int, ...]:
        return self.sections or (len(self.ids),)

    def positions(self) -> list[int]:
        """True positions: every section starts at the cache's next one, or `shift` later."""
        start = self.cache.next_position + self.shift
        return [start + offset for part in self.parts for offset in range(part)]

    @property
    def width(self) -> int:
        """How many tokens the model is given."""
        return len(self.again) + len(self.ids)


@dataclass(frozen=True)
class LayerActivations:
    """What one layer made of one row.

    Args:
        queries [H, Q, D], keys and values [K, Q, D]: post-RoPE.
        positions: true positions [Q].
        states: hidden states as they entered attention; empty where nobody asked.
    """

    queries: Float[Tensor, "H Q D"]
    keys: Float[Tensor, "K Q D"]
    values: Float[Tensor, "K Q D"]
    positions: Int[Tensor, " Q"]
    states: Float[Tensor, "_ _"] = field(default_factory=lambda: empty_tensor(torch.float32, 0, 0))


# Called after each layer of each row, once the cache of that layer is up to date.
Observer = Callable[[int, int, LayerActivations], None]


class ForwardBatch:
    """The state of one forward call: rows, mode, and who watches. Used once."""

    def __init__(
        self,
        rows: Sequence[BatchSegment],
        mode: Mode,
        device: torch.device,
        observer: Observer | None,
    ) -> None:
        self.rows = rows
        self.called: set[int] = set()
        # Of all tokens, as they entered the attention that is going on; none where nobody asks.
        self.states: Float[Tensor, "_ _"] = empty_tensor(torch.float32, 0, 0)
        self._mode = mode
        self._observer = observer
        self._plans = [row.cache.plans for row in rows]
        again = [range(row.reread_start, row.reread_start + len(row.again)) for row in rows]
        told = [[*old, *row.positions()] for old, row in zip(again, rows, strict=True)]
        self._positions = [torch.tensor(own, device=device) for own in told]
        for row in rows:
            for tier in row.cache.tiers:
                tier.expect(row.coming)

    def positions(self) -> Int[Tensor, "1 Q"]:
        """True positions of all rows, as the model takes them."""
        return torch.cat(self._positions)[None]

    def attend(
        self,
        layer: int,
        queries: Queries,
        keys: Keys,
        values: Values,
        scaling: float,
        sliding_window: int | None,
    ) -> Queries:
        del scaling, sliding_window  # known from the survey at load
        self.called.add(layer)
        if len(self.rows) == 1:
            return self._row(0, layer, queries, keys, values)
        widths = [row.width for row in self.rows]
        parts = zip(
            queries.split(widths, 1), keys.split(widths, 1), values.split(widths, 1), strict=True
        )
        return torch.cat([self._row(i, layer, *part) for i, part in enumerate(parts)], dim=1)

    def finish(self) -> None:
        """Count the tokens as read.

        Raises:
            ModelError: some layer of the model never asked for attention.
        """
        missed = {layer.index for layer in self.rows[0].cache.spec.layers} - self.called
        if missed:
            raise ModelError(f"Layers {sorted(missed)} never called attention in this pass.")
        if self._mode is Mode.APPEND:
            for row in self.rows:
                row.cache.advance(len(row.ids))

    def roll_back(self) -> None:
        """Take back what a failed pass has already appended.

        A cache that carried out a plan meanwhile cannot be put back, and is spoiled.
        """
        for row, plans in zip(self.rows, self._plans, strict=True):
            if row.cache.plans != plans:
                row.cache.invalidate()
            elif self._mode is Mode.APPEND:
                row.cache.truncate(row.cache.next_position)

    def _row(self, index: int, layer: int, queries: Queries, keys: Keys, values: Values) -> Queries:
        row, count = self.rows[index], len(self.rows[index].again)
        places = self._positions[index]
        new = queries[:, count:], keys[:, count:], values[:, count:], places[count:]

        def answer() -> Queries:
            return row.cache.attend(layer, *new, self._mode, row.parts, row.shift)

        if count:
            old = queries[:, :count], keys[:, :count], values[:, :count], places[:count]
            out = row.cache.stores[layer].again(*old, answer)
        else:
            out = answer()
        if self._observer is not None:
            self._observer(index, layer, LayerActivations(*new, self._states(index)))
        return out

    def _states(self, index: int) -> Float[Tensor, "_ _"]:
        """Of a row's new tokens."""
        if not len(self.states):
            return self.states
        stop = sum(row.width for row in self.rows[: index + 1])
        return self.states[stop - len(self.rows[index].ids) : stop]
