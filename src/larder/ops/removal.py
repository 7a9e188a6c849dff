"""Taking rows out of ragged storage without laying it out anew.

    before   [ a b c d e | slack | f g h | slack ]
    remove b, f and h
    after    [ a c d e | slack     | g | slack   ]

What stays of a head moves up within the head's own region, so a step that gives up one entry costs
a move of what lies behind it; or it moves down to the entry, where less lies before it, and the
head begins a row later. The readable form is here, the fast one in `larder.ops.fast.removal`;
it is taken for contiguous storage on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int, Int64
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
    new_starts: Int64[Tensor, " K"] | None = None,
) -> None:
    """Move the kept rows of every head together, in order and in place.

    Rows that are where they shall be are not touched; what lies around the kept ones is slack
    afterwards, of any content. A call that raises has changed nothing. One thread at a time
    may use a storage; different storages are safe from several threads.

    Args:
        tensors: of one storage: keys, values, positions and the like, of any type, [C, ...].
        starts, lengths: where the heads lie before the removal; int64 in host memory.
        kept: indices into the packed entries (head by head, without slack), ascending.
        new_lengths: how many of `kept` each head has.
        columns: further numbers of the same rows, one after the other.
        new_starts: where the kept rows of each head shall lie, in host memory; they must not reach
            rows of other heads. Left out, where the head lies already.

    Raises:
        CacheError: the storages do not hold the heads, or `kept` does not fit them.
    """
    rows = () if columns is None else tuple(columns)
    storages = *tensors, *rows
    new_starts = starts if new_starts is None else new_starts
    _check_storages(storages, starts, lengths)
    _check_counts(lengths, kept, new_lengths)
    case = storages, starts, lengths, kept, new_lengths, new_starts
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
    new_starts: Int64[Tensor, " K"],
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
    places = zip(heads, owned, new_starts.tolist(), strict=True)
    for own, (start, offset, _), new_start in places:
        rows = own - offset + start
        targets = torch.arange(new_start, new_start + len(rows))
        moved = rows != targets
        for storage in storages:
            source, target = (part[moved].to(storage.device) for part in (rows, targets))
            storage[target] = storage[source]
    return None


def starts_of_least_motion(
    starts: Int[Tensor, " K"],
    lengths: Int[Tensor, " K"],
    kept: Int64[Tensor, " kept"],
    new_lengths: tuple[int, ...],
    free: Bool[Tensor, " K"],
) -> Int64[Tensor, " K"]:
    """New starts for `remove_rows`: each head's end moves up, or its front down, as is less.

    Args:
        free: heads whose front may move; the others stay where they are.
    """
    if kept.device.type == "cpu":
        return removal.starts_of_least_motion(starts, lengths, kept, new_lengths, free)
    return readable_starts(starts, lengths, kept, new_lengths, free)


def readable_starts(
    starts: Int[Tensor, " K"],
    lengths: Int[Tensor, " K"],
    kept: Int64[Tensor, " kept"],
    new_lengths: tuple[int, ...],
    free: Bool[Tensor, " K"],
) -> Int64[Tensor, " K"]:
    """`starts_of_least_motion` for every device, one head after the other."""
    result, offset = starts.clone(), 0
    for h, own in enumerate(kept.cpu().split(list(new_lengths))):
        gone = int(lengths[h]) - len(own)
        shifts = own - offset - torch.arange(len(own))  # rows removed before each kept one
        if bool(free[h]) and int((shifts < gone).sum()) < int((shifts > 0).sum()):
            result[h] += gone
        offset += int(lengths[h])
    return result


def _check_storages(storages: Sequence[Tensor], starts: Tensor, lengths: Tensor) -> None:
    ends = zip(starts.tolist(), lengths.tolist(), strict=True)
    end = max((start + length for start, length in ends), default=0)
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
