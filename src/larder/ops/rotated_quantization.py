"""Vectors rotated at random and quantized to the optimal levels of their distribution (TurboQuant).

Zandieh, Daliri, Hadian, Mirrokni, "TurboQuant: Online Vector Quantization with Near-optimal
Distortion Rate" (2025), arXiv:2504.19874. A vector is divided by its norm and rotated; a number of
a random direction of D dimensions has a density proportional to (1 - x^2)^((D - 3) / 2), and the
levels are those of least squared error for it (Lloyd-Max, algorithm 1). Of b bits a sketched code
gives one to the signs of a random projection of what the levels missed, which makes inner products
unbiased (algorithm 2); with one bit it is nothing else: QJL, Zandieh, Daliri, Han, "QJL: 1-Bit
Quantized JL Transform for KV Cache Quantization with Zero Overhead" (2024), arXiv:2406.03482.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from jaxtyping import Float, Float16, UInt8
from torch import Tensor

GRID_POINTS = 1 << 14  # of the density
LLOYD_ROUNDS = 400
ROTATION_SEED, PROJECTION_SEED = 0, 1

Vectors = Float[Tensor, "N W"]
Codes = UInt8[Tensor, "N W"]
Norms = Float16[Tensor, "N 1"]


@cache
def rotation(size: int) -> Float[Tensor, "W W"]:
    """Random orthogonal matrix, the same in every process."""
    source = torch.Generator().manual_seed(ROTATION_SEED)
    mixed = torch.randn(size, size, generator=source, dtype=torch.float64)
    directions, triangle = torch.linalg.qr(mixed)
    return (directions * triangle.diagonal().sign()).float()


@cache
def projection(size: int) -> Float[Tensor, "W W"]:
    """Matrix of independent normal numbers, the same in every process."""
    source = torch.Generator().manual_seed(PROJECTION_SEED)
    return torch.randn(size, size, generator=source)


@cache
def levels(bits: int, size: int) -> Float[Tensor, " M"]:
    """The 2^bits levels of least squared error for a number of a random direction, ascending."""
    edges = np.linspace(-1, 1, GRID_POINTS + 1)
    points = (edges[1:] + edges[:-1]) / 2
    density = (1 - points**2) ** ((size - 3) / 2)
    mass, moment = (np.append(0.0, part.cumsum()) for part in (density, density * points))
    count = 1 << bits
    found = np.interp((np.arange(count) + 0.5) / count * mass[-1], mass, edges)
    for _ in range(LLOYD_ROUNDS):
        cuts = np.concatenate([[-1.0], (found[1:] + found[:-1]) / 2, [1.0]])
        masses, sums = (np.diff(np.interp(cuts, edges, part)) for part in (mass, moment))
        found = np.divide(sums, masses, out=found.copy(), where=masses > 0)
    return torch.from_numpy(found).float()


def encode(numbers: Vectors, bits: int) -> tuple[Codes, Norms]:
    """Codes of vectors, and their norms."""
    norms = numbers.float().norm(dim=1, keepdim=True).half()
    rotated = _directions(numbers.float(), norms) @ rotation(numbers.shape[1]).T
    own = levels(bits, numbers.shape[1]).to(rotated.device)
    codes = torch.bucketize(rotated, (own[1:] + own[:-1]) / 2)
    return codes.to(torch.uint8), norms


def decode(codes: Codes, norms: Norms, bits: int) -> Vectors:
    """Vectors of codes, in float32."""
    size = codes.shape[1]
    own = levels(bits, size).to(codes.device)
    return own[codes.long()] @ rotation(size).to(codes.device) * norms.float()


def encode_sketched(numbers: Vectors, bits: int) -> tuple[Codes, Norms, Norms]:
    """Codes of vectors, the sign of a projected remainder as the lowest bit; the norms of vectors
    and of remainders.
    """
    codes, norms = encode(numbers, bits - 1)
    rest = numbers.float() - decode(codes, norms, bits - 1)
    signs = rest @ projection(numbers.shape[1]).to(rest.device).T >= 0
    return codes * 2 + signs.to(torch.uint8), norms, rest.norm(dim=1, keepdim=True).half()


def decode_sketched(codes: Codes, norms: Norms, rest_norms: Norms, bits: int) -> Vectors:
    """Vectors of sketched codes, in float32; their inner products are unbiased."""
    size = codes.shape[1]
    signs = (codes % 2).float() * 2 - 1
    scale = math.sqrt(math.pi / 2) / size
    rest = signs @ projection(size).to(codes.device) * scale * rest_norms.float()
    return decode(codes // 2, norms, bits - 1) + rest


def _directions(numbers: Vectors, norms: Norms) -> Vectors:
    held = norms.float()
    return numbers / torch.where(held > 0, held, torch.ones_like(held))
