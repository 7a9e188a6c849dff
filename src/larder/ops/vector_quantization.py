"""Vector quantization of pairs of numbers behind a Hadamard transform (HIGGS).

Malinovskii et al., "Pushing the Limits of Large Language Model Quantization via the Linearity
Theorem" (2024), arXiv:2411.17525, section 4: behind a Hadamard transform numbers are nearly
normally distributed, so a grid that is optimal for a normal distribution quantizes them, whatever
they were. A code names the nearest point of the grid of a pair of numbers; one scale per transform
is stored beside. As in the code released with AQUA-KV there are no random signs. What differs:
where a width is no power of two, a Hadamard matrix of 12 or 20 times one is taken if it divides the
width, and the grid is made here by Lloyd's algorithm on quasi-random points.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float, Float16, Int64, UInt8
from torch import Tensor

from larder.core.codec import hadamard_order
from larder.ops.quantization import FLOAT16_MAX, pack_codes, unpack_codes

PAIR = 2  # numbers that a code stands for
GRID_SAMPLES, GRID_ROUNDS = 16384, 60
ROWS_AT_ONCE = 1 << 14  # pairs compared with a grid at once


@dataclass(frozen=True)
class VectorCodes:
    """Codes of vectors, one row each.

    Args:
        packed: codes of the pairs of each vector, packed into bytes.
        scales: root mean square of the numbers of each transform.
    """

    packed: UInt8[Tensor, "N B"]
    scales: Float16[Tensor, "N G"]

    def __len__(self) -> int:
        return len(self.packed)

    def select(self, rows: Int64[Tensor, " M"]) -> VectorCodes:
        """Codes of some vectors."""
        return VectorCodes(self.packed[rows], self.scales[rows])

    def joined(self, other: VectorCodes) -> VectorCodes:
        """Codes with others behind them."""
        return VectorCodes(
            torch.cat([self.packed, other.packed]), torch.cat([self.scales, other.scales])
        )


@dataclass(frozen=True)
class VectorQuantizer:
    """Quantizer of vectors of one width.

    Args:
        width: numbers of a vector, an even number.
        bits: per number, 1 to 4, without scales.
    """

    width: int
    bits: int

    def encode(self, numbers: Float[Tensor, "N W"]) -> VectorCodes:
        """Codes of finite numbers."""
        order = hadamard_order(self.width)
        rotated = numbers.float().unflatten(1, (-1, order)) @ hadamard(order).to(numbers.device)
        scales = rotated.square().mean(-1).sqrt().clamp(max=FLOAT16_MAX).half()
        unit = rotated / scales.float().clamp(min=torch.finfo(torch.float16).tiny)[..., None]
        codes = _nearest(unit.reshape(-1, PAIR), gaussian_grid(self._points).to(numbers.device))
        rows = codes.reshape(len(numbers), self.width // PAIR)
        return VectorCodes(pack_codes(rows, PAIR * self.bits), scales)

    def decode(self, codes: VectorCodes) -> Float[Tensor, "N W"]:
        """Numbers of codes, in float32."""
        order = hadamard_order(self.width)
        names = unpack_codes(codes.packed, PAIR * self.bits, self.width // PAIR)
        points = gaussian_grid(self._points).to(names.device).view(torch.float64).flatten()
        unit = points.index_select(0, names.flatten().int()).view(torch.float32)  # pairs at once
        rotated = unit.view(len(codes), -1, order) * codes.scales.float()[..., None]
        return (rotated @ hadamard(order).to(rotated.device).T).flatten(1)

    def nothing(self, device: torch.device) -> VectorCodes:
        """Codes of no vector."""
        return self.encode(torch.zeros(0, self.width, device=device))

    @property
    def _points(self) -> int:
        return 1 << (PAIR * self.bits)


def _nearest(pairs: Float[Tensor, "M 2"], grid: Float[Tensor, "P 2"]) -> UInt8[Tensor, " M"]:
    """Nearest point of a grid to each pair; ties go to the first."""
    lengths = grid.square().sum(1)
    parts = [(2 * part @ grid.T - lengths).argmax(1) for part in pairs.split(ROWS_AT_ONCE)]
    return torch.cat(parts).to(torch.uint8)


@cache
def gaussian_grid(points: int) -> Float[Tensor, "P 2"]:
    """Grid of the least mean squared error for pairs of standard normal numbers."""
    uniform = torch.quasirandom.SobolEngine(PAIR).draw(GRID_SAMPLES + 1)[1:]
    samples = torch.special.ndtri(uniform.double()).float()
    grid = samples[:points]
    for _ in range(GRID_ROUNDS):
        own = _nearest(samples, grid).long()
        counts = torch.bincount(own, minlength=points)
        means = torch.zeros_like(grid).index_add_(0, own, samples) / counts.clamp(min=1)[:, None]
        grid = torch.where(counts[:, None] > 0, means, grid)
    return grid


@cache
def hadamard(order: int) -> Float[Tensor, "O O"]:
    """Orthonormal Hadamard matrix: Sylvester's, of a matrix by Paley where 12 or 20 divides."""
    odd = order // (order & -order)
    base = torch.ones(1, 1) if odd == 1 else _paley(4 * odd - 1)
    pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    while len(base) < order:
        base = torch.kron(base, pair)
    return base / order**0.5


def _paley(prime: int) -> Float[Tensor, "O O"]:
    """Hadamard matrix of order prime + 1, where the prime is 3 modulo 4 (Paley, 1933)."""
    squares = {number * number % prime for number in range(1, prime)}
    signs = torch.tensor([0.0] + [1.0 if n in squares else -1.0 for n in range(1, prime)])
    offsets = torch.arange(prime)
    core = signs[(offsets[:, None] - offsets) % prime]
    matrix = torch.eye(prime + 1)
    matrix[0, 1:] = 1.0
    matrix[1:, 0] = -1.0
    matrix[1:, 1:] += core
    return matrix
