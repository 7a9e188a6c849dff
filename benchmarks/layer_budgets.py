"""Layer budgets of EpiCache against what eviction costs in each layer, on keyed needles in prose.

Two measurements, both by the log-likelihood per token of the expected answers (teacher forcing):

loss     of each layer: it keeps 1/16 of its entries by KVzip's scores, all others everything; and
         the rank correlation of these losses with each calibration, summed over heads.
budgets  EpiCache at a quarter of the tokens under equal layers, budgets by sensitivity, the same
         profile in reverse, by CompressKV's eviction error, by HeadKV's heads, and by the measured
         losses (of other texts).

    python benchmarks/layer_budgets.py --corpus FOLDER --model smollm2 --texts 4 --loss-texts 2

One text of 30 layers takes about 7 minutes of one core for its losses and 4 for its budgets.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from _needles import needle_texts

from larder.core import Calibration, Conversation, LayerScores, Plan, Variant
from larder.engine import Engine
from larder.models import calibrate
from larder.ops import apportion
from larder.policy import (
    Budget,
    EvictionError,
    HeadKV,
    Pooled,
    Protect,
    Sensitivity,
    top_k_per_layer,
)
from larder.session import Policy
from larder_bench.scoring.teacher_forcing import score_answers

CUT = 16  # a cut layer keeps one entry of so many
SHARE = 4  # EpiCache keeps one token of so many
CALIBRATIONS = frozenset({"sensitivity", "eviction_error", "retrieval", "reconstruction"})
LOSS_SEED = 1000  # texts of the losses are not those of the budgets


@dataclass(frozen=True)
class FixedShares(Budget):
    """Layer budgets in proportion to given weights; heads of a layer compete.

    Args:
        weights: one number per managed layer.
        floor: the least that a layer gets, as a share of the average.
    """

    weights: tuple[float, ...] = ()
    floor: float = 0.0

    def layer_tokens(
        self, tokens: int, layers: int, least: int, most: int, calibration: Calibration
    ) -> tuple[int, ...]:
        del calibration
        floor = min(tokens, max(least, int(self.floor * tokens), 1))
        return apportion(layers * tokens, self.weights, floor, most)

    def choose(
        self, ready: Mapping[int, LayerScores], quotas: Mapping[int, int]
    ) -> dict[int, Plan]:
        return {index: top_k_per_layer(scored, quotas[index]) for index, scored in ready.items()}


@dataclass(frozen=True)
class OneLayerCut(FixedShares):
    """One layer keeps what the others leave of the total, and these everything.

    Args:
        layer: place of that layer among the managed ones.
    """

    layer: int = 0

    def layer_tokens(
        self, tokens: int, layers: int, least: int, most: int, calibration: Calibration
    ) -> tuple[int, ...]:
        del least, calibration
        rest = layers * tokens - (layers - 1) * most
        return tuple(rest if index == self.layer else most for index in range(layers))


def answers(engine: Engine, chat: Conversation, policy: Policy, tokens: int) -> tuple[float, float]:
    """Log-likelihood per token and share of exact answers of a text under a policy."""
    memory = engine.under(policy, str(tokens)).read(chat)
    scored = score_answers(engine, memory, chat.questions)
    return (fmean(one.log_likelihood for one in scored), fmean(float(one.exact) for one in scored))


def layer_losses(engine: Engine, chats: Sequence[Conversation]) -> list[float]:
    """Mean log-likelihood per token that cutting each layer alone costs, in nats."""
    layers = len(engine.loaded.decoder.spec.managed)
    kvzip = replace(Policy.parse("kvzip"), protect=Protect(sinks=0, recent=0))
    sums = [0.0] * layers
    for chat in chats:
        length = len(engine.tokenizer.encode_conversation(chat).ids)
        tokens = length - round(length * (1 - 1 / CUT) / layers)
        whole = fmean(
            one.log_likelihood for one in score_answers(engine, engine.read(chat), chat.questions)
        )
        for layer in range(layers):
            cut = replace(kvzip, budget=OneLayerCut(layer=layer))
            sums[layer] += whole - answers(engine, chat, cut, tokens)[0]
            print(f"layer {layer}: {sums[layer]:.4f} nats over the texts so far", flush=True)
    return [total / len(chats) for total in sums]


def ranks(values: Sequence[float]) -> list[int]:
    """Place of each value in ascending order."""
    order = sorted(range(len(values)), key=values.__getitem__)
    return [order.index(index) for index in range(len(values))]


def by_layer(values: Sequence[float], layers: int) -> list[float]:
    """Sum of a calibration over the heads of each layer."""
    heads = len(values) // layers
    return [sum(values[layer * heads : (layer + 1) * heads]) for layer in range(layers)]


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Spearman's rank correlation."""
    a, b = ranks(left), ranks(right)
    middle = (len(a) - 1) / 2
    products = sum((x - middle) * (y - middle) for x, y in zip(a, b, strict=True))
    return products / sum((x - middle) ** 2 for x in a)


