"""Questions about several contexts: what is reused, CPU time of the prefill, right answers.

    python benchmarks/contexts.py FILE... [--model smollm2] [--contexts 6] [--questions 20]
        [--way NAME...]

FILE is a conversation with questions (`{"messages", "qa"}`). Its messages are cut into contexts of
a few lines. A question whose answer stands in exactly one context is asked about that one and
others, drawn and ordered by a seed, so that contexts recur at other places between other ones. All
contexts are read once beforehand (`reading_cpu_ratio`). One JSONL line per way of reading in
results/contexts.jsonl: `cached` is the share of context tokens that was found, `recomputed` that of
tokens computed in all layers, `prefill_cpu_ratio` the CPU time of all prefills divided by that of
the first way (reading everything) in the same run, `right` the share of answers that contain the
expected one, `entropy` the attention entropy of the last token of the question in nats, mean over
layers and heads.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from _timing import environment, write
from torch import Tensor

from larder.cache import ParallelLayer, SequenceCache
from larder.core import Mode, Question
from larder.engine import Engine
from larder.evaluation import string_match
from larder.models import BatchSegment, LayerActivations
from larder.prefill import ChunkMemory
from larder.session import read_conversation

OUT = Path("results/contexts.jsonl")
WAYS = {
    "full": "full",
    "cacheblend": "cacheblend",
    "cachecraft": "cachecraft",
    "kvcomm": "kvcomm",
    "rotated": "blended(recompute=0.0) > unlimited()",
    "ape": "ape",
    "parallel": "parallel(temperature=1.0, scale=1.0) > unlimited()",
}
SEED = 7


@dataclass(frozen=True)
class Case:
    """Question about some contexts, one of which has the answer."""

    question: Question
    contexts: tuple[str, ...]


def cases(path: Path, lines: int, count: int, questions: int, source: random.Random) -> list[Case]:
    conversation = read_conversation(path)
    dialogue = [f"{one.role}: {one.content}" for one in conversation.messages]
    texts = ["\n".join(dialogue[start : start + lines]) for start in range(0, len(dialogue), lines)]
    found: list[Case] = []
    for question in conversation.questions:
        holding = [text for text in texts if question.answer in text]
        if question.kind != "single" or len(holding) != 1 or len(found) == questions:
            continue
        others = source.sample([text for text in texts if text != holding[0]], count - 1)
        order = source.sample([*holding, *others], count)
        found.append(Case(question, tuple(order)))
    return found


def entropy(engine: Engine, cache: SequenceCache, ids: tuple[int, ...]) -> float:
    """Attention entropy of the last token of a question, mean over layers and query heads."""
    found: list[Tensor] = []

    def observe(_segment: int, layer: int, activations: LayerActivations) -> None:
        store = cache.layers[layer]
        held, spec = store.entries(), store.layer
        keys = torch.stack(
            [held.keys[s : s + n] for s, n in zip(held.starts, held.lengths, strict=True)]
        )
        keys = (
            torch.cat([keys, activations.keys], 1)
            .float()
            .repeat_interleave(spec.query_heads // spec.kv_heads, 0)
        )
        logits = (keys @ activations.queries[:, -1:].float().transpose(1, 2))[..., 0] * spec.scaling
        if isinstance(store, ParallelLayer) and (split := store.num_context_entries):
            temperature, scale = store.factors
            context = logits[:, :split] / temperature
            lse = context.logsumexp(-1, keepdim=True)
            logits = torch.cat([context + lse * (scale * temperature - 1), logits[:, split:]], 1)
        weights = logits.softmax(-1)
        found.append(-(weights * weights.clamp(min=1e-30).log()).sum(-1))

    engine.loaded.decoder.read([BatchSegment(cache, ids)], Mode.SCRATCH, observe)
    return float(torch.stack(found).mean())


def measure(
    engine: Engine, asked: list[Case], new_tokens: int, chunks: ChunkMemory
) -> dict[str, float]:
    """Sums over all questions."""
    sums = defaultdict[str, float](float)
    for case in asked:
        started = time.process_time()
        memory = engine.read(contexts=case.contexts, chunks=chunks)
        seconds = time.process_time() - started
        sums["seconds"] += seconds
        sums["tokens"] += sum(memory.reuse.tokens)
        sums["cached"] += memory.reuse.cached_tokens
        sums["recomputed"] += memory.reuse.recomputed_tokens
        answer = engine.ask(memory, case.question.question, max_new_tokens=new_tokens)
        sums["right"] += string_match(answer.text, case.question.answer)
        cache, _ = memory.activate_for(case.question.question)
        ids = engine.tokenizer.encode_question_about(memory.conversation, case.question)
        sums["entropy"] += entropy(engine, cache, ids)
    return sums


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--contexts", type=int, default=6)
    parser.add_argument("--lines", type=int, default=8)
    parser.add_argument("--questions", type=int, default=20, help="of each file, at most")
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--way", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    source = random.Random(SEED)
    asked = [
        case
        for path in options.files
        for case in cases(path, options.lines, options.contexts, options.questions, source)
    ]
    engine = Engine.load(options.model, policy="full")
    whole: dict[str, float] = {}
    chunks, started = ChunkMemory(), time.process_time()
    for text in sorted({text for case in asked for text in case.contexts}):
        engine.under("ape").read(contexts=[text], chunks=chunks)
    reading = time.process_time() - started
    for name in options.way:
        policy = WAYS[name]
        sums = measure(engine.under(policy), asked, options.new_tokens, chunks)
        whole = whole or sums
        row = {
            "model": options.model,
            "way": name,
            "policy": policy,
            "questions": len(asked),
            "contexts": options.contexts,
            "context_tokens": sums["tokens"] / len(asked),
            "cached": sums["cached"] / sums["tokens"],
            "recomputed": sums["recomputed"] / sums["tokens"],
            "prefill_cpu_ratio": sums["seconds"] / whole["seconds"],
            "reading_cpu_ratio": reading / whole["seconds"],
            "right": sums["right"] / len(asked),
            "entropy": sums["entropy"] / len(asked),
        }
        print(json.dumps(row), flush=True)
        write(options.out, [row | {"environment": environment()}])


if __name__ == "__main__":
    main()
