"""The policies that are compared: all presets, and what they would be without their last twist.

A preset that merges what it rejects has a twin that drops it, `NAME:drop`; one that holds entries
at less than full precision has one that holds fewer of them in full, `NAME:exact`. Some presets
that drop have a twin that merges as D2O does, `NAME:fold`; and D2O has twins that lack a part of
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from larder import Policy
from larder.bench.cases import Case, folded, twins
from larder.core.errors import UnknownName
from larder.session.presets import PRESETS

FIRST = ("random", "streaming_llm", "h2o", "d2o", "snapkv", "keydiff", "full")
LAST = ("epicache", "exact_question", "epicache_batched")
BASELINES = ("random", "h2o")
EXPECTED = (("d2o", "h2o"), ("h2o", "streaming_llm"), ("d2o", "streaming_llm"))
# The three steps from H2O to D2O: protect less of the recent, budget by layer, fold.
STEPS = (("d2o:uniform:drop", "h2o"), ("d2o:drop", "d2o:uniform:drop"))
FOLDED = ("random", "h2o", "snapkv", "keydiff", "streaming_llm")
_D2O = "blockwise() > protect(sinks=4, recent={recent}) > column_mass() > {rest} > every_step()"
ABLATION = {
    "d2o:uniform": _D2O.format(recent=0.25, rest="uniform() > fold_ema()"),
    "d2o:uniform:drop": _D2O.format(recent=0.25, rest="uniform() > drop()"),
    "d2o:always": _D2O.format(recent=0.25, rest='inverse_variance() > fold_ema(threshold="none")'),
    "d2o:average": _D2O.format(
        recent=0.25, rest='inverse_variance() > fold_ema(weights="average")'
    ),
    "d2o:values": _D2O.format(recent=0.25, rest='inverse_variance() > fold_ema(likeness="values")'),
    "d2o:half recent": _D2O.format(recent=0.5, rest="inverse_variance() > fold_ema()"),
}


def cases(chosen: Sequence[str] = ()) -> list[Case]:
    """All cases in the order in which they are wanted, or those chosen.

    Raises:
        UnknownName: one that is chosen does not exist.
    """
    known = _by_name()
    unknown = set(chosen) - set(known)
    if unknown:
        names = ", ".join(known)
        raise UnknownName(f"no case {', '.join(sorted(unknown))}: there are {names}.")
    return [case for name, case in known.items() if not chosen or name in chosen]


def pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """Which case is compared with which, among those there are; the one with more first.

    A twin that is a preset, too, goes by the name of that.
    """
    known = _by_name()
    named = {str(case.policy): name for name, case in reversed(known.items())}
    twinned = [
        (name, named[str(twin.policy)]) for name in known if name in PRESETS for twin in twins(name)
    ]
    merging = [(f"{name}:fold", name) for name in FOLDED]
    lacking = [tuple(name.rsplit(":", 1)) for name in ABLATION]
    lacks = [(base, f"{base}:{part}") for base, part in lacking]
    found = dict.fromkeys((*EXPECTED, *STEPS, *twinned, *merging, *lacks))
    return [pair for pair in found if set(pair) <= set(names)]


@cache
def _by_name() -> dict[str, Case]:
    """All cases in their order; a twin that is a preset, too, or another twin, left out."""
    names = [name for name in PRESETS if name not in FIRST + LAST]
    order = [case for name in (*FIRST, *names) for case in (_preset(name), *twins(name))]
    order += [case for name in FOLDED for case in folded(name)]
    order += [Case(name, Policy.parse(sentence)) for name, sentence in ABLATION.items()]
    order += [case for name in LAST for case in (_preset(name), *twins(name))]
    spelled = {str(Policy.parse(name)) for name in PRESETS}
    found: dict[str, Case] = {}
    for case in order:
        if case.name in PRESETS or str(case.policy) not in spelled:
            found[case.name] = case
            spelled.add(str(case.policy))
    return found


def _preset(name: str) -> Case:
    return Case(name, Policy.parse(name))
