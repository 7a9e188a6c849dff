"""Requests of a batch by prefix tree and memory, against plain LRU prefix caching in file order.

    python benchmarks/batch_order.py [--model seed] [--texts 10] [--requests 8] [--memory-mib 8]

Texts, each with several questions, stand in a file in random order, as logs do. `file` answers one
request after the other, over the longest prefix that caches of former requests hold within the
bytes; the least recently used leave. `tree` is `larder batch` (BatchLLM) within the same bytes.
Printed, and written to results/batch_order.jsonl, are the prompt tokens that were read and CPU
seconds; the greedy answers of both are compared.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from _timing import environment, write

from larder.cache import SequenceCache
from larder.core import AppendKind, Mode
from larder.engine import BatchRequest, BatchRunner, Engine, GenerationBatch, StoppingCriteria
from larder.models import BatchSegment, Decoder

OUT = Path("results/batch_order.jsonl")
SEED, NEW_TOKENS = 3, 8
Answers = dict[str, tuple[int, ...]]


def trace(texts: int, requests: int, tokens: int, vocabulary: int) -> list[BatchRequest]:
    """Requests in random order: a beginning that all share, a text, and a question of 16 tokens."""
    source = Random(SEED)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(source.randrange(10, vocabulary) for _ in range(count))

    beginning = ids(32)
    bodies = [beginning + ids(tokens) for _ in range(texts)]
    found = [
        BatchRequest(f"{text}.{number}", body + ids(16), max_new_tokens=NEW_TOKENS)
        for text, body in enumerate(bodies)
        for number in range(requests)
    ]
    source.shuffle(found)
    return found


class FileOrder:
    """Requests one by one, over caches of former ones; the least recently used leave."""

    def __init__(self, decoder: Decoder, max_bytes: int) -> None:
        self._decoder, self._max_bytes = decoder, max_bytes
        self._held = OrderedDict[tuple[int, ...], SequenceCache]()
        self.num_read_tokens = 0
        self.answers: Answers = {}

    def run(self, requests: Sequence[BatchRequest]) -> None:
        """Answer all requests."""
        for request in requests:
            self._answer(request)

    def _answer(self, request: BatchRequest) -> None:
        cache, known = self._longest(request.ids)
        rest = request.ids[known:-1]
        if rest:
            segment = BatchSegment(cache, rest, append_kind=AppendKind.TEXT)
            self._decoder.read([segment], Mode.APPEND)
        self.num_read_tokens += len(rest) + 1
        self._hold(request.ids[:-1], cache.fork())
        batch = GenerationBatch(
            self._decoder,
            [cache],
            [request.ids[-1:]],
            request.sampling,
            StoppingCriteria(NEW_TOKENS),
            contexts=[request.ids],
        )
        while batch.is_running:
            batch.step()
        self.answers[request.name] = tuple(batch.generated[0])

    def _longest(self, ids: tuple[int, ...]) -> tuple[SequenceCache, int]:
        """Cache of the longest known prefix, and its tokens."""
        best = max(self._held, key=lambda own: _common(own, ids), default=())
        known = min(_common(best, ids), len(ids) - 1)
        if not known:
            return SequenceCache(self._decoder.spec, "dense"), 0
        self._held.move_to_end(best)
        cache = self._held[best].fork()
        cache.truncate(known)
        return cache, known

    def _hold(self, ids: tuple[int, ...], cache: SequenceCache) -> None:
        self._held[ids] = cache
        full = self._decoder.spec.full_bytes
        while (
            len(self._held) > 1
            and sum(full(len(own)) for own in self._distinct()) > self._max_bytes
        ):
            self._held.popitem(last=False)

    def _distinct(self) -> list[tuple[int, ...]]:
        """Tokens of each held cache that no cache before it shares, as a radix tree counts them."""
        names = sorted(self._held)
        pairs = zip([(), *names], names, strict=False)
        return [own[_common(before, own) :] for before, own in pairs]


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    limit = min(len(one), len(other))
    return next((n for n in range(limit) if one[n] != other[n]), limit)


def measured(run: Callable[[], int]) -> tuple[int, float]:
    """Tokens read, and CPU seconds."""
    started = time.process_time()
    return run(), time.process_time() - started


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    decoder = Engine.load(options.model, policy="full").loaded.decoder
    tokens = options.tokens
    requests = trace(options.texts, options.requests, tokens, options.vocabulary)
    max_bytes = int(options.memory_mib * 2**20)

    def in_file_order() -> int:
        order = FileOrder(decoder, max_bytes)
        order.run(requests)
        answers["file"] = order.answers
        return order.num_read_tokens

    def by_tree() -> int:
        own = answers.setdefault("tree", {})
        runner = BatchRunner(
            decoder,
            lambda ids: "",
            frozenset(),
            max_bytes,
            lambda result: own.update({result.request.name: result.ids}),
            lambda request, error: sys.exit(str(error)),
        )
        runner.run(requests)
        return runner.num_read_tokens

    answers = dict[str, Answers]()
    prompt = sum(len(request.ids) for request in requests)
    rows = list[dict[str, Any]]()
    for name, run in {"file": in_file_order, "tree": by_tree}.items():
        read, seconds = measured(run)
        rows.append(
            {"order": name, "prompt_tokens": prompt, "read_tokens": read, "cpu_seconds": seconds}
        )
        print(f"{name:5} {read} of {prompt} prompt tokens read, {seconds:.1f} CPU s", flush=True)
    alike = sum(answers["file"][name] == ids for name, ids in answers["tree"].items())
    print(f"{alike} of {len(requests)} answers alike")
    settings = vars(options) | {"out": str(options.out), "environment": environment()}
    write(options.out, [row | settings for row in rows])
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A batch by prefix tree and in file order.")
    parser.add_argument("--model", default="seed")
    parser.add_argument("--texts", type=int, default=10)
    parser.add_argument("--requests", type=int, default=8, help="of each text")
    parser.add_argument("--tokens", type=int, default=400, help="of each text")
    parser.add_argument("--vocabulary", type=int, default=500)
    parser.add_argument("--memory-mib", type=float, default=8.0)
    parser.add_argument("--out", type=Path, default=OUT)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
