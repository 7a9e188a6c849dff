"""Training of principal components for the codecs `kvtc`.

Staniszewski and Lancucki, "KV Cache Transform Coding for Compact Storage in LLM Inference" (KVTC,
2025), arXiv:2511.01815: principal components of keys before rotation, and of values, over all
layers and heads, by a randomized decomposition, and the groups of components and their bits by
dynamic programming on some of the tokens. Plans are made so that DEFLATE's gain is spent, too.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from larder.cache.kvtc_coding import pack_components, unpack_components
from larder.cache.kvtc_tables import SIDES, KvtcTables, PrincipalSide
from larder.core.errors import BadParameter, ModelError
from larder.models.attention_backend import AttentionInputs, CausalAttention
from larder.models.decoder import Decoder
from larder.models.learned_weights import Card
from larder.models.measurements.transform import check_layers
from larder.ops.bit_allocation import Errors, allocate, group_errors
from larder.prefill.base import Progress
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter
from larder.training.corpus import Corpus, CorpusSplit
from larder.training.predictive import SINKS, LayerSamples

KVTC = "kvtc"
SHARES = {"1/8": 1 / 8, "1/16": 1 / 16}
FULL_BITS = 16  # of a number
ROUNDS, SLACK = 5, 0.02  # of the search for a budget, and what of the share may be left
POWER_ROUNDS, OVERSAMPLED = 2, 32  # of the randomized decomposition


@dataclass(frozen=True)
class KvtcSettings:
    """Calibration of principal components.

    Args:
        tokens: read to find components, at most; 23 KB of memory each for SmolLM2.
        test_tokens: of documents left out, at most.
        passage_tokens: read together.
        rank: components that are kept, at most.
        planned_tokens: tokens that bits are divided on.
        seed: of the order of documents, and of the decomposition.
    """

    tokens: int = 20_000
    test_tokens: int = 2_000
    passage_tokens: int = 1024
    rank: int = 2048
    planned_tokens: int = 1024
    seed: int = 0

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
    started, layers = time.perf_counter(), decoder.spec.managed
    check_layers(layers)
    samples = _samples(decoder, adapter, corpus, settings, progress)
    if not samples[CorpusSplit.TRAIN].tokens:
        raise ModelError(
            "The corpus has no training document: give more texts, or fewer passage_tokens."
        )
    sides = [_side(_joined(samples[CorpusSplit.TRAIN], n), settings) for n in range(len(SIDES))]
    radians = tuple(torch.tensor(layer.radians) for layer in layers)
    tables = KvtcTables.of(KvtcTables((sides[0], sides[1]), radians).tensors())
    metrics = dict[str, float]()
    for split in (CorpusSplit.TEST, CorpusSplit.HELD_OUT):
        if samples[split].tokens:
            metrics |= _tested(tables, samples[split], split.value)
    card = Card(
        KVTC,
        (decoder.spec.fingerprint,),
        corpus.digest[:16],
        samples[CorpusSplit.TRAIN].tokens,
        settings.seed,
        round(time.perf_counter() - started, 1),
        metrics,
        asdict(settings),
    )
    return tables, card


def principal_side(
    numbers: Float[Tensor, "N W"], rank: int, seed: int
) -> tuple[Float[Tensor, " W"], Float[Tensor, "W R"]]:
    """Mean, and the directions of the largest deviations."""
    torch.manual_seed(seed)
    mean = numbers.mean(0)
    drawn = min(rank + OVERSAMPLED, *numbers.shape)
    directions = torch.svd_lowrank(numbers - mean, q=drawn, niter=POWER_ROUNDS)[2]
    return mean, directions[:, :rank]


def planned(
    components: Float[Tensor, "N R"], errors: Errors, allowed: float
) -> Int32[Tensor, "G 2"]:
    """Size and bits of each group, whose packed codes take about `allowed` bits a token."""
    budget, best = allowed, torch.zeros(0, 2, dtype=torch.int32)
    for _ in range(ROUNDS):
        groups = allocate(errors, components.shape[1], int(budget))
        best = torch.tensor([(each.size, each.bits) for each in groups], dtype=torch.int32)
        found = 8 * len(pack_components(components, best)) / len(components)
        if (1 - SLACK) * allowed <= found <= allowed or budget > 4 * allowed:
            break
        budget *= allowed / max(found, 1.0) * (1 - SLACK / 4)
    return best


def _samples(
    decoder: Decoder,
    adapter: TokenizerAdapter,
    corpus: Corpus,
    settings: KvtcSettings,
    progress: Progress,
) -> Mapping[CorpusSplit, LayerSamples]:
    """Keys and values of some passages of each split."""
    limits = dict.fromkeys(CorpusSplit, settings.test_tokens) | {CorpusSplit.TRAIN: settings.tokens}
    samples = {split: LayerSamples(decoder.spec.managed) for split in CorpusSplit}
    for passage in corpus.passages(adapter, settings.passage_tokens, settings.seed):
        own = samples[passage.split]
        if all(samples[split].tokens >= limits[split] for split in CorpusSplit):
            break
        if own.tokens >= limits[passage.split] or len(passage.ids) <= SINKS:
            continue

        def show(inputs: AttentionInputs, own: LayerSamples = own) -> None:
            if inputs.layer in own.layers:
                own.add(inputs)

        decoder.forward_uncached(passage.ids, CausalAttention(show))
        own.tokens += len(passage.ids) - SINKS
        own.documents.add(passage.document)
        progress(min(samples[CorpusSplit.TRAIN].tokens, settings.tokens), settings.tokens)
    return samples


def _joined(samples: LayerSamples, side: int) -> Float[Tensor, "N W"]:
    """Keys (0) or values (1) of all layers side by side."""
    return torch.cat([samples.layer(place)[side] for place in samples.layers.values()], 1)


def _side(numbers: Float[Tensor, "N W"], settings: KvtcSettings) -> PrincipalSide:
    mean, basis = principal_side(numbers, settings.rank, settings.seed)
    some = numbers[:: max(len(numbers) // settings.planned_tokens, 1)]
    components = (some - mean) @ basis
    errors, whole = group_errors(components), FULL_BITS * numbers.shape[1]
    plans = {name: planned(components, errors, share * whole) for name, share in SHARES.items()}
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
