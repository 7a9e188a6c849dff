"""Validation of combinations of policy parts, when a policy is parsed or its sizes are filled
in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from larder.cache.forms.base import CacheLayer
from larder.cache.spec import FORMS
from larder.core.errors import BadParameter, SpellingError, UsageError
from larder.core.memory_budget import count_of_tokens
from larder.core.part import PolicyPart
from larder.core.recall import RecallPart
from larder.core.registry import public_name
from larder.core.spelling import spell
from larder.policy.budgets.base import Budget
from larder.policy.compensation.base import Compensation
from larder.policy.planner import Planner
from larder.policy.protect import Protect
from larder.policy.providers.base import DraftProvider, select_providers
from larder.policy.scorers.base import ReducedScorer, Scorer
from larder.policy.storage.base import Storage
from larder.policy.storage.exact import Exact
from larder.policy.timing.base import Timing
from larder.policy.units.base import Unit
from larder.policy.values.base import ValueRule
from larder.prefill.base import Schedule

DEFAULT_BLOCK_TOKENS = 512
# Parts, by slot, that leave entries as they are once they were judged.
UNCHANGING = {
    "session": ("single",),
    "compensation": ("drop", "park"),
    "storage": ("exact",),
    "timing": ("prefill_only",),
}


def check_timing(scorer: Scorer, timing: Timing) -> None:
    """Validate that no scorer needs scratch prompts at decode steps.

    Raises:
        SpellingError: a prompt of the scorer would have to be read at every step.
    """
    generating = timing.scorers[0] if timing.scorers else scorer
    if timing.excess() is not None and needs_scratch_prompts(generating):
        raise SpellingError(
            f"{spell(generating)} judges by prompts read behind the cache, which are not read "
            f"while text is generated: leave {spell(timing)} out, or take another scorer."
        )


def check_cache_form(storage: Storage) -> None:
    """Validate the cache form of a storage.

    Raises:
        UnknownName: no cache form has that name.
        SpellingError: the form needs options or positions that the storage does not give it.
    """
    kind: type[CacheLayer] = FORMS.load(storage.form)
    given = frozenset[str]() if storage.residual is None else frozenset({"residual"})
    can_create = kind.requires == given and (kind.has_public_name or bool(given))
    if not can_create or kind.rerotates_keys != storage.rerotates_keys:
        raise SpellingError(
            f"{spell(storage)} gives the cache form {storage.form!r} none of what it needs: take "
            "the policy part that creates it, or another form."
        )


def check_query_positions(scorer: Scorer, storage: Storage) -> None:
    """Validate that stored queries and keys have the same positions.

    Raises:
        SpellingError: queries keep true positions, but the storage rotates keys to others.
    """
    if scorer.required_ledger().queries and storage.rerotates_keys:
        raise SpellingError(
            f"{spell(scorer)} judges by queries at their true positions, but {spell(storage)} "
            "turns keys to other ones: leave the storage out, or take another scorer."
        )


def check_weights(scorer: Scorer, values: ValueRule) -> None:
    """Validate that a value rule has the attention weights that it needs.

    Raises:
        SpellingError: the scorer computes no attention weights.
    """
    if values.wants_weights and scorer.default_reduction() is None:
        raise SpellingError(
            f"{spell(values)} asks how much attention entries hold, but {spell(scorer)} looks at "
            "none: leave its mass out, or take a scorer by attention such as snapkv."
        )


def check_single_cut(schedule: Schedule, compensation: Compensation) -> None:
    """Validate that a compensation with a single cut prefills the whole text first.

    Raises:
        SpellingError: the schedule makes plans between blocks.
    """
    plans_between = schedule.has_blocks or schedule.turn_rule.plans_turns
    if compensation.needs_whole_text and plans_between:
        raise SpellingError(
            f"{spell(compensation)} cuts a text once, when all of it was read, but "
            f"{spell(schedule)} plans in between: take whole(), or park() without a cut."
        )


def check_unit(schedule: Schedule, unit: Unit) -> None:
    """Validate that a unit that judges by the end of a text is asked when it is there.

    Raises:
        SpellingError: the schedule makes plans between blocks.
    """
    if unit.needs_whole_text and schedule.has_blocks:
        raise SpellingError(
            f"{spell(unit)} judges by the end of the text, but {spell(schedule)} plans at the end "
            "of every block: take whole(), or a unit that is given what the text asks for, such as "
            'window(task="given").'
        )


def check_narrowing(
    schedule: Schedule, planner: Planner, compensation: Compensation, recall: RecallPart | None
) -> None:
    """Validate that a policy can do without some tokens in deeper layers.

    Raises:
        SpellingError: a part needs every token in every layer, or chooses by what is not there yet.
    """
    if not schedule.narrows:
        return
    own = schedule.scoring or ReducedScorer(planner.scorer, planner.reduction)
    part = public_name(type(schedule))
    if schedule.chooses_in_pass and needs_scratch_prompts(own.scorer):
        raise SpellingError(
            f"{part}() chooses tokens in the pass that reads them, but {spell(own.scorer)} judges "
            "by prompts read behind it: name a scorer by attention for the choice, as in "
            f'{part}(scorer="snapkv(window=8)"), or take two_passes().'
        )
    needed = [part for part in (own.scorer, own.reduction.heads) if not _is_served(part, planner)]
    if needed:
        raise SpellingError(
            f"{spell(needed[0])} looks at what no other part of the policy asks for: name it in "
            f"the policy too, or take another scorer in {part}()."
        )
    if planner.token_providers or select_providers(planner.providers, DraftProvider):
        raise SpellingError(
            f"{spell(planner.scorer)} looks at what the model predicts behind every token, which "
            f"{part}() does not compute for all: take whole(), or another scorer."
        )
    if compensation.rebuilding is not None or (recall is not None and recall.corrected):
        name = spell(compensation) if compensation.rebuilding is not None else spell(recall)
        raise SpellingError(
            f"{name} computes tokens again in every layer, but {part}() leaves some out of "
            "deeper ones: take whole(), or drop()."
        )


def _is_served(part: PolicyPart, planner: Planner) -> bool:
    """True if a planner provides what a part reads."""
    tallies = frozenset[str]().union(*(own.required_tallies() for own in planner.parts))
    columns = set(planner.ledger.columns)
    return (
        part.required_providers() <= planner.providers
        and part.required_tallies() <= tallies
        and part.required_calibrations() <= planner.calibrations
        and columns.issuperset(part.required_ledger().columns)
        and part.required_ledger().queries <= planner.ledger.queries
    )


def check_turn_rule(schedule: Schedule, parts: Mapping[str, object]) -> None:
    """Validate that nothing but plans at the ends of turns changes entries that were judged.

    Args:
        parts: parts of a policy by slot.

    Raises:
        SpellingError: another part would change them.
    """
    if not schedule.turn_rule.plans_turns:
        return
    for slot, names in UNCHANGING.items():
        name = public_name(type(parts[slot]))
        if name not in names:
            raise SpellingError(
                f"{public_name(type(schedule))}() never changes again what a turn has left, but "
                f"{name}() would: take {' or '.join(f'{each}()' for each in names)}, or another "
                "schedule."
            )


def check_heads(budget: Budget, compensation: Compensation) -> None:
    """Validate that a compensation for retrieval heads knows which heads these are.

    Raises:
        SpellingError: the budget does not separate retrieval heads from streaming heads.
    """
    if compensation.separates_streaming_heads and not budget.separates_streaming_heads:
        raise SpellingError(
            f"{spell(compensation)} parks for retrieval heads only, but {spell(budget)} does not "
            "tell these from streaming heads: take retrieval_heads(), or another cut."
        )


def check_recompute(compensation: Compensation, storage: Storage) -> None:
    """Validate that recomputed entries equal stored ones.

    Raises:
        SpellingError: the storage does not hold entries exactly.
    """
    if compensation.rebuilding is not None and storage != Exact():
        raise SpellingError(
            f"{spell(compensation)} recomputes entries as the model made them, which "
            f"{spell(storage)} does not hold: leave the storage out, or take drop()."
        )


def check_state(compensation: Compensation, storage: Storage) -> None:
    """Validate that entries beside a state of rejected ones are held exactly.

    Raises:
        SpellingError: they are not.
    """
    if compensation.sums_rejected and storage != Exact():
        raise SpellingError(
            f"{spell(compensation)} sums up rejected entries beside exact ones, which "
            f"{spell(storage)} does not hold: leave the storage out, or take drop()."
        )


def check_added(scorer: Scorer, compensation: Compensation, storage: Storage) -> None:
    """Validate that entries added by a compensation come from the full cache and can be stored.

    Raises:
        SpellingError: entries are rejected while the text is read, or the storage holds none that
            are added.
    """
    if not compensation.added_entries:
        return
    if not needs_scratch_prompts(scorer):
        raise SpellingError(
            f"{spell(compensation)} reads the full cache once the text is scored, but "
            f"{spell(scorer)} has entries rejected while it is read: take reconstruct(), or drop()."
        )
    if storage != Exact() and not (storage.codecs and storage.form == "ragged"):
        raise SpellingError(
            f"{spell(compensation)} adds entries that {spell(storage)} cannot hold beside its own: "
            "take quantized(), leave the storage out, or take drop()."
        )


def check_correction(
    protect: Protect, recall: RecallPart | None, tokens: int | None = None
) -> None:
    """Validate that corrected tokens are protected.

    Args:
        tokens: resident entries per kv head; None before sizes are filled in.

    Raises:
        BadParameter: more tokens are corrected than are protected.
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


