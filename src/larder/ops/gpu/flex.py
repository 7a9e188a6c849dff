"""Attention over pages by `flex_attention` of torch, for biases, softcaps and float32.

The block mask is the page table itself: a block is a page, and a segment attends to its own pages
where they lie in the pool.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from larder.ops.pages import SegmentTables

QUERY_BLOCK = 128
PAGE_MULTIPLE = 128  # blocks of keys that the compiled kernel reads lie within a page
MIN_HEAD_DIM = 16


def supports(head_dim: int, page_tokens: int) -> bool:
    """True if the compiled kernel takes pages of this form."""
    return head_dim >= MIN_HEAD_DIM and page_tokens % PAGE_MULTIPLE == 0


def paged_attention(
    queries: Float[Tensor, "S R Q D"],
    keys: Float[Tensor, "N P D"],
    values: Float[Tensor, "N P D"],
    tables: SegmentTables,
    scaling: float,
    bias: Float[Tensor, "N P"] | None = None,
    softcap: float | None = None,
) -> tuple[Float[Tensor, "S R Q D"], Float[Tensor, "S R Q"]]:
    """Attention of every query over all entries of its segment; see `ops.paged_attention`.

    The output has the dtype of the queries.
    """
    from torch.nn.attention.flex_attention import AuxRequest

    out, aux = _compiled(queries.device.type)(
        queries,
        keys.flatten(0, 1)[None, None],
        values.flatten(0, 1)[None, None],
        score_mod=_score_mod(bias, softcap),
        block_mask=_block_mask(queries.shape[2], keys.shape[0], keys.shape[1], tables),
        scale=scaling,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )
    return out, aux.lse


def _score_mod(
    bias: Float[Tensor, "N P"] | None, softcap: float | None
) -> Callable[..., Tensor] | None:
    """Softcap, then bias of the row; None for logits as they are."""
    if bias is None and softcap is None:
        return None
    added = None if bias is None else bias.flatten()

    def modified(score, b, h, q, row):  # untyped, because torch traces it
        del b, h, q
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return score if added is None else score + added[row]

    return modified


def _block_mask(query_len: int, num_pages: int, page_tokens: int, tables: SegmentTables) -> Any:
    """Block mask of the page tables; without any read on the host."""
    from torch.nn.attention.flex_attention import BlockMask

    table, lengths, _, _, order = tables

    def is_own(b, h, q, row):  # untyped, because torch traces it
        del h, q
        page, place = row // page_tokens, row % page_tokens
        number = order[page]
        return (table[b, number] == page) & (number * page_tokens + place < lengths[b])

    query_blocks = -(-query_len // QUERY_BLOCK)
    counts = torch.div(lengths + page_tokens - 1, page_tokens, rounding_mode="floor")
    return BlockMask.from_kv_blocks(
        counts[:, None, None].expand(-1, 1, query_blocks).contiguous(),
        table[:, None, None].expand(-1, 1, query_blocks, -1).contiguous(),
        BLOCK_SIZE=(QUERY_BLOCK, page_tokens),
        mask_mod=is_own,
        seq_lengths=(query_len, num_pages * page_tokens),
        compute_q_blocks=False,
    )


@cache
def _compiled(device: str) -> Callable[..., Any]:
    """Compiled on a GPU; elsewhere the eager form, which computes all logits."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False) if device == "cuda" else flex_attention
