"""All parts of the families that decide: a new part is tested by existing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass, replace
from enum import Enum
from importlib import import_module
from typing import Any

import pytest

from builders import runnable
from larder.core.spelling import name_of
from larder.policy.planner import TALLIES
from larder.session.policy import FAMILIES as SLOTS

FAMILIES = {**SLOTS, "tally": TALLIES}

# Parameters small enough for the small layers of these tests.
SMALL: dict[str, dict[str, Any]] = {
    "snapkv": {"window": 3, "kernel": 3},
    "reconstruct": {"chunk": 7},
    "novelty": {"decay": 0.8, "turn": 3},
    "infinipot": {"novel": 0.4},
    "lookahead": {"tokens": 3, "kernel": 3},
    "positions_first": {"tokens": 3},
    "random": {"seed": 3},
    "morph": {"window": 3},
    "leverage": {"sketch": 5, "ridge": 0.02, "seed": 2},
    "expected": {"future": 5, "sinks": 2, "epsilon": 0.03},
    "sinks_and_window": {"sinks": 2},
    "roco": {"spared": 0.4},
    "lagkv": {"sinks": 1, "lag": 2},
    "lagged": {"tokens": 5},
    "split": {"reading": 0.6, "recent": 2, "every": 4},
    "mean_variance": {"gamma": 2.0},
    "ema": {"beta": 0.6},
    "criticality": {"epsilon": 0.05},
    "cam": {"window": 2, "seed": 7},
    "kvmerger": {"threshold": -0.1, "width": 0.8},
    "chelsea": {"chunk": 5},
    "fixed_slot": {"distance": 4},
    "chunk": {"size": 3},
    "window": {"size": 4},
    "ada": {"safeguard": 0.5},
    "dynamic": {"most": 1.5, "least": 0.5},
    "threshold": {"share": 0.3},
    "headkv": {"beta": 1.5},
    "retrieval_heads": {"share": 0.3},
    "eviction_error": {"least": 7, "most": 2.0},
    "retrieval": {"heads": 2},
    "ladder": {"span": 0.4},
}


def instances(slot: str) -> list[Any]:
    """Every part of a family, once per variant."""
    return [part for name in runnable(FAMILIES[slot].names()) for part in variants(slot, name)]


def variants(slot: str, name: str) -> Iterator[Any]:
    part = FAMILIES[slot].load(name)(**SMALL.get(name, {}))
    named = [f.name for f in parameters(part) if isinstance(getattr(part, f.name), Enum)]
    if not named:
        yield part
    for field in named:
        for member in type(getattr(part, field)):
            yield replace(part, **{field: member})


def parameters(part: Any) -> tuple[Field[Any], ...]:
    return fields(part) if is_dataclass(part) else ()


def label(part: Any) -> str:
    shown = [getattr(part, f.name) for f in parameters(part)]
    return "-".join([name_of(type(part)), *[v.value for v in shown if isinstance(v, Enum)]])


def reference(part: Any) -> Any:
    """The module with the loop that a part must equal."""
    return import_module(f"references.{name_of(type(part))}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for slot in FAMILIES:
        if slot in metafunc.fixturenames:
            metafunc.parametrize(slot, instances(slot), ids=label)


@pytest.fixture(scope="session")
def loop_of() -> Any:
    return reference
