"""The dimension key, and the tensor types that cross layer borders.

    B sequences     L layers        H query heads    K kv heads      R = H / K
    Q query positions               S cached positions of one head   T packed positions, sum of S
    D head size     P page size     N pages          C capacity      E episodes     V vocabulary

Query head h belongs to kv head h // R. A *packed* tensor [T] holds the entries of kv head 0, then
those of kv head 1, and so on; `lengths` says how many each head has.
"""

from __future__ import annotations

from enum import Enum
from functools import cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Queries = Float[Tensor, "H Q D"]
Keys = Float[Tensor, "K Q D"]
Values = Float[Tensor, "K Q D"]
Packed = Float[Tensor, " T"]
PackedMask = Bool[Tensor, " T"]
Positions = Int[Tensor, " Q"]


class Mode(Enum):
    """What a pass through the model does to the cache.

    APPEND: attends, then the new entries stay.
    SCRATCH: attends and leaves no trace (patched prompts, reconstruction, forced answers).
    PROBE: attends to nothing; only queries, keys and values are recorded. The zeros it answers
        with make every output behind the first layer meaningless: use nothing of them.
    """

    APPEND = "append"
    SCRATCH = "scratch"
    PROBE = "probe"


class AppendKind(Enum):
    """What tokens that are appended are, to a cache that parks some of what it holds.

    STEP: one that was generated attends to what is found for it. Several at once are a text.
    TEXT: all of it attends to everything, exactly, be it one token.
    QUESTION: a text that something is generated behind: as `TEXT`, unless a policy says otherwise.
    """

    STEP = "step"
    TEXT = "text"
    QUESTION = "question"


class Variant(Enum):
    """Whom a part follows where paper, released code and sound practice differ."""

    LARDER = "larder"
    PAPER = "paper"
    CODE = "code"


@cache
def empty_tensor(dtype: torch.dtype, *shape: int) -> Tensor:
    """A tensor without elements, in host memory, shared by all who say nothing.

    A decode step makes a dozen records for every layer, most of which leave most fields empty.
    """
    return torch.empty(shape, dtype=dtype)
