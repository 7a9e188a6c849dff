"""Attention to coded transform components on a CPU, which decodes as it goes.

The kernel is compiled from C (`c/transform_attention.c`). Where it was not, or for sizes that it
does not serve, blocks are decoded one after the other and torch attends.
"""

from __future__ import annotations

from ctypes import Structure, byref, c_double
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Float, Int8, Int16, Int32, Int64, UInt8
from torch import Tensor

from larder.core.codec import LAST_TIER, Coder
from larder.ops.cpu.c_library import INTEGER, POINTER, CodeTables, c_library
from larder.ops.plane_coder import plane_library
from larder.ops.symbol_model import BUCKETS, NUM_CLASSES

LANES = 16  # of the kernels' vectors
CODER_LANES = 32
TOGETHER = 2  # blocks that a thread decodes at once
TABLE_BYTES = 192  # of a class
MAX_HEAD_DIM = 256
MAX_QUERY_ROWS = 16  # per kv head

CODERS = {Coder.ENTROPY: 0, Coder.PLANES: 1}  # of `enum component_coder`
PLANE_ROWS = 64
PLANE_BYTES = 320  # of planes of a component of a group, with room
FAR_BYTES = 256  # of symbols of a row that are no bytes

LOWER_STEPS = 256  # of a lower byte, in a step of an upper one
MOST_NOISE = 0.005  # that rounded matrices may add to that of coding, in squares

# Outputs and log-sum-exp.
Attended = tuple[Float[Tensor, "H Q D"], Float[Tensor, "H Q"]]


class ByteMatricesCall(Structure):
    """`struct byte_matrices` of c/transform_attention.h."""

    _fields_ = [(name, POINTER) for name in ("numbers", "firsts", "scales", "lowers")]


class TransformAttentionCall(Structure):
    """`struct transform_attention` of c/transform_attention.h."""

    _fields_ = [
        *((name, POINTER) for name in ("blocks", "payload", "queries", "inverse", "pairs")),
        *((name, POINTER) for name in ("means", "bases", "rotation", "bias")),
        ("tables", CodeTables),
        *((name, POINTER) for name in ("other_outs", "other_lses", "outs", "lses")),
        *((name, INTEGER) for name in ("num_blocks", "kv_heads", "num_queries", "head_dim")),
        ("half", INTEGER),
        ("step", c_double),
        ("threads", INTEGER),
        ("bytes", ByteMatricesCall),  # last: a library of an older version does not read it
        ("coder", INTEGER),
    ]


@dataclass(frozen=True)
class ByteMatrices:
    """Matrices from components to keys as bytes; see `byte_matrices`.

    Args:
        numbers: upper and lower bytes, of four neighboring components side by side.
        firsts: what sums begin with: those of the lower bytes of 0 to D / 4 fours, then those of
            the upper ones.
        scales: of each dimension.
        noise: squared error of a dimension by upper bytes alone, of a symbol of 1, relative to
            that of coding.
    """

    numbers: Int8[Tensor, "K 2 D4 D 4"]
    firsts: Int32[Tensor, "K D4_2 D"]
    scales: Float[Tensor, "K D"]
    noise: Float[Tensor, " K"]

    def lowers(self, ratios: Float[Tensor, "K D"]) -> Int32[Tensor, "K T"]:
        """Fours of components that need lower bytes in each tier, from the finest on.

        Args:
            ratios: deviations over the step of tier 0.
        """
        steps = 2.0 ** torch.arange(-LAST_TIER, LAST_TIER + 1, dtype=torch.float64)
        squares = (ratios.double()[:, None] / steps[None, :, None]).square()
        fours = squares.unflatten(2, (-1, 4)).sum(3)
        behind = fours.flip(2).cumsum(2).flip(2)  # of a four and all behind it
        return (self.noise.double()[:, None, None] * behind > MOST_NOISE).sum(2).int()


