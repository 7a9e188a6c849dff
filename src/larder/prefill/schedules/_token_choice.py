"""Choice of the tokens of a text that go deeper, from the scores of the layers that read them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from larder.core.errors import BadParameter, SpellingError, UnknownName, UsageError
from larder.core.images import ImageSpans
from larder.core.observation import Observation
from larder.core.registry import public_name
from larder.core.spec import ModelSpec
from larder.core.spelling import spell
from larder.core.types import Packed, TokenIds
from larder.ops.packing import mask_outside
from larder.ops.topk import top_mask
from larder.policy.budgets.base import WITHOUT_LIMIT
from larder.policy.planner import Planner
from larder.policy.scorers.base import ReducedScorer
from larder.prefill.base import Schedule, Steps
from larder.prefill.reader import PrefillGroup, PrefillReader, PrefillSequence

# Number of tokens that are selected behind a layer: called with its index and the number of tokens
# that reached it.
CountTokens = Callable[[int, int], int]


@dataclass
class TokenChoice:
    """Tokens that deeper layers read behind some layers of one pass, by the scores of these layers.

    Scores of a token are added over the kv heads. Protected tokens, those that the scorer always
    keeps, and the last one are always selected; ties go to the earlier token.

    Args:
        planner: parts of the policy.
        budget: M, which protected shares are relative to.
        layers: indices of the managed layers behind which tokens are chosen.
        count: number of selected tokens.
        scoring: scorer of the choice; None for the scores of the policy.
        chosen: indices of the selected tokens among those that reached a layer, by layer.
    """

    planner: Planner
    budget: int
    layers: frozenset[int]
    count: CountTokens
    scoring: ReducedScorer | None = None
    chosen: dict[int, Int64[Tensor, " N"]] = field(default_factory=dict[int, Tensor])

    def observe(self, layer: int, observation: Observation, scores: Packed | None) -> None:
        """Choose among the tokens of a pass behind one layer."""
        if layer not in self.layers:
            return
        reached = len(observation.query_positions)
        positions, length = observation.query_positions, observation.length
        always = always_passing(self.planner, self.scoring, positions, length, self.budget)
        count = max(int(always.sum()), self.count(layer, reached))
        if count < reached:
            new_scores = token_scores(
                observation, scores_of(self.scoring, observation, scores), reached
            )
            marks = top_mask(new_scores.masked_fill(always, torch.inf), count)
            self.chosen[layer] = torch.nonzero(marks).flatten()

    def before(self, layer: int, positions: Int[Tensor, " Q"]) -> Int64[Tensor, " N"] | None:
        """Tokens that go into a layer."""
        return self.chosen.get(layer - 1)


def scores_of(
    scoring: ReducedScorer | None, observation: Observation, scores: Packed | None
) -> Packed:
    """Scores that tokens are chosen by.

    Args:
        scoring: scorer of the choice; None for the scores of the policy.
        scores: of the policy; None in a pass in which it does not score.
    """
    if scoring is not None:
        return scoring.scorer.score_with(observation, scoring.reduction).float()
    assert scores is not None  # policies that score later are refused
    return scores


def always_passing(
    planner: Planner,
    scoring: ReducedScorer | None,
    positions: Int[Tensor, " Q"],
    length: int,
    budget: int,
) -> Bool[Tensor, " Q"]:
    """Mask of the tokens that are selected whatever their scores: protected ones, and the last.

    Args:
        length: true tokens read.
        budget: M, which protected shares are relative to.
    """
    ends = (planner.scorer if scoring is None else scoring.scorer).protected_tokens()
    always = planner.protect.mask(positions, length, budget)
    return always | mask_outside(positions, ends.first, length - max(1, ends.last))


def token_scores(observation: Observation, scores: Packed, tokens: int) -> Float[Tensor, " Q"]:
    """Scores of the latest tokens of a layer, added over its kv heads."""
    heads = scores.split(list(observation.entries.lengths))
    return torch.stack([head[-tokens:] for head in heads]).sum(0)


def layer_index(layer: int | float, spec: ModelSpec) -> int:
    """Index of a managed layer by index or depth.

    Args:
        layer: its index, or its depth as a fraction of all layers. A layer with a sliding window
            stands for the managed one before it, or else for the first.

    Raises:
        UsageError: the model has no such layer.
    """
    count = len(spec.layers)
    index = max(0, round(layer * count) - 1) if isinstance(layer, float) else layer
    if index >= count:
        raise UsageError(
            f"Tokens are to be chosen behind layer {index}, but the model has the layers 0 to "
            f"{count - 1}: name one of them, or a depth such as 0.5."
        )
    managed = [own.index for own in spec.managed]
    if not managed:
        raise UsageError(
            "Every layer of the model slides a window of its own, so that no layer sees all tokens "
            "to choose among: take whole() or blockwise()."
        )
    return max((number for number in managed if number <= index), default=managed[0])


def scoring_reader(reader: PrefillReader) -> PrefillReader:
    """Reader that scores managed layers even where the budget has no limit."""
    if reader.quotas or reader.tokens != WITHOUT_LIMIT:
        return reader
    managed = reader.decoder.spec.managed
    return replace(reader, quotas={layer.index: WITHOUT_LIMIT for layer in managed})


def recent_tokens(reader: PrefillReader, scoring: ReducedScorer | None) -> int:
    """Latest tokens that are always selected: the protected ones, and those of the scorer."""
    planner = reader.planner
    scorer = planner.scorer if scoring is None else scoring.scorer
    budget = min(reader.tokens, WITHOUT_LIMIT)
    recent = 0 if budget == WITHOUT_LIMIT else planner.protect.recent_tokens(budget)
    return max(1, recent, scorer.protected_tokens().last)


def largest_quota(reader: PrefillReader, first: int) -> int:
    """Most entries per kv head that the budget lets a layer from `first` on hold; 0 without one."""
    quotas = [quota for layer, quota in reader.quotas.items() if layer >= first]
    return max((quota for quota in quotas if quota < WITHOUT_LIMIT), default=0)


class NarrowingSchedule(Schedule):
    """Base of schedules that read a text in one pass, in which chosen tokens alone go deeper."""

    scorer: str | None
    narrows: ClassVar[bool] = True
    chooses_in_pass: ClassVar[bool] = True

    @property
    def scoring(self) -> ReducedScorer | None:
        return scoring_of(public_name(type(self)), self.scorer)

    def steps(self, reader: PrefillReader, sequences: PrefillGroup, ids: TokenIds) -> Steps[None]:
        total = len(ids) * len(sequences)
        for number, sequence in enumerate(sequences, start=1):
            check_text(self, sequence, ids)
            yield from self.read_steps(reader, sequence, ids)
            reader.finish(sequence)
            yield len(ids) * number, total

    @abstractmethod
    def read_steps(
        self, reader: PrefillReader, sequence: PrefillSequence, ids: TokenIds
    ) -> Iterator[None]:
        """Steps of reading a text into one sequence."""


def check_text(schedule: object, sequence: PrefillSequence, ids: TokenIds) -> None:
    """Check that tokens of a text may be left out of some layers.

    Raises:
        UsageError: the text has images.
    """
    start = sequence.cache.next_position
    images: ImageSpans = sequence.images.within(start, start + len(ids))
    if images.spans:
        raise UsageError(
            f"{spell(schedule)} leaves tokens out of deeper layers, but the text has images, "
            "whose tokens see each other: take whole() or blockwise()."
        )


def scoring_of(part: str, scorer: str | None) -> ReducedScorer | None:
    """Scorer of a choice; None for that of the policy.

    Raises:
        BadParameter: the text names no scorer that scores in the pass that reads the text.
    """
    if scorer is None:
        return None
    try:
        return ReducedScorer.parse(scorer)
    except (SpellingError, UnknownName) as error:
        raise BadParameter(f"{part}.scorer must be a scorer: {error}") from None
