"""Answers that are generated over recalled pages, against the full cache and against forgetting.

    python benchmarks/recall_answers.py FILE... [--policies full,icecache:256] [--out PATH]

Every question of every file is answered for real, token by token: the question is read with
attention to everything, as every text is under park(); each generated token sees the fast tier and
what is recalled for it. A recital is scored item by item. `NAME:M` is a preset under a budget of M
entries per head. One JSONL line per file and case; lines already there are kept. `--report` prints
the table, with what each case does worse or better than the full cache on the same items.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from larder import Conversation, Engine, read_conversation
from larder.bench.items import items_of
from larder.bench.metrics import exact
from larder.bench.recite import KIND
from larder.bench.rows import append, known_rows
from larder.bench.surroundings import commit_of_this
from larder.engine.answer import Answer

SMALL = "icecache_small"
CASES = (
    "full",
    "icecache:256",
    "icecache:128",
    f"{SMALL}:64",
    "snapkv_whole:256",
    "h2o:256",
    "random:256",
)
NUMBERED = re.compile(r"(\d+): (.*)", re.DOTALL)
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--policies", default=",".join(CASES))
    parser.add_argument("--out", type=Path, default=Path("results/recall_answers.jsonl"))
    parser.add_argument("--questions", type=int, default=1000, help="the most of a file")
    parser.add_argument("--report", action="store_true", help="only print the table")
    options = parser.parse_args()
    cases = options.policies.split(",")
    if not options.report:
        _run(options, cases)
    _report(list(known_rows(options.out)))


def _run(options: argparse.Namespace, cases: list[str]) -> None:
    engine = Engine.load(policy="full")
    known = {(row["file"], row["case"]) for row in known_rows(options.out)}
    for path in options.files:
        conversation = read_conversation(path)
        for case in cases:
            if (path.stem, case) in known:
                continue
            row = {"file": path.stem, "case": case, "commit": commit_of_this()}
            row |= _measure(engine, conversation, case, options.questions)
            row["load"] = os.getloadavg()[0]
            append(options.out, [row])
            right = [item for item in row["items"] if item]
            print(f"{path.stem:20} {case:20} {len(right)} of {len(row['items'])}", flush=True)


def _measure(engine: Engine, conversation: Conversation, case: str, most: int) -> Row:
    """All that one case does on one file."""
    name, _, budget = case.partition(":")
    under = engine.under(name, budget or None)
    begun = time.perf_counter()
    memory = under.read(conversation)
    read, begun = time.perf_counter() - begun, time.perf_counter()
    items: list[bool] = []
    tokens = 0
    for question in conversation.questions[:most]:
        room = 32 + 2 * len(engine.loaded.tokenizer.encode(question.answer))
        answer = under.ask(memory, question.question, max_new_tokens=room)
        items += _items(question.kind, answer, question.answer)
        tokens += answer.new_tokens
    figures = memory.figures
    return {
        "context_tokens": figures.context_tokens,
        "kv_bytes": figures.kv_bytes,
        "active_kv_bytes": figures.active_kv_bytes,
        "read_seconds": round(read, 2),
        "ask_seconds": round(time.perf_counter() - begun, 2),
        "new_tokens": tokens,
        "items": items,
    }


def _items(kind: str, answer: Answer, expected: str) -> list[bool]:
    """Whether each item of an answer is right; one of most questions."""
    if kind != KIND:
        return [exact(answer.text, expected)]
    said, wanted = _numbered(answer.text), _numbered(expected)
    return [exact(said.get(number, ""), text) for number, text in wanted.items()]


def _numbered(text: str) -> dict[str, str]:
    """The items of a recital by their numbers."""
    found = (NUMBERED.match(text[start:stop].strip()) for start, stop in items_of(text))
    return {item[1]: item[2] for item in found if item is not None}


def _report(rows: list[Row]) -> None:
    held: dict[tuple[str, str], dict[str, list[bool]]] = defaultdict(dict)
    for row in rows:
        kind = "-".join(row["file"].split("-")[:2])
        held[kind, row["case"]][row["file"]] = row["items"]
    print("| data | case | files | items | right | full, same items | right where full is |")
    print("|---|---|---|---|---|---|---|")
    for (kind, case), files in sorted(held.items()):
        full = held.get((kind, "full"), {})
        pairs = [p for f, own in files.items() if f in full for p in zip(own, full[f], strict=True)]
        alike = [own for own, whole in pairs if whole]
        items = [item for own in files.values() for item in own]
        print(
            f"| {kind} | {case} | {len(files)} | {len(items)} | {_share(items)} | "
            f"{_share([whole for _, whole in pairs])} | {_share(alike)} |"
        )


def _share(items: list[bool]) -> str:
    return f"{sum(items) / len(items):.3f}" if items else "-"


if __name__ == "__main__":
    main()
