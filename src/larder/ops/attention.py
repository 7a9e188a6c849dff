"""Attention over a cache, with the log-sum-exp that is needed to merge partial results.

Query head h belongs to kv head h // R. Outputs and log-sum-exp are float32 whatever the storage, so
that merging parts rounds once, at the end. A query that sees nothing gets output 0 and log-sum-exp
-inf.

A softcap c bounds logits: c * tanh(logit / c), before biases are added. Sinks are logits without a
value that belong to the softmax of a query head: `apply_sinks` adds them once all parts are merged.

Ragged storage is one flat buffer: kv head h owns rows [starts[h], starts[h] + lengths[h]) of keys
and values, with slack between heads. Dense storage is the case of equal lengths.

A CPU kernel in `larder.ops.cpu` is used where it applies. Kernels support no gradients: where an
input requires one, and on other devices, torch computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from larder.core.spec import LayerSpec
from larder.ops.cpu import decode_attention, flash_attention

NO_SINKS = torch.empty(0)
MOST_LOGITS = 1 << 22  # float32 logits in memory at a time without a kernel: 16 MiB


def attention(
    queries: Float[Tensor, "R Q D"],
    keys: Float[Tensor, "S D"],
    values: Float[Tensor, "S D"],
    scaling: float,
    mask: Bool[Tensor, "Q S"] | None = None,
    bias: Float[Tensor, " S"] | None = None,
    softcap: float | None = None,
) -> tuple[Float[Tensor, "R Q D"], Float[Tensor, "R Q"]]:
    """Attention of one group of query heads over the entries of its kv head, in float32.

    `bias` is added to the logits of each entry; see `ragged_attention`.
    """
    logits = cap_logits(queries.float() @ keys.float().transpose(-1, -2) * scaling, softcap)
    if bias is not None:
        logits = logits + bias
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    lse = logits.logsumexp(-1)
    peak = lse.masked_fill(lse.isneginf(), 0.0)  # -inf minus -inf would be NaN
    weights = (logits - peak.unsqueeze(-1)).exp()
    return weights @ values.float(), lse


def cap_logits(logits: Float[Tensor, "*rows"], softcap: float | None) -> Float[Tensor, "*rows"]:
    """Logits bounded by a softcap, as they are for None."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def apply_sinks(
    out: Float[Tensor, "H Q D"], lse: Float[Tensor, "H Q"], sinks: Float[Tensor, " _"]
) -> Float[Tensor, "H Q D"]:
    """Attention output under a softmax that also has a sink per query head.

    Args:
        lse: log-sum-exp over the entries alone.
        sinks: logit of each query head; empty without sinks.
    """
    return out * sink_shares(lse, sinks).unsqueeze(-1) if len(sinks) else out


def sink_shares(
    lse: Float[Tensor, "H *rows"], sinks: Float[Tensor, " H"]
) -> Float[Tensor, "H *rows"]:
    """Share of the entries in the softmax of each query, the rest of which is the sink's."""
    return torch.sigmoid(lse - sinks.view(-1, *[1] * (lse.ndim - 1)))


