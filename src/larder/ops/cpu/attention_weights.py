"""Attention weights of stored rows on a CPU: logits and softmax of decode attention.

The kernel is compiled from C (`c/attention_weights.c`). Where it was not, numba compiles one that
splits the entries of every head into chunks of fixed size, which are processed in parallel. A chunk
stores the exponentials of its logits relative to its own maximum; one factor per chunk turns them
into softmax weights. The weights depend on the number of threads with neither.
"""

from __future__ import annotations

from ctypes import CDLL, byref

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from larder.ops.cpu.c_library import WeighingCall, c_library
from larder.ops.cpu.decode_attention import (
    MAX_HEAD_DIM,
    as_numpy,
    bias_array,
    decode_attention,
    num_threads_for,
    query_rows,
)

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
    """Kernel of `attention_weights` for calls that decode attention supports; thread-safe.

    The C kernel of decode attention records logits beside its result, which is not used here.
    """
    library, num_kv_heads = c_library(), lengths.shape[0]
    if library is None or queries.shape[-1] > MAX_HEAD_DIM:
        return numba_attention_weights(queries, keys, starts, lengths, scaling, join, bias)
    group_len = len(queries) // num_kv_heads
    logits = torch.empty(group_len * queries.shape[1], len(keys))
    decode_attention(queries, keys, keys, starts, lengths, scaling, bias, logits)
    return _weigh(library, logits, starts, lengths, group_len, join)


def _weigh(
    library: CDLL,
    logits: Float[Tensor, "N C"],
    starts: Int[Tensor, " K"],
    lengths: Int[Tensor, " K"],
    group_len: int,
    join: str,
) -> Float[Tensor, " C"]:
    """Softmax of logits [group_len * Q, C] by the C kernel, joined."""
    logits, starts, lengths = logits.contiguous(), starts.contiguous(), lengths.contiguous()
    weights = torch.zeros(logits.shape[1], dtype=torch.float32)
    call = WeighingCall(
        logits=logits.data_ptr(),
        starts=starts.data_ptr(),
        lengths=lengths.data_ptr(),
        weights=weights.data_ptr(),
        logits_stride=logits.stride(0),
        heads=len(lengths),
        group_len=group_len,
        query_len=len(logits) // group_len,
        join=REDUCTION_CODES[join],
    )
    if library.larder_weights_from_logits(byref(call)):
        raise MemoryError("The weights of attention could not allocate their buffers.")
    return weights


def numba_attention_weights(
    queries: Float[Tensor, "H Q D"],
    keys: Float[Tensor, "C D"],
    starts: Int[Tensor, " K"],
    lengths: Int[Tensor, " K"],
    scaling: float,
    join: str,
    bias: Float[Tensor, " C"] | None = None,
) -> Float[Tensor, " C"]:
    """`attention_weights` where no C kernel was compiled, and for heads too long for it."""
    from larder.ops.cpu import (
        attention_weights_kernels as kernels,  # compiles: not before it is needed
    )

    rows, owned = query_rows(queries, lengths.shape[0]), lengths.numpy()
    num_kv_heads, num_rows, head_dim = rows.shape
    chunks = kernels.chunk_bounds(owned)
    threads = num_threads_for(int(owned.sum()) * num_rows * head_dim)
    shares = np.array([len(chunks) * s // threads for s in range(threads + 1)], np.int64)
    weigh = kernels.attention_weights_parallel if threads > 1 else kernels.attention_weights
    weights = torch.zeros(len(keys), dtype=torch.float32)
    weigh(
        rows,
        as_numpy(keys),
        bias_array(bias),
        starts.numpy(),
        owned,
        np.float32(scaling),
        (chunks, shares),
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
    if (library := c_library()) is not None:
        return _weigh(library, logits, starts, lengths, len(logits), join)
    from larder.ops.cpu import attention_weights_kernels as kernels

    weights, code = torch.zeros(logits.shape[1], dtype=torch.float32), REDUCTION_CODES[join]
    kernels.weights_from_logits(
        logits.numpy(), starts.numpy(), lengths.numpy(), len(logits), code, weights.numpy()
    )
    return weights


def head_weights_from_logits(
    logits: Float[Tensor, "R C"], starts: Int[Tensor, " K"], lengths: Int[Tensor, " K"]
) -> Float[Tensor, "R C"]:
    """Kernel of `head_weights_from_logits`; thread-safe."""
    library = c_library()
    if library is not None:
        return torch.stack(
            [_weigh(library, row[None], starts, lengths, 1, "sum") for row in logits]
        )
    from larder.ops.cpu import attention_weights_kernels as kernels

    shares = torch.zeros_like(logits)
    kernels.head_weights_from_logits(
        logits.numpy(), starts.numpy(), lengths.numpy(), shares.numpy()
    )
    return shares
