"""Recall and traffic of the recall indexes on recorded keys of a model.

    python benchmarks/recall_indexes.py FILE [--model smollm2] [--tokens 8192] [--count 256]

FILE is a conversation, which the model reads, repeated if it is shorter than --tokens; questions
are asked behind it. The keys of every --every-th layer but the first 32 and the last 64 tokens go
into each index with its defaults, at once, and it is searched for the tokens of the answers, each
answer in order. Reported is, for --count entries per kv head:

    recall      share of the 32 entries with the largest products, by query head, that was found
    mass        softmax weight over the parked entries that was found, and `of best`, as a share of
                what as many entries with the largest products hold
    entries     that a query head attends to
    moved       entries per kv head that a token needs and the token before did not have
    KiB/token   of keys and values of 16 bits that move for a token, over all layers
    held        bytes of the index per parked entry; keys and values of 16 bits take 4 D
    us          of a search of one layer, the median; only of an idle machine it means something

--only names indexes, or spells them with parameters, as "squeezed(coarse=0)". `rewatch` sees the
queries of a question before those of its answer. `flat` has the best of the query heads in turn,
exactly. Sentences of `sentences` end at tokens with punctuation; the first token of an answer, and
one behind such a token, attends to all entries.
JSONL goes to results/recall_indexes.jsonl.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from _recorded_keys import RecordedLayer, load_or_record, text_ids
from _timing import environment, write
from jaxtyping import Float, Int64
from torch import Tensor

from larder.core import RECALLS, Entries, RecallIndex, RecallPart, build, parse
from larder.policy import VocabularyProvider, select_providers

SINKS, RECENT, BEST = 32, 64, 32
OUT, KEYS = Path("results/recall_indexes.jsonl"), Path("results/recall_keys")
SETTINGS: dict[str, dict[str, Any]] = {"bounds": {"page": 16}}


@dataclass
class SearchRecord:
    """Results of the searches of one index, one number per token and layer."""

    recall: list[float]
    mass: list[float]
    best: list[float]
    entries: list[float]
    moved: list[float]
    micros: list[float]


def main() -> None:
    options = _options()
    recorded = load_or_record(options.file, options.tokens, options.questions, KEYS, options.model)
    layers = recorded[options.every // 2 :: options.every]
    sentences = _sentences(options)
    print(f"{len(layers)} of {len(recorded)} layers, {options.tokens} tokens", flush=True)
    for name in options.only or sorted(RECALLS.builtin_names()):
        row = {
            "index": name,
            **_measure(name, layers, options, len(recorded), sentences),
            **environment(),
        }
        print({key: row[key] for key in list(row)[:9]}, flush=True)
        write(OUT, [row])


def _measure(
    name: str,
    layers: list[RecordedLayer],
    options: argparse.Namespace,
    total: int,
    sentences: Float[Tensor, " S"],
) -> dict[str, Any]:
    (call,) = parse(name)
    part = build(RECALLS.load(call.name), SETTINGS.get(name, {}) | call.parameters)
    part = replace(part, tokens=options.count // part.page * part.page, dense=0)
    indexes = [_built(part, each, sentences) for each in layers]
    part.measure([index for index, _ in indexes])
    sums = SearchRecord([], [], [], [], [], [])
    for (index, entries), own in zip(indexes, layers, strict=True):
        _search(part, index, entries, own, sums)
    held = sum(t.nbytes for index, _ in indexes for t in index.tensors())
    width, heads = layers[0].layer.head_dim, layers[0].layer.kv_heads
    return {
        "recall": round(fmean(sums.recall), 3),
        "mass": round(fmean(sums.mass), 3),
        "of best": round(fmean(sums.mass) / fmean(sums.best), 3),
        "entries": round(fmean(sums.entries), 1),
        "moved": round(fmean(sums.moved), 1),
        "KiB/token": round(fmean(sums.moved) * heads * total * 4 * width / 1024, 1),
        "held": round(held / sum(sum(entries.lengths) for _, entries in indexes), 1),
        "us": round(median(sums.micros)),
    }


def _sentences(options: argparse.Namespace) -> Float[Tensor, " S"]:
    """Number of the sentence of each token of the text, below 0 where it ends one."""
    ids, tokenizer = text_ids(options.file, options.tokens, options.model)
    provider = select_providers(["sentence_ends"], VocabularyProvider)["sentence_ends"]
    known = {token: provider.contains(tokenizer.decode([token]), False) for token in set(ids)}
    numbers, number = list[float](), 1
    for token in ids:
        numbers.append(-number if known[token] else number)
        number += known[token]
    return torch.tensor(numbers)


def _built(
    part: RecallPart, own: RecordedLayer, sentences: Float[Tensor, " S"]
) -> tuple[RecallIndex, Entries]:
    keys = own.keys[:, SINKS : own.keys.shape[1] - RECENT].contiguous()
    heads, length, width = keys.shape
    positions = torch.arange(SINKS, SINKS + length, dtype=torch.int32).repeat(heads)
    starts = tuple(head * length for head in range(heads))
    flat = keys.view(-1, width)
    columns = {"sentence": sentences[SINKS : SINKS + length].repeat(heads)}
    entries = Entries(flat, flat, positions, starts, (length,) * heads, columns)
    index = part.index(own.layer)
    observed = own.latest[:, -part.observed :] if part.observed else None
    if part.observes_unrotated and observed is not None:
        from larder.ops import rotate

        last = own.keys.shape[1]
        indices = torch.arange(last - observed.shape[1], last)
        observed = rotate(observed, -indices, torch.tensor(own.layer.radians))
    index.add(entries, None if observed is None else observed.contiguous())
    return index, entries


def _search(
    part: RecallPart, index: RecallIndex, entries: Entries, own: RecordedLayer, sums: SearchRecord
) -> None:
    """Searches for the tokens of all answers; each answer begins with nothing fetched."""
    heads, group = own.layer.kv_heads, own.layer.group
    keys = torch.stack([entries.head_keys(head) for head in range(heads)])
    behind, before = own.keys.shape[1] + own.distance, list[set[int]]()
    questions = (each[:, -max(part.observed, 1) :] for each in own.openings)
    for step, query in enumerate(own.queries.unbind(1)):
        is_first = step == 0 or int(behind[step]) != int(behind[step - 1]) + 1
        if part.follows:
            position = torch.full((heads,), int(behind[step]), dtype=torch.int32)
            rows = keys[:, -1]
            lexicon = {"sentence": torch.ones(heads)}  # the answers have no punctuation inside
            stays = Entries(rows, rows, position, tuple(range(heads)), (1,) * heads, lexicon)
            index.observe_step(query, stays, next(questions) if is_first else None)
        started = time.perf_counter()
        result = index.find(query.contiguous(), entries, part.pages)
        sums.micros.append(1e6 * (time.perf_counter() - started))
        room = part.pages * part.sets(own.layer) // len(result.pages)  # as a cache has slots
        found = index.contents(result.pages[:, :room].contiguous()).flatten(1)
        if result.attends_all:
            found = torch.arange(keys.shape[1]).expand(heads, -1)
        logits = query.view(heads, group, -1) @ keys.mT * own.layer.scaling
        for mass, recall, best, count in _qualities(logits.flatten(0, 1), found):
            sums.mass.append(mass)
            sums.recall.append(recall)
            sums.best.append(best)
            sums.entries.append(count)
        now = _by_kv_head(found, heads)
        if not is_first:
            fresh = [len(new - old) for new, old in zip(now, before, strict=True)]
            sums.moved.append(fmean(fresh))
        before = now


def _qualities(
    logits: Float[Tensor, "H M"], found: Int64[Tensor, "N E"]
) -> Iterator[tuple[float, float, float, float]]:
    """Mass, recall, mass of as many of the largest, and entries, for each query head."""
    weights = logits.softmax(1)
    sets = found.repeat_interleave(len(logits) // len(found), 0)
    for row, entries in zip(weights, sets, strict=True):
        mark = torch.zeros_like(row, dtype=torch.bool)
        mark[entries[entries >= 0]] = True
        count = int(mark.sum())
        ranked = row.sort(descending=True)
        hits = mark[ranked.indices[:BEST]].float().mean()
        yield float(row[mark].sum()), float(hits), float(ranked.values[:count].sum()), count


def _by_kv_head(found: Int64[Tensor, "N E"], heads: int) -> list[set[int]]:
    rows = found.view(heads, -1)
    return [set(row[row >= 0].tolist()) for row in rows]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--count", type=int, default=256)
    parser.add_argument("--questions", type=int, default=6)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=[])
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
