"""A whole policy: one part in each of seven slots, in a fixed order.

session    schedule      protect     scorer    budget      compensation   timing
episodes > blockwise > protect > patched > sensitivity > drop > prefill_only
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from larder.core.errors import SpellingError, UnknownName, UsageError
from larder.core.family import Family, unknown
from larder.core.spelling import Call, build, parse, spell
from larder.policy.budgets.base import Budget
from larder.policy.compensation.base import Compensation
from larder.policy.planner import Planner
from larder.policy.protect import Protect
from larder.policy.scorers.base import Scorer
from larder.policy.timing.prefill_only import PrefillOnly
from larder.prefill.base import Schedule
from larder.session.arrangements.base import Arrangement
from larder.session.presets import PRESETS

FAMILIES: Mapping[str, Family] = {
    "session": Family("session", "larder.session.arrangements"),
    "schedule": Family("schedule", "larder.prefill.schedules"),
    "scorer": Family("scorer", "larder.policy.scorers"),
    "budget": Family("budget", "larder.policy.budgets"),
    "compensation": Family("compensation", "larder.policy.compensation"),
    "timing": Family("timing", "larder.policy.timing"),
}
DEFAULT_BLOCK_TOKENS = 512
SLOTS = ("session", "schedule", "protect", "scorer", "budget", "compensation", "timing")
DEFAULTS = {
    "session": "single",
    "schedule": "whole",
    "scorer": "sinks_and_window",
    "budget": "pooled",
    "compensation": "drop",
    "timing": "prefill_only",
}


@dataclass(frozen=True)
class Policy:
    """What is kept of a conversation, and how it is decided. `str()` is its canonical spelling."""

    session: Arrangement
    schedule: Schedule
    protect: Protect
    scorer: Scorer
    budget: Budget
    compensation: Compensation
    timing: PrefillOnly

    @staticmethod
    def parse(sentence: str) -> Policy:
        """A policy from a preset's name or a sentence of parts; omitted slots take defaults.

        Raises:
            SpellingError: it does not parse, or parts are out of order.
            UnknownName: no such preset, part or parameter.
            BadParameter: a value out of range.
        """
        text = sentence.strip()
        if text in PRESETS:
            text = PRESETS[text]
        calls = parse(text)
        slots = [_slot(call) for call in calls]
        order = [SLOTS.index(slot) for slot in slots]
        if order != sorted(set(order)):
            raise SpellingError(
                f"The parts of {sentence!r} are out of order or doubled: write at most one each of "
                f"{' > '.join(SLOTS)}."
            )
        given = dict(zip(slots, calls, strict=True))
        return Policy(**{slot: _part(slot, given.get(slot)) for slot in SLOTS})

    def __str__(self) -> str:
        return " > ".join(spell(getattr(self, f.name)) for f in fields(self))

    @property
    def planner(self) -> Planner:
        """The part of the policy that decides."""
        return Planner(self.protect, self.scorer, self.budget, self.compensation)

    def filled(self, tokens: int, block: int | None) -> Policy:
        """The same policy with the open sizes filled in.

        Args:
            tokens: entries per kv head, for a budget left open.
            block: M_block from the command line, for a schedule left open.

        Raises:
            UsageError: a block was given that contradicts the spelling, or exceeds the budget.
        """
        budget, schedule = self.budget, self.schedule
        if budget.tokens is None:
            budget = replace(budget, tokens=tokens, kept=None)  # pyright: ignore
        return replace(self, budget=budget, schedule=_blocked(schedule, tokens, block))


def _blocked(schedule: Schedule, tokens: int, block: int | None) -> Schedule:
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


def _slot(call: Call) -> str:
    if call.name == "protect":
        return "protect"
    for slot, family in FAMILIES.items():
        if call.name in family.names():
            return slot
    known = sorted({name for family in FAMILIES.values() for name in family.names()} | {"protect"})
    raise UnknownName(unknown("policy part or preset", call.name, sorted({*known, *PRESETS})))


def _part(slot: str, call: Call | None) -> Any:
    if slot == "protect":
        return build(Protect, {} if call is None else call.parameters)
    call = call or Call(DEFAULTS[slot])
    return build(FAMILIES[slot].load(call.name), call.parameters)
