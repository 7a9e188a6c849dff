"""Which tokens are read once more with a new one, so that what it recalls corrects them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from larder.cache.forms.corrected import CorrectedLayer
from larder.core.types import AppendKind, Mode
from larder.models.passes import Row


def with_latest(row: Row, mode: Mode) -> Row:
    """The row, with the tokens before it that it corrects; as it is where there are none."""
    stores = _stores(row)
    if (
        not stores
        or mode is not Mode.APPEND
        or len(row.ids) > 1
        or row.coming is not AppendKind.STEP
    ):
        return row
    ids = stores[0].ids
    return replace(row, again=ids, since=row.cache.next_position - len(ids))


def read_on(rows: Sequence[Row]) -> None:
    """Have caches know what was read last, once a pass that appends is over."""
    for row in rows:
        for store in _stores(row):
            store.read_on(row.ids)


def _stores(row: Row) -> list[CorrectedLayer]:
    return [store for store in row.cache.stores if isinstance(store, CorrectedLayer)]
