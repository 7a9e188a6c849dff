"""Agreement of the entries that presses of kvpress keep with those that Larder keeps.

    python benchmarks/peers/kept_entries.py --peer-python PATH --corpus FOLDER
        [--model smollm2] [--tokens 1200] [--seed 0] [--texts 1] [--informed] [--press NAME ...]
        [--out FILE] [--report FILE]

Both sides read the same token ids of one text in float32 and keep a quarter of them. For each press
of `_equal_pairs.py` a row has the Jaccard index of the positions that both keep, |A and B| over
|A or B|, in each layer and kv head: its mean and its least value. `--help` of side_by_side.py
explains how to install kvpress. `--report` prints the table of measured rows and runs nothing;
rows of several texts become one line.

`--informed` runs the presses that need more than a text, on `--seed` and `--texts - 1` seeds after
it, with what Larder's policy has: a question, gates (`larder train fast_kvzip` makes them), classes
of heads, curves. DuoAttentionPress keeps half of the heads whole, ThinKPress half of the channels.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from _equal_pairs import (
    DMS,
    DUO,
    EQUAL_PAIRS,
    FINCH,
    KVCOMPOSE,
    KVGRAD,
    KVZIP,
    LAZY,
    STREAMING,
    THINK,
    informed_pairs,
    pyramid_pair,
)
from _pairs import KVPRESS, PeerPair

from larder.core import Conversation
from larder.engine import Engine
from larder.models import PACKAGED_MODELS, learned_file
from larder.policy import CURVE_POINTS, greedy_shares
from larder.session import Policy, SizeOptions, prefill_conversation
from larder_bench.datasets.prompt_templates import worded_chat
from larder_bench.datasets.sources import TaskSources
from larder_bench.datasets.task_prompts import Wording
from larder_bench.results.rows import Row, append_rows, read_rows
from larder_bench.tasks.base import parse_task

TASK = 'needles(kind="magic", needles=4, hay="prose")'
OUT = Path("results/kept_entries.jsonl")
WORKER = Path(__file__).with_name("kept_worker.py")
QUESTION = "What are all the special magic numbers mentioned in the provided text?"
BOOKS, BOOK_CHARACTERS = 50, 3000  # texts by which kvpress scores heads on the fly
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
    """Markdown table of rows: of the texts of one press, the mean and the least."""
    yield "| press | Larder | mean | least |"
    yield "|---|---|---|---|"
    texts: dict[str, list[Row]] = {}
    for row in rows:
        texts.setdefault(row["press"], []).append(row)
    for press, own in texts.items():
        yield f"| `{press}` | `{own[0]['policy']}` | {' | '.join(_figures(own))} |"


def agreement(theirs: Positions, ours: Positions) -> list[float]:
    """Jaccard index of the kept positions of each head, layer by layer."""
    return [
        _jaccard(set(one), set(other))
        for layer, other_layer in zip(theirs, ours, strict=True)
        for one, other in zip(layer, other_layer, strict=True)
    ]


def _jaccard(one: set[int], other: set[int]) -> float:
    return len(one & other) / len(one | other) if one | other else 1.0


def _figures(rows: Sequence[Row]) -> list[str]:
    refused = next((row["refused"] for row in rows if "refused" in row), None)
    if refused is not None:
        return [refused, ""]
    mean = sum(row["mean"] for row in rows) / len(rows)
    return [_share(mean), _share(min(row["least"] for row in rows))]


def _share(number: float) -> str:
    return "1" if number >= EXACT else f"{number:.3f}".lstrip("0")


def _compare(options: argparse.Namespace) -> Iterator[Row]:
    engine = Engine.load(options.model, policy="full", dtype="float32")
    for seed in range(options.seed, options.seed + options.texts):
        yield from _compare_text(options, Text(engine, options, seed))


def _compare_text(options: argparse.Namespace, text: Text) -> Iterator[Row]:
    pairs = informed_pairs(len(text.ids)) if options.informed else EQUAL_PAIRS
    pairs = [*pairs] if options.informed else [*pairs, pyramid_pair(text.kept)]
    pairs = _chosen([pair for pair in pairs if pair.package == KVPRESS], options.press)
    made = [pair.made for pair in pairs]
    job = {
        "model": str(PACKAGED_MODELS[options.model].folder(options.model)),
        "dtype": "float32",
        "threads": 1,
        "seed": text.seed,
        "ids": text.ids,
        "kept": text.kept,
        "presses": made,
        "question": text.question,
    }
    for press, (name, give) in GIFTS.items():
        if any(own.startswith(press) for own in made):
            job[name] = give(text)
    command = [options.peer_python, str(WORKER)]
    done = subprocess.run(
        command, input=json.dumps(job), stdout=subprocess.PIPE, text=True, check=True
    )
    results = json.loads(done.stdout[done.stdout.index("[{") :])
    for pair, result in zip(pairs, results, strict=True):
        yield _row(options, pair, text, result)


def _chosen(pairs: Sequence[PeerPair], presses: Sequence[str] | None) -> list[PeerPair]:
    """Pairs of some presses, of all by default.

    Raises:
        SystemExit: a press that no pair has.
    """
    known = [pair.made for pair in pairs]
    unknown = [press for press in presses or () if press not in known]
    if unknown:
        sys.exit(f"no pair has the press {unknown[0]!r}; --press takes one of: {', '.join(known)}")
    return [pair for pair in pairs if presses is None or pair.made in presses]


@dataclass(frozen=True)
class Text:
    """One text that both sides read."""

    engine: Engine
    options: argparse.Namespace
    seed: int

    @cached_property
    def conversation(self) -> Conversation:
        wording = Wording.INSTRUCT
        task = parse_task(TASK).make(self.seed, self.options.tokens, self.sources)
        return worded_chat(task, wording)

    @cached_property
    def sources(self) -> TaskSources:
        count = self.engine.tokenizer.count_tokens
        return TaskSources(count, self.options.corpus, wording=Wording.INSTRUCT)

    @cached_property
    def ids(self) -> list[int]:
        return list(self.engine.tokenizer.encode_conversation(self.conversation).ids)

    @property
    def kept(self) -> int:
        """Entries that every kv head keeps on average."""
        return len(self.ids) // 4

    @cached_property
    def question(self) -> list[int]:
        asking = replace(self.conversation, question_prompt="\n\n{question}")
        return list(self.engine.tokenizer.encode_question_about(asking, QUESTION))

    def calibration(self, name: str) -> tuple[float, ...]:
        return self.engine.runtime.calibrate(frozenset({name}))[name]


def _by_head(numbers: Any, text: Text) -> list[Any]:
    """Numbers by layer and kv head."""
    layers = text.engine.loaded.decoder.spec.layers
    return torch.tensor(numbers).view(len(layers), layers[0].kv_heads, -1).tolist()


def _q_filters(text: Text) -> list[list[list[float]]]:
    """Mean directions of queries, by layer and kv head."""
    return _by_head(text.calibration("q_filters"), text)


def _packaged_weights(text: Text) -> str:
    folder = Path(str(files("larder.models"))) / "learned"
    return str(folder / f"kvzap.{text.options.model}.safetensors")


def _trained_gates(text: Text) -> str:
    return str(learned_file(text.engine.loaded.decoder.spec.fingerprint, "fast_kvzip"))


def _streaming_error(text: Text) -> dict[str, Any]:
    sinks, recent = STREAMING[DUO]
    scores = torch.tensor(_by_head(text.calibration("streaming_error"), text)).squeeze(-1)
    return {"sinks": sinks, "recent": recent, "scores": scores.tolist()}


def _prose(text: Text) -> list[str]:
    """Texts of the corpus that are long enough to score heads by, cut to the same length."""
    long = [prose[:BOOK_CHARACTERS] for prose in text.sources.prose if len(prose) > BOOK_CHARACTERS]
    return long[:BOOKS]


def _curve(text: Text) -> list[list[float]]:
    """Share that each kv head loses under the text's budget: the sinks, the newest entry and, of
    the rest, what the greedy choice gives are kept.
    """
    length, least, curves = len(text.ids), 5, text.calibration("utility")
    starts = range(0, len(curves), CURVE_POINTS)
    heads = [curves[start : start + CURVE_POINTS] for start in starts]
    free = length - least
    shares = greedy_shares(heads, len(heads) * (text.kept - least) / free)
    lost = [1 - (least + share * free) / length for share in shares]
    return torch.tensor(_by_head(lost, text)).squeeze(-1).tolist()


# What a press is given, under its name in the job.
GIFTS: dict[str, tuple[str, Callable[[Text], Any]]] = {
    "QFilterPress": ("q_filters", _q_filters),
    "KVzapPress": ("kvzap", _packaged_weights),
    "FastKVzipPress": ("fast_kvzip", _trained_gates),
    DUO.partition("(")[0]: ("streaming_error", _streaming_error),
    "DuoAttentionPress(head_compression_ratio=0.5, on": ("books", _prose),
    "LUKVPress": ("curve", _curve),
}


def _row(options: argparse.Namespace, pair: PeerPair, text: Text, result: dict[str, Any]) -> Row:
    row: Row = {
        "study": "kept_entries",
        "model": options.model,
        "task": TASK,
        "tokens": options.tokens,
        "seed": text.seed,
        "press": pair.made,
        "policy": pair.ours,
        "kvpress": result["kvpress"],
        "dtype": "float32",
        "context_tokens": len(text.ids),
    }
    if "refused" in result:
        return row | {"refused": result["refused"]}
    kept = budget_tokens(pair.made, text, result["kept"])
    shares = agreement(result["kept"], larder_positions(text, pair, kept))
    row |= {
        "kept_tokens": kept,
        "their_share": round(_mean_kept(result["kept"]) / len(text.ids), 4),
    }
    return row | {"mean": round(sum(shares) / len(shares), 4), "least": round(min(shares), 4)}


def budget_tokens(made: str, text: Text, theirs: Positions) -> int:
    """Entries that every kv head keeps on average: what the press comes to; all where a threshold
    of scores decides.

    Args:
        theirs: what the press kept.
    """
    if made in STREAMING:
        return (len(text.ids) + sum(STREAMING[made])) // 2
    if made.startswith(LAZY):
        return math.ceil(_mean_kept(theirs))
    return len(text.ids) if made == THINK or made.startswith(DMS) else text.kept


def _mean_kept(kept: Positions) -> float:
    """Entries of a kv head, on average."""
    return fmean(len(head) for layer in kept for head in layer)


def larder_positions(text: Text, pair: PeerPair, kept: int) -> Positions:
    """Positions that a policy keeps, with kvpress's own request to repeat the text; of ThinK, the
    channels of the first key.

    Args:
        kept: entries of every kv head, on average.
    """
    engine, asking = text.engine, replace(text.conversation, question_prompt="\n\n{question}")
    request = engine.tokenizer.encode_question_about(asking, REPEAT)
    # KVComposePress repeats the bare text.
    repeats = {KVZIP: {"repeat": request}, KVGRAD: {"repeat": request}, KVCOMPOSE: {"repeat": []}}
    prompts = (repeats | {FINCH: {"question": text.question}}).get(pair.made, {})
    memory = prefill_conversation(
        engine.runtime, text.conversation, Policy.parse(pair.ours), SizeOptions(kept), prompts
    )
    cache = memory.caches.activate(0)
    layers = [cache.entries(layer.index) for layer in engine.loaded.decoder.spec.layers]
    if pair.made == THINK:
        return [
            [
                own.head_keys(head)[0].nonzero().flatten().tolist()
                for head in range(len(own.lengths))
            ]
            for own in layers
        ]
    return [
        [sorted(own.head_positions(head).tolist()) for head in range(len(own.lengths))]
        for own in layers
    ]


def _options() -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--model", choices=sorted(PACKAGED_MODELS), default="smollm2")
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--tokens", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--texts", type=int, default=1)
    parser.add_argument("--informed", action="store_true", help="presses that need more than text")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument(
        "--press", action="append", metavar="NAME", help="only this press, written as in the table"
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="print the table of a file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
