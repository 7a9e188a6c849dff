"""Long generation over two tiers: cost per token and memory as the index grows.

    python benchmarks/recall_growth.py [--tokens 16384] [--policy icecache] [--budget 256]

The bundled model reads the conversation of the examples and generates with sampling, so that it
does not repeat itself. After every 2,048 tokens it prints one line: process seconds per token,
bytes of both tiers, offloaded entries per head, the share of requested pages that were in the fast
tier, and whether every offloaded entry is in exactly one page. JSONL goes to --out.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from larder import Engine, read_conversation
from larder.cache import SequenceCache, TieredLayer
from larder.engine import SamplingParams, StoppingCriteria
from larder.engine.generate import generate
from larder.session import decode_planner
from larder_bench.results.environment import checkout_commit

SHORT = Path(__file__).parents[1] / "examples" / "conversation.json"
QUESTION = "Tell me everything, and go on."


@dataclass
class GrowthReporter:
    """Callback that prints a line after every `every` tokens."""

    cache: SequenceCache
    every: int
    out: Path
    generated: int = 0
    started: float = field(default_factory=time.process_time)

    def __call__(self, row: int, token: int) -> bool:
        self.generated += 1
        if self.generated % self.every == 0:
            line = self._figures() | {"commit": checkout_commit()}
            print(json.dumps(line), flush=True)
            with self.out.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(line) + "\n")
            self.started = time.process_time()
        return True

    def _figures(self) -> dict[str, object]:
        requested, moved = self.cache.pages
        parked = [int(n) for tier in self.cache.tiers for n in tier.fetcher.shared_index.indexed]
        return {
            "generated": self.generated,
            "seconds_per_token": round((time.process_time() - self.started) / self.every, 5),
            "fast_bytes": self.cache.device_nbytes,
            "bytes": self.cache.nbytes,
            "parked_per_head": [min(parked), max(parked)],
            "hit_rate": round(1 - moved / requested, 3) if requested else None,
            "in_one_page": all(map(_once, self.cache.tiers)),
        }


def _once(tier: TieredLayer) -> bool:
    """Test if the pages of a layer's index contain every known entry exactly once."""
    index, lengths = tier.fetcher.shared_index.index, tier.fetcher.shared_index.indexed
    for head, (pages, length) in enumerate(zip(index.counts, lengths, strict=True)):
        heads = torch.full((len(index.counts), pages), -1)
        heads[head] = torch.arange(pages)
        inside = index.contents(heads)[head].flatten()
        if inside[inside >= 0].sort().values.tolist() != list(range(int(length))):
            return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--every", type=int, default=2048)
    parser.add_argument("--policy", default="icecache")
    parser.add_argument("--budget", default="256")
    parser.add_argument("--file", type=Path, default=SHORT)
    parser.add_argument("--out", type=Path, default=Path("results/recall_growth.jsonl"))
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    engine = Engine.load(policy=options.policy, budget=options.budget)
    memory = engine.read(read_conversation(options.file))
    cache = memory.activate_for(QUESTION)[0].fork()
    planner = decode_planner(engine.runtime, memory.policy, [cache])
    generate(
        engine.loaded.decoder,
        [cache],
        [engine.tokenizer.encode_question(QUESTION)],
        SamplingParams(temperature=1.0, seed=0),
        StoppingCriteria(options.tokens),
        GrowthReporter(cache, options.every, options.out),
        *([] if planner is None else [planner.observer]),
    )


if __name__ == "__main__":
    main()
