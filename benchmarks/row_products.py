"""Products of few rows with weights in memory, by number of rows: the C kernel beside torch.

    python benchmarks/row_products.py --dtype bfloat16 --rows 1 4 6 9 12 18 36 --shapes 2048x1024

Shapes are outputs x inputs, by default those of the layers of SmolLM2-135M and Qwen3-0.6B. Every
weight is read once in a pass over as many as fit in 100 MB, so that none is in a cache of the
processor; both products take turns, and the least CPU time of seven passes on one thread counts.
Printed are the time of one product, GFLOP/s, GB/s of weights, and torch's time over the kernel's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from larder.ops import few_rows_linear

SHAPES = ("576x576", "1536x576", "576x1536", "2048x1024", "3072x1024", "1024x3072", "1024x2048")
ROWS = (1, 4, 6, 7, 9, 12, 16, 18, 24, 36)
WEIGHT_BYTES = 100_000_000
PASSES = 7


def seconds_of_product(
    product: Callable[[Tensor, Tensor], Tensor], rows: Tensor, weights: Tensor
) -> float:
    """CPU seconds of one product, as a mean over the weights."""
    started = time.process_time()
    for weight in weights:
        product(rows, weight)
    return (time.process_time() - started) / len(weights)


def report(shape: str, num_rows: int, weights: Tensor) -> None:
    """Print a line of the table."""
    _, outputs, inputs = weights.shape
    rows, best = torch.randn(num_rows, inputs).to(weights.dtype), [float("inf")] * 2
    for _ in range(PASSES):
        for n, product in enumerate((few_rows_linear, linear)):
            best[n] = min(best[n], seconds_of_product(product, rows, weights))
    own, others = best
    operations, nbytes = 2 * num_rows * outputs * inputs, weights[0].nbytes
    print(
        f"{shape:10} {num_rows:3} rows {own * 1e6:8.1f} us {operations / own / 1e9:6.1f} GFLOP/s "
        f"{nbytes / own / 1e9:5.1f} GB/s; torch {others * 1e6:8.1f} us, {others / own:.2f} times",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Products of few rows with weights in memory.")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS))
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    dtype = getattr(torch, chosen.dtype)
    for shape in chosen.shapes:
        outputs, inputs = map(int, shape.split("x"))
        count = max(2, WEIGHT_BYTES // (outputs * inputs * dtype.itemsize))
        weights = torch.randn(count, outputs, inputs).to(dtype)
        for num_rows in chosen.rows:
            report(shape, num_rows, weights)


if __name__ == "__main__":
    main()
