"""What an index is handed: entries that it knows, and new ones behind them."""

from __future__ import annotations

import torch
from jaxtyping import Int64
from torch import Tensor

from larder.core.errors import CacheError
from larder.core.observation import Entries


def check_new_entries(entries: Entries, known: tuple[int, ...], layer: int) -> None:
    """Look at the entries that come, before an index changes anything.

    Args:
        known: how many entries of each kv head the index has.

    Raises:
        CacheError: a key is not finite, or a head has fewer entries than the index knows.
    """
    for head, (length, first) in enumerate(zip(entries.lengths, known, strict=True)):
        if length < first:
            raise CacheError(
                f"An index of layer {layer} knows {first} entries of kv head {head} and was handed "
                f"{length}: entries never leave a slow tier; build the index anew."
            )
        coming = entries.keys_from(head, first)
        # A sum is finite where all are, but for overflows: those are looked at one by one.
        if not bool(coming.float().sum().isfinite()):
            _check_rows(coming.isfinite().all(-1), first, head, layer)


def indexed_layout(
    entries: Entries, known: tuple[int, ...]
) -> tuple[Int64[Tensor, " K"], Int64[Tensor, " K"]]:
    """Starts, and lengths as far as an index knows them, as kernels take them."""
    return entries.layout[0], torch.tensor(known)


def _check_rows(finite: Tensor, first: int, head: int, layer: int) -> None:
    if bool(finite.all()):
        return
    entry = first + int((~finite).int().argmax())
    raise CacheError(
        f"The key of entry {entry} of kv head {head} in layer {layer} holds NaN or infinity, and "
        "no search finds such a key: check what the model computes."
    )
