"""Uncompressed numbers. No paper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from larder.store.codecs.base import RowLayout, StorageCodec


class Raw(StorageCodec):
    """Codec that stores every bit."""

    lossless: ClassVar[bool] = True

    def encode(self, numbers: Float[Tensor, "T D"], rows: RowLayout) -> dict[str, Tensor]:
        return {"numbers": numbers}

    def decode(self, coded: Mapping[str, Tensor], rows: RowLayout) -> Float[Tensor, "T D"]:
        return coded["numbers"].reshape(sum(rows.lengths), rows.head_dim)


Part = Raw
