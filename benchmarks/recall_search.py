"""Cost of a search: a query step of 8 kv heads of 128 dimensions with two query heads each.

    python benchmarks/recall_search.py FILE... [--tokens 32400] [--sizes 16384,65536,262144]

FILE is a conversation, of which the seed model reads --tokens tokens, repeated if it is shorter;
the recorded keys and queries are cached in results/recall_keys. Keys are real: two heads of 64
dimensions side by side make one of 128, and texts follow each other, rotated to their new
positions. If there are too few, they are repeated with noise of a fifth of their standard
deviation. Queries are those of answers to the last text. Independent random numbers would be
meaningless, because they have no neighbors. On shared machines, use the minimum times.

The cases alternate in one run: `dci` with its defaults, `dci.code`, `flat` with pages of 16, a
numpy product with a partial sort, and usearch's HNSW (M 16), if installed, with the smallest
breadth whose recall@5 is that of `dci`; it returns 12 keys instead of pages. HNSW is built for the
first `--peers` kv heads only, and its times are scaled up. JSONL goes to
results/recall_search.jsonl.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _recorded_keys import load_or_record, parked_entries
from _timing import environment, write
from jaxtyping import Float
from torch import Tensor

from larder.core import Entries, LayerSpec, Variant
from larder.recall import Dci, DciIndex, Flat
from larder_bench.profiling.timing import interleaved, percentiles

HEADS, GROUP, COUNT, STEPS, DENSE, THETA = 8, 2, 12, 8, 2, 1e6
BREADTHS = (16, 32, 64, 128, 256, 512, 1024)
OUT, KEYS = Path("results/recall_search.jsonl"), Path("results/recall_keys")
LAYER = LayerSpec(0, HEADS * GROUP, HEADS, 128, 128**-0.5)


def main() -> None:
    options = _options()
    recorded = [load_or_record(file, options.tokens, COUNT, KEYS) for file in options.files]
    texts = [[vars(layer) for layer in text] for text in recorded]
    for size in map(int, options.sizes.split(",")):
        keys, queries = _stream(texts, size)
        entries = parked_entries(keys)
        row = {"size": size, **environment()} | _measure(entries, queries, options)
        print("\n".join(f"{name}: {value}" for name, value in row.items()), "\n", flush=True)
        write(OUT, [row])


def _measure(entries: Entries, queries: list[Tensor], options: Any) -> dict[str, Any]:
    """Build all indexes, time alternating searches, and compare their results."""
    row: dict[str, Any] = {}
    searches: dict[str, Callable[[Tensor], object]] = {}
    for name, variant in (("dci", Variant.LARDER), ("dci.code", Variant.CODE)):
        index = DciIndex(Dci(variant=variant), LAYER)
        started = time.perf_counter()
        index.add(_first(entries, -64))
        row[f"{name} built, keys/s"] = round(sum(entries.lengths) / (time.perf_counter() - started))
        index.add(_first(entries, -16))  # compiles
        started = time.perf_counter()
        index.add(entries)
        row[f"{name} a page of 16 added, ms"] = round(1e3 * (time.perf_counter() - started), 2)
        held = sum(tensor.nbytes for tensor in index.tensors())
        row[f"{name} bytes per key"] = round(held / sum(entries.lengths), 2)
        row[f"{name} fill"] = round(sum(entries.lengths) / sum(index.counts) / index.page, 3)
        seen = [index.search(query, entries, COUNT)[1].float().mean() for query in queries]
        row[f"{name} keys seen"] = round(float(torch.stack(seen).mean()))
        recalls = [_recall(index, query, entries) for query in queries]
        row[f"{name} recall@5"] = round(sum(recalls) / len(recalls), 3)
        searches[name] = lambda query, index=index: index.find(query, entries, COUNT)
    flat = Flat(page=16).index(LAYER)
    flat.add(entries)
    searches["flat"] = lambda query: flat.find(query, entries, COUNT)
    searches["numpy"] = lambda query: _by_numpy(query, entries)
    scales = dict.fromkeys(searches, 1.0)
    if options.peers:
        peer = _peer(entries, queries, row["dci recall@5"], options.peers, row)
        searches["usearch"], scales["usearch"] = peer, HEADS / options.peers
    cases = {name: lambda go=go: [go(query) for query in queries] for name, go in searches.items()}
    for name, seconds in interleaved(cases, options.rounds).items():
        times = percentiles([1e6 * scales[name] * each / len(queries) for each in seconds])
        times["least"] = 1e6 * scales[name] * min(seconds) / len(queries)
        row[f"{name} us"] = {key: round(value) for key, value in times.items()}
    return row


def _peer(
    entries: Entries, queries: list[Tensor], wanted: float, heads: int, row: dict[str, Any]
) -> Callable[[Tensor], object]:
    """HNSW search over the first heads, with the smallest breadth that reaches the wanted
    recall.
    """
    from usearch.index import Index

    indexes = []
    started = time.perf_counter()
    for head in range(heads):
        index = Index(ndim=LAYER.head_dim, metric="ip", dtype="f32", connectivity=16)
        keys = entries.head_keys(head).numpy()
        index.add(np.arange(len(keys)), keys, threads=torch.get_num_threads())
        indexes.append(index)
    added = sum(entries.lengths[:heads])
    row["usearch built, keys/s"] = round(added / (time.perf_counter() - started))
    row["usearch bytes per key, beside keys"] = round(
        sum(index.serialized_length for index in indexes) / added - 4 * LAYER.head_dim
    )

    def search(query: Tensor) -> list[Any]:
        queries = query.numpy().reshape(HEADS, GROUP, -1)
        return [index.search(queries[head], COUNT) for head, index in enumerate(indexes)]

    for breadth in BREADTHS:
        for index in indexes:
            index.expansion_search = breadth
        found = [_shared(search(query), query, entries) for query in queries]
        row["usearch breadth"] = breadth
        row["usearch recall@5"] = round(sum(found) / len(found), 3)
        if row["usearch recall@5"] >= wanted:
            break
    return search


def _shared(found: list[Any], query: Tensor, entries: Entries) -> float:
    """Share of the best 5 keys among those found by HNSW, over query heads."""
    hits = []
    for head, matches in enumerate(found):
        for own in range(GROUP):
            products = entries.head_keys(head) @ query[head * GROUP + own]
            hits.append(
                len(set(products.topk(5).indices.tolist()) & set(matches.keys[own].tolist()))
            )
    return sum(hits) / len(hits) / 5


def _recall(index: DciIndex, query: Tensor, entries: Entries) -> float:
    """Share of the best 5 keys in the pages found, over query heads."""
    held = index.contents(index.find(query, entries, COUNT).pages).flatten(1).tolist()
    hits = []
    for head in range(HEADS * GROUP):
        products = entries.head_keys(head // GROUP) @ query[head]
        hits.append(len(set(products.topk(5).indices.tolist()) & set(held[head // GROUP])))
    return sum(hits) / len(hits) / 5


def _by_numpy(query: Tensor, entries: Entries) -> list[Any]:
    queries, best = query.numpy().reshape(HEADS, GROUP, -1), []
    for head in range(HEADS):
        products = queries[head] @ entries.head_keys(head).numpy().T
        best.append(np.argpartition(products, -192, axis=1)[:, -192:])
    return best


def _first(entries: Entries, fewer: int) -> Entries:
    lengths = tuple(length + fewer for length in entries.lengths)
    nothing = entries.positions
    return Entries(entries.keys, entries.values, nothing, entries.starts, lengths)


def _stream(texts: list[Any], size: int) -> tuple[Float[Tensor, "K S D"], list[Tensor]]:
    """Keys of `size` tokens, and queries after them."""
    needed, at, parts, number = size + 64, 0, [], 0
    source = torch.Generator().manual_seed(0)
    while at < needed:
        text = texts[(len(texts) - 1 - number) % len(texts)]
        keys = _paired([layer["keys"] for layer in text[DENSE:]])[:, : needed - at]
        if number >= len(texts):
            keys = keys + 0.2 * keys.std(1, keepdim=True) * torch.randn(
                keys.shape, generator=source
            )
        parts.insert(0, keys)
        number, at = number + 1, at + keys.shape[1]
    start, rotated = 0, []
    for part in parts:
        rotated.append(_rotated(part, start))
        start += part.shape[1]
    last = _rotated(
        _paired([layer["queries"] for layer in texts[-1][DENSE:]]), start - parts[-1].shape[1]
    )
    chosen = torch.linspace(0, last.shape[1] - 1, STEPS).long()
    return torch.cat(rotated, 1), [last[:, step].contiguous() for step in chosen]


def _paired(layers: list[Float[Tensor, "K S D"]]) -> Float[Tensor, "L S E"]:
    """Keys of 8 kv heads of 128 dimensions, or their query heads, from heads of 64 in 4 layers."""
    groups = [layer.unflatten(0, (2, -1)) for layer in layers]  # [2, R, S, D]
    sides = [(a, b) for a in range(4) for b in (a, (a + 1) % 4)]
    return torch.cat([torch.cat([groups[a][0], groups[b][1]], -1) for a, b in sides])


def _rotated(rows: Float[Tensor, "K S E"], by: int) -> Float[Tensor, "K S E"]:
    """Rows of two heads side by side, rotated to later positions."""
    angles = by * THETA ** (-torch.arange(32, dtype=torch.float64) / 32)
    cos, sin = angles.cos().float(), angles.sin().float()
    halves = rows.unflatten(-1, (2, 2, 32))
    first, second = halves[..., 0, :], halves[..., 1, :]
    both = torch.stack([first * cos - second * sin, second * cos + first * sin], -2)
    return both.flatten(-3)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--tokens", type=int, default=32400)
    parser.add_argument("--sizes", default="16384,65536,262144")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peers", type=int, default=2, help="kv heads that HNSW is built for")
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
