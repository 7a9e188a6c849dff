"""Dimension key, and the tensor types that cross layer borders.

    B sequences     L layers        H query heads    K kv heads      R = H / K
    Q query positions               S cached positions of one head   T packed positions, sum of S
    D head size     P page size     N pages          C capacity      E episodes     V vocabulary
    Dv head size of values: D, but for latents (MLA)

Query head h belongs to kv head h // R. A *packed* tensor [T] holds the entries of kv head 0, then
those of kv head 1, and so on; `lengths` has the number of entries of each head.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from functools import cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

TokenIds = tuple[int, ...]
Queries = Float[Tensor, "H Q D"]
Keys = Float[Tensor, "K Q D"]
Values = Float[Tensor, "K Q D"]
Packed = Float[Tensor, " T"]
PackedMask = Bool[Tensor, " T"]
Positions = Int[Tensor, " Q"]
HiddenStates = Float[Tensor, "Q hidden"]
WeightChunk = Float[Tensor, "R c S"]  # attention of c queries of each head of a group
NamedTensors = Mapping[str, Tensor]
TensorShapes = Mapping[str, tuple[int, ...]]  # by name of the tensor


class Mode(Enum):
    """Effect of a forward pass on the cache.

    APPEND: attends to the cache and appends the new entries.
    SCRATCH: attends and leaves the cache unchanged (patched prompts, reconstruction, forced
        answers).
    PROBE: attends to nothing and only records queries, keys and values. Its attention outputs are
        zeros, so outputs behind the first layer are meaningless.
    """

    APPEND = "append"
    SCRATCH = "scratch"
    PROBE = "probe"


class AppendKind(Enum):
    """Kind of appended tokens; it decides what they attend to in a cache with offloaded entries.

    STEP: one generated token attends to the recalled pages. Several tokens at once are a text.
    TEXT: every token attends to all entries, exactly, even a single one.
    QUESTION: text before a generated answer: as `TEXT`, unless the policy says otherwise.
    """

    STEP = "step"
    TEXT = "text"
    QUESTION = "question"


class Variant(Enum):
    """Source that a part follows where the paper, its released code and Larder differ."""

    LARDER = "larder"
    PAPER = "paper"
    CODE = "code"


@cache
def empty_tensor(dtype: torch.dtype, *shape: int) -> Tensor:
    """Shared empty tensor in host memory, the default of optional tensor fields.

    A decode step makes a dozen records per layer, most of which leave most fields empty.
    """
    return torch.empty(shape, dtype=dtype)
