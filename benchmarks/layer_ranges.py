"""Layers that a tuned model computes of a text that its base has read (DroidSpeak).

    python benchmarks/layer_ranges.py FILE [--sender smollm2] [--receiver smollm2-dialogue]
        [--tokens 768] [--continued 128] [--step 5]

FILE is plain text. Ranges start and end at every --step-th layer. Printed are the ranges that no
other beats in layers computed and divergence of the continuation from the receiver's own reading,
a copy without any layer first; JSONL goes to results/layer_ranges.jsonl.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from _timing import environment, shortest_run, write

from larder.cache import SequenceCache
from larder.core import Mode
from larder.models import (
    BatchSegment,
    load,
    pareto_ranges,
    range_profiles,
    receive_reading,
    share_reading,
)

OUT = Path("results/layer_ranges.jsonl")


def main() -> None:
    options = _options()
    sender, receiver = load(options.sender), load(options.receiver)
    ids = tuple(receiver.tokenizer.encode(options.file.read_text(encoding="utf-8")))
    text = ids[: options.tokens]
    behind = ids[options.tokens : options.tokens + options.continued]
    count = len(receiver.decoder.spec.layers)
    edges = [*range(0, count, options.step), count]
    ranges = [(0, 0), *((a, b) for a in edges for b in edges if a < b)]
    profiles = range_profiles(sender.decoder, receiver.decoder, text, behind, ranges)
    reading = share_reading(sender.decoder, text, edges[:-1])
    whole = shortest_run(lambda: _read(receiver, text))[1]
    for one in pareto_ranges(profiles):
        again = lambda one=one: receive_reading(receiver.decoder, reading, one.layers)  # noqa: E731
        row = {
            "study": "layer_ranges",
            "sender": options.sender,
            "receiver": options.receiver,
            "tokens": len(text),
            "layers": list(one.layers),
            "divergence": round(one.divergence, 5),
            "time_ratio": round(shortest_run(again)[1] / whole, 3),
        }
        print(row, flush=True)
        write(OUT, [row | {"environment": environment()}])


def _read(loaded, ids: tuple[int, ...]) -> None:
    cache = SequenceCache(loaded.decoder.spec, "dense")
    loaded.decoder.read([BatchSegment(cache, ids)], Mode.APPEND)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--sender", default="smollm2")
    parser.add_argument("--receiver", default="smollm2-dialogue")
    parser.add_argument("--tokens", type=int, default=768)
    parser.add_argument("--continued", type=int, default=128)
    parser.add_argument("--step", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
