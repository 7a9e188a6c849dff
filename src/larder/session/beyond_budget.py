"""What a policy holds beyond its budget, told when it is loaded."""

from __future__ import annotations

from larder.core.spec import ModelSpec
from larder.core.spelling import name_of, spell
from larder.policy.budgets.unlimited import Unlimited
from larder.prefill.schedules.whole import Whole
from larder.session.policy import Policy


def beyond_budget(policy: Policy, spec: ModelSpec | None = None) -> tuple[str, ...]:
    """The exceptions from "budget at rest, budget + block while a turn runs", a clause each.

    Args:
        spec: of the model, where it is known.
    """
    slides = _sliding_layers(spec)
    if spec is not None and not spec.managed:
        return slides
    if isinstance(policy.budget, Unlimited):
        return (f"{spell(policy.budget)} keeps everything that is read", *slides)
    found = list[str]()
    if isinstance(policy.schedule, Whole):
        found.append("whole() holds a whole context until all of it is read")
    found += _dense_layers(policy)
    if policy.recall is not None:
        part = name_of(type(policy.compensation))
        found.append(f"{part}() keeps what is rejected in host memory, and what finds it")
    if policy.rebuilding is not None:
        part = name_of(type(policy.compensation))
        found.append(f"{part}() keeps what rejected entries are rebuilt from")
    return (*found, *slides)


def beyond_budget_line(clauses: tuple[str, ...]) -> str:
    """Clauses in one line."""
    return f"beyond the budget: {'; '.join(clauses)}"


def _dense_layers(policy: Policy) -> list[str]:
    dense = 0 if policy.recall is None else policy.recall.dense
    if policy.rebuilding is not None:
        dense = policy.rebuilding.depth
    if not dense:
        return []
    return [f"the first {'layer keeps' if dense == 1 else f'{dense} layers keep'} everything"]


def _sliding_layers(spec: ModelSpec | None) -> tuple[str, ...]:
    if spec is None or len(spec.managed) == len(spec.layers):
        return ()
    if not spec.managed:
        return (f"all {len(spec.layers)} layers slide: policy and budget change nothing here",)
    count = len(spec.layers) - len(spec.managed)
    return (f"{count} of {len(spec.layers)} layers hold sliding windows of their own",)
