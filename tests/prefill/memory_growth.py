"""Reads a long input with the seed model and prints process memory on the way, in bytes.

python flatness.py bounded|full TOKENS
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from pathlib import Path

import torch

from larder import Policy
from larder.cache import SequenceCache
from larder.core import Mode
from larder.models import BatchSegment, load
from larder.prefill import Blockwise, PeakMemoryMeter, PrefillReader, PrefillSequence, no_progress

BUDGET, BLOCK, STEP = 1024, 512, 4096


def resident_bytes() -> int:
    """Memory of this process, after what is free was given back."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096


def main(kind: str, tokens: int) -> None:
    torch.set_num_threads(2)
    decoder = load().decoder
    source = torch.Generator().manual_seed(0)
    ids = tuple(torch.randint(6, decoder.vocab_size, (tokens,), generator=source).tolist())
    planner = Policy.parse("snapkv() > pooled()").planner
    layers = tuple(layer.index for layer in decoder.spec.managed)
    quotas = planner.quotas(BUDGET, tokens, layers, {})
    form = "ragged" if kind == "bounded" else "dense"
    cache = SequenceCache(decoder.spec, form)
    meter, result = PeakMemoryMeter(), {}
    reader = PrefillReader(decoder, planner, BUDGET, quotas, meter)
    for start in range(0, tokens, STEP):
        part = ids[start : start + STEP]
        if kind == "bounded":
            Blockwise(BLOCK).read(reader, [PrefillSequence(cache, {})], part, no_progress)
        else:
            for cut in range(0, len(part), BLOCK):
                decoder.read([BatchSegment(cache, part[cut : cut + BLOCK])], Mode.APPEND)
        result[start + len(part)] = {"rss": resident_bytes(), "nbytes": cache.nbytes}
    print(json.dumps({"told": result, "peak_entries": meter.peak_entries}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
