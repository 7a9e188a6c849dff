"""Cost of assembling a text's cache from chunks: divergence from a full prefill, and time.

    python benchmarks/blend.py [--model NAME] [--tokens 2048] [--piece 256] [--continued 64]

A text is cut into chunks, each is read alone, and the caches are combined with a share of their
tokens recomputed (CacheBlend). The continuation is read over that cache and over a full prefill's:
the Kullback-Leibler divergence of the next-token distributions measures the difference. One JSONL
line per share in results/blend.jsonl; `time_ratio` is the time of combining divided by that of the
prefill, in one run, the best of several.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from _inputs import text_ids
from _timing import environment, shortest_run, write
from torch import Tensor

from larder.cache import ChunkEntries, SequenceCache
from larder.core import Mode
from larder.models import RECOMPUTE_SHARE, BatchSegment, ContextChunk, Decoder, blend, load

OUT = Path("results/blend.jsonl")
SHARES = (0.0, RECOMPUTE_SHARE, 0.5, 1.0)


def read(decoder: Decoder, ids: tuple[int, ...]) -> SequenceCache:
    cache = SequenceCache(decoder.spec, "dense")
    decoder.read([BatchSegment(cache, ids)], Mode.APPEND)
    return cache


def follow(decoder: Decoder, cache: SequenceCache, ids: tuple[int, ...]) -> Tensor:
    """Log-probabilities of a continuation, [N, V]."""
    logits = decoder.forward_logits([BatchSegment(cache, ids)], Mode.APPEND, range(len(ids)))
    return logits.double().log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="seed")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--piece", type=int, default=256)
    parser.add_argument("--continued", type=int, default=64)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    loaded = load(options.model)
    decoder = loaded.decoder
    ids = text_ids(loaded.tokenizer, options.tokens + options.continued)
    text, continued = ids[: options.tokens], ids[options.tokens :]
    starts = range(0, len(text), options.piece)
    parts = [text[start : start + options.piece] for start in starts]
    caches = [(part, read(decoder, part)) for part in parts]
    chunks = [ContextChunk(part, ChunkEntries.of(c, 0, len(part))) for part, c in caches]
    full, read_seconds = shortest_run(lambda: read(decoder, text))
    exact = follow(decoder, full, continued)
    for share in SHARES:
        blended, seconds = shortest_run(lambda share=share: blend(decoder, chunks, share))
        near = follow(decoder, blended.cache(decoder.spec), continued)
        divergence = (exact.exp() * (exact - near)).sum(-1)
        row = {
            "model": options.model,
            "tokens": len(text),
            "piece_tokens": options.piece,
            "share": share,
            "computed": len(blended.chosen) / len(text),
            "kl_mean": float(divergence.mean()),
            "kl_max": float(divergence.max()),
            "same_next_token": float((exact.argmax(-1) == near.argmax(-1)).double().mean()),
            "time_ratio": seconds / read_seconds,
        }
        print(json.dumps(row), flush=True)
        write(options.out, [row | {"environment": environment()}])


if __name__ == "__main__":
    main()
