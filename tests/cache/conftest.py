"""The stores that the contract holds for: a new one joins by being listed here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from importlib import import_module
from random import Random
from typing import Any

import pytest
import torch

from builders import Tokens, a_layer, a_plan, draw, layer_options
from larder.cache import (
    FORMS,
    CacheLayer,
    CompactLayer,
    DenseLayer,
    GradedLayer,
    LayerOptions,
    LowRankLayer,
    RaggedLayer,
    SlidingWindowLayer,
    TieredLayer,
)
from larder.core import LOG_COUNT, Codec, LayerSpec, Ledger, OffloadSpec, Plan
from larder.recall import Flat
from low_rank_weights import silent_maps
from memory_counts import checked_counts
from references.cache.compact import CompactLoop
from references.cache.dense import DenseLoop
from references.cache.ragged import RaggedLoop
from references.cache.window import WindowLoop
from transforms import a_transform_layer


@pytest.fixture(autouse=True)
def counted_memory() -> Iterator[None]:
    with checked_counts():
        yield


class Plans(Enum):
    """Which plans a store can carry out."""

    NONE = "none"
    SAME_IN_EVERY_HEAD = "same"
    ANY = "any"


@dataclass(frozen=True)
class Kind:
    """One form of storage, the loop it must equal, and what it can do.

    Args:
        merges: whether it carries out folds.
        ledger: what it remembers; the numbers stay 0 or NaN unless a test writes them.
        codecs: of its grades; they change no number, so that it must equal the loop.
        grades: given to the entries of a filled store in turn.
        parks: whether what plans reject is attended to all the same.
    """

    store: Callable[[LayerSpec, LayerOptions], CacheLayer]
    loop: Callable[[LayerSpec], RaggedLoop]
    plans: Plans
    merges: bool = False
    ledger: Ledger = Ledger()
    codecs: tuple[Codec, ...] = ()
    grades: tuple[int, ...] = (0,)
    window: int | None = None
    chunk: int | None = None
    parks: bool = False


# In groups of three and two, numbers as they are.
LOSSLESS = (Codec(0, 0, 3), Codec(0, 0, 2))
LEDGER = Ledger(("mass", LOG_COUNT, "age"), ("threshold", "mean"))


PARKING = OffloadSpec(Flat(tokens=8, page=4, dense=0))


def a_transformed(layer: LayerSpec, options: LayerOptions) -> CacheLayer:
    dtype, device = options.dtype, options.device
    return a_transform_layer(layer, dtype, device, options.spec.ledger, step=0.0)  # codes nothing


def a_low_rank(layer: LayerSpec, options: LayerOptions) -> CacheLayer:
    return LowRankLayer(layer, options, silent_maps(layer))


KINDS = {
    "dense": Kind(DenseLayer, DenseLoop, Plans.SAME_IN_EVERY_HEAD),
    "ragged": Kind(RaggedLayer, RaggedLoop, Plans.ANY, merges=True),
    "remembering": Kind(RaggedLayer, RaggedLoop, Plans.ANY, merges=True, ledger=LEDGER),
    "compact": Kind(CompactLayer, CompactLoop, Plans.ANY, merges=True),
    "graded": Kind(GradedLayer, RaggedLoop, Plans.ANY, True, LEDGER, LOSSLESS),
    "coded": Kind(GradedLayer, RaggedLoop, Plans.ANY, True, LEDGER, LOSSLESS, (0, 0, 1, 0, 2, 1)),
    "transformed": Kind(a_transformed, RaggedLoop, Plans.ANY, True, LEDGER),
    "low_rank": Kind(a_low_rank, RaggedLoop, Plans.ANY, True, LEDGER),
    "tiered": Kind(TieredLayer, RaggedLoop, Plans.NONE, parks=True),
    "window": Kind(SlidingWindowLayer, WindowLoop, Plans.NONE, window=6),
    "chunked": Kind(SlidingWindowLayer, WindowLoop, Plans.NONE, window=6, chunk=6),
}
# Forms that are compared with a loop in a test file of their own.
COMPARED_APART = {
    *("blended", "corrected", "gapless", "graded", "paged", "paired", "parallel", "rebuilt"),
    *("residual", "shared_kv", "transform"),
}
# Any other form joins by its file and the `Loop` of its reference, which takes plans of any kind.
KINDS |= {
    name: Kind(FORMS.load(name), import_module(f"references.cache.{name}").Loop, Plans.ANY, True)
    for name in FORMS.names()
    if name not in KINDS.keys() | COMPARED_APART
}
SHAPES = {"grouped": (2, 2), "multi_query": (1, 3), "multi_head": (3, 1)}  # K, R


@dataclass
class Subject:
    """A store under test."""

    kind: Kind
    layer: LayerSpec

    def new(self, dtype: torch.dtype = torch.float32) -> CacheLayer:
        ledger, codecs = self.kind.ledger, self.kind.codecs
        parking = PARKING if self.kind.parks else None
        options = layer_options(dtype, ledger=ledger, codecs=codecs, parking=parking)
        return self.kind.store(self.layer, options)

    def loop(self) -> RaggedLoop:
        return self.kind.loop(self.layer)

    def tokens(self, count: int, start: int = 0, seed: int = 0) -> Tokens:
        return draw(self.layer, count, start, seed)

    def stored(self, new: Tokens, dtype: torch.dtype) -> Tokens:
        """Keys and values in the type of the storage, queries as they are."""
        return replace(new, keys=new.keys.to(dtype), values=new.values.to(dtype))

    def chosen(self, held: int) -> list[list[int]]:
        """Entries to keep in each head: uneven and one head empty, where the form allows it."""
        if self.kind.plans is Plans.SAME_IN_EVERY_HEAD:
            return [list(range(0, held, 3))] * self.layer.kv_heads
        heads = [list(range(head, held, 2 + head)) for head in range(self.layer.kv_heads)]
        return [*heads[:-1], []] if len(heads) > 1 else heads

    def unreplaced_bytes(self, store: CacheLayer) -> int:
        """Bytes that appending leaves where they are."""
        if isinstance(store, GradedLayer):
            return store.coded_bytes
        return store.low_rank_state.nbytes if isinstance(store, LowRankLayer) else 0

    def losing(self, source: Random, lengths: tuple[int, ...], gone: int) -> list[list[int]]:
        """All but `gone` entries of each head, any of them."""
        same = self.kind.plans is Plans.SAME_IN_EVERY_HEAD
        heads = [
            sorted(source.sample(range(length), max(length - gone, 0)))
            for length in (lengths[:1] if same else lengths)
        ]
        return heads * len(lengths) if same else heads

    def filled(
        self, count: int = 13, dtype: torch.dtype = torch.float32
    ) -> tuple[CacheLayer, RaggedLoop]:
        """Some tokens appended, and a plan carried out if the form takes plans."""
        store, loop = self.new(dtype), self.loop()
        new = self.stored(self.tokens(count), dtype)
        for twin in (store, loop):
            twin.append(new.keys, new.values, new.positions)
        if self.kind.plans is not Plans.NONE:
            chosen = self.chosen(count)
            loop.keep(chosen)
            plan = self.plan(chosen, count)
            if any(self.kind.grades):
                turns = [self.kind.grades[i % len(self.kind.grades)] for i in range(len(plan.kept))]
                plan = replace(plan, grades=torch.tensor(turns, dtype=torch.int8))
            store.apply(plan)
        return store, loop

    def plan(self, chosen: list[list[int]], held: int) -> Plan:
        return a_plan(chosen, [held] * self.layer.kv_heads)


def cases(*kinds: str) -> list[str]:
    """Each kind in all shapes; one that only adds to another in one of them."""
    return [
        f"{kind}-{shape}"
        for kind in kinds
        for shape in SHAPES
        if kind not in ("remembering", "graded", "coded", "transformed") or shape == "grouped"
    ]


def a_subject(case: str) -> Subject:
    kind, shape = case.split("-")
    layer = a_layer(*SHAPES[shape], window=KINDS[kind].window)
    return Subject(KINDS[kind], replace(layer, chunk=KINDS[kind].chunk))


@pytest.fixture(params=cases(*KINDS))
def subject(request: pytest.FixtureRequest) -> Subject:
    return a_subject(request.param)


@pytest.fixture(params=cases(*(n for n, kind in KINDS.items() if kind.plans is not Plans.NONE)))
def planned(request: pytest.FixtureRequest) -> Subject:
    """Stores that carry out plans."""
    return a_subject(request.param)


@pytest.fixture(params=cases(*(name for name, kind in KINDS.items() if kind.merges)))
def merging(request: pytest.FixtureRequest) -> Subject:
    """Stores that carry out folds."""
    return a_subject(request.param)


# Attention that has more than a scaling.
VARIANTS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": (0.5, -1.0, 3.0, 0.0)},
    "both": {"softcap": 4.0, "sinks": (0.5, -1.0, 3.0, -60.0)},
}


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Fields of a layer of four query heads."""
    return VARIANTS[request.param]


@pytest.fixture(params=KINDS)
def variant_subject(request: pytest.FixtureRequest, variant: dict[str, Any]) -> Subject:
    """Every store over a layer whose attention has a softcap, sinks or both."""
    subject = a_subject(f"{request.param}-grouped")
    return Subject(subject.kind, replace(subject.layer, **variant))


@pytest.fixture(params=[*(f"remembering-{shape}" for shape in SHAPES), "coded-grouped"])
def remembering(request: pytest.FixtureRequest) -> Subject:
    """A store with a ledger."""
    return a_subject(request.param)


@pytest.fixture(params=["apply", "evict"])
def carry_out(request: pytest.FixtureRequest) -> Callable[[CacheLayer, Plan], None]:
    """Both ways of carrying out a plan."""
    return lambda store, plan: getattr(store, request.param)(plan)
