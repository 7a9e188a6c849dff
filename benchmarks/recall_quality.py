"""How much of what real queries want every part of recall finds, with a budget of 256 entries.

    python benchmarks/recall_quality.py FILE... [--tokens 4096,16320,32400] [--parts dci,flat]

Each file is read by the seed model to so many tokens, over and over if it is shorter, and asked
some of its questions; keys of the text and queries of the answers are kept in results/recall_keys.
The first and last 32 entries are never parked; an index over the others may find 192: 12 pages of
16. A line per part: recall@1, @3 and @5 of the keys with the largest products, per query head; how
many pages are those that an exact search over the same pages finds; the share of attention that the
found and the unparked have, and the most that 192 single entries could have; bytes beside each key;
how full pages are; seconds to take in a layer. Layers 0 and 1 are left out, as they park nothing.
`dci.code` is a variant of `dci`. JSONL goes to results/recall_quality.jsonl.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from _real_keys import Heard, kept
from _recalled import RANKS, Recalled, listen, parked
from _timing import environment, write

from larder.core.errors import LarderError
from larder.core.recall import RECALLS, Recall
from larder.core.types import Variant

FETCHED, DENSE, ASKED = 192, 2, 12
OUT, KEYS = Path("results/recall_quality.jsonl"), Path("results/recall_keys")
SHOWN = (
    "recall@1",
    "recall@3",
    "recall@5",
    "pages",
    "mass",
    "possible",
    "bytes",
    "fill",
    "seconds",
)


def main() -> None:
    options = _options()
    names = options.parts.split(",") if options.parts else _names()
    for tokens in map(int, options.tokens.split(",")):
        texts = [kept(path, tokens, ASKED, KEYS) for path in options.files]
        print(f"\n{tokens} tokens, {', '.join(path.stem for path in options.files)}\n")
        print(f"| part | {' | '.join(SHOWN)} |\n|---|{'---|' * len(SHOWN)}")
        for name in names:
            found = _measured(part(name), texts, options.every)
            cells = [f"{found[key]:.3f}" if key in found else "" for key in SHOWN]
            print(f"| {name} | {' | '.join(cells)} | {found.get('refused', '')}", flush=True)
            about = {"part": name, "tokens": tokens, "files": len(texts), **environment()}
            write(OUT, [about | found])


def part(name: str) -> Recall:
    """`dci`, or with a variant `dci.code`."""
    base, _, variant = name.partition(".")
    return RECALLS.load(base)(**({"variant": Variant(variant)} if variant else {}))


def _names() -> list[str]:
    names = [name for name in RECALLS.names() if name not in ("flat", "dci")]
    return ["flat", "dci", "dci.code", "dci.paper", *names]


def _measured(wanted: Recall, texts: list[list[Heard]], every: int) -> dict[str, Any]:
    recalled = Recalled(dict.fromkeys(RANKS, 0.0))
    held = keys = pages = seconds = 0.0
    layers = 0
    for text in texts:
        for heard in text[DENSE:]:
            entries, index = parked(heard.keys), wanted.index(heard.layer)
            latest = heard.latest[:, -wanted.observed :] if wanted.observed else None
            started = time.process_time()
            try:
                index.add(entries, latest)
            except LarderError as error:
                return {"refused": str(error)}
            seconds += time.process_time() - started
            held += sum(tensor.nbytes for tensor in index.tensors())
            keys, layers = keys + sum(entries.lengths), layers + 1
            pages += sum(index.counts) * index.page
            asked = heard.queries[:, ::every]
            count = max(FETCHED // index.page, 1)
            listen(index, heard.layer, heard.keys, asked, count, recalled)
    spent = {"bytes": held / keys, "fill": keys / pages, "seconds": seconds / layers}
    return recalled.means() | spent


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--tokens", default="4096,16320,32400")
    parser.add_argument("--parts", default="")
    parser.add_argument("--every", type=int, default=8, help="ask every so many of the queries")
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
