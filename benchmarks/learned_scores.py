"""Learned scores against KVzip, StreamingLLM and a random choice, on documents not trained on.

Every document is read under every policy at the same share of entries. Then two texts are forced
behind the cache, and compared with the full cache: the document's own continuation, and a copy of
a part of it after a request to repeat it and a cue. Weights are those of `larder train`; a policy
`NAME_shuffled` is NAME with the inputs of its gate in another order.

    larder train kvzap --model smollm2 --corpus FOLDER --held-out SOURCE
    python benchmarks/learned_scores.py --model smollm2 --corpus FOLDER --held-out SOURCE

One document of 768 tokens takes about 4 seconds of one core under each policy, KVzip twice that.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from random import Random
from statistics import fmean

import torch
from torch import Tensor

from larder.core import Mode
from larder.engine import Engine
from larder.evaluation import Bootstrap
from larder.models import BatchSegment, LayerTensors, LearnedWeights, load_learned
from larder.policy import GateProvider, column_providers
from larder.prefill import PeakMemoryMeter
from larder.session import Policy, build_caches, common_prompts
from larder.training import Corpus, CorpusSplit, Document, read_corpus
from larder_bench.scoring.kl_divergence import kl_divergence

FOLLOWING = 64  # tokens of the continuation
CUE, RECITED = 16, 48  # tokens of the copy that are given, and that are compared
SHUFFLED = "_shuffled"  # end of the name of a policy whose weights are shuffled
BLOCKS = "blockwise(tokens=128) > protect(sinks=4, recent=32)"  # of Locret, scaled to short texts
POLICIES = {
    "full": "whole() > unlimited()",
    "kvzip": "whole() > reconstruct() > global()",
    "kvzap": "whole() > kvzap() > global()",
    "kvzap_mlp": 'whole() > kvzap(form="mlp") > global()',
    "fast_kvzip": "whole() > fast_kvzip() > global()",
    "locret": "whole() > locret() > uniform()",
    "locret_blockwise": f"{BLOCKS} > locret() > uniform()",
    "snapkv_blockwise": f"{BLOCKS} > snapkv() > uniform()",
    "trim": "whole() > trim() > uniform()",
    "global_retention": "whole() > global_retention() > global()",
    "global_retention_per_head": "whole() > global_retention() > uniform()",
    "attention_gate": "whole() > attention_gate() > global()",
    "attention_gate_threshold": "whole() > attention_gate() > fixed_threshold(kept=1.0)",
    "q_filters": "whole() > q_filters() > uniform()",
    "keydiff": "whole() > keydiff() > uniform()",
    "snapkv": "whole() > snapkv() > uniform()",
    "h2o": "whole() > protect(sinks=0, recent=0.5) > column_mass() > uniform()",
    "less": "whole() > protect(sinks=0, recent=0.5) > column_mass() > uniform() > less()",
    "lococo": "whole() > protect(sinks=0, recent=0.5) > column_mass() > uniform() > lococo()",
    "expected": "whole() > expected() > ada()",
    "streaming_llm": "whole() > protect(sinks=4, recent=0) > sinks_and_window() > uniform()",
    "random": "whole() > random() > global()",
}
COMPARED = [name for name in POLICIES if name != "full"] + [f"kvzap{SHUFFLED}"]


def left_out(corpus: Corpus, seed: int) -> Iterator[Document]:
    """Documents that nothing was trained on, sources in turn."""
    splits, own = corpus.splits(), dict[str, list[Document]]()
    for document in corpus.documents:
        if splits[document.name] is not CorpusSplit.TRAIN:
            own.setdefault(document.source, []).append(document)
    for documents in own.values():
        Random(seed).shuffle(documents)
    for row in zip_longest(*own.values()):
        yield from (document for document in row if document is not None)


def texts(
    engine: Engine, corpus: Corpus, tokens: int, count: int, seed: int
) -> list[tuple[Document, tuple[int, ...]]]:
    """Token ids of documents that are long enough."""
    found = list[tuple[Document, tuple[int, ...]]]()
    for document in left_out(corpus, seed):
        if len(found) == count:
            break
        result = document.conversation
        text = "".join((result.opening, *(f"{m.content}\n" for m in result.messages)))
        ids = engine.tokenizer.encode(text)
        if len(ids) >= tokens + FOLLOWING:
            found.append((document, ids[: tokens + FOLLOWING]))
    return found


def forced_logits(
    engine: Engine, sentence: str, share: float, ids: tuple[int, ...], seed: int
) -> dict[str, Tensor]:
    """Logits of the continuation and of the copy, behind a cache of the text before."""
    context, following = ids[:-FOLLOWING], ids[-FOLLOWING:]
    policy, runtime = Policy.parse(sentence), engine.runtime
    if policy.budget.tokens is None and "unlimited" not in sentence:
        policy = policy.with_sizes(round(share * len(context)), None)
    prompts = common_prompts(engine.tokenizer)
    cache = build_caches(runtime, policy, context, [prompts], PeakMemoryMeter()).activate(0)
    start = Random(seed).randrange(len(context) - CUE - RECITED)
    copy = (*prompts["repeat"], *context[start : start + CUE + RECITED])
    sections = (len(following), len(copy))
    wanted = [*range(FOLLOWING - 1), *range(sum(sections) - RECITED - 1, sum(sections) - 1)]
    segment = BatchSegment(cache, (*following, *copy), sections)
    logits = runtime.decoder.forward_logits([segment], Mode.SCRATCH, wanted)
    return {"continuation": logits[: FOLLOWING - 1], "recite": logits[FOLLOWING - 1 :]}


def shuffled_weights(learned: LearnedWeights, width: int, seed: int) -> LearnedWeights:
    """Weights with the inputs of every layer's gate, of `width` numbers, in a random order."""
    source = torch.Generator().manual_seed(seed)

    def shuffled(tensors: LayerTensors) -> LayerTensors:
        order = torch.randperm(width, generator=source)
        return {k: each[:, order] if is_map(each) else each for k, each in tensors.items()}

    def is_map(tensor: Tensor) -> bool:
        return tensor.dim() == 2 and tensor.shape[1] == width

    return replace(learned, layers=tuple(shuffled(own) for own in learned.layers))


