"""Retrieved contexts in the order that shares prefixes, against the given order, by one trace.

    python benchmarks/context_order.py [--requests 60] [--documents 16] [--contexts 5]
        [--turns 1] [--batch | --count] [--policy full] [--kv-budget 48MiB]

A life-log is cut into documents. Each request asks a question whose answer stands in one of them,
and sends this one and others, drawn by popularity (Zipf) and in random order. The same requests go
to a `larder serve` in its own process twice, in the given order (plain prefix caching under least
recently used eviction) and with `context_order: shared`. With --turns each conversation asks so
many questions, with contexts of their own; with --batch `larder batch` answers all of them from a
file. Printed, and written to results/context_order.jsonl, are the prompt tokens, those of them that
were computed, CPU seconds of the server (Linux), and the share of answers that contain the right
one. The first conversation of a server warms it up and does not count.

With --count no model runs: printed are the tokens that `larder batch` reads of all prompts, by the
tree of their prefixes, in the given order, in the order of a server that knows no later request
(`one by one`), and in the order of one tree of all requests.

On two cores with a load of 9 `--requests 24` takes two minutes, `--count` some seconds.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from _server import Server, run_server
from _timing import environment, write
from chat_load import ProcessUse

from larder.cli.batch_contexts import BatchContexts, batch_contexts
from larder.core import Conversation, Question
from larder.engine import BatchRequest, Engine, prefix_tree
from larder.evaluation import string_match
from larder.server import ContextOrders, chunk_id, ordered_texts
from larder.session import TemplateMessage, TokenizerAdapter
from larder.store import ByteLedger
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
    rng, lines = Random(SEED), [f"{m.role}: {m.content}" for m in conversation.messages]
    size = -(-len(lines) // documents)
    texts = ["\n".join(lines[start : start + size]) for start in range(0, len(lines), size)]
    rng.shuffle(texts)
    weights = [1 / (rank + 1) for rank in range(len(texts))]
    asked = [
        (question, holding[0])
        for question in conversation.questions
        if len(holding := [text for text in texts if question.answer in text]) == 1
    ]
    found = list[ContextRequest]()
    for _ in range(requests):
        question, needed = rng.choice(asked)
        chosen = {needed: None}
        while len(chosen) < min(contexts, len(texts)):
            chosen[rng.choices(texts, weights)[0]] = None
        found.append(ContextRequest(question, tuple(rng.sample(list(chosen), len(chosen)))))
    return found


def body_of(messages: list[dict[str, Any]], order: str, model: str) -> dict[str, Any]:
    """Body of a request."""
    return {
        "model": model,
        "messages": messages,
        "context_order": order,
        "max_tokens": 12,
        "temperature": 0,
    }


def replay(
    server: Server, conversations: Sequence[Sequence[ContextRequest]], order: str, model: str
) -> dict[str, Any]:
    """Figures of all requests, one after the other."""
    before, prompt, cached, right = ProcessUse.of(server.process), 0, 0, 0.0
    for conversation in conversations:
        messages = list[dict[str, Any]]()
        for request in conversation:
            question = {"role": "user", "content": request.question.question}
            messages.append(question | {"contexts": request.contexts})
            reply = server.ask("POST", "/v1/chat/completions", body_of(messages, order, model))
            if reply.status != 200:
                raise RuntimeError(f"a request was refused: {reply.body.decode()}")
            usage, message = reply.json["usage"], reply.json["choices"][0]["message"]
            prompt += usage["prompt_tokens"]
            cached += usage["prompt_tokens_details"]["cached_tokens"]
            right += string_match(message["content"], request.question.answer)
            messages.append({"role": "assistant", "content": message["content"]})
    count = sum(map(len, conversations))
    return {
        "order": order,
        "requests": count,
        "prompt_tokens": prompt,
        "cached": cached / prompt,
        "computed_tokens": prompt - cached,
        "cpu_seconds": ProcessUse.of(server.process).cpu_seconds - before.cpu_seconds,
        "right": right / count,
    }


def answered_batch(requests: Sequence[ContextRequest], order: str, model: str) -> dict[str, Any]:
    """Figures of `larder batch` over all requests in one file."""
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder, "requests.jsonl"), Path(folder, "results.jsonl")
        lines = list[str]()
        for number, request in enumerate(requests):
            message = {"role": "user", "content": request.question.question}
            body = body_of([message], order, model) | {"contexts": request.contexts}
            line = {"custom_id": str(number), "url": "/v1/chat/completions", "body": body}
            lines.append(json.dumps(line) + "\n")
        file.write_text("".join(lines))
        command = [sys.executable, "-m", "larder", "batch", str(file), "--out", str(out)]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        ran = subprocess.run(
            [*command, "--model", model, "--json"], check=True, capture_output=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        result, right = json.loads(ran.stdout), 0.0
        for line in map(json.loads, out.read_text().splitlines()):
            text = line["response"]["body"]["choices"][0]["message"]["content"]
            right += string_match(text, requests[int(line["custom_id"])].question.answer)
    return {
        "order": order,
        "requests": len(requests),
        "prompt_tokens": result["prompt_tokens"],
        "cached": 1 - result["read_tokens"] / result["prompt_tokens"],
        "computed_tokens": result["read_tokens"],
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "right": right / len(requests),
    }


def one_by_one(requests: Sequence[ContextRequest]) -> list[BatchContexts]:
    """Contexts of each request in the order that shares most with the requests before it."""
    orders, found = ContextOrders(ByteLedger()), list[BatchContexts]()
    for request in requests:
        texts = {chunk_id(text): text for text in request.contexts}
        order = orders.shared("", {name: len(text) for name, text in texts.items()})
        orders.add("", order)
        found.append(BatchContexts(ordered_texts(texts, order)))
    return found


def count_tokens(engine: Engine, requests: Sequence[ContextRequest]) -> Iterator[dict[str, Any]]:
    """Tokens that a batch reads of all prompts, by order of their contexts."""
    bodies = [{"contexts": list(request.contexts)} for request in requests]
    given, shared = (
        batch_contexts([{"body": body | {"context_order": order}} for body in bodies])
        for order in ORDERS
    )
    orders = {"given": given, "one by one": one_by_one(requests), "shared": shared}
    for order, contexts in orders.items():
        prompts = list[BatchRequest]()
        for request, opening in zip(requests, contexts, strict=True):
            message = TemplateMessage("user", opening.text() + request.question.question)
            ids = engine.tokenizer.encode(engine.tokenizer.render_messages([message]))
            prompts.append(BatchRequest(str(len(prompts)), ids))
        yield {
            "order": order,
            "requests": len(requests),
            "prompt_tokens": sum(len(each.ids) for each in prompts),
            "computed_tokens": prefix_tree(prompts).read_tokens(),
        }


def served(
    conversations: Sequence[Sequence[ContextRequest]], order: str, options: argparse.Namespace
) -> dict[str, Any]:
    """Figures of a server of its own."""
    serve = ["--model", options.model, "--policy", options.policy]
    serve += ["--kv-budget", options.kv_budget, "--host-budget", options.host_budget]
    with tempfile.TemporaryDirectory() as home, run_server(Path(home), serve) as server:
        replay(server, conversations[:1], order, options.model)  # warms up
        return replay(server, conversations[1:], order, options.model)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    engine = Engine.load("seed", policy="full")
    count = TokenizerAdapter(engine.loaded.tokenizer).count_tokens
    task = parse_task(f"lifelog(questions={options.questions})")
    conversation = task.make(0, options.tokens, TaskSources(count))
    requests = trace(conversation, options.documents, options.contexts, options.requests)
    if options.count:
        return _print_counts(options, list(count_tokens(engine, requests)))
    turns = options.turns
    conversations = [requests[start : start + turns] for start in range(0, len(requests), turns)]
    rows = list[dict[str, Any]]()
    for order in ORDERS:
        if options.batch:
            rows.append(answered_batch(requests, order, options.model))
        else:
            rows.append(served(conversations, order, options))
        row = rows[-1]
        print(
            f"{order:7} {row['cached']:.2f} of {row['prompt_tokens']} prompt tokens cached, "
            f"{row['computed_tokens']} computed, "
            f"{row['cpu_seconds']:.1f} CPU s, {row['right']:.2f} right",
            flush=True,
        )
    settings = {"kv_budget": options.kv_budget, "host_budget": options.host_budget}
    settings |= {"turns": turns, "batch": options.batch}
    write(options.out, [row | settings | {"environment": environment()} for row in rows])
    return 0


def _print_counts(options: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> int:
    for row in rows:
        print(
            f"{row['order']:10} {row['prompt_tokens']:,} tokens in {row['requests']} prompts, "
            f"{row['computed_tokens']:,} of them read"
        )
    write(options.out, [row | {"count": True, "environment": environment()} for row in rows])
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Contexts in shared and in given order.")
    parser.add_argument("--model", default="seed")
    parser.add_argument("--policy", default="full")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--contexts", type=int, default=5)
    parser.add_argument("--turns", type=int, default=1, help="of each conversation")
    parser.add_argument("--batch", action="store_true", help="by `larder batch`")
    parser.add_argument("--count", action="store_true", help="tokens of a batch, without a model")
    parser.add_argument("--tokens", type=int, default=3000, help="of the whole life-log")
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--kv-budget", default="48MiB")
    parser.add_argument("--host-budget", default="16MiB")
    parser.add_argument("--out", type=Path, default=OUT)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
