"""Attention of a block of queries on a CPU, and the sum of the weights that each entry receives.

The C kernel attends to the entries of a cache and causally to the new tokens in one call, with dot
products of bfloat16 numbers where the processor has them.
"""

from __future__ import annotations

from ctypes import byref
from functools import cache, partial

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.ops.cpu import flash_attention
from larder.ops.cpu.c_library import BlockCall, c_library
from larder.ops.cpu.decode_attention import SPAN_FLOATS, SUPPORTED_DTYPES
from larder.ops.cpu.kernel_choice import saved_choice, slowdown, thread_seconds

TIMED_HEADS, TIMED_QUERIES, TIMED_ENTRIES = 4, 128, 512


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


@cache
def is_faster(dtype: torch.dtype, head_dim: int) -> bool:
    """True if the kernel attends faster than torch does; measured once per machine.

    With matrix units (AMX), torch may be the faster one.
    """
    name = f"blocks of {str(dtype).removeprefix('torch.')}, heads of {head_dim}"
    return bool(saved_choice(name, partial(_measure, dtype, head_dim), 1))


def _measure(dtype: torch.dtype, head_dim: int) -> int:
    """1 if the kernel is faster."""
    queries = torch.ones(TIMED_HEADS, TIMED_QUERIES, head_dim, dtype=dtype)
    stored = torch.ones(TIMED_ENTRIES, head_dim, dtype=dtype)
    new = torch.ones(1, TIMED_QUERIES, head_dim, dtype=dtype)
    layout = torch.tensor([0]), torch.tensor([TIMED_ENTRIES])
    limits = TIMED_ENTRIES + 1 + torch.arange(TIMED_QUERIES)[None]
    if not flash_attention.supports(queries, stored, stored):
        return 1

    def ours() -> None:
        starts, lengths = layout
        block_attention(queries, stored, stored, starts, lengths, new, new, limits, 1.0, None, None)

    def torchs() -> None:
        flash_attention.ragged(queries, stored, stored, *layout, 1.0)
        flash_attention.causal(queries, new, new, 1.0, (TIMED_QUERIES,), None)

    return int(slowdown(partial(thread_seconds, ours), partial(thread_seconds, torchs)) < 1)


class BlockWork:
    """Block of queries, what they attend to, and outputs.

    Args:
        limits: entries that a query sees, the first ones of its kv head.
        sums: output buffer for the sums of the weights of each entry, head by head, new ones
            behind the stored ones; None for none.
        attends: False to leave out the attention, whose result is then empty.
    """

    def __init__(
        self,
        queries: Float[Tensor, "H Q D"],
        keys: Float[Tensor, "C D"],
        values: Float[Tensor, "C D"],
        starts: Int64[Tensor, " K"],
        lengths: Int64[Tensor, " K"],
        new_keys: Float[Tensor, "K N D"],
        new_values: Float[Tensor, "K N D"],
        limits: Int64[Tensor, "K Q"],
        scaling: float,
        bias: Float[Tensor, " C"] | None,
        sums: Float[Tensor, " T"] | None,
        attends: bool = True,
    ) -> None:
        (num_heads, query_len, head_dim), (num_kv_heads, new_len, _) = queries.shape, new_keys.shape
        new = queries, new_keys, new_values
        queries, new_keys, new_values = (side.detach().contiguous() for side in new)
        starts, lengths, limits = starts.contiguous(), lengths.contiguous(), limits.contiguous()
        bias = None if bias is None else bias.float().contiguous()
        shape = (num_heads, query_len, head_dim) if attends else (0, 0, head_dim)
        self.state = torch.empty(shape), torch.empty(shape[:2])
        # The call has addresses of these.
        self._held = (
            queries,
            new_keys,
            new_values,
            starts,
            lengths,
            limits,
            bias,
            keys,
            values,
            sums,
        )
        entries = int(lengths.sum()) + num_kv_heads * new_len
        group_len = num_heads // num_kv_heads
        floats = entries * group_len * query_len // num_kv_heads * head_dim
        self.call = BlockCall(
            queries=queries.data_ptr(),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            starts=starts.data_ptr(),
            lengths=lengths.data_ptr(),
            new_keys=new_keys.data_ptr(),
            new_values=new_values.data_ptr(),
            limits=limits.data_ptr(),
            outs=self.state[0].data_ptr() if attends else None,
            lses=self.state[1].data_ptr() if attends else None,
            sums=None if sums is None else sums.data_ptr(),
            heads=num_kv_heads,
            group_len=group_len,
            query_len=query_len,
            new_len=new_len,
            head_dim=head_dim,
            item_bytes=keys.element_size(),
            scaling=scaling,
            threads=min(torch.get_num_threads(), floats // SPAN_FLOATS + 1),
        )

    def run(self) -> None:
        """Attend.

        Raises:
            MemoryError: buffers could not be allocated.
        """
        library = c_library()
        assert library is not None
        if library.larder_block_attention(byref(self.call)):
            raise MemoryError("Attention of a block could not allocate its buffers.")


def block_attention(
    queries: Float[Tensor, "H Q D"],
    keys: Float[Tensor, "C D"],
    values: Float[Tensor, "C D"],
    starts: Int64[Tensor, " K"],
    lengths: Int64[Tensor, " K"],
    new_keys: Float[Tensor, "K N D"],
    new_values: Float[Tensor, "K N D"],
    limits: Int64[Tensor, "K Q"],
    scaling: float,
    bias: Float[Tensor, " C"] | None,
    sums: Float[Tensor, " T"] | None,
    attends: bool = True,
) -> tuple[Float[Tensor, "H Q D"], Float[Tensor, "H Q"]]:
    """Kernel of `block_attention`; thread-safe. Arguments are those of `BlockWork`."""
    sides, new = (queries, keys, values, starts, lengths), (new_keys, new_values)
    work = BlockWork(*sides, *new, limits, scaling, bias, sums, attends)
    work.run()
    return work.state
