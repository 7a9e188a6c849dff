"""Small layer specs and random tensors for tests of caches and policies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from larder.cache import FORMS, CacheSpec, LayerOptions
from larder.core import Entries, LayerSpec, ModelSpec, Observation, OffloadSpec, Plan, RecomputeSpec
from larder.policy import (
    PROVIDERS,
    TALLIES,
    ActivationProvider,
    GradientProvider,
    Provider,
    select_providers,
)
from larder.recall import Flat

# Cache forms that a cache may be given by name; the others are created by these.
FORM_NAMES = [name for name in FORMS.names() if FORMS.load(name).has_public_name]
HEAD_DIM = 8
HIDDEN = 12
# Parts that another package does the work of, by its name; without it nobody can try them.
CARRIED = {"kvpress": "kvpress"}
RADIANS = (1.0, 0.3, 0.07)  # the last two dimensions are not turned


def runnable(names: Iterable[str]) -> list[str]:
    """Parts whose package, if they need one, is installed."""
    return [name for name in names if name not in CARRIED or find_spec(CARRIED[name])]


def small_parameters(name: str) -> dict[str, Any]:
    """Parameters of a part that suit small layers, from its reference; else its defaults."""
    return vars(import_module(f"references.{name}")).get("SMALL", {})


def a_layer(
    kv_heads: int = 2, group: int = 2, window: int | None = None, index: int = 0
) -> LayerSpec:
    return LayerSpec(index, kv_heads * group, kv_heads, HEAD_DIM, 0.3, window, RADIANS)


def a_spec(*layers: LayerSpec, dtype: torch.dtype = torch.float32) -> ModelSpec:
    return ModelSpec(layers, dtype, torch.device("cpu"))


def layer_options(
    dtype: torch.dtype = torch.float32, device: torch.device | None = None, **spec: Any
) -> LayerOptions:
    return LayerOptions(dtype, device or torch.device("cpu"), CacheSpec("ragged", **spec))


def parking_of(form: str) -> OffloadSpec | None:
    """Recall of a cache of that form: of all parked entries; None if it parks none."""
    return OffloadSpec(Flat(tokens=1000, page=4, dense=0)) if form == "tiered" else None


def tiers_of(form: str) -> dict[str, Any]:
    """Tiers of rejected entries that a cache of that form is made with."""
    rebuilding = RecomputeSpec() if form == "rebuilt" else None
    return {"parking": parking_of(form), "rebuilding": rebuilding}


@dataclass(frozen=True)
class Tokens:
    """Projections of new tokens in a layer: queries [H, Q, D], keys and values [K, Q, D]."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor

    def part(self, start: int, stop: int) -> Tokens:
        span = slice(start, stop)
        return Tokens(
            self.queries[:, span], self.keys[:, span], self.values[:, span], self.positions[span]
        )


