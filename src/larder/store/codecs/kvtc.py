"""Principal components over all layers and heads, quantized in groups and packed by DEFLATE (KVTC).

Staniszewski and Lancucki, "KV Cache Transform Coding for Compact Storage in LLM Inference" (KVTC,
2025), arXiv:2511.01815, known to us from secondary accounts: keys without their rotary embedding,
and values, of all layers and heads of a token are one vector each; their principal components are
calibrated once, dynamic programming divides bits among groups of them
(`larder.ops.bit_allocation`), and DEFLATE packs the codes. The first 4 tokens and the latest 128
stay as they are.

What differs: groups of 8 bits are integers, where the paper has floating point; zlib packs, where
the paper has a library of an accelerator; and components are found in fewer tokens. Shares are
those of the coded tokens: the exact ones come on top.

A cache is coded so where every head of every managed layer holds the same tokens; what a policy
evicts by head is coded as `entropy` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from larder.cache.kvtc import KvtcTables, decode, encode
from larder.cache.predictive import by_head, side_by_side
from larder.core.errors import Damaged
from larder.ops.quantization import check_range
from larder.store.codecs.base import CodedStack, LayerStack, RowLayout, StorageCodec, TensorRole
from larder.store.codecs.entropy import Entropy
from larder.store.codecs.predictive import EXACT_DTYPE, ROLES, with_exact

SINKS, RECENT = 4, 128  # first and latest tokens, which stay exact


class Kvtc(StorageCodec):
    """Principal components in an eighth of the bfloat16 bytes, beside exact ends."""

    spans_layers: ClassVar[bool] = True
    share: ClassVar[str] = "1/8"  # of the bytes in bfloat16, as plans name it
    recent: ClassVar[int] = RECENT  # latest tokens, which stay exact

    def check_model(self, model: str) -> None:
        KvtcTables.load(model)

    def encode(self, numbers: Float[Tensor, "T D"], rows: RowLayout) -> dict[str, Tensor]:
        return Entropy().encode(numbers, rows)

    def decode(self, coded: Mapping[str, Tensor], rows: RowLayout) -> Float[Tensor, "T D"]:
        return Entropy().decode(coded, rows)

    def encode_stack(self, stack: LayerStack) -> CodedStack:
        tables, is_coded = KvtcTables.find(stack.model), self._is_coded(stack.positions)
        if tables is None or not _fits(tables, stack) or not bool(is_coded.any()):
            return CodedStack()
        positions = stack.positions[is_coded]
        sides: list[dict[TensorRole, dict[str, Tensor]]] = [{} for _ in stack.sides]
        for role, side in zip(ROLES, tables.sides, strict=True):
            parts = list[Tensor]()
            for index, arrays in enumerate(stack.sides):
                check_range(arrays[role])
                rotated = tables.radians[index] if role is TensorRole.KEYS else None
                parts.append(side_by_side(arrays[role][:, is_coded], positions, rotated))
                exact = arrays[role][:, ~is_coded].to(EXACT_DTYPE)
                sides[index][role] = {"exact": exact}
            sides[0][role]["words"] = encode(side, side.plans[self.share], torch.cat(parts, 1))
        return CodedStack(tuple(sides), {"model": stack.model, "tables": tables.digest})

    def decode_stack(
        self, coded: CodedStack, positions: Int[Tensor, " S"], heads: Sequence[int]
    ) -> Iterator[dict[TensorRole, Float[Tensor, "K S D"]]]:
        tables, is_coded = KvtcTables.find(str(coded.note["model"])), self._is_coded(positions)
        if tables is None or tables.digest != coded.note["tables"]:
            raise Damaged("The cache was coded with components that are no longer here.")
        if not len(tables.radians) == len(coded.sides) == len(heads):
            raise Damaged(f"{len(coded.sides)} layers do not fit {len(tables.radians)}.")
        count, coded_positions = int(is_coded.sum()), positions[is_coded]
        whole = {
            role: decode(side, side.plans[self.share], coded.sides[0][role]["words"], count)
            for role, side in zip(ROLES, tables.sides, strict=True)
        }
        first = dict.fromkeys(ROLES, 0)
        for index, arrays in enumerate(coded.sides):
            found = dict[TensorRole, Tensor]()
            for role in ROLES:
                exact = arrays[role]["exact"]
                width = heads[index] * exact.shape[2]
                numbers = whole[role][:, first[role] : first[role] + width]
                first[role] += width
                rotated = tables.radians[index] if role is TensorRole.KEYS else None
                restored = by_head(numbers, heads[index], coded_positions, rotated)
                found[role] = with_exact(restored, exact, is_coded)
            yield found

    def _is_coded(self, positions: Int[Tensor, " S"]) -> Tensor:
        """Mask of the tokens that are coded."""
        newest = int(positions.max()) if len(positions) else 0
        return (positions >= SINKS) & (positions <= newest - self.recent)


class Kvtc16(Kvtc):
    """Principal components in a sixteenth of the bfloat16 bytes, beside exact ends."""

    share: ClassVar[str] = "1/16"


def _fits(tables: KvtcTables, stack: LayerStack) -> bool:
    widths = [
        sum(sides[role].shape[0] * sides[role].shape[2] for sides in stack.sides) for role in ROLES
    ]
    return widths == [len(side.mean) for side in tables.sides]


Part = Kvtc