def compared_budgets(sensitivity: Sequence[float], losses: Sequence[float]) -> dict[str, Budget]:
    """Budgets by name; losses empty if they were not measured."""
    turned = [max(sensitivity) + min(sensitivity) - one for one in sensitivity]
    budgets: dict[str, Budget] = {
        "equal layers": Pooled(),
        "sensitivity, floor .015": Sensitivity(floor=0.015),
        "sensitivity, floor .25": Sensitivity(),
        "sensitivity of the released code": Sensitivity(alpha=1.2, variant=Variant.CODE),
        "eviction error (CompressKV)": EvictionError(),
        "retrieval and reasoning heads (HeadKV)": HeadKV(),
        "sensitivity reversed, floor .25": FixedShares(
            weights=tuple(one**2 for one in turned), floor=0.25
        ),
    }
    if losses:
        weights = tuple(max(0.0, one) for one in losses)
        budgets["measured losses, floor .25"] = FixedShares(weights=weights, floor=0.25)
    return budgets


def main(options: argparse.Namespace) -> None:
    engine = Engine.load(options.model, policy="full")
    started = time.perf_counter()
    calibration = calibrate(engine.loaded.decoder, engine.tokenizer.encode, CALIBRATIONS)
    sensitivity = [1 - cosine for cosine in calibration["sensitivity"]]
    cut = needle_texts(
        engine, options.model, options.corpus, range(LOSS_SEED, LOSS_SEED + options.loss_texts)
    )
    losses = layer_losses(engine, cut) if cut else []
    row: dict[str, object] = {
        "model": options.model,
        "sensitivity": [round(one, 5) for one in sensitivity],
        "losses": [round(one, 4) for one in losses],
    }
    if losses:
        profiles = {name: by_layer(values, len(losses)) for name, values in calibration.items()}
        profiles["sensitivity"] = sensitivity
        row["rank correlation"] = {
            name: round(rank_correlation(values, losses), 2) for name, values in profiles.items()
        }
    print(json.dumps(row), flush=True)
    epicache = Policy.parse("epicache")
    scores: dict[str, list[tuple[float, float]]] = {}
    for chat in needle_texts(engine, options.model, options.corpus, range(options.texts)):
        tokens = len(engine.tokenizer.encode_conversation(chat).ids) // SHARE
        for name, budget in compared_budgets(sensitivity, losses).items():
            result = answers(engine, chat, replace(epicache, budget=budget), tokens)
            scores.setdefault(name, []).append(result)
    for name, results in scores.items():
        row = {
            "budgets": name,
            "log-likelihood per token": round(fmean(one[0] for one in results), 3),
            "exact": round(fmean(one[1] for one in results), 3),
            "texts": len(results),
        }
        print(json.dumps(row), flush=True)
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--loss-texts", type=int, default=2)
    main(parser.parse_args())
