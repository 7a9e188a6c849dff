"""Rotary position embedding, and moving keys that were already rotated.

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021), arXiv:2104.09864,
section 3.2. Halves are paired as Hugging Face models pair them: dimension d with d + D / 2. A
rotation by an angle is undone by its negative, so a cached key moves from one position to another
by one rotation of the difference.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def frequencies(head_dim: int, theta: float) -> Float[Tensor, " half"]:
    """Radians per position of each pair of dimensions, for the default RoPE."""
    return theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def rotate(
    vectors: Float[Tensor, "K S D"],
    positions: Int[Tensor, " S"],
    radians: Float[Tensor, " half"],
) -> Float[Tensor, "K S D"]:
    """Queries or keys turned to their positions; computed in float32, returned in their type."""
    angles = positions.to(torch.float32)[:, None] * radians  # [S, D / 2]
    cosine, sine = angles.cos(), angles.sin()
    first, second = vectors.float().chunk(2, dim=-1)
    turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    return turned.to(vectors.dtype)


def rerotate(
    keys: Float[Tensor, "K S D"],
    old: Int[Tensor, " S"],
    new: Int[Tensor, " S"],
    radians: Float[Tensor, " half"],
) -> Float[Tensor, "K S D"]:
    """Rotated keys moved from their old positions to new ones."""
    return rotate(keys, new - old, radians)
