"""Bits per number of transform-coded entries with which an eviction loses least on a model.

For `transform()` where a spelling names no bits. A budget in bytes holds few entries in many bits
or many in few, and which loses less is a property of the model. Passages of the bundled text
decide: entries are chosen by the highest attention that they get while the passage is repeated
(KVzip), over all layers and heads, coded with each candidate, and compared with the full cache in
the text that follows and in a part that is recited. What a candidate loses is the geometric mean of
these divergences, so that passages, budgets and both kinds weigh alike. Passages are few, and the
transforms were fitted on the same text, which favors low numbers: of the candidates that lose at
most `tolerance` times as much as the best, the one nearest the usual number is chosen.

Its numbers are one per layer, all the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from larder.cache.sequence import SequenceCache
from larder.core.errors import BadParameter, BudgetError, CacheError, ModelError, UsageError
from larder.core.observation import LayerScores, Observation
from larder.core.registry import Family
from larder.core.types import Mode, TokenIds
from larder.models.attention_backend import AttentionInputs, CausalAttention
from larder.models.batch_segment import BatchSegment
from larder.models.decoder import Decoder
from larder.models.measurements._attention_capture import copy_maxima
from larder.models.measurements.base import Granularity, Measurement, SampleText
from larder.models.measurements.reconstruction import REQUEST
from larder.policy.compensation.drop import Drop
from larder.policy.planner import Planner
from larder.policy.protect import Protect
from larder.policy.scorers.reconstruct import Reconstruct
from larder.policy.storage.base import Storage
from larder.policy.storage.exact import Exact
from larder.policy.storage.transform import USUAL_BITS, Transform

CANDIDATES = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0)
SHARES = (1 / 8, 1 / 16)  # of the bytes of the full cache in bfloat16
BFLOAT16_BYTES = 2
LEAST = 1e-6  # nats; less is not told apart
BUDGETS = Family("budget", "larder.policy.budgets")


@dataclass(frozen=True)
class ForcedText:
    """Text behind a passage.

    Args:
        first: index of the first token whose prediction is compared.
        logits: of the compared tokens, behind the full cache.
    """

    ids: TokenIds
    first: int
    logits: Float[Tensor, "N V"]


@dataclass(frozen=True, eq=False)
class CachedPassage:
    """Passage with its full cache.

    Args:
        scores: of the entries of managed layers, by layer index.
    """

    cache: SequenceCache
    scores: Mapping[int, Float[Tensor, " T"]]
    probes: tuple[ForcedText, ...]


@dataclass(frozen=True)
class BitsMeasurement(Measurement):
    """Bits with which passages of the bundled text lose least.

    Args:
        context: tokens of a passage.
        following: tokens that are compared, of each kind.
        cue: tokens of the recited part that are given.
        passages: how many.
        tolerance: ratio of what candidates lose up to which they are not told apart.
    """

    context: int = 1024
    following: int = 64
    cue: int = 16
    passages: int = 3
    tolerance: float = 1.1
    granularity = Granularity.LAYER
    candidates: ClassVar[tuple[float, ...]] = CANDIDATES

    def __post_init__(self) -> None:
        is_fit = self.context >= 2 * (self.cue + self.following) and self.following >= 1
        if not is_fit or self.cue < 1 or self.passages < 1 or self.tolerance < 1:
            raise BadParameter(
                "transform_bits needs context >= 2 * (cue + following), cue, following and "
                f"passages >= 1 and tolerance >= 1, got {self}."
            )

    def measure(self, decoder: Decoder, sample: SampleText) -> tuple[float, ...]:
        from larder.models.calibration import calibrate  # which loads measurements

        if not decoder.spec.managed:
            return ()
        calibrate(decoder, sample.encode, frozenset({"transform"}))
        try:
            lost = self.divergences(decoder, sample)
        except (BudgetError, CacheError, UsageError) as error:
            raise ModelError(f"transform() cannot hold this model's entries: {error}") from None
        return (best_bits(lost, self.tolerance),) * len(decoder.spec.managed)

    def divergences(self, decoder: Decoder, sample: SampleText) -> dict[float, tuple[float, ...]]:
        """Nats per token lost with each candidate: of each passage, then by budget, what follows
        and what is recited.
        """
        size, found = self.context + self.following, dict[float, tuple[float, ...]]()
        ids, steps = sample.ids(self.passages * size), self.passages * len(self.candidates)
        for index in range(self.passages):
            own = ids[index * size : (index + 1) * size]
            passage = self._passage(decoder, own, tuple(sample.encode(REQUEST)))
            for done, bits in enumerate(self.candidates):
                sample.progress(index * len(self.candidates) + done, steps)
                lost = _lost(decoder, passage, Transform(bits=bits))
                found[bits] = (*found.get(bits, ()), *lost)
        return found

    def _passage(self, decoder: Decoder, ids: TokenIds, request: TokenIds) -> CachedPassage:
        text = (*opening_ids(decoder), *ids[: self.context])
        cache = SequenceCache(decoder.spec, "ragged")
        decoder.read([BatchSegment(cache, text)], Mode.APPEND)
        cache.compact()
        middle = len(text) // 2
        repeat = (*request, *text[middle : middle + self.cue + self.following])
        probed = (ids[self.context :], 1), (repeat, len(repeat) - self.following)
        probes = [
            ForcedText(own, first, _logits(decoder, cache, own, first)) for own, first in probed
        ]
        return CachedPassage(cache, _scores(decoder, text, request), tuple(probes))


def best_bits(divergences: Mapping[float, Sequence[float]], tolerance: float) -> float:
    """Candidate nearest the usual number among those that lose about as little as the best.

    Args:
        divergences: nats per token by candidate.
        tolerance: ratio to what the best candidate loses, as a geometric mean, of those.
    """
    logarithms = {
        bits: sum(math.log(max(nats, LEAST)) for nats in lost) / len(lost)
        for bits, lost in divergences.items()
    }
    most = min(logarithms.values()) + math.log(tolerance)
    near = [bits for bits, logarithm in logarithms.items() if logarithm <= most]
    return min(near, key=lambda bits: (abs(bits - USUAL_BITS), -bits))


def opening_ids(decoder: Decoder) -> TokenIds:
    """First token of a text, where the model has one: some fail without it."""
    first = decoder.module.config.get_text_config().bos_token_id
    return () if first is None else (int(first),)


def _scores(decoder: Decoder, text: TokenIds, request: TokenIds) -> dict[int, Float[Tensor, " T"]]:
    """Highest weight of each entry while the text is repeated, by managed layer."""
    managed = {layer.index for layer in decoder.spec.managed}
    found = dict[int, Tensor]()

    def show(inputs: AttentionInputs) -> None:
        if inputs.layer in managed:
            found[inputs.layer] = copy_maxima(inputs, len(text)).flatten()

    decoder.forward_uncached((*text, *request, *text), CausalAttention(show))
    return found


def _logits(
    decoder: Decoder, cache: SequenceCache, ids: TokenIds, first: int
) -> Float[Tensor, "N V"]:
    """Logits that predict the tokens of a text from `first` on, behind a cache."""
    rows = range(first - 1, len(ids) - 1)
    return decoder.forward_logits([BatchSegment(cache, ids)], Mode.SCRATCH, rows)


def _lost(decoder: Decoder, passage: CachedPassage, storage: Transform) -> list[float]:
    """Nats per token that a storage loses, by budget and probe."""
    found = list[float]()
    for share in SHARES:
        cache = _coded(decoder, passage, storage, share)
        for probe in passage.probes:
            near = _logits(decoder, cache, probe.ids, probe.first).log_softmax(-1)
            full = probe.logits.log_softmax(-1)
            found.append(float((full.exp() * (full - near)).sum(-1).mean().clamp(min=0)))
    return found


def _coded(
    decoder: Decoder, passage: CachedPassage, storage: Transform, share: float
) -> SequenceCache:
    """Copy of a full cache with as many entries as a share of its bytes holds, coded."""
    spec, length = decoder.spec, passage.cache.next_position
    itemsize, layers = spec.dtype.itemsize, tuple(layer.index for layer in spec.managed)
    tokens = int(share * length * BFLOAT16_BYTES / itemsize)
    entries = storage.entries(tokens, spec.managed, itemsize)
    planner = Planner(Protect(), Reconstruct(), BUDGETS.load("global")(), Drop(), storage=storage)
    cache = _copied(passage.cache, storage)
    ready = {
        index: _scored(planner, cache, index, passage.scores[index], entries) for index in layers
    }
    plans = planner.plan(ready, planner.quotas(entries, length, layers, {}), cache.entries)
    for index, plan in cache.fit_plans(plans).items():
        cache.apply(index, plan)
    return cache


def _copied(full: SequenceCache, storage: Storage) -> SequenceCache:
    cache = SequenceCache(full.spec, storage.form, transform=storage.transform)
    for index, store in enumerate(cache.layers):
        own = full.entries(index)
        heads = range(len(own.lengths))
        keys = torch.stack([own.head_keys(head) for head in heads])
        values = torch.stack([own.head_values(head) for head in heads])
        store.append(keys, values, own.head_positions(0))
    cache.advance(full.next_position, full.recurrent)
    return cache


def _scored(
    planner: Planner, cache: SequenceCache, layer: int, scores: Tensor, entries: int
) -> LayerScores:
    """Scores of a layer with the protected entries, whose storage needs no inspection."""
    observation = Observation(
        cache.spec.layers[layer],
        cache.entries(layer),
        torch.empty(0, 0, 0),
        torch.empty(0, dtype=torch.long),
        cache.next_position,
        (0, 0),
    )
    return replace(planner, storage=Exact()).with_protection(observation, scores, entries)


Part = BitsMeasurement
