"""Policies by the short names that tables give them: presets, and presets with one twist.

`NAME:drop` is a preset that drops what it would merge, `NAME:exact` one that holds fewer entries
but in full, `NAME:fold` one that merges as D2O does what it would drop, `NAME:whole` one that reads
everything before it decides, `NAME:blockwise` one that decides block by block,
`NAME:sensitivity` one under the layer budgets of the preset `epicache` and with its protection,
`NAME:pooled` one under equal layers whose heads compete. Several twists may follow each other, as
in `NAME:blockwise:exact`. A policy that is written out goes by what it is written as.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from larder.core.errors import UnknownName
from larder.core.family import unknown
from larder.policy.budgets.pooled import Pooled
from larder.policy.budgets.sensitivity import Sensitivity
from larder.policy.compensation.drop import Drop
from larder.policy.compensation.fold_ema import FoldEma
from larder.policy.protect import Protect
from larder.policy.storage.exact import Exact
from larder.prefill.schedules.blockwise import Blockwise
from larder.prefill.schedules.whole import Whole
from larder.session.policy import Policy
from larder.session.presets import PRESETS

TWISTS: Mapping[str, Mapping[str, Any]] = {
    "drop": {"compensation": Drop()},
    "exact": {"storage": Exact()},
    "fold": {"compensation": FoldEma()},
    "whole": {"schedule": Whole()},
    "blockwise": {"schedule": Blockwise()},
    "sensitivity": {"budget": Sensitivity(floor=0.015), "protect": Protect(sinks=0, recent=0)},
    "pooled": {"budget": Pooled()},
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
    base, *twists = name.split(":")
    if not twists or base not in PRESETS:
        return Case(name, Policy.parse(name))
    if strange := [twist for twist in twists if twist not in TWISTS]:
        raise UnknownName(unknown("twist of a preset", strange[0], sorted(TWISTS)))
    return twisted(base, *twists)


def twisted(name: str, *twists: str) -> Case:
    """A preset with another part in one slot or more.

    Raises:
        UsageError: its parts do not go together then.
    """
    parts = {slot: part for twist in twists for slot, part in TWISTS[twist].items()}
    policy = replace(Policy.parse(name), **parts)
    return Case(":".join((name, *twists)), Policy.parse(str(policy)))
