"""Policies by the short names that tables give them: presets, and presets with one twist.

`NAME:drop` is a preset that drops what it would merge, `NAME:exact` one that holds fewer entries
but in full, `NAME:fold` one that merges as D2O does what it would drop, `NAME:whole` one that reads
everything before it decides. A policy that is written out goes by what it is written as.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from larder.core.errors import UnknownName
from larder.core.family import unknown
from larder.policy.compensation.drop import Drop
from larder.policy.compensation.fold_ema import FoldEma
from larder.policy.storage.exact import Exact
from larder.prefill.schedules.whole import Whole
from larder.session.policy import Policy
from larder.session.presets import PRESETS

TWISTS: Mapping[str, Mapping[str, Any]] = {
    "drop": {"compensation": Drop()},
    "exact": {"storage": Exact()},
    "fold": {"compensation": FoldEma()},
    "whole": {"schedule": Whole()},
}


@dataclass(frozen=True)
class Case:
    """A policy with its budget open, and the name that tables give it."""

    name: str
    policy: Policy

    @property
    def asks_first(self) -> bool:
        """Whether it must know the question before it reads."""
        return "question" in self.policy.scorer.wanted()

    @property
    def is_full(self) -> bool:
        """Whether it keeps everything."""
        return self.name == "full"


def case(name: str) -> Case:
    """The case of that name.

    Raises:
        UnknownName: no such twist; else as `Policy.parse`.
    """
    base, colon, twist = name.partition(":")
    if not colon or base not in PRESETS:
        return Case(name, Policy.parse(name))
    if twist not in TWISTS:
        raise UnknownName(unknown("twist of a preset", twist, sorted(TWISTS)))
    return twisted(base, twist)


def twisted(name: str, twist: str) -> Case:
    """A preset with another part in one slot.

    Raises:
        UsageError: its parts do not go together then.
    """
    policy = replace(Policy.parse(name), **TWISTS[twist])
    return Case(f"{name}:{twist}", Policy.parse(str(policy)))