def draw(
    layer: LayerSpec, count: int, start: int = 0, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Tokens:
    """Random tokens at true positions start, start + 1, ..."""
    source = torch.Generator().manual_seed(1000 * seed + start)

    def normal(heads: int) -> Tensor:
        return (2 * torch.randn(heads, count, layer.head_dim, generator=source)).to(dtype)

    positions = torch.arange(start, start + count)
    return Tokens(
        normal(layer.query_heads), normal(layer.kv_heads), normal(layer.kv_heads), positions
    )


def a_plan(heads: Iterable[Sequence[int]], held: Sequence[int]) -> Plan:
    """The plan that keeps the named entries of each head, when heads hold `held` entries each."""
    kept: list[int] = []
    counts: list[int] = []
    start = 0
    for chosen, length in zip(heads, held, strict=True):
        kept += [start + index for index in chosen]
        counts.append(len(chosen))
        start += length
    return Plan(torch.tensor(kept, dtype=torch.int64), tuple(counts))


def some_entries(
    layer: LayerSpec,
    positions: Sequence[Sequence[int]],
    slack: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Entries:
    """Random entries at the given positions of each head; rows that nobody owns hold garbage."""
    source = torch.Generator().manual_seed(seed)
    rows = sum(len(head) + slack for head in positions)
    keys, values = torch.randn(2, rows, layer.head_dim, generator=source).mul(2).to(dtype)
    indices = torch.full((rows,), 10**6, dtype=torch.int32)
    starts, start = [], 0
    for head in positions:
        starts.append(start)
        indices[start : start + len(head)] = torch.tensor(head, dtype=torch.int32)
        start += len(head) + slack
    lengths = tuple(len(head) for head in positions)
    return Entries(keys, values, indices, tuple(starts), lengths)


SENTENCE_TOKENS = 3  # of all sentences in the columns of a view


def a_view(
    layer: LayerSpec, positions: Sequence[Sequence[int]], queries: int = 5, seed: int = 0
) -> Observation:
    """Observation of a layer after a block of `queries` tokens, at the end of its entries."""
    length = 1 + max((p for head in positions for p in head), default=0)
    block = draw(layer, queries, max(0, length - queries), seed + 1)
    entries = some_entries(layer, positions, seed=seed)
    indices = entries.positions
    ends = indices % SENTENCE_TOKENS == SENTENCE_TOKENS - 1
    starts = (indices - indices % SENTENCE_TOKENS + 1).float()
    sentences = dict.fromkeys(("sentence", "shot"), torch.where(ends, -starts, starts))
    remembered = replace(entries, columns=some_columns(len(entries.keys), seed) | sentences)
    channels = head_numbers(layer.head_dim) * layer.kv_heads  # heads may be reordered
    calibration = {"retrieval": head_numbers(layer.query_heads), "q_filters": channels}
    inputs = captured_inputs(layer, queries, seed)
    ids = tuple(range(queries))
    return Observation(
        layer=layer,
        entries=remembered,
        queries=block.queries,
        query_positions=block.positions,
        length=length,
        span=(0, length),
        ids=ids,
        keys=block.keys,
        calibration=calibration,
        inputs=inputs,
    )


def head_numbers(count: int) -> tuple[float, ...]:
    """A number for each of some heads, some equal and some 0, as a measurement may give."""
    return tuple((7 * head + 3) % 5 / 4 for head in range(count))


def some_columns(rows: int, seed: int = 0) -> dict[str, Tensor]:
    """A number in (0, 1) per row in every column that a tally keeps, or who reads."""
    source = torch.Generator().manual_seed(seed)
    return {name: torch.rand(rows, generator=source) for name in kept_columns()}


@cache
def kept_columns() -> list[str]:
    """Finding the parts of a family reads what every installed package offers: once is enough."""
    tallies = [TALLIES.load(name) for name in TALLIES.names()]
    provided = select_providers(PROVIDERS.names(), Provider).items()
    columns = {name for name, provider in provided if provider.has_column}
    return sorted(columns.union(name for tally in tallies for name in tally.columns))


class ToyAttention(nn.Module):
    """Attention module with the projections that providers find in models."""

    def __init__(self, layer: LayerSpec, hidden: int = HIDDEN) -> None:
        super().__init__()
        queries, keys = layer.query_heads * layer.head_dim, layer.kv_heads * layer.head_dim
        self.q_proj, self.o_proj = nn.Linear(hidden, queries), nn.Linear(queries, hidden)
        self.k_proj, self.v_proj = nn.Linear(hidden, keys), nn.Linear(hidden, keys)


def captured_inputs(layer: LayerSpec, queries: int, seed: int = 0) -> dict[str, Tensor]:
    """Inputs that all activation providers capture in a pass of random hidden states."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        attention, states = ToyAttention(layer), torch.randn(queries, HIDDEN)
        providers = select_providers(PROVIDERS.names(), ActivationProvider)
        captured = {name: each.capture(attention, states) for name, each in providers.items()}
        slopes = select_providers(PROVIDERS.names(), GradientProvider)
        return captured | {name: each.numbers(states) for name, each in slopes.items()}
