"""Rotary position embedding (RoPE), and rerotation of keys to new positions.

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021), arXiv:2104.09864,
section 3.2. Halves are paired as in Hugging Face models: with n frequencies, dimension d is paired
with d + n; dimensions from 2 n on are not rotated. The negative angle undoes a rotation, so a
cached key moves from one position to another by one rotation by the difference.

An angle is a position times a frequency, rounded to float32, as models compute it. At large
positions that rounding is more than a difference of positions would show, so the two angles of a
move are rounded separately.
"""

from __future__ import annotations

from threading import Lock

import torch
from jaxtyping import Float, Int
from torch import Tensor

FIRST_TABLE = 1024  # positions of a table of rotations
MOST_TABLE = 1 << 17  # of one that is made to save time alone

_tables: dict[tuple[float, ...], Float[Tensor, "P 2 half"]] = {}
_tables_lock = Lock()

Rotation = tuple[Float[Tensor, "#S half"], Float[Tensor, "#S half"]]  # cosines, sines


def frequencies(head_dim: int, theta: float) -> Float[Tensor, " half"]:
    """Radians per position of each pair of dimensions, for the default RoPE."""
    return theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def rotate(
    vectors: Float[Tensor, "K S D"], positions: Int[Tensor, " S"], radians: Float[Tensor, " half"]
) -> Float[Tensor, "K S D"]:
    """Queries or keys rotated to their positions; computed in float32, returned in their dtype."""
    return _apply_rotation(vectors, _rotation(positions, radians))


def rerotate(
    keys: Float[Tensor, "K S D"],
    old: Int[Tensor, " S"],
    new: Int[Tensor, " S"],
    radians: Float[Tensor, " half"],
) -> Float[Tensor, "K S D"]:
    """Rotated keys moved from their old positions to new ones."""
    (cosine, sine), (old_cosine, old_sine) = _rotation(new, radians), _rotation(old, radians)
    onward = cosine * old_cosine + sine * old_sine, sine * old_cosine - cosine * old_sine
    return _apply_rotation(keys, onward)


def rerotate_per_head(
    vectors: Float[Tensor, "N Q D"],
    old: Int[Tensor, " Q"],
    new: Int[Tensor, "K Q"],
    radians: Float[Tensor, " half"],
) -> Float[Tensor, "N Q D"]:
    """Rotated queries or keys moved to positions that differ per kv head.

    Args:
        vectors: the N / K heads of kv head 0, then those of kv head 1, and so on.
    """
    group = vectors.shape[0] // new.shape[0]
    each = new.repeat_interleave(group, 0).flatten()
    moved = rerotate(vectors.flatten(0, 1)[None], old.repeat(vectors.shape[0]), each, radians)
    return moved.view_as(vectors)


def rotate_per_head(
    vectors: Float[Tensor, "N Q D"], positions: Int[Tensor, "K Q"], radians: Float[Tensor, " half"]
) -> Float[Tensor, "N Q D"]:
    """Queries or keys rotated to positions that differ per kv head; see `rerotate_per_head`."""
    each = positions.repeat_interleave(vectors.shape[0] // positions.shape[0], 0).flatten()
    return rotate(vectors.flatten(0, 1)[None], each, radians).view_as(vectors)


def unrotate_by_mean(
    keys: Float[Tensor, "S D"], positions: Int[Tensor, " P"], radians: Float[Tensor, " half"]
) -> Float[Tensor, "S D"]:
    """Keys rotated by the inverse of the mean rotation to some positions, in float32.

    Their product with an unrotated query is the mean over the query at all positions.
    """
    cosine, sine = (part.mean(0, keepdim=True) for part in _rotation(positions, radians))
    return _apply_rotation(keys.float()[None], (cosine, -sine))[0]


def rotation_table(length: int, radians: tuple[float, ...]) -> Float[Tensor, "P 2 half"]:
    """Cosines and sines of at least the positions below `length`; kept, one table per frequencies.

    A table that is too short is replaced by one of twice the length.
    """
    with _tables_lock:
        held = _tables.get(radians)
        if held is None or len(held) < length:
            size = max(length, FIRST_TABLE, 0 if held is None else 2 * len(held))
            positions, frequencies_ = torch.arange(size), torch.tensor(radians, dtype=torch.float32)
            held = _tables[radians] = torch.stack(_rotation(positions, frequencies_), 1)
    return held


def rotate_by_table(
    vectors: Float[Tensor, "K S D"], positions: Int[Tensor, " S"], radians: tuple[float, ...]
) -> Float[Tensor, "K S D"]:
    """`rotate` with the rotations of `rotation_table`, where positions are not too large for it."""
    if not len(positions) or not 0 <= int(positions.min()) <= int(positions.max()) < MOST_TABLE:
        return rotate(vectors, positions, torch.tensor(radians, dtype=torch.float32))
    table = rotation_table(int(positions.max()) + 1, radians)
    cosine, sine = table[positions].unbind(1)
    return _apply_rotation(vectors, (cosine, sine))


def _rotation(positions: Int[Tensor, " S"], radians: Float[Tensor, " half"]) -> Rotation:
    angles = positions.to(torch.float32)[:, None] * radians
    return angles.cos(), angles.sin()


def _apply_rotation(vectors: Float[Tensor, "K S D"], turn: Rotation) -> Float[Tensor, "K S D"]:
    cosine, sine = turn
    half = cosine.shape[1]
    first, second, rest = vectors.float().split([half, half, vectors.shape[2] - 2 * half], dim=-1)
    pairs = [first * cosine - second * sine, second * cosine + first * sine]
    return torch.cat([*pairs, rest], dim=-1).to(vectors.dtype)