@dataclass(frozen=True)
class TransformedHeads:
    """Matrices that attention to the coded entries of a layer needs.

    Args:
        inverse: matrices from components to keys (0) and values (1).
        pairs: those of keys as pairs of bfloat16 numbers of neighboring components; None where keys
            are computed in float32.
        bytes: the same in bytes, for symbols that are bytes; None likewise.
        ratios: deviations of the components of keys over the step.
        means: of keys before rotation, and of values.
        bases: class of each component in tier 0, keys first.
        rotation: cosines and sines of each position.
    """

    inverse: Float[Tensor, "2 K D D"]
    pairs: Int32[Tensor, "K half D"] | None
    bytes: ByteMatrices | None
    ratios: Float[Tensor, "K D"]
    means: Float[Tensor, "2 K D"]
    bases: Int32[Tensor, "K D2"]
    rotation: Float[Tensor, "P 2 half"]


def supports(coder: Coder, num_queries: int, head_dim: int, half: int) -> bool:
    """True if the kernel attends to keys and values of these sizes.

    Args:
        coder: of the components.
        num_queries: per kv head.
        half: pairs of rotated dimensions.
    """
    library = plane_library() if coder is Coder.PLANES else c_library()
    return (
        coder in CODERS
        and library is not None
        and num_queries <= MAX_QUERY_ROWS
        and head_dim <= MAX_HEAD_DIM
        and head_dim % (2 * LANES) == 0
        and half % LANES == 0
    )


def can_step() -> bool:
    """True if decode steps take coded entries; a library of an older version does not."""
    return hasattr(c_library(), "larder_attend_coded")


