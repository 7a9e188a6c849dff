"""All parts of the families that decide: a new part is tested by existing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass, replace
from enum import Enum
from importlib import import_module
from typing import Any

import pytest

from builders import runnable, small_parameters
from larder.core import public_name
from larder.policy import TALLIES
from larder.session import FAMILIES as SLOTS

FAMILIES = {**SLOTS, "tally": TALLIES}


def instances(slot: str) -> list[Any]:
    """Every part of a family, once per variant."""
    return [part for name in runnable(FAMILIES[slot].names()) for part in variants(slot, name)]


def variants(slot: str, name: str) -> Iterator[Any]:
    part = FAMILIES[slot].load(name)(**small_parameters(name))
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
    return "-".join([public_name(type(part)), *[v.value for v in shown if isinstance(v, Enum)]])


def reference(part: Any) -> Any:
    """The module with the loop that a part must equal."""
    return import_module(f"references.{public_name(type(part))}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for slot in FAMILIES:
        if slot in metafunc.fixturenames:
            metafunc.parametrize(slot, instances(slot), ids=label)


@pytest.fixture(scope="session")
def loop_of() -> Any:
    return reference
