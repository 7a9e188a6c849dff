"""The stored row that points most in the direction of another one: what a rejected entry is like.

Cosine similarity in float32, within a kv head. The readable form is here, the fast one, for the few
rows that go in a decode step on a CPU, in `larder.ops.cpu.nearest`.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor
from torch.nn.functional import normalize

from larder.ops.cpu import nearest as fast

MAX_COSINES = 1 << 22  # of one chunk: 16 MiB


def nearest_rows(
    rows: Float[Tensor, "C D"],
    starts: Int[Tensor, " K"],
    lengths: Int[Tensor, " K"],
    marked: Bool[Tensor, " T"],
    asked: Int64[Tensor, " F"],
) -> tuple[Float[Tensor, " F"], Int64[Tensor, " F"]]:
    """For every asked entry, the marked one of its head that is most alike.

    Args:
        rows: flat storage of keys or values; kv head h owns [starts[h], starts[h] + lengths[h]).
        starts, lengths: int64 in host memory.
        marked: which packed entries may be found.
        asked: packed entries, ascending; none of them marked.

    Returns:
        The cosine, and the packed index of what was found: of equals the first. -inf and -1 where
        no entry of the head is marked.
    """
    if fast.supports_nearest(rows, len(asked), lengths.shape[0]):
        return fast.nearest_rows(rows, starts, lengths, marked, asked)
    return reference_nearest_rows(rows, starts, lengths, marked, asked)


def reference_nearest_rows(
    rows: Float[Tensor, "C D"],
    starts: Int[Tensor, " K"],
    lengths: Int[Tensor, " K"],
    marked: Bool[Tensor, " T"],
    asked: Int64[Tensor, " F"],
) -> tuple[Float[Tensor, " F"], Int64[Tensor, " F"]]:
    """`nearest_rows` for every device and type: a matrix product per head, in chunks."""
    cosines: list[Tensor] = [rows.new_empty(0, dtype=torch.float32)]
    places: list[Tensor] = [torch.empty(0, dtype=torch.int64, device=rows.device)]
    first = 0
    bounds = torch.searchsorted(asked.cpu(), lengths.cumsum(0)).tolist()
    shares = asked.tensor_split(bounds)[:-1]
    for start, length, share in zip(starts.tolist(), lengths.tolist(), shares, strict=True):
        own = normalize(rows[start : start + length].float(), dim=-1)
        found = torch.nonzero(marked[first : first + length]).flatten()
        seeking = own[share - first]
        if len(found):
            chunk = max(MAX_COSINES // len(found), 1)
            for some in seeking.split(chunk):
                best = (some @ own[found].T).max(-1)
                cosines.append(best.values)
                places.append(found[best.indices] + first)
        else:
            cosines.append(own.new_full((len(share),), -torch.inf))
            places.append(torch.full((len(share),), -1, device=rows.device))
        first += length
    return torch.cat(cosines), torch.cat(places)
