"""Agreement of the entries that presses of kvpress keep with those that Larder keeps.

    python benchmarks/peers/kept_entries.py --peer-python PATH --corpus FOLDER
        [--model smollm2] [--tokens 1200] [--seed 0] [--press NAME ...] [--out FILE] [--report FILE]

Both sides read the same token ids of one text in float32 and keep a quarter of them. For each press
of `_equal_pairs.py` a row has the Jaccard index of the positions that both keep, |A and B| over
|A or B|, in each layer and kv head: its mean and its least value. `--help` of side_by_side.py
explains how to install kvpress. `--report` prints the table of measured rows and runs nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from _equal_pairs import EQUAL_PAIRS, KVCOMPOSE, KVZIP, pyramid_pair
from _pairs import KVPRESS, PeerPair

from larder.core import Conversation
from larder.engine import Engine
from larder.models import PACKAGED_MODELS, calibrate
from larder.session import Policy, SizeOptions, prefill_conversation
from larder_bench.datasets.prompt_templates import worded_chat
from larder_bench.datasets.sources import TaskSources
from larder_bench.datasets.wording import Wording
from larder_bench.results.rows import Row, append_rows, read_rows
from larder_bench.tasks.base import parse_task

TASK = 'needles(kind="magic", needles=4, hay="prose")'
OUT = Path("results/kept_entries.jsonl")
WORKER = Path(__file__).with_name("kept_worker.py")
REPEAT = "Repeat the previous context exactly."
EXACT = 0.9995  # mean from which an agreement is printed as 1
Positions = list[list[list[int]]]  # by layer and kv head, ascending


def main() -> None:
    options = _options()
    if options.report is not None:
        print("\n".join(table(read_rows(options.report))))
        return
    rows = list(_compare(options))
    append_rows(options.out, rows)
    print("\n".join(table(rows)))


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Markdown table of rows."""
    yield "| press | Larder | mean | least |"
    yield "|---|---|---|---|"
    for row in rows:
        figures = [row["refused"], ""] if "refused" in row else _figures(row)
        yield f"| `{row['press']}` | `{row['policy']}` | {' | '.join(figures)} |"


def agreement(theirs: Positions, ours: Positions) -> list[float]:
    """Jaccard index of the kept positions of each head, layer by layer."""
    return [
        _jaccard(set(one), set(other))
        for layer, other_layer in zip(theirs, ours, strict=True)
        for one, other in zip(layer, other_layer, strict=True)
    ]


def _jaccard(one: set[int], other: set[int]) -> float:
    return len(one & other) / len(one | other) if one | other else 1.0


def _figures(row: Row) -> list[str]:
    return [_share(row["mean"]), _share(row["least"])]


def _share(number: float) -> str:
    return "1" if number >= EXACT else f"{number:.3f}".lstrip("0")


def _compare(options: argparse.Namespace) -> Iterator[Row]:
    engine = Engine.load(options.model, policy="full", dtype="float32")
    conversation = _conversation(engine, options)
    ids = list(engine.tokenizer.encode_conversation(conversation).ids)
    kept = len(ids) // 4
    pairs = [p for p in (*EQUAL_PAIRS, pyramid_pair(kept)) if p.package == KVPRESS]
    pairs = [p for p in pairs if options.press is None or p.made in options.press]
    job = {
        "model": str(PACKAGED_MODELS[options.model].folder(options.model)),
        "dtype": "float32",
        "threads": 1,
        "seed": options.seed,
        "ids": ids,
        "kept": kept,
        "presses": [pair.made for pair in pairs],
        "q_filters": _q_filters(engine),
        "kvzap": str(
            Path(str(files("larder.models"))) / "learned" / f"kvzap.{options.model}.safetensors"
        ),
    }
    command = [options.peer_python, str(WORKER)]
    done = subprocess.run(
        command, input=json.dumps(job), stdout=subprocess.PIPE, text=True, check=True
    )
    results = json.loads(done.stdout[done.stdout.index("[{") :])
    for pair, result in zip(pairs, results, strict=True):
        yield _row(options, pair, engine, conversation, kept, result)


def _row(
    options: argparse.Namespace,
    pair: PeerPair,
    engine: Engine,
    conversation: Conversation,
    kept: int,
    result: dict[str, Any],
) -> Row:
    row: Row = {
        "study": "kept_entries",
        "model": options.model,
        "task": TASK,
        "tokens": options.tokens,
        "seed": options.seed,
        "press": pair.made,
        "policy": pair.ours,
        "kvpress": result["kvpress"],
        "dtype": "float32",
        "context_tokens": len(engine.tokenizer.encode_conversation(conversation).ids),
        "kept_tokens": kept,
    }
    if "refused" in result:
        return row | {"refused": result["refused"]}
    shares = agreement(result["kept"], larder_positions(engine, conversation, pair, kept))
    return row | {"mean": round(sum(shares) / len(shares), 4), "least": round(min(shares), 4)}


def larder_positions(
    engine: Engine, conversation: Conversation, pair: PeerPair, kept: int
) -> Positions:
    """Positions that a policy keeps, with kvpress's own request to repeat the text."""
    asking = replace(conversation, question_prompt="\n\n{question}")
    request = engine.tokenizer.encode_question_about(asking, REPEAT)
    # KVComposePress repeats the bare text.
    prompts = {KVZIP: {"repeat": request}, KVCOMPOSE: {"repeat": []}}.get(pair.made, {})
    memory = prefill_conversation(
        engine.runtime, conversation, Policy.parse(pair.ours), SizeOptions(kept), prompts
    )
    cache = memory.caches.activate(0)
    layers = [cache.entries(layer.index) for layer in engine.loaded.decoder.spec.layers]
    return [
        [sorted(own.head_positions(head).tolist()) for head in range(len(own.lengths))]
        for own in layers
    ]


def _q_filters(engine: Engine) -> list[list[list[float]]]:
    """Mean directions of queries, by layer and kv head."""
    decoder = engine.loaded.decoder
    name = "q_filters"
    values = calibrate(decoder, engine.tokenizer.encode, frozenset({name}))[name]
    layers = decoder.spec.layers
    shape = len(layers), layers[0].kv_heads, -1
    return torch.tensor(values).view(*shape).tolist()


def _conversation(engine: Engine, options: argparse.Namespace) -> Conversation:
    count, wording = engine.tokenizer.count_tokens, Wording.INSTRUCT
    sources = TaskSources(count, options.corpus, wording=wording)
    return worded_chat(parse_task(TASK).make(options.seed, options.tokens, sources), wording)


def _options() -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--model", choices=sorted(PACKAGED_MODELS), default="smollm2")
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--tokens", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--press", action="append", metavar="NAME", help="only these presses")
    parser.add_argument("--report", type=Path, metavar="FILE", help="print the table of a file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
