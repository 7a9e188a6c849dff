"""Passkeys recited from a cache, on documents that nothing was trained on.

Ten passkeys are hidden in each document. `heads` compares ways to choose the kv heads
that keep everything while the others keep sinks and recent tokens, at a share of full heads, with
all questions asked behind the cache. `entries` compares scores at a number of entries per kv head,
with the question in the prompt or behind the cache. A passkey counts if each of its tokens is the
most likely one, so that greedy decoding would say it.

    larder train duo_attention --model smollm2 --dtype bfloat16 --corpus FOLDER --held-out SOURCE
    python benchmarks/passkeys.py heads --corpus FOLDER --held-out SOURCE
    python benchmarks/passkeys.py entries --corpus FOLDER --held-out SOURCE --in-prompt
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean

import torch
from learned_scores import SHUFFLED, shuffled_weights, texts
from torch import Tensor

from larder.core import Calibration, Mode
from larder.engine import Engine
from larder.evaluation import Bootstrap
from larder.models import (
    BatchSegment,
    HiddenNeedle,
    NeedlePassage,
    NeedleSettings,
    SampleText,
    load_learned,
)
from larder.policy import PROVIDERS
from larder.prefill import PeakMemoryMeter
from larder.session import ModelRuntime, Policy, build_caches, common_prompts
from larder.training import answers_right, read_corpus

SINKS, RECENT = 16, 64  # as the gates were trained
GATES = "duo_attention"
HEADS = {
    "gates": 'retrieval_heads(share={share}, trial="gates")',
    "shuffled gates": 'retrieval_heads(share={share}, trial="gates")',
    "one at a time": 'retrieval_heads(share={share}, trial="passkeys")',
    "razor_attention": "retrieval_heads(share={share})",
    "copy": 'retrieval_heads(share={share}, trial="copy")',
}
SCORES = {
    "lookahead_kv": "whole() > lookahead_kv() > uniform(tokens={tokens})",
    f"lookahead_kv{SHUFFLED}": "whole() > lookahead_kv() > uniform(tokens={tokens})",
    "snapkv": "whole() > snapkv() > uniform(tokens={tokens})",
    "streaming_llm": "whole() > protect(sinks=4, recent=0) > sinks_and_window() > "
    "uniform(tokens={tokens})",
    "random": "whole() > random() > uniform(tokens={tokens})",
}
FULL = "whole() > unlimited()"


def head_policies(share: float, context: int) -> dict[str, str]:
    """Policies whose chosen heads hold the whole text, as `share` of all, the full cache, and
    others that hold as many entries.
    """
    tokens = math.ceil(share * context + (1 - share) * (SINKS + RECENT))
    begin = f"whole() > protect(sinks={SINKS}, recent={RECENT}) > random() > "
    own = {name: begin + text.format(share=share) for name, text in HEADS.items()}
    sized = {name: text.replace("share=", f"tokens={tokens}, share=") for name, text in own.items()}
    evicted = {name: SCORES[name].format(tokens=tokens) for name in ("random", "streaming_llm")}
    return {"full": FULL, **sized, **evicted}


def score_policies(tokens: int) -> dict[str, str]:
    """Policies of equal budget, and the full cache."""
    return {"full": FULL, **{name: text.format(tokens=tokens) for name, text in SCORES.items()}}


def shuffled(runtime: ModelRuntime, seed: int) -> ModelRuntime:
    """Runtime whose trained gates stand at other heads."""

    def calibrate(names: frozenset[str]) -> Calibration:
        found = dict(runtime.calibrate(names))
        if GATES in found:
            found[GATES] = tuple(Random(seed).sample(found[GATES], len(found[GATES])))
        return found

    return replace(runtime, calibrate=calibrate)


def put_soft_tokens(runtime: ModelRuntime, name: str, seed: int) -> None:
    """Use the trained weights of `lookahead_kv` as they are, or shuffled where its name says so."""
    if name.removesuffix(SHUFFLED) not in PROVIDERS.names():
        return
    decoder, provider = runtime.decoder, PROVIDERS.load(name.removesuffix(SHUFFLED))()
    learned = load_learned(decoder.spec, name.removesuffix(SHUFFLED), provider)
    if name.endswith(SHUFFLED):
        learned = shuffled_weights(learned, decoder.spec.width, seed)
    decoder.soft_prompts.put(name.removesuffix(SHUFFLED), learned.layers)


def forced(runtime: ModelRuntime, sentence: str, read: Sequence[int], ids: Sequence[int]) -> Tensor:
    """Logits behind every token of `ids`, forced behind a cache of what was read before."""
    prompts = common_prompts(runtime.tokenizer)
    policy, meter = Policy.parse(sentence), PeakMemoryMeter()
    cache = build_caches(runtime, policy, tuple(read), [prompts], meter).activate(0)
    segment = BatchSegment(cache, tuple(ids))
    return runtime.decoder.forward_logits([segment], Mode.SCRATCH, range(len(ids)))


def measured(
    runtime: ModelRuntime, sentence: str, passage: NeedlePassage, cut: int, asked: Sequence[int]
) -> tuple[list[bool], float]:
    """Mask of the passkeys that are predicted, and the mean loss of their tokens.

    Args:
        cut: tokens that are read into the cache.
        asked: indices of tokens that predict passkeys, at or behind the last one read.
    """
    first = min(cut, asked[0])
    logits = forced(runtime, sentence, passage.ids[:first], passage.ids[first : asked[-1] + 1])
    rows = logits[[position - first for position in asked]]
    targets = torch.tensor([passage.ids[position + 1] for position in asked], device=rows.device)
    right = (rows.argmax(-1) == targets).tolist()
    loss = float(torch.nn.functional.cross_entropy(rows, targets))
    return answers_right(asked, right), loss


def questions(
    passage: NeedlePassage, in_prompt: bool, count: int, seed: int
) -> list[tuple[NeedlePassage, int, tuple[int, ...]]]:
    """Texts that are read and asked: all questions behind the cache, or one in each prompt."""
    if not in_prompt:
        return [(passage, passage.context, passage.predicting)]

    def asked(needle: HiddenNeedle) -> tuple[NeedlePassage, int, tuple[int, ...]]:
        answer = needle.predicting
        ids = (*passage.ids[: passage.context], *passage.ids[needle.question : answer[-1] + 2])
        shift = passage.context - needle.question
        rows = tuple(position + shift for position in answer)
        return replace(passage, ids=ids), rows[0], rows

    return [asked(needle) for needle in Random(seed).sample(passage.needles, count)]


def print_table(found: Mapping[str, Sequence[tuple[list[bool], float]]]) -> None:
    drawing = Bootstrap()
    whole = fmean(hit for hits, _ in found["full"] for hit in hits)
    for name, own in found.items():
        recall, loss = fmean(hit for hits, _ in own for hit in hits), fmean(row[1] for row in own)
        line = f"  {name:16} recall {recall:.3f}  of full {recall / max(whole, 1e-9):.3f}"
        line += f"  nats {loss:.3f}"
        for other in ("random", "streaming_llm", "snapkv", "shuffled gates"):
            if other in found and other != name:
                less = drawing.difference([[o[1]] for o in own], [[o[1]] for o in found[other]])
                line += f"  less {other} {less.mean:+.3f} [{less.low:+.3f} {less.high:+.3f}]"
        print(line)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("compared", choices=["heads", "entries"])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--held-out", default=None)
    parser.add_argument("--share", type=float, default=0.5, help="of full heads")
    parser.add_argument("--entries", type=int, default=64, help="per kv head")
    parser.add_argument("--in-prompt", action="store_true", help="read the question, too")
    parser.add_argument("--asked", type=int, default=2, help="questions of a document, in prompts")
    parser.add_argument("--policies", default="", help="names, with commas; all by default")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--words", type=int, default=4, help="of a passkey")
    parser.add_argument("--documents", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    engine = Engine.load(args.model, policy="full", dtype=args.dtype)
    corpus, runtime = read_corpus(args.corpus, args.held_out), engine.runtime
    sample = SampleText(engine.tokenizer.encode)
    settings = NeedleSettings(args.tokens, 10, args.words)
    found = dict[str, list[tuple[list[bool], float]]]()
    rows = texts(engine, corpus, args.tokens, args.documents, args.seed)
    for number, (document, ids) in enumerate(rows):
        passage = settings.hidden_in(ids[: args.tokens], sample, args.seed + number)
        policies = (
            head_policies(args.share, passage.context)
            if args.compared == "heads"
            else score_policies(args.entries)
        )
        for name in args.policies.split(",") if args.policies else policies:
            used = shuffled(runtime, args.seed) if name == "shuffled gates" else runtime
            put_soft_tokens(used, name, args.seed)
            own = found.setdefault(name, [])
            for text, cut, asked in questions(passage, args.in_prompt, args.asked, number):
                own.append(measured(used, policies[name], text, cut, asked))
        last = {name: fmean(own[-1][0]) for name, own in found.items()}
        print(json.dumps({"document": document.name, "recall": last}), flush=True)
    print_table(found)
    print(f"\n{args}")


if __name__ == "__main__":
    main()
