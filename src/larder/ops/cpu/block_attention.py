"""Attention of a block of queries on a CPU, and the weights that each entry receives.

The C kernel attends to the entries of a cache and causally to the new tokens in one call, with dot
products of bfloat16 numbers where the processor has them. The weights of an entry are summed, or
the largest one is found.
"""

from __future__ import annotations

from ctypes import byref
from functools import cache
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.ops.cpu.c_library import BlockCall, c_library
from larder.ops.cpu.decode_attention import SPAN_FLOATS, SUPPORTED_DTYPES

if TYPE_CHECKING:
    from larder.ops.block_attention import BlockAttention


def supports(queries: Tensor, keys: Tensor, values: Tensor) -> bool:
    """True for contiguous storage of one supported dtype in host memory, and an even head size."""
    return (
        queries.device.type == keys.device.type == "cpu"
        and keys.dtype in SUPPORTED_DTYPES
        and queries.dtype is values.dtype is keys.dtype
        and keys.shape == values.shape
        and queries.shape[-1] % 2 == 0
        and keys.is_contiguous()
        and values.is_contiguous()
        and _has_kernel()
    )


@cache
def _has_kernel() -> bool:
    """True unless the library is missing, or of a version without the kernel."""
    return hasattr(c_library(), "larder_block_attention")


class BlockWork:
    """Call of the kernel for one block, and its outputs.

    Args:
        attends: False to leave out the attention, whose result is then empty.
    """

    def __init__(self, block: BlockAttention, attends: bool = True) -> None:
        num_heads, query_len, head_dim = block.queries.shape
        num_kv_heads, new_len, _ = block.new_keys.shape
        new = block.queries, block.new_keys, block.new_values
        queries, new_keys, new_values = (side.detach().contiguous() for side in new)
        starts, lengths = block.starts.contiguous(), block.lengths.contiguous()
        # Each query sees the stored entries of its head, and new ones up to its own.
        limits = lengths[:, None] + torch.arange(1, query_len + 1)  # [K, Q]
        bias = None if block.bias is None else block.bias.float().contiguous()
        shape = (num_heads, query_len, head_dim) if attends else (0, 0, head_dim)
        self.state = torch.empty(shape), torch.empty(shape[:2])
        # The call has addresses of these.
        self._held = block, queries, new_keys, new_values, starts, lengths, limits, bias
        entries = int(lengths.sum()) + num_kv_heads * new_len
        group_len = num_heads // num_kv_heads
        floats = entries * group_len * query_len // num_kv_heads * head_dim
        self.call = BlockCall(
            queries=queries.data_ptr(),
            keys=block.keys.data_ptr(),
            values=block.values.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            starts=starts.data_ptr(),
            lengths=lengths.data_ptr(),
            new_keys=new_keys.data_ptr(),
            new_values=new_values.data_ptr(),
            limits=limits.data_ptr(),
            outs=self.state[0].data_ptr() if attends else None,
            lses=self.state[1].data_ptr() if attends else None,
            sums=None if block.sums is None else block.sums.data_ptr(),
            heads=num_kv_heads,
            group_len=group_len,
            query_len=query_len,
            new_len=new_len,
            head_dim=head_dim,
            item_bytes=block.keys.element_size(),
            scaling=block.scaling,
            threads=_num_threads(floats),
        )

    def run(self) -> tuple[Float[Tensor, "H Q D"], Float[Tensor, "H Q"]]:
        """Attend; thread-safe. Returns output and log-sum-exp in float32.

        Raises:
            MemoryError: buffers could not be allocated.
        """
        _run(self.call)
        return self.state


def largest_weights(
    queries: Float[Tensor, "H Q D"],
    keys: Float[Tensor, "C D"],
    starts: Int64[Tensor, " K"],
    lengths: Int64[Tensor, " K"],
    scaling: float,
    bias: Float[Tensor, " C"] | None = None,
) -> Float[Tensor, " T"]:
    """Largest softmax weight of each entry over the queries of its kv head, in float32.

    All queries see all entries. Without queries a weight is 0; NaN stays NaN. Storage as `supports`
    asks for, without gradient.

    Args:
        starts, lengths: rows of each kv head in the flat storage, in host memory.
        scaling: of the logits.
        bias: added to the logit of each stored row, in natural log units.

    Returns:
        One number per entry, head by head.

    Raises:
        MemoryError: buffers could not be allocated.
    """
    num_heads, query_len, head_dim = queries.shape
    heads = len(lengths)
    queries, keys = queries.detach().contiguous(), keys.detach()
    limits = lengths[:, None].expand(-1, query_len).contiguous()
    added = None if bias is None else bias.float().contiguous()
    largest = keys.new_empty(int(lengths.sum()), dtype=torch.float32)
    _run(
        BlockCall(
            queries=queries.data_ptr(),
            keys=keys.data_ptr(),
            bias=None if added is None else added.data_ptr(),
            starts=starts.data_ptr(),
            lengths=lengths.data_ptr(),
            limits=limits.data_ptr(),
            sums=largest.data_ptr(),
            heads=heads,
            group_len=num_heads // heads,
            query_len=query_len,
            head_dim=head_dim,
            item_bytes=keys.element_size(),
            is_largest=1,
            scaling=scaling,
            threads=_num_threads(len(largest) * num_heads // heads * query_len * head_dim),
        )
    )
    return largest


def _num_threads(floats: int) -> int:
    """Threads for a call that multiplies so many numbers per kv head."""
    return min(torch.get_num_threads(), floats // SPAN_FLOATS + 1)


def _run(call: BlockCall) -> None:
    """Call the kernel.

    Raises:
        MemoryError: buffers could not be allocated.
    """
    library = c_library()
    assert library is not None
    if library.larder_block_attention(byref(call)):
        raise MemoryError("Attention of a block could not allocate its buffers.")
