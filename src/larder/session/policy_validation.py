"""Which parts of a policy do not go together, told when it is parsed or its sizes are filled in."""

from __future__ import annotations

from dataclasses import fields, replace

from larder.core.errors import BadParameter, SpellingError, UsageError
from larder.core.family import public_name
from larder.core.recall import RecallPart
from larder.core.spelling import spell
from larder.policy.budgets.base import Budget
from larder.policy.budgets.retrieval_heads import RetrievalHeads
from larder.policy.compensation.base import Compensation
from larder.policy.compensation.recompute import Recompute
from larder.policy.protect import Protect
from larder.policy.scorers.base import Scorer
from larder.policy.storage.base import Storage
from larder.policy.storage.exact import Exact
from larder.policy.timing.base import Timing
from larder.policy.values.base import ValueRule
from larder.prefill.base import Schedule
from larder.prefill.schedules.whole import Whole

DEFAULT_BLOCK_TOKENS = 512


def check_timing(scorer: Scorer, timing: Timing) -> None:
    """Raises: SpellingError: a prompt of the scorer would have to be read at every step."""
    generating = timing.scorers[0] if timing.scorers else scorer
    if timing.excess() is not None and needs_scratch_prompts(generating):
        raise SpellingError(
            f"{spell(generating)} judges by prompts read behind the cache, which are not read "
            f"while text is generated: leave {spell(timing)} out, or take another scorer."
        )


def check_query_positions(scorer: Scorer, storage: Storage) -> None:
    """Raises: SpellingError: queries are held as they were, but keys turned to other positions."""
    if scorer.queries() and storage.rerotates_keys:
        raise SpellingError(
            f"{spell(scorer)} judges by queries at their true positions, but {spell(storage)} "
            "turns keys to other ones: leave the storage out, or take another scorer."
        )


def check_weights(scorer: Scorer, values: ValueRule) -> None:
    """Raises: SpellingError: values ask for attention weights, which a scorer does not look at."""
    if values.wants_weights and scorer.default_reduction() is None:
        raise SpellingError(
            f"{spell(values)} asks how much attention entries hold, but {spell(scorer)} looks at "
            "none: leave its mass out, or take a scorer by attention such as snapkv."
        )


def check_single_cut(schedule: Schedule, compensation: Compensation) -> None:
    """Raises: SpellingError: a text would be cut once, but is read in blocks with plans between."""
    if compensation.needs_whole_text and not isinstance(schedule, Whole):
        raise SpellingError(
            f"{spell(compensation)} cuts a text once, when all of it was read, but "
            f"{spell(schedule)} plans in between: take whole(), or park() without a cut."
        )


def check_heads(budget: Budget, compensation: Compensation) -> None:
    """Raises: SpellingError: streaming heads lose what they reject, but they look alike."""
    if compensation.separates_streaming_heads and not isinstance(budget, RetrievalHeads):
        raise SpellingError(
            f"{spell(compensation)} parks for retrieval heads only, but {spell(budget)} does not "
            "tell these from streaming heads: take retrieval_heads(), or another cut."
        )


def check_recompute(compensation: Compensation, storage: Storage) -> None:
    """Raises: SpellingError: entries come back whole, but the others are held otherwise."""
    if isinstance(compensation, Recompute) and storage != Exact():
        raise SpellingError(
            f"{spell(compensation)} makes entries anew as the model made them, which "
            f"{spell(storage)} does not hold: leave the storage out, or take drop()."
        )


def check_correction(
    protect: Protect, recall: RecallPart | None, tokens: int | None = None
) -> None:
    """See that what is read once more is held still.

    Args:
        tokens: entries that stay; None where that is not known yet, nor what a share of it is.

    Raises:
        BadParameter: more tokens are corrected than always stay.
    """
    if recall is None or not recall.corrected:
        return
    if tokens is None and isinstance(protect.recent, float):
        return
    stay = protect.recent_tokens(tokens or 0)
    if recall.corrected > stay:
        raise BadParameter(
            f"{public_name(type(recall))}.corrected must be at most the {stay} latest tokens that "
            f"protect.recent keeps, got {recall.corrected}: correct fewer, or protect more."
        )


def with_block_size(schedule: Schedule, tokens: int, block: int | None) -> Schedule:
    """A schedule with the size of its blocks filled in, if it reads any.

    Raises:
        UsageError: it reads none, or others than asked for, or they exceed the budget.
    """
    names = [f.name for f in fields(schedule)]  # pyright: ignore
    if "tokens" not in names:
        if block is not None:
            raise UsageError(
                f"--block {block} was given, but {spell(schedule)} reads no blocks: leave it out, "
                "or take blockwise()."
            )
        return schedule
    size = schedule.tokens if schedule.tokens is not None else block
    if block is not None and size != block:
        raise UsageError(
            f"--block {block} contradicts {spell(schedule)} in the policy: give one of the two."
        )
    size = min(DEFAULT_BLOCK_TOKENS, tokens) if size is None else size
    if size > tokens:
        raise UsageError(
            f"The block of {size} tokens is larger than the budget of {tokens}: lower --block or "
            "raise --budget."
        )
    return replace(schedule, tokens=size)  # pyright: ignore


def needs_scratch_prompts(scorer: Scorer) -> bool:
    """Whether a scorer has anything read behind the cache before it judges."""
    return bool(scorer.scratch((0,), 0, dict.fromkeys(scorer.required_prompts(), (0,))))
