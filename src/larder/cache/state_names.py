"""Names and texts in saved states."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def with_prefix(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors whose names start with a prefix, by the rest of their names."""
    return {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}


def text_tensor(text: str) -> Tensor:
    """Text as a tensor of its bytes."""
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def text_of(saved: Tensor) -> str:
    """Text of a tensor, the inverse of `text_tensor`."""
    return bytes(saved.cpu().tolist()).decode()
