"""Empty tensors, each made once: what stands where nothing is said."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def empty_tensor(dtype: torch.dtype, *shape: int) -> Tensor:
    """A tensor without elements, in host memory, shared by all who say nothing.

    A decode step makes a dozen records for every layer, most of which leave most fields empty.
    """
    return torch.empty(shape, dtype=dtype)
