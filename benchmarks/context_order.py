"""Retrieved contexts in the order that shares prefixes, against the given order, by one trace.

    python benchmarks/context_order.py [--requests 60] [--documents 16] [--contexts 5]
        [--policy full] [--kv-budget 48MiB]

A life-log is cut into documents. Each request asks a question whose answer stands in one of them,
and sends this one and others, drawn by popularity (Zipf) and in random order. The same requests go
to a `larder serve` in its own process twice, in the given order (plain prefix caching under least
recently used eviction) and with `context_order: shared`. Printed, and written to
results/context_order.jsonl, are the share of prompt tokens that were cached, CPU seconds of the
server (Linux), and the share of answers that contain the right one.

On two cores with a load of 9 `--requests 24` takes two minutes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from _server import Server, run_server
from _timing import environment, write
from chat_load import ProcessUse

from larder.core import Conversation, Question
from larder.engine import Engine
from larder.evaluation import string_match
from larder.session import TokenizerAdapter
from larder_bench.datasets.sources import TaskSources
from larder_bench.tasks.base import parse_task

OUT = Path("results/context_order.jsonl")
ORDERS = ("given", "shared")
SEED = 5


@dataclass(frozen=True)
class ContextRequest:
    """Question and the texts that were retrieved for it, one of which has the answer."""

    question: Question
    contexts: tuple[str, ...]


def trace(
    conversation: Conversation, documents: int, contexts: int, requests: int
) -> list[ContextRequest]:
    """Requests over the documents that a conversation is cut into."""
    luck, said = Random(SEED), [f"{m.role}: {m.content}" for m in conversation.messages]
    size = -(-len(said) // documents)
    texts = ["\n".join(said[start : start + size]) for start in range(0, len(said), size)]
    luck.shuffle(texts)
    weights = [1 / (rank + 1) for rank in range(len(texts))]
    asked = [
        (question, holding[0])
        for question in conversation.questions
        if len(holding := [text for text in texts if question.answer in text]) == 1
    ]
    found = list[ContextRequest]()
    for _ in range(requests):
        question, needed = luck.choice(asked)
        chosen = {needed: None}
        while len(chosen) < min(contexts, len(texts)):
            chosen[luck.choices(texts, weights)[0]] = None
        found.append(ContextRequest(question, tuple(luck.sample(list(chosen), len(chosen)))))
    return found


def replay(
    server: Server, requests: Sequence[ContextRequest], order: str, model: str
) -> dict[str, Any]:
    """Figures of all requests, one after the other."""
    before, prompt, cached, right = ProcessUse.of(server.process), 0, 0, 0.0
    for request in requests:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": request.question.question}],
            "contexts": request.contexts,
            "context_order": order,
            "max_tokens": 12,
            "temperature": 0,
        }
        reply = server.ask("POST", "/v1/chat/completions", body)
        if reply.status != 200:
            raise RuntimeError(f"a request was refused: {reply.body.decode()}")
        usage = reply.json["usage"]
        prompt += usage["prompt_tokens"]
        cached += usage["prompt_tokens_details"]["cached_tokens"]
        text = reply.json["choices"][0]["message"]["content"]
        right += string_match(text, request.question.answer)
    cpu_seconds = ProcessUse.of(server.process).cpu_seconds - before.cpu_seconds
    return {
        "order": order,
        "requests": len(requests),
        "prompt_tokens": prompt,
        "cached": cached / prompt,
        "cpu_seconds": cpu_seconds,
        "right": right / len(requests),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    count = TokenizerAdapter(Engine.load("seed", policy="full").loaded.tokenizer).count_tokens
    task = parse_task(f"lifelog(questions={options.questions})")
    conversation = task.make(0, options.tokens, TaskSources(count))
    requests = trace(conversation, options.documents, options.contexts, options.requests)
    serve = ["--model", options.model, "--policy", options.policy]
    serve += ["--kv-budget", options.kv_budget, "--host-budget", options.host_budget]
    rows = list[dict[str, Any]]()
    for order in ORDERS:
        with tempfile.TemporaryDirectory() as home, run_server(Path(home), serve) as server:
            replay(server, requests[:1], order, options.model)  # warms up
            rows.append(replay(server, requests[1:], order, options.model))
        row = rows[-1]
        print(
            f"{order:7} {row['cached']:.2f} of {row['prompt_tokens']} prompt tokens cached, "
            f"{row['cpu_seconds']:.1f} CPU s, {row['right']:.2f} right",
            flush=True,
        )
    settings = {"kv_budget": options.kv_budget, "host_budget": options.host_budget}
    write(options.out, [row | settings | {"environment": environment()} for row in rows])
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Contexts in shared and in given order.")
    parser.add_argument("--model", default="seed")
    parser.add_argument("--policy", default="full")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--contexts", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=3000, help="of the whole life-log")
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--kv-budget", default="48MiB")
    parser.add_argument("--host-budget", default="16MiB")
    parser.add_argument("--out", type=Path, default=OUT)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
