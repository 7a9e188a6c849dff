"""Entries of a layer after a plan, one by one."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from larder.core import Entries


@dataclass
class Entry:
    """One kept entry.

    Args:
        kept: its number among the entries of its head before the plan.
    """

    kept: int
    key: list[float]
    value: list[float]
    columns: dict[str, float] = field(default_factory=dict)


@dataclass
class Outcome:
    """Entries of each head, and scalars of each head by name.

    Args:
        added: entries behind the kept ones of each head, `kept` their true position.
    """

    heads: list[list[Entry]]
    scalars: dict[str, list[float]] = field(default_factory=dict)
    added: list[list[Entry]] = field(default_factory=list)


def untouched(entries: Entries, kept: list[list[int]]) -> Outcome:
    """The kept entries as they were."""
    return Outcome([[_entry(entries, h, s) for s in head] for h, head in enumerate(kept)])


def key_of(entries: Entries, head: int, entry: int) -> list[float]:
    return _numbers(entries.keys[entries.starts[head] + entry])


def value_of(entries: Entries, head: int, entry: int) -> list[float]:
    return _numbers(entries.values[entries.starts[head] + entry])


def _entry(entries: Entries, head: int, entry: int) -> Entry:
    row = entries.starts[head] + entry
    columns = {name: float(column[row]) for name, column in entries.columns.items()}
    return Entry(entry, key_of(entries, head, entry), value_of(entries, head, entry), columns)


def _numbers(row: Tensor) -> list[float]:
    return [float(x) for x in row]
