"""Cost and savings of codecs for saved caches: bytes, error, divergence, and speed.

    python benchmarks/store_codecs.py [--model NAME] [--tokens 4096] [--continued 64]

A text is read, its cache saved with each codec and restored, and its continuation read over both
caches: the Kullback-Leibler divergence of the next-token distributions from the exact ones measures
the effect on answers. One JSONL line per codec in results/store_codecs.jsonl; `write_mb_s` and
`read_mb_s` are megabytes of the cache itself per second, container and digest included, the best of
several runs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _inputs import text_ids
from _timing import environment, shortest_run, write
from torch import Tensor

from larder.cache import SequenceCache
from larder.core import Mode
from larder.models import BatchSegment, load
from larder.store import (
    CODECS,
    codec_named,
    decode_state,
    encode_state,
    pack_container,
    state_nbytes,
    unpack_container,
)

OUT = Path("results/store_codecs.jsonl")
BLOCK_TOKENS = 512


def measure_codec(
    name: str, cache: SequenceCache, follow: Callable[[SequenceCache], Tensor]
) -> Any:
    """Row of a codec for a cache.

    Args:
        follow: returns the log-probabilities of the continuation over a cache, [N, V].
    """
    state, layers = cache.state(), len(cache.spec.layers)
    codec = codec_named(name)

    def write() -> tuple[bytes, dict[str, Any]]:
        tensors, meta = encode_state(state, codec, name, layers)
        return pack_container(tensors, {"coded": meta}), meta

    (data, meta), write_seconds = shortest_run(write)
    restored, read_seconds = shortest_run(
        lambda: decode_state(unpack_container(data)[0], meta, state_nbytes(state))
    )
    exact, near = (
        follow(cache.fork()),
        follow(SequenceCache.restore(cache.spec, restored, cache.meta())),
    )
    errors = [
        (restored[key].double() - state[key].double()).abs().flatten()
        for key in state
        if key.endswith(("keys", "values"))
    ]
    numbers = sum(len(each) for each in errors)
    divergence = (exact.exp() * (exact - near)).sum(-1)
    return {
        "codec": name,
        "lossless": codec.lossless,
        "cache_bytes": state_nbytes(state),
        "saved_bytes": len(data),
        "bits_per_number": 8 * len(data) / numbers,
        "max_error": max(float(each.max()) for each in errors),
        "mean_error": sum(float(each.sum()) for each in errors) / numbers,
        "kl_mean": float(divergence.mean()),
        "kl_max": float(divergence.max()),
        "same_next_token": float((exact.argmax(-1) == near.argmax(-1)).double().mean()),
        "write_mb_s": state_nbytes(state) / write_seconds / 1e6,
        "read_mb_s": state_nbytes(state) / read_seconds / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="seed")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--continued", type=int, default=64)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    loaded = load(options.model)
    decoder = loaded.decoder
    ids = text_ids(loaded.tokenizer, options.tokens + options.continued)
    cache = SequenceCache(decoder.spec, "dense")
    for start in range(0, options.tokens, BLOCK_TOKENS):
        block = ids[start : min(start + BLOCK_TOKENS, options.tokens)]
        decoder.read([BatchSegment(cache, block)], Mode.APPEND)
    rest = ids[options.tokens :]

    def follow(over: SequenceCache) -> Tensor:
        logits = decoder.forward_logits([BatchSegment(over, rest)], Mode.APPEND, range(len(rest)))
        return logits.double().log_softmax(-1)

    rows = []
    for name in CODECS.names():
        rows.append(
            {"model": options.model, "tokens": options.tokens, **measure_codec(name, cache, follow)}
        )
        print(json.dumps(rows[-1]), flush=True)
    write(options.out, [row | {"environment": environment()} for row in rows])


if __name__ == "__main__":
    main()
