"""Training of principal components for the codecs `kvtc`.

Staniszewski and Lancucki, "KV Cache Transform Coding for Compact Storage in LLM Inference" (KVTC,
2025), arXiv:2511.01815: principal components of keys before rotation, and of values, over all
layers and heads, by a randomized decomposition, and the groups of components and their bits by
dynamic programming on some of the tokens. Plans are made so that DEFLATE's gain is spent, too.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from larder.cache.kvtc import SIDES, KvtcTables, PrincipalSide, pack_components, unpack_components
from larder.core.errors import BadParameter
from larder.models.decoder import Decoder
from larder.models.learned_weights import Card
from larder.ops.bit_allocation import AllocationTable, group_errors
from larder.prefill.base import Progress
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter
from larder.training.corpus import Corpus, CorpusSplit
from larder.training.layer_samples import (
    SINKS,
    LayerSamples,
    SampleSettings,
    read_splits,
    samples_card,
    tested_splits,
)

KVTC = "kvtc"
# Shares of the bytes of coded tokens that bits are divided for. Codecs take 1/8 and 1/16; with
# exact ends, a whole cache of 2,080 tokens takes 1/4, 1/8 and 1/16 at 1/5, 1/16 and 1/20.
SHARES = {"1/5": 1 / 5, "1/8": 1 / 8, "1/16": 1 / 16, "1/20": 1 / 20}
FULL_BITS = 16  # of a number
ROUNDS, SLACK = 5, 0.02  # of the search for a budget, and what of the share may be left
MOST_PACKED = 2  # times that DEFLATE makes codes smaller, at most, in this search
POWER_ROUNDS, OVERSAMPLED = 3, 32  # of the randomized decomposition


@dataclass(frozen=True)
class KvtcSettings(SampleSettings):
    """Calibration of principal components.

    Args:
        rank: components that are kept, at most.
        planned_tokens: tokens that bits are divided on.
    """

    tokens: int = 20_000
    test_tokens: int = 2_000
    rank: int = 2048
    planned_tokens: int = 1024

    def __post_init__(self) -> None:
        counts = self.tokens, self.test_tokens, self.rank, self.planned_tokens
        if min(counts) < 1 or self.passage_tokens <= SINKS:
            raise BadParameter(
                "kvtc needs tokens, test_tokens, rank and planned_tokens above 0, and "
                f"passage_tokens above {SINKS}, got {self}."
            )


def train_kvtc(
    decoder: Decoder,
    adapter: TokenizerAdapter,
    corpus: Corpus,
    settings: KvtcSettings,
    progress: Progress,
) -> tuple[KvtcTables, Card]:
    """Components of a model, and the share of the variance that they keep of documents left out.

    Raises:
        ModelError: keys cannot be rotated back, or there is nothing to train on.
    """
    started = time.perf_counter()
    samples = read_splits(decoder, adapter, corpus, settings, progress)
    sides = [_side(_joined(samples[CorpusSplit.TRAIN], n), settings) for n in range(len(SIDES))]
    radians = tuple(torch.tensor(layer.radians) for layer in decoder.spec.managed)
    tables = KvtcTables.of(KvtcTables((sides[0], sides[1]), radians).tensors())
    metrics = dict[str, float]()
    for split, own in tested_splits(samples):
        metrics |= _tested(tables, own, split.value)
    return tables, samples_card(KVTC, decoder, corpus, samples, settings, started, metrics)


def principal_side(
    numbers: Float[Tensor, "N W"], rank: int, seed: int
) -> tuple[Float[Tensor, " W"], Float[Tensor, "W R"]]:
    """Mean, and the directions of the largest deviations, by power rounds on the second moments of
    the deviations: they are smaller than the numbers, and products with them cost less.
    """
    source, mean = torch.Generator().manual_seed(seed), numbers.mean(0)
    deviations = numbers - mean
    moments = deviations.T @ deviations
    drawn = min(rank + OVERSAMPLED, *numbers.shape)
    basis = torch.randn(len(moments), drawn, generator=source)
    for _ in range(POWER_ROUNDS):
        basis = torch.linalg.qr(moments @ basis)[0]
    rotation = torch.linalg.eigh(basis.T @ moments @ basis)[1].flip(1)
    return mean, basis @ rotation[:, :rank]


def planned(
    components: Float[Tensor, "N R"], table: AllocationTable, allowed: float
) -> Int32[Tensor, "G 2"]:
    """Size and bits of each group, whose packed codes take about `allowed` bits a token."""
    budget, best = allowed, torch.zeros(0, 2, dtype=torch.int32)
    for _ in range(ROUNDS):
        groups = table.groups(int(budget))
        best = torch.tensor([(each.size, each.bits) for each in groups], dtype=torch.int32)
        found = 8 * len(pack_components(components, best)) / len(components)
        if (1 - SLACK) * allowed <= found <= allowed or budget > table.budget:
            break
        budget *= allowed / max(found, 1.0) * (1 - SLACK / 4)
    return best


def _joined(samples: LayerSamples, side: int) -> Float[Tensor, "N W"]:
    """Keys (0) or values (1) of all layers side by side."""
    return torch.cat([samples.layer(index)[side] for index in samples.layers.values()], 1)


def _side(numbers: Float[Tensor, "N W"], settings: KvtcSettings) -> PrincipalSide:
    mean, basis = principal_side(numbers, settings.rank, settings.seed)
    some = numbers[:: max(len(numbers) // settings.planned_tokens, 1)]
    components = (some - mean) @ basis
    whole, width = FULL_BITS * numbers.shape[1], components.shape[1]
    most = int(MOST_PACKED * max(SHARES.values()) * whole)
    table = AllocationTable.of(group_errors(components), width, most)
    plans = {name: planned(components, table, share * whole) for name, share in SHARES.items()}
    return PrincipalSide(mean, basis, plans)


def _tested(tables: KvtcTables, samples: LayerSamples, split: str) -> dict[str, float]:
    """Share of the variance that is kept at each share of the bytes."""
    found = {f"{split}_tokens": float(samples.tokens)}
    for number, (name, side) in enumerate(zip(SIDES, tables.sides, strict=True)):
        numbers = _joined(samples, number) - side.mean
        components = numbers @ side.basis
        for share, plan in side.plans.items():
            packed = pack_components(components, plan)
            near = unpack_components(packed, plan, len(numbers), side.basis.shape[1])
            left = (numbers - near @ side.basis.T).square().sum() / numbers.square().sum()
            label = f"{split}_{name}_{share.replace('/', '_')}"
            found[f"{label}_r2"] = round(1 - float(left), 4)
            found[f"{label}_bits"] = round(8 * len(packed) / numbers.numel(), 3)
    return found
