"""AQUA-KV, KVTC and `predictive`, which hold whole tokens, at the bytes of the policy `larder`.

The texts and what is compared are those of the study `larder_rivals_long`: the true continuation,
and a passage recited on request, in nats per token from the full cache. The full cache of a text is
coded by each codec of saved caches, decoded, and attended to; its bytes are those of the saved
file. `aqua()` is attended to as it is; its bytes are those of every tensor, exact tokens counted in
bfloat16. Both are relative to the full cache in bfloat16; trained tables are not counted. Where
`aqua()` has no room for all tokens, those with the highest mean of KVzip's scores over all layers
and heads are kept.

    larder train kvtc --model smollm2 --dtype float32 --corpus TEXTS
    larder train predictive --model smollm2 --dtype float32 --corpus TEXTS
    larder train aqua --model smollm2 --dtype float32 --corpus TEXTS
    python benchmarks/whole_token_caches.py --corpus FOLDER

Prints means, and the ratio of the committed rows of `larder` to them with its 95 % interval of a
paired bootstrap over texts; with --summary FILE those of rows that were measured before. A text
takes about 80 s of processor time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import torch
from _timing import write

from larder.cache import SequenceCache
from larder.core import LayerScores
from larder.evaluation import Bootstrap
from larder.session import Policy
from larder.store import (
    Kvtc,
    Kvtc16,
    LayerStack,
    Predictive,
    Predictive16,
    StorageCodec,
    TensorRole,
    pack_container,
)
from larder_bench.cli.bench_options import BenchOptions, context_loader
from larder_bench.execution.runner import validate_study
from larder_bench.results.rows import read_results
from larder_bench.scoring.kl_divergence import kl_divergence
from larder_bench.scoring.recorded_scores import (
    RECORDING_TOKENS,
    RecordedText,
    compared_bytes,
    compared_full_bytes,
    forced_logits,
)
from larder_bench.studies.study import read_study
from larder_bench.studies.target_size import search_budget

OUT = Path("results/whole_token_caches.jsonl")
STUDIES = Path("studies")
STUDY, QUARTER = "larder_rivals_long", "larder_rivals_quarter"
FOLLOWING = 64  # tokens that are compared, as in the measure `divergence`
POLICY = "whole() > reconstruct() > uniform() > {}"
BUDGETS = {"1/4": 1 / 4, "1/8": 1 / 8, "1/16": 1 / 16}
Row = dict[str, Any]


class PredictiveQuarter(Predictive):
    share: ClassVar[float] = 1 / 4


class KvtcQuarter(Kvtc):
    share: ClassVar[str] = "1/5"


class KvtcEighth(Kvtc):
    recent: ClassVar[int] = 0


class KvtcSixteenth(Kvtc):
    share: ClassVar[str] = "1/20"
    recent: ClassVar[int] = 24


FORMS: Mapping[str, Mapping[str, StorageCodec | str]] = {
    "1/4": {
        "predictive": PredictiveQuarter(),
        "kvtc, 128 latest exact": KvtcQuarter(),
        "aqua, all tokens": "aqua(bits=3, recent=116)",
    },
    "1/8": {
        "predictive": Predictive(),
        "kvtc, 128 latest exact": Kvtc16(),
        "kvtc, none of the latest exact": KvtcEighth(),
        "aqua, all tokens": "aqua(bits=1, recent=96)",
        "aqua, tokens of kvzip": "aqua(recent=16)",
    },
    "1/16": {
        "predictive": Predictive16(),
        "kvtc, 24 latest exact": KvtcSixteenth(),
        "aqua, tokens of kvzip": "aqua(recent=16)",
        "aqua in 1 bit, tokens of kvzip": "aqua(bits=1, recent=16)",
    },
}


@dataclass(frozen=True, eq=False)
class TokenScoredText(RecordedText):
    """Text whose scores are means over all heads of all layers, so that whole tokens are kept."""

    def scores(self, policy: Policy, tokens: int = RECORDING_TOKENS) -> dict[int, LayerScores]:
        own = super().scores(policy, tokens)
        heads = [head for each in own.values() for head in each.scores.split(each.lengths)]
        mean = torch.stack(heads).mean(0)
        return {
            layer: replace(each, scores=mean.repeat(len(each.lengths)))
            for layer, each in own.items()
        }

    @staticmethod
    def of_text(text: RecordedText) -> TokenScoredText:
        """The same text; what is recorded of one is recorded of both."""
        return TokenScoredText(**{each.name: getattr(text, each.name) for each in fields(text)})


def layer_stack(text: RecordedText) -> LayerStack:
    """Keys and values of the full cache of a text."""
    layers, positions = list[dict[TensorRole, torch.Tensor]](), torch.arange(len(text.ids))
    for layer in range(len(text.cache.layers)):
        own = text.cache.entries(layer)
        heads = range(len(own.lengths))
        keys = torch.stack([own.head_keys(head) for head in heads])
        values = torch.stack([own.head_values(head) for head in heads])
        layers.append({TensorRole.KEYS: keys, TensorRole.VALUES: values})
    return LayerStack(tuple(layers), positions, text.cache.spec.fingerprint)


def decoded(
    text: RecordedText, stack: LayerStack, codec: StorageCodec
) -> tuple[SequenceCache, Row]:
    """Cache that was coded and decoded, the bytes of its file, and the processor time of both."""
    spec, started = text.cache.spec, time.process_time()
    coded = codec.encode_stack(stack)
    tensors = {
        f"{layer}.{role.value}:{name}": tensor
        for layer, sides in enumerate(coded.sides)
        for role, parts in sides.items()
        for name, tensor in parts.items()
    }
    file = pack_container(tensors | {"positions": stack.positions.int()}, {"note": coded.note})
    written = time.process_time()
    cache = SequenceCache(spec, "dense")
    heads = [layer.kv_heads for layer in spec.layers]
    layers = codec.decode_stack(coded, stack.positions, heads)
    for store, sides in zip(cache.layers, layers, strict=True):
        keys, values = (sides[role].to(spec.dtype) for role in (TensorRole.KEYS, TensorRole.VALUES))
        store.append(keys, values, stack.positions)
    cache.advance(len(text.ids))
    resumed = time.process_time() - written
    return cache, {"bytes": len(file), "write": written - started, "resume": resumed, "kept": 1.0}


def held(text: TokenScoredText, storage: str, budget: str, guess: int) -> tuple[SequenceCache, Row]:
    """Cache of a storage of whole tokens at a budget, and its bytes.

    Args:
        guess: budget in tokens that may fit.
    """
    policy, length = Policy.parse(POLICY.format(storage)), len(text.ids)
    fit = search_budget(
        lambda tokens: text.held(policy, tokens),
        compared_bytes,
        int(compared_full_bytes(text) * BUDGETS[budget]),
        guess,
        length,
    )
    cache = fit.result
    heads = length * sum(layer.kv_heads for layer in cache.spec.managed)
    kept = cache.managed_entries / heads
    return cache, {"bytes": compared_bytes(cache), "tokens": fit.tokens, "kept": kept}


def rows_of(
    text: RecordedText, only: Sequence[str], guesses: dict[tuple[str, str], int]
) -> Iterator[Row]:
    """Rows of all forms of a text.

    Args:
        only: budgets.
        guesses: budget in tokens of each form, of the text before; updated.
    """
    whole, stack, full = TokenScoredText.of_text(text), layer_stack(text), compared_full_bytes(text)
    for budget in only:
        for name, form in FORMS[budget].items():
            if isinstance(form, str):
                guess = guesses.get((budget, name), len(text.ids) // 8)
                cache, row = held(whole, form, budget, guess)
                guesses[budget, name] = row["tokens"]
            else:
                cache, row = decoded(text, stack, form)
            for probe, ids in text.probes.items():
                logits = forced_logits(text.engine, cache, ids)
                row[probe] = float(kl_divergence(text.logits[probe], logits).mean())
            yield {"budget": budget, "form": name, "share": row["bytes"] / full, **row}


def measured_texts(options: argparse.Namespace) -> Iterator[tuple[int, RecordedText]]:
    """Texts of the study by seed, each read into a full cache."""
    study = replace(read_study(STUDY), files=options.first + options.texts)
    bench_options = BenchOptions(corpus=options.corpus, dtype=options.dtype)
    bench = context_loader(study, bench_options)(study.models[0])
    cells = {cell.seed: cell for cell in validate_study(study)}
    for seed in range(options.first, options.first + options.texts):
        cell = cells[seed]
        conversation = bench.conversation(cell.task, cell.seed, cell.tokens)
        yield seed, bench.recorded(conversation, FOLLOWING)


def rows_of_larder() -> dict[tuple[str, int], Row]:
    """Committed divergences of `larder`, by budget and seed."""
    found = dict[tuple[str, int], Row]()
    paths = [STUDIES / "results" / f"{name}.jsonl.zst" for name in (STUDY, QUARTER)]
    for cell in read_results(paths).cells:
        if cell["policy"] == "larder":
            kinds = {item["kind"] for item in cell["items"]}
            found[cell["budget"], cell["seed"]] = {
                kind: fmean(item["kl"] for item in cell["items"] if item["kind"] == kind)
                for kind in kinds
            }
    return found


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """Means of each form, and ratios of `larder` to it."""
    ours = rows_of_larder()
    for budget, forms in FORMS.items():
        for name in forms:
            own = [row for row in rows if (row["budget"], row["form"]) == (budget, name)]
            own = [row for row in own if (budget, row["text"]) in ours]
            if not own:
                continue
            shares = [row["share"] for row in own]
            line = f"{budget:5} {name:31} n={len(own):2} share {min(shares):.4f} to "
            line += f"{max(shares):.4f} kept {fmean(row['kept'] for row in own):.2f}"
            for kind in ("next", "recited"):
                theirs = [[row[kind]] for row in own]
                line += f"  {kind} {fmean(row[kind] for row in own):.5f}"
                if len(own) > 1:
                    larder = [[ours[budget, row["text"]][kind]] for row in own]
                    ratio = Bootstrap().ratio(larder, theirs)
                    line += f" larder/it {ratio.mean:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
            for part in ("write", "resume"):
                if part in own[0]:
                    line += f"  {part} {fmean(row[part] for row in own):.2f} s"
            yield line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--first", type=int, default=0, help="Seed of the first text.")
    parser.add_argument("--budgets", nargs="+", choices=BUDGETS, default=[*BUDGETS])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--summary", type=Path, metavar="FILE", help="Measure nothing.")
    options = parser.parse_args()
    if options.summary is None:
        guesses = dict[tuple[str, str], int]()
        for seed, text in measured_texts(options):
            for row in rows_of(text, options.budgets, guesses):
                print(json.dumps({"text": seed, **row}), flush=True)
                write(options.out, [{"text": seed, **row}])
    path = options.summary or options.out
    print(*summary([json.loads(line) for line in path.read_text().splitlines()]), sep="\n")


if __name__ == "__main__":
    main()
