"""Sentence of a policy: its parts by slot.

    kvzip                         preset
    kvzip > quantized(bits=4)     preset, with parts added or changed
    kvzip:int4                    variant of a preset, as tables name it
    keydiff() > uniform()         parts alone; omitted slots take defaults

A first name without parentheses is a preset's, if there is one of that name; with parentheses it
is a part's. A part behind a preset takes its slot: it replaces the part that the preset has there,
or, if that is the same part, changes the parameters that it names. What belongs to a replaced part
leaves with it: the aggregation and the head rule of a scorer, the recall of an offload. A variant
(`PRESET_VARIANTS`) replaces parts with all their parameters; more of them and parts may follow.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

from larder.core.errors import SpellingError, UnknownName
from larder.core.recall import RECALLS
from larder.core.registry import LISTING, Family, unknown_name_message
from larder.core.spelling import Call, parse
from larder.policy.scorers.base import REDUCTION_SLOTS, SCORERS
from larder.session.presets import PRESET_VARIANTS, PRESETS

FAMILIES: Mapping[str, Family] = {
    "session": Family("session", "larder.session.arrangements"),
    "schedule": Family("schedule", "larder.prefill.schedules"),
    "scorer": SCORERS,
    **REDUCTION_SLOTS,
    "values": Family("values", "larder.policy.values"),
    "unit": Family("unit", "larder.policy.units"),
    "budget": Family("budget", "larder.policy.budgets"),
    "compensation": Family("compensation", "larder.policy.compensation"),
    "recall": RECALLS,
    "storage": Family("storage", "larder.policy.storage"),
    "timing": Family("timing", "larder.policy.timing"),
}
SLOTS = (
    "session",
    "schedule",
    "protect",
    "scorer",
    "aggregation",
    "heads",
    "values",
    "unit",
    "budget",
    "compensation",
    "recall",
    "storage",
    "timing",
)

_VARIANTS = re.compile(r"\s*(\w+)((?::\w+)+)")
_PRESS = re.compile(r"\s*(\w+Press)\b")
# Slots whose part belongs to that of another one.
BELONGINGS: Mapping[str, tuple[str, ...]] = {
    "scorer": tuple(REDUCTION_SLOTS),
    "compensation": ("recall",),
}


def parts_by_slot(sentence: str) -> dict[str, Call]:
    """Parsed parts of a sentence by slot, those of its preset included.

    Raises:
        SpellingError: the sentence does not parse, or parts are out of order or repeated.
        UnknownName: a preset, a variant or a part does not exist.
    """
    _check_press(sentence)
    name, variants = "", list[str]()
    if (match := _VARIANTS.match(sentence)) is not None:
        name, variants = match[1], match[2].split(":")[1:]
        _check_variants(name, variants)
        sentence = name + sentence[match.end() :]
    calls = parse(sentence)
    if not calls[0].is_bare or calls[0].name not in PRESETS:
        return _in_order(calls, "")
    preset, *own = calls
    parts = _in_order(parse(PRESETS[preset.name]), "")
    for variant in variants:
        others = _in_order(parse(PRESET_VARIANTS[variant]), "")
        parts = _replaced(parts, others, kept=others)
    return _extended(parts, _in_order(own, f"{preset} > "))


def _check_variants(name: str, variants: Sequence[str]) -> None:
    """Check the names in front of a colon and behind it.

    Raises:
        UnknownName: the one is no preset, or another no variant.
    """
    if name not in PRESETS:
        raise UnknownName(
            unknown_name_message("preset with variants", name, sorted(PRESETS), LISTING)
        )
    for variant in variants:
        if variant not in PRESET_VARIANTS:
            raise UnknownName(
                unknown_name_message("variant of a preset", variant, sorted(PRESET_VARIANTS))
            )


def _check_press(sentence: str) -> None:
    """Check that a sentence is not the constructor of a press of kvpress.

    Raises:
        SpellingError: it is.
    """
    if (press := _PRESS.match(sentence)) is not None:
        written = sentence.strip() if "(" in sentence else f"{press[1]}(...)"
        raise SpellingError(
            f"{press[1]} is a press of kvpress, not a part of a policy: in Python pass the object, "
            f"kvpress={written}, or take the policy that stands beside it in docs/from_kvpress.md."
        )


def _extended(preset: Mapping[str, Call], calls: Mapping[str, Call]) -> dict[str, Call]:
    """Parts of a preset with others in their slots; of the same part, parameters change."""
    changed, others = dict(preset), dict[str, Call]()
    for slot, call in calls.items():
        former = preset.get(slot)
        if former is not None and former.name == call.name:
            changed[slot] = Call(call.name, {**former.parameters, **call.parameters})
        else:
            others[slot] = call
    return _replaced(changed, others, kept=calls)


def _replaced(
    preset: Mapping[str, Call], calls: Mapping[str, Call], kept: Mapping[str, Call]
) -> dict[str, Call]:
    """Parts of a preset with others in their slots, and without what belonged to those replaced.

    Args:
        kept: slots whose parts stay.
    """
    parts = {**preset, **calls}
    for slot in calls:
        for belonging in BELONGINGS.get(slot, ()):
            if belonging not in kept:
                parts.pop(belonging, None)
    return parts


def _in_order(calls: Sequence[Call], preset: str) -> dict[str, Call]:
    """Calls by slot.

    Args:
        preset: beginning of the sentence in front of them, for errors.

    Raises:
        SpellingError: two calls have one slot, or the slots are out of order.
    """
    placed = sorted(((_slot_of(call), call) for call in calls), key=lambda own: SLOTS.index(own[0]))
    for (slot, first), (other, second) in pairwise(placed):
        if slot == other:
            same = f"{first.name} is given twice"
            both = f"{first.name} and {second.name} are both in the slot {slot!r}"
            raise SpellingError(
                f"{same if first.name == second.name else both}, and a policy has one part in "
                "each: leave one of the two out."
            )
    ordered = [call for _, call in placed]
    if ordered != list(calls):
        given, right = (preset + " > ".join(map(str, sequence)) for sequence in (calls, ordered))
        raise SpellingError(f"The parts of {given!r} are out of order: write {right!r}.")
    return dict(placed)


def _slot_of(call: Call) -> str:
    if call.name == "protect":
        return "protect"
    for slot, family in FAMILIES.items():
        if call.name in family.builtin_names():
            return slot
    for slot, family in FAMILIES.items():
        if call.name in family.names():
            return slot
    if call.name in PRESETS:
        raise SpellingError(
            f"{call.name} is a preset, not a part: write its name first and without parentheses, "
            f"and other parts behind it, as in '{call.name} > quantized(bits=4)'."
        )
    known = sorted({name for family in FAMILIES.values() for name in family.names()} | {"protect"})
    raise UnknownName(
        unknown_name_message(
            "policy part or preset", call.name, sorted({*known, *PRESETS}), LISTING
        )
    )
