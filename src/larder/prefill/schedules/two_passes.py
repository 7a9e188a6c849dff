"""Prefill in two passes: find tokens with the first layers, then read the found ones alone.

Liang et al., "ILRe: Intermediate Layer Retrieval for Context Compression in Causal Language Models"
(2025), arXiv:2508.17892: a text streams block by block through the layers up to one in the middle,
whose attention from the question to all of its keys chooses tokens; these are read by the whole
model as a short text. Scores are smoothed over several widths at once, so that single tokens and
whole passages are found. Song et al., "Compress, Gather, and Recompute: REFORMing Long-Context
Processing in Transformers" (2025), arXiv:2506.01215, finds tokens by the likeness of their vectors
from several layers instead, and computes their entries again.

Of both the abstracts are known to us, not the released code. Inferred: every width chooses equally
many tokens; scores of several layers are added; found tokens are read at their true positions, as
everything else is (`compact()` gives them positions without gaps). Differences: the layer of ILRe
is not picked by a measurement; what the first pass caches is whole, where REFORM cuts it, and is
freed before the second. Protected tokens are always found. What is read later goes through all
layers, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from larder.core.arguments import require
from larder.core.errors import BadParameter
from larder.core.observation import Observation
from larder.core.types import Packed, TokenIds
from larder.ops.pooling import running_max
from larder.policy.scorers.base import ReducedScorer
from larder.prefill.base import Schedule, Steps, split_blocks
from larder.prefill.reader import PrefillGroup, PrefillReader, PrefillSequence
from larder.prefill.schedules._token_choice import (
    always_passing,
    check_text,
    largest_quota,
    layer_index,
    scores_of,
    scoring_of,
    scoring_reader,
    token_scores,
)
from larder.prefill.schedules.narrowing import KEPT, check_counts, check_layer
from larder.prefill.schedules.whole import BLOCK_TOKENS, Whole


@dataclass(frozen=True)
class TwoPasses(Schedule):
    """Prefill of the tokens that the first layers of the model find in a text.

    Args:
        layer: the last layer of the first pass: its index, or its depth as a fraction of all
            layers. Where it slides a window, the nearest one before it that does not.
        layers: layers whose scores are added, at equal distances up to `layer`. A scorer of a few
            measured heads names its layers itself (`key_cosine(share=0.05)`).
        tokens: tokens that are read in the second pass.
        kept: the same as a fraction of the text; left open with `tokens`, as many as the budget
            holds, and a quarter without one. Never fewer than it holds.
        scorer: what finds tokens, with an aggregation and a head rule behind it if its paper's are
            not wanted; left open, the scorer of the policy.
        widths: numbers of neighboring tokens that share their highest score, odd, separated by
            spaces; each finds equally many tokens.
    """

    layer: int | float = 0.5
    layers: int = 1
    tokens: int | None = None
    kept: float | None = None
    scorer: str | None = None
    widths: str = "1"
    narrows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_layer("two_passes", self.layer)
        check_counts("two_passes", self.tokens, self.kept)
        scoring_of("two_passes", self.scorer)
        require(self.layers >= 1, "two_passes.layers", "at least 1", self.layers)
        words = self.widths.split()
        if not words or not all(word.isdecimal() and int(word) % 2 for word in words):
            raise BadParameter(
                f'two_passes.widths must be odd numbers separated by spaces, such as "1 7 31", got '
                f"{self.widths!r}."
            )

    @property
    def scoring(self) -> ReducedScorer | None:
        return scoring_of("two_passes", self.scorer)

    def steps(self, reader: PrefillReader, sequences: PrefillGroup, ids: TokenIds) -> Steps[None]:
        total = len(ids) * len(sequences)
        for number, sequence in enumerate(sequences, start=1):
            count = self._count(reader, len(ids))
            if count < len(ids):
                yield from self._sequence_steps(reader, sequence, ids, count)
                reader.finish(sequence)
                yield len(ids) * number, total
            else:
                for step in Whole().steps(reader, [sequence], ids):
                    yield step and (len(ids) * number, total)

    def _sequence_steps(
        self, reader: PrefillReader, sequence: PrefillSequence, ids: TokenIds, count: int
    ) -> Iterator[None]:
        check_text(self, sequence, ids)
        spec, reader = reader.decoder.spec, scoring_reader(reader)
        last = layer_index(self.layer, spec)
        managed = [layer.index for layer in spec.managed if layer.index <= last]
        scorer = reader.planner.scorer if self.scoring is None else self.scoring.scorer
        chosen = scorer.scored_layers(reader.planner.calibration) or frozenset(
            managed[-1 - len(managed) * index // self.layers] for index in range(self.layers)
        )
        search = TokenSearch(reader, sequence, ids, chosen, self.scoring)
        yield from search.steps()
        widths = [int(word) for word in self.widths.split()]
        rows = selected_tokens(search.scores, search.always, count, widths)
        del search
        yield
        yield from reader.read_chosen_steps(sequence, ids, rows)

    def _count(self, reader: PrefillReader, num_tokens: int) -> int:
        """Tokens that are read in the second pass."""
        held = largest_quota(reader, 0)
        if self.tokens is not None:
            return max(self.tokens, held)
        if self.kept is None and held:
            return held
        return max(int(num_tokens * (KEPT if self.kept is None else self.kept)), held)


Part = TwoPasses


class TokenSearch:
    """First pass over a text: scores of its tokens by some layers. Used once.

    Layers behind the last of these get one token of each block, so that they cost next to nothing.

    Args:
        ids: the text.
        layers: indices of the layers whose scores are added.
        scoring: scorer of the search; None for that of the policy.
    """

    def __init__(
        self,
        reader: PrefillReader,
        sequence: PrefillSequence,
        ids: TokenIds,
        layers: frozenset[int],
        scoring: ReducedScorer | None,
    ) -> None:
        quotas = {layer: quota for layer, quota in reader.quotas.items() if layer in layers}
        self._reader, self._ids, self._last = replace(reader, quotas=quotas), ids, max(layers)
        self._sequence = replace(sequence, cache=sequence.cache.fork())
        self._original, self._scoring = sequence.cache, scoring
        self._by_layer: dict[int, Float[Tensor, " Q"]] = {}
        self.always: Bool[Tensor, " Q"] = torch.zeros(len(ids), dtype=torch.bool)

    @property
    def scores(self) -> Float[Tensor, " Q"]:
        """Scores of all tokens of the text, added over layers and kv heads."""
        return torch.stack([self._by_layer[layer] for layer in sorted(self._by_layer)]).sum(0)

    def steps(self) -> Iterator[None]:
        """Read the text, block by block."""
        meter, parked = self._reader.meter, self._original.nbytes
        meter.parked_bytes += parked
        try:
            yield from self._read()
        finally:
            meter.parked_bytes -= parked

    def _read(self) -> Iterator[None]:
        planner = self._reader.planner
        scorer = planner.scorer if self._scoring is None else self._scoring.scorer
        observed = max(BLOCK_TOKENS, scorer.protected_tokens().last)
        first = 0 if planner.observes_whole_text else max(0, len(self._ids) - observed)
        for block in split_blocks(self._ids[:first], BLOCK_TOKENS):
            self._reader.append_chosen(self._sequence, block, self._before)
            yield
        rest = self._ids[first:]
        yield from self._reader.score_steps(
            self._sequence, rest, self._ids, self._before, self._observe, scorer
        )

    def _before(self, layer: int, positions: Tensor) -> Int64[Tensor, " N"] | None:
        if layer != self._last + 1 or len(positions) == 1:
            return None
        return torch.tensor([len(positions) - 1], device=positions.device)

    def _observe(self, layer: int, observation: Observation, scores: Packed | None) -> None:
        count, start = len(self._ids), self._original.next_position
        new_scores = token_scores(observation, scores_of(self._scoring, observation, scores), count)
        self._by_layer[layer] = new_scores
        positions = torch.arange(start, start + count, device=new_scores.device)
        planner, tokens = self._reader.planner, self._reader.tokens
        self.always = always_passing(planner, self._scoring, positions, start + count, tokens)


def selected_tokens(
    scores: Float[Tensor, " Q"], always: Bool[Tensor, " Q"], count: int, widths: Sequence[int]
) -> Int64[Tensor, " N"]:
    """Indices of the tokens that are found: those that always are, then the best of every width.

    Args:
        count: number of tokens, at least as many as always are found.
        widths: of the pooling; each finds equally many until `count` are.
    """
    turns = torch.full_like(scores, torch.inf)
    for index, width in enumerate(widths):
        order = running_max(scores, width).argsort(descending=True, stable=True)
        ranks = torch.empty_like(scores)
        ranks[order] = torch.arange(len(scores), dtype=scores.dtype, device=scores.device)
        turns = torch.minimum(turns, ranks * len(widths) + index)
    turns = turns.masked_fill(always, -1.0)
    count = max(count, int(always.sum()))
    return turns.argsort(stable=True)[:count].sort().values
