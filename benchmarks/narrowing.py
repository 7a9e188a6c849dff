"""Prefill time of policies that let few tokens go deeper, and what their caches answer.

    python benchmarks/narrowing.py time --tokens 4096
    python benchmarks/narrowing.py quality --corpus FOLDER --texts 4 [--tokens 1500]
        [--questions 2] [--place inside]

`time` reads one text under each policy in turn, several times, and prints the processor time of the
shortest read as a ratio to that of `full` and of `snapkv` in the same run. `quality` scores the
expected answers to questions about numbers in prose by their likelihood: the question is the end of
what is read and compressed (inside), or asked behind the cache (after). Policies that score by a
question are given it before they read. A row is printed after each read or set of questions, with
the shortest read and the mean of all answers so far: the last row of a policy is its result. On one
core of a shared machine `time` takes 10 minutes for 4,096 tokens, `quality` 5 minutes for a text.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch
from _inputs import text_ids
from _needles import TOKENS, needle_texts
from _timing import environment, write

from larder.core import Conversation
from larder.engine import Engine
from larder_bench.scoring.teacher_forcing import score_answers

POLICIES = ("full", "snapkv", "fastkv", "pyramidinfer", "ilre", "reform", "random")
BASES = ("full", "snapkv")  # of ratios
TIMED_TOKENS = 4096
PLACES = ("inside", "after")
OUT = Path("results/narrowing.jsonl")


def read_seconds(engine: Engine, text: str, policy: str, budget: str) -> tuple[float, int]:
    """Processor time of one read, and the bytes of its cache."""
    reader = engine if policy == "full" else engine.under(policy, budget)
    question = {"question": "What is said about the weather?"}
    started = time.process_time()
    memory = reader.read(text, question)
    return time.process_time() - started, memory.figures.kv_bytes


def timed(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """A row after each read, with the shortest one of its policy so far."""
    engine = Engine.load(options.model, policy="full")
    ids = text_ids(engine.tokenizer.tokenizer, options.tokens or TIMED_TOKENS)
    text = engine.tokenizer.decode(ids)
    best: dict[str, float] = {}
    sizes: dict[str, int] = {}
    for number in range(options.runs):
        for policy in options.policy:
            seconds, sizes[policy] = read_seconds(engine, text, policy, options.budget)
            best[policy] = min(seconds, best.get(policy, seconds))
            ratios = {
                f"time_of_{base}": round(best[policy] / best[base], 3)
                for base in BASES
                if base in best
            }
            yield {
                "policy": policy,
                "tokens": len(ids),
                "run": number + 1,
                "kv_bytes": sizes[policy],
                "seconds": round(best[policy], 1),
                **ratios,
            }


def scores(
    engine: Engine, reader: Engine, chat: Conversation, place: str
) -> Iterator[tuple[float, float]]:
    """Likelihood and exactness of the answers to the questions of a text."""
    asked = chat.questions
    if place == "after" and not reader.policy.scorer.required_prompts():
        memory = reader.read(chat)  # one cache for all of them
        yield from ((one.log_likelihood, one.exact) for one in score_answers(engine, memory, asked))
        return
    for question in asked:
        text = replace(chat, inside=question if place == "inside" else None)
        memory = reader.read(text, {"question": question.question})
        (one,) = score_answers(engine, memory, [question])
        yield one.log_likelihood, one.exact


def answered(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """A row for each policy, budget and place of the question, after each text."""
    engine = Engine.load(options.model, policy="full")
    found: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    length, seeds = options.tokens or TOKENS, range(options.texts)
    for chat in needle_texts(engine, options.model, options.corpus, seeds, length):
        tokens = len(engine.tokenizer.encode_conversation(chat).ids)
        asked = replace(chat, questions=chat.questions[: options.questions])
        for place in options.place:
            for policy in options.policy:
                for share in (1,) if policy == "full" else options.share:
                    reader = engine if share == 1 else engine.under(policy, str(tokens // share))
                    key = policy, f"1/{share}", place
                    found.setdefault(key, []).extend(scores(engine, reader, asked, place))
                    yield quality_row(*key, length, found[key])


def quality_row(
    policy: str, budget: str, place: str, tokens: int, results: Sequence[tuple[float, float]]
) -> dict[str, object]:
    """Means of the likelihood and exactness of some answers."""
    return {
        "policy": policy,
        "tokens": tokens,
        "budget": budget,
        "question": place,
        "log_likelihood_per_token": round(fmean(one[0] for one in results), 2),
        "exact": round(fmean(one[1] for one in results), 2),
        "questions": len(results),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("time", "quality"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--policy", nargs="+", default=POLICIES)
    parser.add_argument("--tokens", type=int, help="of each text")
    parser.add_argument("--budget", default="25%")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--questions", type=int, default=2, help="of each text, at most")
    parser.add_argument("--place", nargs="+", choices=PLACES, default=PLACES, help="of questions")
    parser.add_argument("--share", nargs="+", type=int, default=(4, 8))
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for row in timed(options) if options.what == "time" else answered(options):
        line = {"benchmark": f"narrowing_{options.what}", "model": options.model, **row}
        print(json.dumps(line), flush=True)
        write(options.out, [line | environment()])


if __name__ == "__main__":
    main()
