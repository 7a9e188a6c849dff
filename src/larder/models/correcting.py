"""Which tokens are read once more with a new one, so that what it recalls corrects them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from larder.cache.forms.corrected import CorrectedLayer
from larder.core.types import AppendKind, Mode
from larder.models.forward_batch import BatchSegment


def with_corrected_tokens(row: BatchSegment, mode: Mode) -> BatchSegment:
    """The row, with the tokens before it that it corrects; as it is where there are none."""
    stores = _corrected_stores(row)
    if (
        not stores
        or mode is not Mode.APPEND
        or len(row.ids) > 1
        or row.coming is not AppendKind.STEP
    ):
        return row
    ids = stores[0].ids
    return replace(row, again=ids, since=row.cache.next_position - len(ids))


def advance_corrected(rows: Sequence[BatchSegment]) -> None:
    """Have caches know what was read last, once a pass that appends is over."""
    for row in rows:
        for store in _corrected_stores(row):
            store.read_on(row.ids)


def _corrected_stores(row: BatchSegment) -> list[CorrectedLayer]:
    return [store for store in row.cache.stores if isinstance(store, CorrectedLayer)]
