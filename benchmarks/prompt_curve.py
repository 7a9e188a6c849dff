"""The nearer the patched prompt is to the question, the better the answer: EpiCache's figure 2.

    python benchmarks/prompt_curve.py DATA_FOLDER [--kinds lifelog] [--sizes 1500] [--share 4]

For every question the conversation's utterances are ranked by their similarity to it. Blocks are
then judged by a prompt of eight utterances taken around the 5th, 15th, ... 95th percentile of that
rank, and by the question itself (the paper's upper bound, which needs the question before reading).
Every question has a cache of its own; several are built in one batched pass. Kim et al., "EpiCache"
(2025), arXiv:2509.17396, section 2.3, figure 2. One JSONL line per point in
results/prompt_curve.jsonl.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _per_question import answer_each
from _timing import environment, write

from larder import Conversation, Engine, Policy, Question, read_conversation
from larder.bench.forced import Forced
from larder.bench.lifelog_questions import lifelog_conversation
from larder.core.spelling import spell
from larder.session.embedding import load_embedder
from larder.session.prompts import episode_prompt

PERCENTILES = tuple(range(5, 100, 10))
UTTERANCES = 8
OUT = Path("results/prompt_curve.jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, nargs="?", help="left out: a generated conversation")
    parser.add_argument("--kinds", default="lifelog")
    parser.add_argument("--sizes", default="1500")
    parser.add_argument("--share", type=int, default=4, help="budget is 1/SHARE of the context")
    parser.add_argument("--budget-part", default="pooled", help="pooled, uniform, sensitivity")
    options = parser.parse_args()
    engine = Engine.load(policy="full")
    points: dict[str, list[tuple[float, Forced]]] = {}
    for conversation in _conversations(engine, options):
        _file(engine, conversation, options, points)
    rows = [_row(name, results, options) for name, results in points.items()]
    for row in rows:
        print(
            f"{row['prompt']:16} similarity {row['similarity']:.2f}  exact {row['exact']:.3f}  "
            f"log-likelihood {row['log_likelihood']:.3f}  n {row['questions']}"
        )
    write(OUT, rows)


def _conversations(engine: Engine, options: argparse.Namespace) -> Iterator[Conversation]:
    if options.data is None:
        yield lifelog_conversation(101, 1500, engine.scribe.length, 24, ("single",))
        return
    for kind in options.kinds.split(","):
        for size in options.sizes.split(","):
            for path in sorted(options.data.glob(f"{kind}-{size}-*.json")):
                yield read_conversation(path)


def _file(
    engine: Engine,
    conversation: Conversation,
    options: argparse.Namespace,
    points: dict[str, list[tuple[float, Forced]]],
) -> None:
    text = "".join(message.content for message in conversation.messages)
    questions = [q for q in conversation.questions if q.kind == "single" and q.answer in text]
    said = [m.content for m in conversation.messages if m.role == "user"]
    embedder = load_embedder("minilm")
    likeness = embedder.embed_questions([q.question for q in questions]) @ (
        embedder.embed_segments(said).T
    )
    order = np.argsort(-likeness, axis=1, kind="stable")
    for percentile in PERCENTILES:
        middle = round(len(said) * percentile / 100)
        first = min(max(0, middle - UTTERANCES // 2), len(said) - UTTERANCES)
        chosen = np.sort(order[:, first : first + UTTERANCES], axis=1)
        prompts = [episode_prompt(engine.scribe, [said[i] for i in row.tolist()]) for row in chosen]
        nearness = np.take_along_axis(likeness, chosen, axis=1).mean(axis=1)
        results = _answer(engine, conversation, questions, prompts, options)
        points.setdefault(f"percentile {percentile}", []).extend(
            zip(nearness.tolist(), results, strict=True)
        )
    exact = [engine.scribe.question(question.question) for question in questions]
    results = _answer(engine, conversation, questions, exact, options)
    points.setdefault("exact question", []).extend((1.0, result) for result in results)


def _answer(
    engine: Engine,
    conversation: Conversation,
    questions: Sequence[Question],
    prompts: Sequence[tuple[int, ...]],
    options: argparse.Namespace,
) -> list[Forced]:
    """Build one cache per question, judged by its prompt, and score the expected answer."""
    tokens = round(len(engine.scribe.write(conversation).ids) / options.share)
    policy = Policy.parse(
        f'episodic() > patched(prompt="question") > {options.budget_part}(tokens={tokens})'
    ).filled(tokens, None)
    return answer_each(engine, conversation, questions, prompts, policy)


def _row(
    name: str, results: list[tuple[float, Forced]], options: argparse.Namespace
) -> dict[str, Any]:
    return {
        "prompt": name,
        "similarity": float(np.mean([nearness for nearness, _ in results])),
        "exact": float(np.mean([result.exact for _, result in results])),
        "log_likelihood": float(np.mean([result.log_likelihood for _, result in results])),
        "questions": len(results),
        "kinds": options.kinds,
        "sizes": options.sizes,
        "share": f"1/{options.share}",
        "budget": options.budget_part,
        "protect": spell(Policy.parse("full").protect),
    } | environment()


if __name__ == "__main__":
    main()
