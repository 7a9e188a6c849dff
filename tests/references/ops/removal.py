"""Taking rows out of ragged storage, one row at a time."""

from __future__ import annotations

from torch import Tensor


def remove_rows(
    tensors: list[Tensor],
    starts: list[int],
    lengths: list[int],
    kept: list[int],
    new_lengths: tuple[int, ...],
) -> list[list[Tensor]]:
    """Rows of every tensor afterwards: the kept ones, head by head."""
    own_rows = [
        start + i for start, length in zip(starts, lengths, strict=True) for i in range(length)
    ]
    results: list[list[Tensor]] = []
    for tensor in tensors:
        rows = iter([tensor[own_rows[entry]].clone() for entry in kept])
        results.append([next(rows) for count in new_lengths for _ in range(count)])
    return results
