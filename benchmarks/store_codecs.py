"""Cost and savings of codecs for saved caches: bytes, error, divergence, and speed.

    python benchmarks/store_codecs.py [--model NAME] [--dtype float32] [--tokens 4096]
        [--continued 64] [--corpus FOLDER] [--texts 1] [--first 0] [--codecs raw int4 ...]

A text is read, its cache saved with each codec and restored, and compared over both caches: its
continuation, and a passage of it that is recited behind a request and its first tokens (teacher
forcing). The Kullback-Leibler divergence of the next-token distributions from the exact ones
measures the effect on answers. Texts are the longest ones of a corpus in the order of its file, or
one conversation, repeated. One JSONL line per text and codec in results/store_codecs.jsonl;
`share` is of the bytes in bfloat16. Seconds are of processor time, since other work may run on the
machine: of the model's pass over the text (`prefill_seconds`), of writing and of reading the cache,
container and digest included.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from _inputs import text_ids
from _timing import environment, write
from torch import Tensor

from larder.cache import SequenceCache
from larder.core import Mode
from larder.models import BatchSegment, Decoder, LoadedModel, load
from larder.session import TokenizerAdapter, common_prompts
from larder.store import (
    CODECS,
    codec_named,
    decode_state,
    encode_state,
    pack_container,
    state_nbytes,
    unpack_container,
)
from larder_bench.datasets.corpus import read_prose

OUT = Path("results/store_codecs.jsonl")
BLOCK_TOKENS = 512
CUE_TOKENS = 16
BFLOAT16_BYTES = 2

Probe = Callable[[SequenceCache], Tensor]  # log-probabilities over a cache, [N, V]


def measure_codec(
    name: str, cache: SequenceCache, probes: Mapping[str, Probe], exact: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Row of a codec for a cache.

    Args:
        exact: what each probe finds over the cache itself.
    """
    state = cache.state()
    codec = codec_named(name)
    codec.check_model(cache.spec.fingerprint)

    def write() -> tuple[bytes, dict[str, Any]]:
        tensors, meta = encode_state(state, codec, name, cache.spec)
        return pack_container(tensors, {"coded": meta}), meta

    (data, meta), write_seconds = measured(write)
    restored, read_seconds = measured(
        lambda: decode_state(unpack_container(data)[0], meta, state_nbytes(state))
    )
    again = decode_state(unpack_container(data)[0], meta, state_nbytes(state))
    same = all(torch.equal(restored[key], again[key]) for key in state)
    errors = [
        (restored[key].double() - state[key].double()).abs().flatten()
        for key in state
        if key.endswith(("keys", "values"))
    ]
    numbers = sum(len(each) for each in errors)
    row = {
        "codec": name,
        "lossless": codec.lossless,
        "cache_bytes": state_nbytes(state),
        "saved_bytes": len(data),
        "share": len(data) / (BFLOAT16_BYTES * numbers),
        "bits_per_number": 8 * len(data) / numbers,
        "max_error": max(float(each.max()) for each in errors),
        "mean_error": sum(float(each.sum()) for each in errors) / numbers,
        "same_twice": same,
        "write_seconds": write_seconds,
        "read_seconds": read_seconds,
    }
    for probe, follow in probes.items():
        wanted = exact[probe]
        near = follow(SequenceCache.restore(cache.spec, restored, cache.meta()))
        divergence = (wanted.exp() * (wanted - near)).sum(-1)
        same_token = (wanted.argmax(-1) == near.argmax(-1)).double().mean()
        row |= {
            f"{probe}_kl_mean": float(divergence.mean()),
            f"{probe}_kl_max": float(divergence.max()),
            f"{probe}_same_next_token": float(same_token),
        }
    return row


def measured(run: Callable[[], Any]) -> tuple[Any, float]:
    """Result of a function, and its processor time in seconds."""
    started = time.process_time()
    made = run()
    return made, time.process_time() - started


def texts(loaded: LoadedModel, options: argparse.Namespace) -> Iterator[tuple[int, ...]]:
    """Token ids of each text, continuation included."""
    whole = options.tokens + options.continued
    if options.corpus is None:
        yield text_ids(loaded.tokenizer, whole)
        return
    found = 0
    for text in read_prose(options.corpus / "prose.jsonl.xz"):
        if found == options.first + options.texts:
            return
        ids = tuple(loaded.tokenizer.encode(text)) if len(text) > 4 * whole else ()
        if len(ids) >= whole:
            found += 1
            if found > options.first:
                yield ids[:whole]


def probes_of(
    decoder: Decoder, ids: tuple[int, ...], request: tuple[int, ...], continued: int
) -> dict[str, Probe]:
    """Last tokens of a text, which are read over a cache of those before."""
    length = len(ids) - continued
    start = length // 2
    recited = request + ids[start : start + CUE_TOKENS + continued]
    inputs = {"next": (ids[length:], 0), "recited": (recited, len(recited) - continued - 1)}

    def probe(given: tuple[int, ...], first: int) -> Probe:
        def follow(cache: SequenceCache) -> Tensor:
            rows = range(first, len(given))
            logits = decoder.forward_logits([BatchSegment(cache, given)], Mode.SCRATCH, rows)
            return logits.double().log_softmax(-1)

        return follow

    return {name: probe(*given) for name, given in inputs.items()}


def prefilled(decoder: Decoder, ids: tuple[int, ...]) -> SequenceCache:
    """Full cache of a text."""
    cache = SequenceCache(decoder.spec, "dense")
    for start in range(0, len(ids), BLOCK_TOKENS):
        decoder.read([BatchSegment(cache, ids[start : start + BLOCK_TOKENS])], Mode.APPEND)
    return cache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="seed")
    parser.add_argument("--dtype")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--continued", type=int, default=64)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--texts", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--codecs", nargs="+", default=CODECS.names())
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    loaded = load(options.model, dtype=options.dtype)
    decoder = loaded.decoder
    request = common_prompts(TokenizerAdapter(loaded.tokenizer))["repeat"]
    for number, ids in enumerate(texts(loaded, options), start=options.first):
        cache, prefill_seconds = measured(lambda: prefilled(decoder, ids[: options.tokens]))  # noqa: B023
        probes = probes_of(decoder, ids, request, options.continued)
        exact = {name: follow(cache) for name, follow in probes.items()}
        common = {"model": options.model, "tokens": options.tokens, "text": number}
        common |= {"dtype": str(decoder.spec.dtype), "prefill_seconds": prefill_seconds}
        for name in options.codecs:
            row = common | measure_codec(name, cache, probes, exact)
            print(json.dumps(row), flush=True)
            write(options.out, [row | {"environment": environment()}])


if __name__ == "__main__":
    main()
