"""Attention over pages by `varlen_attn` of torch (FlashAttention), which reads them in place.

Each segment is a sequence of its own with one kv head. `num_splits=1` keeps the bits of a segment
independent of its neighbors, and is the only number that FlashAttention 2 computes correctly over
pages (pytorch/pytorch#194167).
"""

from __future__ import annotations

import inspect
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from larder.ops.pages import SegmentTables

DTYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
DIM_MULTIPLE = 8
PAGE_MULTIPLE = 256  # of FlashAttention 2
ARGUMENTS = frozenset({"block_table", "seqused_k", "num_splits", "enable_gqa", "return_aux"})


def supports(dtype: torch.dtype, head_dim: int, page_tokens: int) -> bool:
    """True if torch has the function, and it takes pages of this form."""
    fits = head_dim <= MAX_HEAD_DIM and head_dim % DIM_MULTIPLE == 0
    return dtype in DTYPES and fits and page_tokens % PAGE_MULTIPLE == 0 and _is_available()


def paged_attention(
    queries: Float[Tensor, "S R Q D"],
    keys: Float[Tensor, "N P D"],
    values: Float[Tensor, "N P D"],
    tables: SegmentTables,
    scaling: float,
    bias: None = None,
    softcap: None = None,
) -> tuple[Float[Tensor, "S R Q D"], Float[Tensor, "S R Q"]]:
    """Attention of every query over all entries of its segment; see `ops.paged_attention`.

    The output has the dtype of the queries. Of a segment without entries, output and log-sum-exp
    are undefined.
    """
    assert bias is None and softcap is None
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    segments, group_len, query_len, _ = queries.shape
    out, lse = varlen_attn(
        queries.transpose(1, 2).flatten(0, 1),  # [S * Q, R, D]
        keys.unsqueeze(2),
        values.unsqueeze(2),
        tables.query_offsets,
        tables.key_offsets,
        query_len,
        tables.table.shape[1] * keys.shape[1],
        return_aux=AuxRequest(lse=True),
        scale=scaling,
        enable_gqa=True,
        seqused_k=tables.lengths,
        block_table=tables.table,
        num_splits=1,
    )
    # The log-sum-exp comes as [R, S * Q], other than torch documents it.
    shape = segments, query_len
    return out.unflatten(0, shape).transpose(1, 2), lse.unflatten(1, shape).transpose(0, 1)


@cache
def _is_available() -> bool:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return ARGUMENTS <= set(inspect.signature(varlen_attn).parameters)
