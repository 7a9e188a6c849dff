"""Cells put together to blocks, each of which one command measures: all of it and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from larder.bench.amounts import OWN, WHOLE
from larder.bench.rows import Row

# What two blocks may differ in to become one, the first of it first.
DIMENSIONS = (
    "seed",
    "budget",
    "policy",
    "matched",
    "measure",
    "tokens",
    "task",
    "model",
)
APART = ("device", "dtype")  # one each in a command
Block = dict[str, tuple[str | int, ...]]  # by dimension; budgets are empty where none is chosen


def blocks(rows: Sequence[Row]) -> list[Block]:
    """Blocks that hold every cell once: each value of a dimension with each of all others."""
    found: list[Block] = [{name: (row[name],) for name in (*DIMENSIONS, *APART)} for row in rows]
    found = _merged(found, "seed")
    found = [part for block in found for part in _in_a_row(block)]
    found = _chosen(_merged(found, "budget"))
    for name in DIMENSIONS[2:]:
        found = _merged(found, name)
    return found


def _merged(found: Sequence[Block], name: str) -> list[Block]:
    """Those that differ in nothing else become one."""
    groups: dict[tuple[object, ...], Block] = {}
    for block in found:
        rest = tuple(values for key, values in block.items() if key != name)
        own = groups.setdefault(rest, block | {name: ()})
        own[name] = tuple(dict.fromkeys((*own[name], *block[name])))
    return list(groups.values())


def _in_a_row(block: Block) -> Iterator[Block]:
    """Seeds that follow each other: a command names the first of them and how many."""
    seeds = sorted(int(seed) for seed in block["seed"])
    starts = [seed for seed in seeds if seed - 1 not in seeds]
    for start, end in zip(starts, [*starts[1:], seeds[-1] + 1], strict=True):
        yield block | {"seed": tuple(seed for seed in seeds if start <= seed < end)}


def _chosen(found: Sequence[Block]) -> list[Block]:
    """What has no budget to choose goes with the budgets of others, for it is run with any."""
    told: dict[tuple[object, ...], Block] = {}
    for block in found:
        if not set(block["budget"]) <= {WHOLE, OWN}:
            told.setdefault(_beside(block), block)
    return [
        block | {"budget": told[_beside(block)]["budget"] if _beside(block) in told else ()}
        if set(block["budget"]) <= {WHOLE, OWN}
        else block
        for block in found
    ]


def _beside(block: Block) -> tuple[object, ...]:
    return tuple(values for key, values in block.items() if key not in ("budget", "policy"))
