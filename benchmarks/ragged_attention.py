"""Speed of attention in a decode step, as ratios measured in one process.

Compares Larder's ragged attention with torch's scaled_dot_product_attention on a dense cache of the
same entries and with a loop over heads of plain torch operations. The implementations alternate,
each after a small matrix product, as between the layers of a model. Prints a table of ratios of
medians (above 1: Larder is faster) and writes one JSON line per case.

    python benchmarks/ragged_attention.py [results/ragged_attention.jsonl]
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from larder.ops import ragged_attention

SEED = 0
SHAPES = ((2, 64, 2), (8, 128, 2))  # K, D, R
LENGTHS = (1024, 16384)
DTYPES = (torch.float32, torch.bfloat16)
SCALING = 0.1
SECONDS = 4.0  # per case

Case = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def main() -> None:
    default = "results/ragged_attention.jsonl"
    path = Path(sys.argv[1] if len(sys.argv) > 1 else default)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    print(f"{'case':34}{'larder p50':>12}{'GB/s':>7}{'vs sdpa':>9}{'vs loop':>9}")
    with path.open("w") as lines:
        for dtype in DTYPES:
            for num_kv_heads, head_dim, group in SHAPES:
                for length in LENGTHS:
                    record = measure(dtype, num_kv_heads, head_dim, group, length)
                    lines.write(json.dumps(record) + "\n")
                    show(record)


def measure(dtype: torch.dtype, num_kv_heads: int, head_dim: int, group: int, length: int) -> dict:
    rows = num_kv_heads * length
    keys, values = (torch.randn(rows, head_dim).to(dtype) for _ in range(2))
    queries = torch.randn(num_kv_heads * group, 1, head_dim).to(dtype)
    lengths = torch.full((num_kv_heads,), length)
    starts = torch.arange(num_kv_heads) * length
    seconds = time_alternately(
        {
            "larder": lambda: ragged_attention(queries, keys, values, starts, lengths, SCALING),
            "sdpa": lambda: dense(queries, keys, values, starts, lengths),
            "loop": lambda: loop_over_heads(queries, keys, values, starts, lengths),
        }
    )
    return {
        "benchmark": "ragged_attention",
        "environment": environment(),
        "seed": SEED,
        "dtype": str(dtype).removeprefix("torch."),
        "kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "group": group,
        "cached_len": length,
        "kv_bytes": 2 * keys.nbytes,
        "p50_us": {name: percentile(times, 50) for name, times in seconds.items()},
        "p95_us": {name: percentile(times, 95) for name, times in seconds.items()},
    }


def time_alternately(cases: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    weights, state = torch.randn(512, 512), torch.randn(8, 512)
    for run in cases.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        for name, run in cases.items():
            state @ weights
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def dense(queries: Tensor, keys: Tensor, values: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    del starts
    shape = (1, len(lengths), -1, keys.shape[-1])
    return scaled_dot_product_attention(
        queries[None], keys.view(shape), values.view(shape), scale=SCALING, enable_gqa=True
    )


def loop_over_heads(
    queries: Tensor, keys: Tensor, values: Tensor, starts: Tensor, lengths: Tensor
) -> Tensor:
    groups = queries.view(len(lengths), -1, queries.shape[-1])
    outs = []
    for group, start, length in zip(groups, starts.tolist(), lengths.tolist(), strict=True):
        rows = slice(start, start + length)
        weights = (group @ keys[rows].T).float().mul_(SCALING).softmax(-1)
        outs.append(weights.to(values.dtype) @ values[rows])
    return torch.cat(outs)


def percentile(seconds: list[float], percent: int) -> float:
    return round(float(np.percentile(seconds, percent)) * 1e6, 1)


def environment() -> dict[str, str | float]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "system": platform.system(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
    }


def show(record: dict) -> None:
    p50 = record["p50_us"]
    name = "{dtype} K={kv_heads} D={head_dim} S={cached_len}".format(**record)
    rate = record["kv_bytes"] / p50["larder"] / 1e3
    sdpa, loop = p50["sdpa"] / p50["larder"], p50["loop"] / p50["larder"]
    print(f"{name:34}{p50['larder']:>9.0f} us{rate:>7.1f}{sdpa:>8.2f}x{loop:>8.2f}x")


if __name__ == "__main__":
    main()
