"""Attention weights of stored rows on a CPU: logits and softmax of decode attention.

The entries of every head are split into chunks of fixed size, which are processed in parallel. A
chunk stores the exponentials of its logits relative to its own maximum; one factor per chunk turns
them into softmax weights, so that every logit and exponential is computed once. The chunks do not
depend on the number of threads, so the weights do not either.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from larder.ops.cpu.decode_attention import as_numpy, bias_array, num_threads_for, query_rows

REDUCTION_CODES = {"max": 0, "sum": 1, "mean": 2}  # as in the kernels


def attention_weights(
    queries: Float[Tensor, "H Q D"],
    keys: Float[Tensor, "C D"],
    starts: Int[Tensor, " K"],
    lengths: Int[Tensor, " K"],
    scaling: float,
    join: str,
    bias: Float[Tensor, " C"] | None = None,
) -> Float[Tensor, " C"]:
    """Kernel of `attention_weights` for calls that decode attention supports; thread-safe."""
    from larder.ops.cpu import (
        attention_weights_kernels as kernels,  # compiles: not before it is needed
    )

    rows, owned = query_rows(queries, lengths.shape[0]), lengths.numpy()
    num_kv_heads, num_rows, head_dim = rows.shape
    pieces = kernels.chunk_bounds(owned)
    threads = num_threads_for(int(owned.sum()) * num_rows * head_dim)
    shares = np.array([len(pieces) * s // threads for s in range(threads + 1)], np.int64)
    weigh = kernels.attention_weights_parallel if threads > 1 else kernels.attention_weights
    weights = torch.zeros(len(keys), dtype=torch.float32)
    weigh(
        rows,
        as_numpy(keys),
        bias_array(bias),
        starts.numpy(),
        owned,
        np.float32(scaling),
        (pieces, shares),
        queries.shape[0] // num_kv_heads,
        REDUCTION_CODES[join],
        weights.numpy(),
    )
    return weights


def supports(logits: Tensor) -> bool:
    """True for logits in host memory."""
    return logits.device.type == "cpu"


def weights_from_logits(
    logits: Float[Tensor, "R C"], starts: Int[Tensor, " K"], lengths: Int[Tensor, " K"], join: str
) -> Float[Tensor, " C"]:
    """Kernel of `weights_from_logits`; the same bits as `attention_weights` of that query."""
    from larder.ops.cpu import (
        attention_weights_kernels as kernels,  # compiles: not before it is needed
    )

    weights = torch.zeros(logits.shape[1], dtype=torch.float32)
    kernels.weights_from_logits(
        logits.numpy(),
        starts.numpy(),
        lengths.numpy(),
        len(logits),
        REDUCTION_CODES[join],
        weights.numpy(),
    )
    return weights


def head_weights_from_logits(
    logits: Float[Tensor, "R C"], starts: Int[Tensor, " K"], lengths: Int[Tensor, " K"]
) -> Float[Tensor, "R C"]:
    """Kernel of `head_weights_from_logits`; thread-safe."""
    from larder.ops.cpu import attention_weights_kernels as kernels

    shares = torch.zeros_like(logits)
    kernels.head_weights_from_logits(
        logits.numpy(), starts.numpy(), lengths.numpy(), shares.numpy()
    )
    return shares
