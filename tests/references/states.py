"""`states`: what enters attention, as it is."""

from __future__ import annotations

from typing import Any


def captured(attention: Any, states: list[list[float]]) -> list[list[float]]:
    del attention
    return [list(row) for row in states]
