"""Cost of restoring keys and values: from memory, from residuals, from the text.

    python benchmarks/recompute.py [--models seed,qwen3-0.6b] [--tokens 1024,4096] [--threads 2]

bytes     Bytes of a token in the shapes of known models, stored as keys and values, as its id, as
          one residual before the first or before the middle layer, or as a residual per layer; and
          the operations that restore its keys and values in a text of 4,096 tokens.
seconds   Seconds per 1,000 tokens, for whole texts of random tokens, methods alternating: `load`
          copies keys and values from memory into a cache, `project` computes those of every layer
          from its own residuals, `reread` runs all layers from the embeddings on, `reread half`
          from the middle layer on, and `read` reads the token ids as a session does. Blocks of 512
          tokens.

`qwen3-0.6b` is a random-weight model in that shape. One JSONL line per case in
results/recompute.jsonl.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _inputs import load_model
from _timing import environment, write

from larder.cache import SequenceCache
from larder.core import Mode
from larder.models import (
    BLOCK_TOKENS,
    GEMMA_3_4B,
    LLAMA_3_1_8B,
    QWEN_3_0_6B,
    BatchSegment,
    Decoder,
    KVSource,
    ResidualStream,
)
from larder_bench.profiling.timing import interleaved, percentiles

OUT = Path("results/recompute.jsonl")
SHAPES = {"gemma-3-4b": GEMMA_3_4B, "llama-3.1-8b": LLAMA_3_1_8B, "qwen3-0.6b": QWEN_3_0_6B}
TEXT_TOKENS = 4096
KIB = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="seed,qwen3-0.6b")
    parser.add_argument("--tokens", default="1024,4096")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="default: torch's own number")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    for name in SHAPES:
        _costs(name)
    for model in options.models.split(","):
        decoder = load_model(model)[1]
        for tokens in map(int, options.tokens.split(",")):
            _seconds(model, decoder, tokens, options.rounds)


def _costs(name: str) -> None:
    shape = SHAPES[name]
    ways = [(held, 0) for held in KVSource] + [(KVSource.ONE, shape.layers // 2)]
    for held, depth in ways:
        row = {
            "shape": name,
            "held": held.value,
            "depth": depth,
            "bytes": shape.bytes_per_token(held, depth),
            "operations": shape.operations_per_token(held, TEXT_TOKENS, depth),
        }
        write(OUT, [{"part": "bytes"} | row])
        print(
            f"{name:13} {held.value:8} depth {depth:2}  {row['bytes'] / KIB:9.3f} KiB  "
            f"{row['operations'] / 1e9:8.3f} G operations"
        )


def _seconds(model: str, decoder: Decoder, tokens: int, rounds: int) -> None:
    cases = _cases(decoder, tokens)
    print(f"\n{model}, {tokens} tokens, {torch.get_num_threads()} threads: seconds per 1,000")
    for way, seconds in interleaved(cases, rounds).items():
        thousand = {k: v * 1000 / tokens for k, v in percentiles(seconds).items()}
        settings = {"part": "seconds", "model": model, "tokens": tokens, "way": way}
        write(OUT, [settings | thousand | environment()])
        print(f"  {way:12} p50 {thousand['p50']:9.4f}  p95 {thousand['p95']:9.4f}", flush=True)


def _cases(decoder: Decoder, tokens: int) -> dict[str, Callable[[], Any]]:
    recompute, spec = decoder.recompute, decoder.spec
    ids = tuple(torch.randint(6, min(decoder.vocab_size, 4096), (tokens,)).tolist())
    cache, residuals = SequenceCache(spec, "dense"), ResidualStream(range(len(spec.layers)))
    starts, places = range(0, tokens, BLOCK_TOKENS), torch.arange(tokens)
    for start in starts:
        recompute.read(BatchSegment(cache, ids[start : start + BLOCK_TOKENS]), residuals)
    state, meta, half = cache.state(), cache.meta(), len(spec.layers) // 2
    held = {layer: residuals.before(layer) for layer in residuals.layers}

    def project() -> None:
        for part in places.split(BLOCK_TOKENS):
            recompute.project({layer: rows[part] for layer, rows in held.items()}, part)

    def reread(depth: int) -> Callable[[], None]:
        return lambda: recompute.reread(depth, held[depth], SequenceCache(spec, "dense"))

    def read() -> None:
        fresh = SequenceCache(spec, "dense")
        for start in starts:
            decoder.read([BatchSegment(fresh, ids[start : start + BLOCK_TOKENS])], Mode.APPEND)

    return {
        "load": lambda: SequenceCache.restore(spec, state, meta),
        "project": project,
        "reread": reread(0),
        "reread half": reread(half),
        "read": read,
    }


if __name__ == "__main__":
    main()