def sentence_of(name: str) -> str:
    return POLICIES[name.removesuffix(SHUFFLED)]


def put_weights(engine: Engine, name: str, seed: int) -> None:
    """Use the weights of a policy's gates as they are, or shuffled where its name says so."""
    decoder = engine.runtime.decoder
    columns = Policy.parse(sentence_of(name)).planner.ledger.columns
    for column, gate in column_providers(columns, GateProvider).items():
        learned = load_learned(decoder.spec, column, gate)
        if name.endswith(SHUFFLED):
            learned = shuffled_weights(learned, decoder.spec.width, seed)
        decoder.gates.put(column, gate, learned)


def print_table(found: Mapping[str, Mapping[str, list[float]]], shown: str) -> None:
    drawing = Bootstrap()
    for measure in ("continuation", "recite"):
        print(f"\n{measure}: mean KL to the full cache in nats, and paired differences")
        for name, scores in found.items():
            own = scores[measure]
            line = f"  {name:16} {fmean(own):.4f}  n={len(own)}"
            for other in ("random", "streaming_llm", "kvzip", "snapkv_blockwise"):
                if other in found and other != name:
                    less = drawing.difference(
                        [[x] for x in own], [[x] for x in found[other][measure]]
                    )
                    line += f"  less {other} {less.mean:+.4f} [{less.low:+.4f} {less.high:+.4f}]"
            print(line)
    print(f"\n{shown}")


def corpus_options(description: str | None, tokens: int, documents: int) -> argparse.ArgumentParser:
    """Options of a benchmark over documents of a corpus.

    Args:
        tokens, documents: defaults.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--held-out", default=None)
    parser.add_argument("--tokens", type=int, default=tokens)
    parser.add_argument("--documents", type=int, default=documents)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def parse_args() -> argparse.Namespace:
    parser = corpus_options(__doc__, tokens=768, documents=24)
    parser.add_argument("--policies", default=",".join(COMPARED))
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--output", type=Path, default=None, help="JSONL, one line per document")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    engine = Engine.load(args.model, policy="full", dtype=args.dtype)
    corpus = read_corpus(args.corpus, args.held_out)
    names = args.policies.split(",")
    found = {name: {"continuation": list[float](), "recite": list[float]()} for name in names}
    for number, (document, ids) in enumerate(
        texts(engine, corpus, args.tokens, args.documents, args.seed)
    ):
        truth = forced_logits(engine, POLICIES["full"], 1.0, ids, number)
        row = dict[str, dict[str, float]]()
        for name in names:
            put_weights(engine, name, args.seed)
            logits = forced_logits(engine, sentence_of(name), args.share, ids, number)
            row[name] = {m: float(kl_divergence(truth[m], logits[m]).mean()) for m in truth}
            for measure, value in row[name].items():
                found[name][measure].append(value)
        line = json.dumps({"document": document.name, "share": args.share, "kl": row})
        print(line, flush=True)
        if args.output is not None:
            with args.output.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
    print_table(found, f"{args.model}, {args.dtype}, {args.tokens} tokens, share {args.share}")


if __name__ == "__main__":
    main()
