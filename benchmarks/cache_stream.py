"""Restores of a cache over links of changing bandwidth: CacheGen's controller and fixed levels.

    python benchmarks/cache_stream.py [--model smollm2] [--tokens 2048] [--continued 64]
        [--text-seconds 3] [--corpus FOLDER]

A text is read, and its cache stored as `--codec cachegen` does: in chunks, at three levels. It is
restored over links in virtual time, within a deadline of one second, in which a link of bandwidth 1
carries the whole cache at its finest level. The model reads the whole text in --text-seconds of
virtual time; encodings, sizes and the model's predictions are real. Of each link and each rule: the
seconds that the restore took, with what the model read again, the levels of its chunks (`t` for
text), and the divergence of the next tokens' predictions from those of the exact cache. One JSONL
line each in results/cache_stream.jsonl.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from _inputs import text_ids
from _timing import environment, write
from torch import Tensor

from larder.cache import SequenceCache
from larder.core import Mode
from larder.engine import identity_of_model
from larder.models import BatchSegment, Decoder, LoadedModel, load
from larder.prefill import append_text
from larder.store import (
    SNAPSHOT_KIND,
    BlobRef,
    ChunkStream,
    ModelIdentity,
    StreamController,
    StreamedChunk,
    StreamRule,
    chunk_slices,
    codec_named,
    decode_cache_blob,
    encode_snapshot,
)
from larder_bench.datasets.corpus import read_prose

OUT = Path("results/cache_stream.jsonl")
LEVELS = codec_named("cachegen").levels
# Bandwidth of each chunk; the last holds to the end.
LINKS = {
    "fast": (2.0,),
    "as fast as needed": (1.05,),
    "slow": (0.7,),
    "slows down": (1.5, 1.5, 1.5, 0.6),
    "drops for a while": (2.0, 2.0, 0.3, 0.3, 2.0),
    "breaks down": (1.5, 1.5, 0.03),
    "speeds up": (0.5, 0.5, 2.0),
}
TEXT = "always text"
ADAPTED = {
    "rule of the paper": StreamController(1.0),
    "rule of the code": StreamController(1.0, StreamRule.CODE),
}
RULES = (*(f"always {name}" for name in LEVELS), TEXT, *ADAPTED)


@dataclass
class StoredText:
    """Text, its exact cache, and its chunks as they are stored."""

    decoder: Decoder
    ids: tuple[int, ...]
    following: tuple[int, ...]
    cache: SequenceCache
    identity: ModelIdentity
    chunks: list[StreamedChunk]
    blobs: dict[str, bytes]

    def predictions(self, cache: SequenceCache) -> Tensor:
        """Log-probabilities behind each of the following tokens."""
        rows, segment = range(len(self.following)), BatchSegment(cache, self.following)
        logits = self.decoder.forward_logits([segment], Mode.SCRATCH, rows)
        return logits.double().log_softmax(-1)

    def restored(
        self,
        chunks: Sequence[StreamedChunk],
        controller: StreamController,
        link: tuple[float, ...],
        text_seconds: float,
    ) -> tuple[SequenceCache, list[int], float]:
        """Cache, levels of its chunks and seconds of a restore over a link."""
        finest = sum(chunk.sizes[0] for chunk in self.chunks)
        bandwidths, now = chain(link, repeat(link[-1])), [0.0]
        token_seconds = text_seconds / len(self.ids)

        def arrived(ref: BlobRef) -> tuple[dict[str, Tensor], Any]:
            now[0] += ref.bytes / (next(bandwidths) * finest)
            data = self.blobs[ref.digest]
            tensors, metadata = decode_cache_blob(data, SNAPSHOT_KIND, "", self.identity, 2**40)
            return tensors, metadata["span"]

        stream = ChunkStream(
            chunks,
            self.ids,
            controller,
            arrived,
            lambda tokens: tokens * token_seconds,
            link[0] * finest,
            lambda: now[0],
        )
        cache, levels, _ = stream.restore(self.decoder.spec)
        rest = self.ids[cache.next_position :]
        append_text(self.decoder, cache, rest)
        return cache, levels, now[0] + token_seconds * len(rest)


def stored_text(loaded: LoadedModel, ids: tuple[int, ...], continued: int) -> StoredText:
    """Text of which all but the last tokens are read and stored."""
    ids, following = ids[:-continued], ids[-continued:]
    cache, identity = SequenceCache(loaded.decoder.spec, "dense"), identity_of_model(loaded)
    append_text(loaded.decoder, cache, ids)
    found = StoredText(loaded.decoder, ids, following, cache, identity, [], {})
    for part, span in chunk_slices(cache.state(), ids):
        start, count = int(str(span["start"])), int(str(span["n_tokens"]))
        refs = list[BlobRef]()
        for name in LEVELS:
            data = encode_snapshot(part, "", identity, "full", name, cache.spec, span)
            refs.append(BlobRef(f"{name} {start}", len(data)))
            found.blobs[refs[-1].digest] = data
        found.chunks.append(StreamedChunk(tuple(refs), start, start + count))
    return found


def measure(text: StoredText, rule: str, link: str, text_seconds: float) -> dict[str, Any]:
    """Row of a rule over a link."""
    chunks, fixed = text.chunks, None
    if rule in ADAPTED:
        controller = ADAPTED[rule]
    else:  # chunks of one level, or time to read the text
        controller = StreamController(2 * text_seconds) if rule == TEXT else StreamController()
        fixed = 0 if rule == TEXT else RULES.index(rule)
        chunks = [replace(chunk, refs=chunk.refs[fixed : fixed + 1]) for chunk in chunks]
    cache, levels, seconds = text.restored(chunks, controller, LINKS[link], text_seconds)
    chosen = "".join(str(each if fixed is None else fixed) for each in levels)
    wanted, near = text.predictions(text.cache), text.predictions(cache)
    return {
        "link": link,
        "rule": rule,
        "seconds": seconds,
        "levels": chosen.ljust(len(text.chunks), "t"),
        "kl": float((wanted.exp() * (wanted - near)).sum(-1).mean()),
    }


def ids_of(loaded: LoadedModel, count: int, corpus: Path | None) -> tuple[int, ...]:
    """Tokens of the first text of a corpus that is long enough, or of a conversation."""
    if corpus is None:
        return text_ids(loaded.tokenizer, count)
    texts = (text for text in read_prose(corpus / "prose.jsonl.xz") if len(text) > 4 * count)
    found = (tuple(loaded.tokenizer.encode(text)) for text in texts)
    return next(ids for ids in found if len(ids) >= count)[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--continued", type=int, default=64)
    parser.add_argument("--text-seconds", type=float, default=3.0)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    loaded = load(options.model)
    ids = ids_of(loaded, options.tokens + options.continued, options.corpus)
    text = stored_text(loaded, ids, options.continued)
    sizes = [sum(chunk.sizes[each] for chunk in text.chunks) for each in range(len(LEVELS))]
    common = {"model": options.model, "tokens": options.tokens, "level_bytes": sizes}
    common |= {"cache_bytes": text.cache.nbytes, "text_seconds": options.text_seconds}
    for link in LINKS:
        for rule in RULES:
            row = common | measure(text, rule, link, options.text_seconds)
            print(json.dumps(row), flush=True)
            write(options.out, [row | {"environment": environment()}])


if __name__ == "__main__":
    main()
