"""Attention of segments over pages: one dispatch for the readable loop, the CPU and accelerators.

A segment is one kv head of one sequence, with R query heads, Q queries and a length of its own, so
that one call serves sequences, heads and layers of any length. Tables and lengths are on the device
of the pages; only the reference and the CPU read them on the host. Output and log-sum-exp are as in
`ops.attention`: float32, 0 and -inf where a segment has no entries, no mask among the queries.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from importlib import import_module
from importlib.util import find_spec

import torch
from jaxtyping import Float
from torch import Tensor

from larder.ops.attention import attention, cap_logits
from larder.ops.pages import SegmentTables, padded_rows

# Tokens of a page that every kernel takes: FlashAttention 2 requires a multiple of 256.
PAGE_TOKENS = 256


class AttentionBackend(Enum):
    """Implementation of attention over pages.

    REFERENCE: one segment after the other, the readable loop.
    CPU: the compiled kernel of `ops.cpu`.
    GATHERED: torch on padded copies of the pages; on any device, without a kernel.
    TRITON: kernels of our own over the pages in place, which take biases and a softcap.
    VARLEN: `varlen_attn` of torch (FlashAttention) over the pages in place.
    """

    REFERENCE = "reference"
    CPU = "cpu"
    GATHERED = "gathered"
    TRITON = "triton"
    VARLEN = "varlen"

    @property
    def is_capturable(self) -> bool:
        """True if a graph may repeat it: it does not read tables on the host."""
        return self not in (AttentionBackend.REFERENCE, AttentionBackend.CPU)

    def with_bias(self) -> AttentionBackend:
        """Backend for logits with biases or a softcap: `varlen_attn` takes neither."""
        return AttentionBackend.GATHERED if self is AttentionBackend.VARLEN else self


def choose_backend(
    device: torch.device, dtype: torch.dtype, head_dim: int, page_tokens: int
) -> AttentionBackend:
    """Fastest backend for pages on a device."""
    if device.type == "cpu":
        return AttentionBackend.CPU
    if device.type != "cuda":
        return AttentionBackend.GATHERED
    if find_spec("triton") is not None:
        from larder.ops.gpu import attention_kernel

        if attention_kernel.supports(page_tokens):
            return AttentionBackend.TRITON
    from larder.ops.gpu import varlen

    fits = varlen.supports(dtype, head_dim, page_tokens)
    return AttentionBackend.VARLEN if fits else AttentionBackend.GATHERED


def paged_attention(
    queries: Float[Tensor, "S R Q D"],
    keys: Float[Tensor, "N P D"],
    values: Float[Tensor, "N P D"],
    tables: SegmentTables,
    scaling: float,
    backend: AttentionBackend,
    bias: Float[Tensor, "N P"] | None = None,
    softcap: float | None = None,
) -> tuple[Float[Tensor, "S R Q D"], Float[Tensor, "S R Q"]]:
    """Attention of every query over all entries of its segment.

    Args:
        bias: added to the logit of each row of the pool, in natural log units.
        softcap: as in `ops.attention`.
    """
    if bias is not None or softcap is not None:
        backend = backend.with_bias()
    return _FORMS[backend]()(queries, keys, values, tables, scaling, bias, softcap)


def reference_paged_attention(
    queries: Float[Tensor, "S R Q D"],
    keys: Float[Tensor, "N P D"],
    values: Float[Tensor, "N P D"],
    tables: SegmentTables,
    scaling: float,
    bias: Float[Tensor, "N P"] | None = None,
    softcap: float | None = None,
) -> tuple[Float[Tensor, "S R Q D"], Float[Tensor, "S R Q"]]:
    """Reference of `paged_attention`: one segment after the other."""
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    for query, pages, length in zip(queries, tables.table, tables.lengths.tolist(), strict=True):
        held = [stored[pages.long()].flatten(0, 1)[:length] for stored in (keys, values)]
        added = None if bias is None else bias[pages.long()].flatten()[:length]
        out, lse = attention(query, held[0], held[1], scaling, bias=added, softcap=softcap)
        outs.append(out)
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


def gathered_attention(
    queries: Float[Tensor, "S R Q D"],
    keys: Float[Tensor, "N P D"],
    values: Float[Tensor, "N P D"],
    tables: SegmentTables,
    scaling: float,
    bias: Float[Tensor, "N P"] | None = None,
    softcap: float | None = None,
) -> tuple[Float[Tensor, "S R Q D"], Float[Tensor, "S R Q"]]:
    """Attention over padded copies of the pages, [S, W * P, D], without reading the tables."""
    rows, is_held = padded_rows(tables.table, tables.lengths, keys.shape[1])
    own_keys, own_values = (side.flatten(0, 1)[rows].float()[:, None] for side in (keys, values))
    logits = cap_logits(queries.float() @ own_keys.mT * scaling, softcap)  # [S, R, Q, W * P]
    if bias is not None:
        logits = logits + bias.flatten()[rows][:, None, None]
    logits = logits.masked_fill(~is_held[:, None, None], -torch.inf)
    lse = logits.logsumexp(-1)
    peak = lse.masked_fill(lse.isneginf(), 0.0)  # -inf minus -inf would be NaN
    weights = (logits - peak.unsqueeze(-1)).exp()
    # Rows of no entry may hold anything, NaN too.
    return weights @ own_values.masked_fill(~is_held[:, None, :, None], 0.0), lse


Form = Callable[..., tuple[Tensor, Tensor]]


def _form(module: str, name: str) -> Callable[[], Form]:
    """Function of a module that is imported when it is first needed."""
    return lambda: vars(import_module(module))[name]


_FORMS: dict[AttentionBackend, Callable[[], Form]] = {
    AttentionBackend.REFERENCE: lambda: reference_paged_attention,
    AttentionBackend.GATHERED: lambda: gathered_attention,
    AttentionBackend.CPU: _form("larder.ops.cpu.paged_attention", "paged_attention"),
    AttentionBackend.VARLEN: _form("larder.ops.gpu.varlen", "paged_attention"),
    AttentionBackend.TRITON: _form("larder.ops.gpu.attention_kernel", "paged_attention"),
}