def kernel_bytes(entries: int, num_blocks: int, head_dim: int, coder: Coder) -> int:
    """Bytes of the decoded blocks of all threads, and of tables in the kernel's form.

    Args:
        entries: of the longest block.
    """
    together = min(num_blocks, TOGETHER * torch.get_num_threads())
    if coder is Coder.PLANES:
        rows = -(-entries // PLANE_ROWS) * PLANE_ROWS
        row = 10 * head_dim + 4 * (MAX_QUERY_ROWS + 6) + FAR_BYTES
        group = head_dim * (9 * PLANE_ROWS + 2 * PLANE_BYTES + 6 * LANES)
        return together * (rows * row + group)
    numbers = 2 * head_dim + MAX_QUERY_ROWS + 5
    keys = LANES * (head_dim + head_dim // 2)
    decoded = 4 * together * (-(-entries // CODER_LANES) * CODER_LANES * numbers + keys)
    return decoded + (NUM_CLASSES + 1) * TABLE_BYTES


class CodedEntriesCall(NamedTuple):
    """Coded entries of a layer of one sequence, as the kernel takes them.

    Args:
        fields: all but queries, further entries and results, which belong to one call each.
        held: tensors that the fields point into, beside those that `of` leaves to the caller.
    """

    fields: TransformAttentionCall
    held: tuple[Tensor, ...]

    @staticmethod
    def of(
        payload: UInt8[Tensor, " N"],
        blocks: Int64[Tensor, "B F"],
        heads: TransformedHeads,
        step: float,
        bias: Float[Tensor, " T"] | None = None,
        coder: Coder = Coder.ENTROPY,
    ) -> CodedEntriesCall:
        """Call for blocks of entries, which holds neither payload nor biases alive.

        Args:
            blocks: head, entries, first position, span of the bitmap of positions, offset of the
                block in the payload, offset and bytes of its words, first entry; by head.
            bias: as in `larder.ops.attention.ragged_attention`, of each entry.
        """
        kv_heads, head_dim = heads.means.shape[1:]
        held: tuple[Tensor, ...] = () if heads.pairs is None else (heads.pairs,)
        matrices = ByteMatricesCall()
        if (own_bytes := heads.bytes) is not None:
            lowers = own_bytes.lowers(heads.ratios).contiguous()
            parts = own_bytes.numbers, own_bytes.firsts, own_bytes.scales, lowers
            matrices = ByteMatricesCall(*(part.data_ptr() for part in parts))
            held = (*held, *parts)
        fields = TransformAttentionCall(
            blocks=blocks.data_ptr(),
            payload=payload.data_ptr(),
            inverse=heads.inverse.data_ptr(),
            pairs=None if heads.pairs is None else heads.pairs.data_ptr(),
            means=heads.means.data_ptr(),
            bases=heads.bases.data_ptr(),
            rotation=heads.rotation.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            tables=_code_tables(coder),
            num_blocks=len(blocks),
            kv_heads=kv_heads,
            head_dim=head_dim,
            half=heads.rotation.shape[2],
            step=step,
            bytes=matrices,
            coder=CODERS[coder],
        )
        own = heads.inverse, heads.means, heads.bases, heads.rotation
        return CodedEntriesCall(fields, (blocks, *own, *held))

    def holding(self, *tensors: Tensor) -> CodedEntriesCall:
        """The call, which holds further tensors alive."""
        return CodedEntriesCall(self.fields, (*self.held, *tensors))


def transform_attention(
    queries: Float[Tensor, "H Q D"],
    coded: CodedEntriesCall,
    scaling: float,
    other: Attended | None = None,
) -> Attended:
    """Attention of every query to all coded entries of its kv head; thread-safe.

    Holds two decoded blocks per thread.

    Args:
        other: attention of the queries to further entries, which is merged.
    """
    library = c_library()
    assert library is not None  # supported
    num_heads, query_len, _ = queries.shape
    given = (queries.float() * scaling).contiguous()
    out, lse = torch.empty_like(given), given.new_empty(num_heads, query_len)
    others = () if other is None else tuple(part.float().contiguous() for part in other)
    call = TransformAttentionCall.from_buffer_copy(coded.fields)
    call.queries, call.outs, call.lses = given.data_ptr(), out.data_ptr(), lse.data_ptr()
    if others:
        call.other_outs, call.other_lses = others[0].data_ptr(), others[1].data_ptr()
    call.num_queries = num_heads // call.kv_heads * query_len
    call.threads = torch.get_num_threads()
    if library.larder_transform_attention(byref(call)):
        raise MemoryError("Attention over coded entries could not allocate its buffers.")
    return out, lse


@cache
def _empty_row() -> Int16[Tensor, " N"]:
    """Table of no class, `struct alias_table` of c/transform_attention.h."""
    return torch.zeros(7 * BUCKETS, dtype=torch.int16)


def _code_tables(coder: Coder) -> CodeTables:
    """Tables of the range coder. Bit planes have none, but the kernel copies the last row."""
    if coder is Coder.PLANES:
        return CodeTables(_empty_row().data_ptr(), 0, 0)
    from larder.ops.cpu.range_coder import packed_tables  # made in a tenth of a second

    return packed_tables().decoding


def bfloat16_pairs(matrices: Float[Tensor, "K D D"]) -> Int32[Tensor, "K half D"]:
    """Rows 2 i and 2 i + 1 of each matrix as pairs of bfloat16, the first in the lower bits."""
    rows = matrices.bfloat16().unflatten(1, (-1, 2)).transpose(2, 3).contiguous()
    return rows.view(torch.int32).squeeze(-1)


def byte_matrices(matrices: Float[Tensor, "K D D"]) -> ByteMatrices:
    """Matrices whose elements are (upper + lower / 256) times the scale of their column."""
    scales = (matrices.abs().amax(1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    plain = matrices / scales[:, None]
    upper = plain.round()
    lower = ((plain - upper) * LOWER_STEPS).round().clamp(-128, 127)
    parts = torch.stack([upper, lower], 1)
    numbers = parts.to(torch.int8).unflatten(2, (-1, 4)).transpose(3, 4).contiguous()
    # Symbols are written plus 128; a sum of lower bytes is rounded, and divided by their steps.
    repaid = -128 * parts.int().unflatten(2, (-1, 4)).sum(3)
    sums = repaid[:, 1].cumsum(1) + LOWER_STEPS // 2
    none = torch.full_like(sums[:, :1], LOWER_STEPS // 2)
    firsts = torch.cat([none, sums, repaid[:, 0].sum(1, keepdim=True)], 1)
    noise = scales.square().sum(1) / matrices.square().sum((1, 2))
    return ByteMatrices(numbers, firsts.int().contiguous(), scales.contiguous(), noise)
