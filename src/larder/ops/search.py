"""Search of stored keys: largest products with queries, top pages, and nearest neighbors.

Rows of scores are padded with -inf. Ties go to the lower index. The CPU kernels are in
`larder.ops.cpu.search`.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor
from torch.nn.functional import normalize

from larder.ops.cpu import search as fast

MAX_SCORES = 1 << 22  # or cosines, of one chunk: 16 MiB


def page_max_scores(
    queries: Float[Tensor, "H D"],
    keys: Float[Tensor, "C D"],
    starts: Int[Tensor, " K"],
    lengths: Int[Tensor, " K"],
    page: int = 1,
) -> Float[Tensor, "H N"]:
    """Largest product of each query with the keys of each page of its kv head.

    Args:
        keys: flat storage; kv head h owns rows [starts[h], starts[h] + lengths[h]), and its page p
            the entries [p * page, (p + 1) * page) of them.
        starts, lengths: int64 in host memory.
    """
    if fast.supports(queries, keys):
        return fast.page_max_scores(queries, keys, starts, lengths, page)
    group = queries.shape[0] // lengths.shape[0]
    num_pages = -(-int(lengths.max()) // page)
    bests = queries.new_full((queries.shape[0], num_pages), -torch.inf, dtype=torch.float32)
    chunk = max(MAX_SCORES // (group * page), 1) * page
    for head, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        head_queries = queries[head * group : (head + 1) * group].float()
        for first in range(0, length, chunk):
            stop = min(first + chunk, length)
            scores = head_queries @ keys[start + first : start + stop].float().T  # [R, S]
            filled = -(-scores.shape[1] // page)
            scores = _padded(scores, filled * page).view(group, filled, page)
            at = first // page
            bests[head * group : (head + 1) * group, at : at + filled] = scores.amax(-1)
    return bests


def scatter_page_max(
    scores: Float[Tensor, "H S"], page_of: Int64[Tensor, "K S"], num_pages: int
) -> Float[Tensor, "H N"]:
    """Largest score of each page, for pages of arbitrary entries.

    Args:
        page_of: page of each entry; -1 where a head has no such entry.
    """
    pages = page_of.repeat_interleave(scores.shape[0] // page_of.shape[0], 0)
    masked = scores.masked_fill(pages < 0, -torch.inf)
    bests = scores.new_full((scores.shape[0], num_pages), -torch.inf)
    return bests.scatter_reduce_(1, pages.clamp(min=0), masked, "amax") if num_pages else bests


def top_rows(scores: Float[Tensor, "F N"], count: int) -> Int64[Tensor, "F P"]:
    """Indices of the `count` highest scores of each row, highest first; -1 in place of -inf."""
    if fast.supports_ranking(scores):
        return fast.top_rows(scores, count)
    values, numbers = torch.sort(scores, dim=1, descending=True, stable=True)
    return numbers[:, :count].masked_fill(values[:, :count].isneginf(), -1)


def interleaved(ranked: Int64[Tensor, "H P"], kv_heads: int, count: int) -> Int64[Tensor, "K L"]:
    """One ranking per kv head, interleaved from those of its query heads.

    All first ranks, then all second ranks, and so on, without duplicates, truncated to `count`.
    """
    if fast.supports_ranking(ranked):
        return fast.interleaved(ranked, kv_heads, count)
    group = ranked.shape[0] // kv_heads
    width = min(count, group * ranked.shape[1])
    united = torch.full((kv_heads, width), -1, device=ranked.device)
    for head, lists in enumerate(ranked.view(kv_heads, group, -1).transpose(1, 2)):
        found = list(dict.fromkeys(page for page in lists.flatten().tolist() if page >= 0))
        some = found[:count]
        united[head, : len(some)] = torch.tensor(some, dtype=torch.int64, device=ranked.device)
    return united


def _padded(scores: Float[Tensor, "R S"], width: int) -> Float[Tensor, "R W"]:
    return torch.nn.functional.pad(scores, (0, width - scores.shape[1]), value=-torch.inf)


def nearest_rows(
    rows: Float[Tensor, "C D"],
    starts: Int[Tensor, " K"],
    lengths: Int[Tensor, " K"],
    marked: Bool[Tensor, " T"],
    query_rows: Int64[Tensor, " F"],
) -> tuple[Float[Tensor, " F"], Int64[Tensor, " F"]]:
    """Nearest marked entry of the same head, by cosine, for each of some entries.

    Args:
        rows: flat storage of keys or values; kv head h owns [starts[h], starts[h] + lengths[h]).
        starts, lengths: int64 in host memory.
        marked: mask of the packed entries that are candidates.
        query_rows: packed entries, ascending; none of them marked.

    Returns:
        Cosine and packed index of the nearest entry, the first of equals; -inf and -1 if no entry
        of the head is marked.
    """
    if fast.supports_nearest(rows, len(query_rows), lengths.shape[0]):
        return fast.nearest_rows(rows, starts, lengths, marked, query_rows)
    cosines: list[Tensor] = [rows.new_empty(0, dtype=torch.float32)]
    indices: list[Tensor] = [torch.empty(0, dtype=torch.int64, device=rows.device)]
    first = 0
    bounds = torch.searchsorted(query_rows.cpu(), lengths.cumsum(0)).tolist()
    shares = query_rows.tensor_split(bounds)[:-1]
    for start, length, share in zip(starts.tolist(), lengths.tolist(), shares, strict=True):
        own = normalize(rows[start : start + length].float(), dim=-1)
        found = torch.nonzero(marked[first : first + length]).flatten()
        seeking = own[share - first]
        if len(found):
            chunk = max(MAX_SCORES // len(found), 1)
            for some in seeking.split(chunk):
                best = (some @ own[found].T).max(-1)
                cosines.append(best.values)
                indices.append(found[best.indices] + first)
        else:
            cosines.append(own.new_full((len(share),), -torch.inf))
            indices.append(torch.full((len(share),), -1, device=rows.device))
        first += length
    return torch.cat(cosines), torch.cat(indices)