def check_gapless(storage: Storage, recall: RecallPart | None) -> None:
    """Validate that recalled entries can be moved to positions without gaps.

    Raises:
        SpellingError: the recall part attends to more than entries at positions of their own.
    """
    if recall is None or not storage.rerotates_keys:
        return
    if recall.corrected or recall.weighs_pages or not recall.is_plain:
        raise SpellingError(
            f"{spell(recall)} attends to more than the entries of the pages that it finds, which "
            f"{spell(storage)} cannot move to other positions: leave the storage out, or take "
            "another recall part, such as positionless()."
        )


def with_block_size(schedule: Schedule, tokens: int, block: int | None) -> Schedule:
    """Schedule with its block size filled in, if it reads blocks.

    Raises:
        UsageError: the schedule reads no blocks, has another block size, or it exceeds the budget.
    """
    if not schedule.has_blocks:
        if block is not None:
            raise UsageError(
                f"A block of {count_of_tokens(block)} was given, but {spell(schedule)} reads no "
                "blocks: "
                "leave it out, or take blockwise()."
            )
        return schedule
    size = schedule.block_tokens if schedule.block_tokens is not None else block
    if block is not None and size != block:
        raise UsageError(
            f"A block of {count_of_tokens(block)} contradicts {spell(schedule)} in the policy: "
            "give one of "
            "the two."
        )
    size = min(DEFAULT_BLOCK_TOKENS, tokens) if size is None else size
    if size > tokens:
        raise UsageError(
            f"The block of {count_of_tokens(size)} is larger than the budget of {tokens}: lower "
            "the block, "
            "or raise the budget."
        )
    return replace(schedule, tokens=size)  # pyright: ignore


def needs_scratch_prompts(scorer: Scorer) -> bool:
    """Test whether a scorer reads scratch prompts after the cache before it scores."""
    return bool(scorer.scratch((0,), 0, dict.fromkeys(scorer.required_prompts(), (0,))))