def sinks_by_group(sinks: Float[Tensor, " _"], num_kv_heads: int) -> Float[Tensor, "K _"]:
    """Sinks of the query heads of each kv head; K empty rows without sinks."""
    return sinks.view(num_kv_heads, len(sinks) // num_kv_heads)


def sink_logits(layer: LayerSpec, like: Tensor) -> Float[Tensor, " _"]:
    """Float32 sinks of a layer on the device of a tensor; empty without sinks."""
    return torch.tensor(layer.sinks, dtype=torch.float32, device=like.device)


def ragged_attention(
    queries: Float[Tensor, "H Q D"],
    keys: Float[Tensor, "C D"],
    values: Float[Tensor, "C D"],
    starts: Int[Tensor, " K"],
    lengths: Int[Tensor, " K"],
    scaling: float,
    bias: Float[Tensor, " C"] | None = None,
    logits: Float[Tensor, "N C"] | None = None,
    softcap: float | None = None,
) -> tuple[Float[Tensor, "H Q D"], Float[Tensor, "H Q"]]:
    """Attention of every query over all entries of its kv head, without mask or padding.

    `starts` and `lengths` are int64 in host memory. Never allocates [H, Q, S] float32.

    Args:
        bias: added to the logit of each stored row, in natural log units, finite float32. A row
            with bias ln(n) weighs as n equal rows do, and counts n times in the log-sum-exp.
        logits: float32 output buffer for the logits of each stored row with the R * Q queries of
            its kv head, softcap and biases included. Slack rows are not written.
    """
    is_plain = softcap is None and not needs_gradient(
        queries, keys, values, *(() if bias is None else (bias,))
    )
    if is_plain and decode_attention.supports(queries, keys, values, lengths.shape[0]):
        return decode_attention.decode_attention(
            queries, keys, values, starts, lengths, scaling, bias, logits
        )
    if is_plain and logits is None and flash_attention.supports(queries, keys, values):
        return flash_attention.ragged(queries, keys, values, starts, lengths, scaling, bias)
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    owned = zip(starts.tolist(), lengths.tolist(), strict=True)
    groups = queries.unflatten(0, (lengths.shape[0], -1))  # [K, R, Q, D]
    for group, (start, length) in zip(groups, owned, strict=True):
        chunk = max(MOST_LOGITS // max(group.shape[0] * length, 1), 1)
        span = slice(start, start + length)
        added = None if bias is None else bias[span]
        if logits is not None:
            rows = group.flatten(0, 1).float() @ keys[span].float().T * scaling
            rows = cap_logits(rows, softcap)
            logits[:, span] = rows if added is None else rows + added
        parts = [
            attention(some, keys[span], values[span], scaling, bias=added, softcap=softcap)
            for some in group.split(chunk, dim=1)
        ]
        outs.append(torch.cat([out for out, _ in parts], dim=1))
        lses.append(torch.cat([lse for _, lse in parts], dim=1))
    return torch.cat(outs), torch.cat(lses)


def causal_attention(
    queries: Float[Tensor, "H Q D"],
    keys: Float[Tensor, "K Q D"],
    values: Float[Tensor, "K Q D"],
    scaling: float,
    sections: tuple[int, ...],
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Float[Tensor, "H Q D"], Float[Tensor, "H Q"]]:
    """Causal attention of new tokens within each section.

    Args:
        sections: lengths that partition Q into independent sequences, in order.
        window: a query at offset i sees offsets above i - window only.
    """
    if softcap is None and _uses_flash(queries, keys, values):
        return flash_attention.causal(queries, keys, values, scaling, sections, window)
    parts: list[tuple[Tensor, Tensor]] = []
    split = (tensor.split(sections, dim=1) for tensor in (queries, keys, values))
    for own_queries, own_keys, own_values in zip(*split, strict=True):
        offsets = torch.arange(own_queries.shape[1], device=queries.device)
        back = offsets.unsqueeze(-1) - offsets  # distance from each query back to each key
        mask = back >= 0 if window is None else (back >= 0) & (back < window)
        parts.append(masked_attention(own_queries, own_keys, own_values, scaling, mask, softcap))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, dim=1), torch.cat(lses, dim=1)


def lookahead_attention(
    queries: Float[Tensor, "H Q D"],
    keys: Float[Tensor, "K Q D"],
    values: Float[Tensor, "K Q D"],
    scaling: float,
    spans: Sequence[tuple[int, int]],
    softcap: float | None = None,
) -> tuple[Float[Tensor, "H Q D"], Float[Tensor, "H Q"]]:
    """Attention of new tokens to the later ones of their span; other tokens see nothing.

    Merged with `causal_attention`, it lets the tokens of a span see each other in both directions.

    Args:
        spans: [start, stop) of disjoint spans of tokens.
    """
    outs = torch.zeros(queries.shape, dtype=torch.float32, device=queries.device)
    lses = outs.new_full(queries.shape[:2], -torch.inf)
    for start, stop in spans:
        if stop - start < 2:
            continue
        seeing, seen = slice(start, stop - 1), slice(start + 1, stop)
        size = stop - start - 1
        mask = torch.ones(size, size, dtype=torch.bool, device=queries.device).triu()
        outs[:, seeing], lses[:, seeing] = masked_attention(
            queries[:, seeing], keys[:, seen], values[:, seen], scaling, mask, softcap
        )
    return outs, lses


def chunk_sections(sections: Sequence[int], starts: Sequence[int], chunk: int) -> tuple[int, ...]:
    """Sections cut where a chunk ends, so that tokens see their own chunk alone.

    Args:
        sections: lengths of runs of consecutive tokens.
        starts: true position of the first token of each.
        chunk: tokens; chunks begin at multiples of it.
    """
    cut: list[int] = []
    for length, start in zip(sections, starts, strict=True):
        ends = range(start - start % chunk + chunk, start + length, chunk)
        edges = [start, *ends, start + length]
        cut += [stop - first for first, stop in zip(edges, edges[1:], strict=False)]
    return tuple(cut)


def windowed_attention(
    queries: Float[Tensor, "H Q D"],
    first_visible: Int[Tensor, " Q"],
    keys: Float[Tensor, "K S D"],
    values: Float[Tensor, "K S D"],
    key_positions: Int[Tensor, " S"],
    scaling: float,
    softcap: float | None = None,
) -> tuple[Float[Tensor, "H Q D"], Float[Tensor, "H Q"]]:
    """Attention over cached entries of a window or chunk.

    Args:
        first_visible: true position of the first key that each query sees.
    """
    mask = key_positions >= first_visible.unsqueeze(-1)  # [Q, S]
    num_kv_heads, cached_len, head_dim = keys.shape
    if mask.all():
        lengths = torch.full((num_kv_heads,), cached_len, dtype=torch.int64)
        starts = torch.arange(num_kv_heads, dtype=torch.int64) * cached_len
        flat = keys.reshape(-1, head_dim), values.reshape(-1, head_dim)
        return ragged_attention(queries, *flat, starts, lengths, scaling, softcap=softcap)
    return masked_attention(queries, keys, values, scaling, mask, softcap)


def masked_attention(
    queries: Float[Tensor, "H Q D"],
    keys: Float[Tensor, "K S D"],
    values: Float[Tensor, "K S D"],
    scaling: float,
    mask: Bool[Tensor, "Q S"],
    softcap: float | None = None,
) -> tuple[Float[Tensor, "H Q D"], Float[Tensor, "H Q"]]:
    """Attention under one mask for all heads; S is at least 1."""
    if softcap is None and _uses_flash(queries, keys, values):
        return flash_attention.masked(queries, keys, values, scaling, mask)
    groups = queries.unflatten(0, (keys.shape[0], -1))  # [K, R, Q, D]
    heads = zip(groups, keys, values, strict=True)
    outs, lses = zip(
        *[attention(q, k, v, scaling, mask, None, softcap) for q, k, v in heads], strict=True
    )
    return torch.cat(outs), torch.cat(lses)


def _uses_flash(queries: Tensor, keys: Tensor, values: Tensor) -> bool:
    fits = flash_attention.supports(queries, keys, values)
    return fits and not needs_gradient(queries, keys, values)


def needs_gradient(*tensors: Tensor) -> bool:
    """True if autograd would record an operation on the tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def merge_attention(
    outs: Sequence[Float[Tensor, "*rows D"]], lses: Sequence[Float[Tensor, "*rows"]]
) -> tuple[Float[Tensor, "*rows D"], Float[Tensor, "*rows"]]:
    """Attention over the union of disjoint parts, in float32.

    Args:
        outs: output of each part; 0 where a query saw no entry.
        lses: log-sum-exp of each part; -inf where a query saw no entry.

    Returns:
        Output and log-sum-exp of the union; 0 and -inf where a query saw no entry.
    """
    if len(outs) == 1:
        return outs[0].float(), lses[0].float()
    parts = torch.stack([lse.float() for lse in lses])  # [parts, *rows]
    lse = parts.logsumexp(0)
    # Clamped, because a softmax of -inf alone is NaN; the output of such a part is 0 anyway.
    shares = parts.clamp(min=torch.finfo(torch.float32).min).softmax(0).unsqueeze(-1)
    whole = shares[0] * outs[0].float()
    for share, out in zip(shares[1:], outs[1:], strict=True):
        whole = torch.addcmul(whole, share, out.float())
    return whole, lse
