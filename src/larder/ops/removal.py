"""Taking rows out of ragged storage without laying it out anew.

    before   [ a b c d e | slack | f g h | slack ]
    remove b, f and h
    after    [ a c d e | slack     | g | slack   ]

What stays of a head moves up within the head's own region, so a step that gives up one entry costs
a move of what lies behind it. The readable form is here, the fast one in `larder.ops.fast.removal`;
it is taken for contiguous storage on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from larder.core.errors import CacheError
from larder.ops.fast import removal


def remove_rows(
    tensors: Sequence[Tensor],
    starts: Int[Tensor, " K"],
    lengths: Int[Tensor, " K"],
    kept: Int64[Tensor, " kept"],
    new_lengths: tuple[int, ...],
    columns: Float[Tensor, "n C"] | None = None,
) -> None:
    """Move the kept rows of every head to the front of its region, in order and in place.

    Rows before the first removed one of a head are not touched; what lies behind the kept ones is
    slack afterwards, of any content. A call that raises has changed nothing. One thread at a time
    may use a storage; different storages are safe from several threads.

    Args:
        tensors: of one storage: keys, values, positions and the like, of any type, [C, ...].
        starts, lengths: where the heads lie before the removal; int64 in host memory.
        kept: indices into the packed entries (head by head, without slack), ascending.
        new_lengths: how many of `kept` each head has.
        columns: further numbers of the same rows, one after the other.

    Raises:
        CacheError: the storages do not hold the heads, or `kept` does not fit them.
    """
    rows = () if columns is None else tuple(columns)
    storages = *tensors, *rows
    _check_storages(storages, starts, lengths)
    _check_counts(lengths, kept, new_lengths)
    case = storages, starts, lengths, kept, new_lengths
    bad = removal.remove(*case) if removal.serves(storages) else readable_remove(*case)
    if bad is not None:
        raise CacheError(
            f"The kept entries of kv head {bad} must ascend within the head's own "
            f"{int(lengths[bad])} packed entries, but they do not: sort them, and count them in "
            "new_lengths head by head."
        )


def readable_remove(
    storages: Sequence[Tensor],
    starts: Int[Tensor, " K"],
    lengths: Int[Tensor, " K"],
    kept: Int64[Tensor, " kept"],
    new_lengths: tuple[int, ...],
) -> int | None:
    """`remove_rows` for every device; the first head whose kept entries are wrong, if any is.

    Copies what it moves, one head and storage at a time.
    """
    offsets = (lengths.cumsum(0) - lengths).tolist()
    owned = list(zip(starts.tolist(), offsets, lengths.tolist(), strict=True))
    heads = kept.cpu().split(list(new_lengths))
    for h, (own, (_, offset, length)) in enumerate(zip(heads, owned, strict=True)):
        edges = torch.cat([own.new_tensor([offset - 1]), own, own.new_tensor([offset + length])])
        if not (edges.diff() > 0).all():
            return h
    for own, (start, offset, _) in zip(heads, owned, strict=True):
        rows = own - offset + start
        still = int((rows == torch.arange(start, start + len(rows))).sum())
        target = slice(start + still, start + len(rows))
        for storage in storages:
            storage[target] = storage[rows[still:].to(storage.device)]
    return None


def _check_storages(storages: Sequence[Tensor], starts: Tensor, lengths: Tensor) -> None:
    end = int((starts + lengths).max()) if len(starts) else 0
    for storage in storages:
        if len(storage) < end:
            raise CacheError(
                f"A storage of {len(storage)} rows cannot hold heads that end at row {end}: "
                "give tensors whose first dimension is that of the storage."
            )


def _check_counts(lengths: Tensor, kept: Tensor, new_lengths: tuple[int, ...]) -> None:
    if len(new_lengths) != len(lengths) or sum(new_lengths) != len(kept) or min(new_lengths) < 0:
        raise CacheError(
            f"new_lengths {new_lengths} must count the {len(kept)} kept entries of "
            f"{len(lengths)} kv heads, one count a head."
        )
