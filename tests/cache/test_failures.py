"""Failed allocations: a change that runs out of memory leaves a store as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from builders import a_plan, layer_options
from cache_stores import exact, same_bits
from larder.cache import CacheLayer, GradedLayer, RaggedLayer
from larder.core import CacheError, Folds, LayerSpec, Plan
from memory_counts import assert_counted

# Operations that only write into memory that is there already.
IN_PLACE = ("copy_", "index_copy_", "index_put_", "add_", "fill_", "zero_")


@pytest.fixture(autouse=True)
def counted_memory() -> None:
    """Counts are checked when memory is not scarce any more, see `refusals`."""


class Scarce(TorchDispatchMode):
    """Refuses the allocation of the given number, counted from 0."""

    def __init__(self, refused: int) -> None:
        super().__init__()
        self.left = refused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ not in IN_PLACE and not func.is_view:
            if self.left == 0:
                raise MemoryError("no more")
            self.left -= 1
        return func(*args, **(kwargs or {}))


def refusals(make: Callable[[], CacheLayer], change: Callable[[CacheLayer], None]) -> int:
    """Try the change with every allocation refused in turn; how many were refused.

    Of the many that a store of several precisions makes, only some.
    """
    step = 7 if isinstance(make(), GradedLayer) else 1
    for refused in range(0, 300 * step, step):
        store = make()
        before = store.state()
        try:
            with Scarce(refused):
                change(store)
        except MemoryError:
            assert same_bits(store.state(), before), refused
            assert_counted(store)
        else:
            return refused
    raise AssertionError("never enough memory")


def assert_refused_in_vain(
    make: Callable[[], CacheLayer], change: Callable[[CacheLayer], None]
) -> None:
    """After all refusals, one store that suffered them holds what an untroubled one does."""
    store, untroubled = make(), make()
    assert refusals(lambda: store, change) > 0
    change(untroubled)
    assert same_bits(store.state(), untroubled.state())
    assert store.nbytes == untroubled.nbytes


def thinned(lengths: tuple[int, ...]) -> Plan:
    return a_plan([list(range(0, length, 2)) for length in lengths], lengths)


def full_plan(store: CacheLayer) -> Plan:
    """A plan that folds and writes everything that there is to write."""
    plan, entries = thinned(store.lengths), store.entries()
    targets = plan.kept[exact(store)[plan.kept]]
    folds = Folds(
        torch.arange(sum(store.lengths)),
        targets[torch.arange(sum(store.lengths)) % len(targets)],
        torch.linspace(0.1, 1, sum(store.lengths)),
        torch.linspace(1, 0.1, sum(store.lengths)),
    )
    numbers = torch.arange(len(plan.kept)).double()  # of another type than the ledger's
    return replace(
        plan,
        folds=folds,
        columns=dict.fromkeys(entries.columns, numbers),
        scalars=dict.fromkeys(entries.scalars, torch.ones(len(store.lengths))),
    )


@pytest.mark.parametrize("size", [1, 80])
def test_failed_append_changes_nothing(subject, size) -> None:
    new = subject.tokens(size, 13)
    change = lambda store: store.append(new.keys, new.values, new.positions)  # noqa: E731
    store, _ = subject.filled()
    assert refusals(lambda: store, change) > 0


def test_failed_reserve_and_compact_change_nothing(subject) -> None:
    def slack() -> CacheLayer:
        store, _ = subject.filled()
        store.reserve(5)
        return store

    for make, change in (
        (lambda: subject.filled()[0], lambda store: store.reserve(90)),
        (slack, lambda store: store.compact()),
    ):
        store = make()
        refusals(lambda store=store: store, change)


def test_failed_plan_changes_nothing(planned, carry_out) -> None:
    plan = thinned(planned.filled()[0].lengths)
    assert_refused_in_vain(lambda: planned.filled()[0], lambda store: carry_out(store, plan))


@pytest.mark.parametrize("remembering", ["remembering-grouped", "coded-grouped"], indirect=True)
def test_failed_merge_and_column_writes_change_nothing(remembering, carry_out) -> None:
    def roomy() -> CacheLayer:
        store = remembering.filled(dtype=torch.bfloat16)[0]
        store.allocate(3)
        return store

    plan = full_plan(roomy())
    assert_refused_in_vain(roomy, lambda store: carry_out(store, plan))


def test_failed_column_write_changes_nothing(remembering) -> None:
    names = remembering.kind.ledger.columns

    def change(store: CacheLayer) -> None:
        store.write_columns(written)

    store = remembering.filled()[0]
    written = {name: torch.rand(len(store.entries().positions)) for name in names}
    refusals(lambda: store, change)


def test_failed_truncate_changes_nothing(subject) -> None:
    store, _ = subject.filled()
    assert refusals(lambda: store, lambda store: store.truncate(5)) > 0


def test_append_of_another_dtype_names_layer_and_dtypes() -> None:
    layer = RaggedLayer(LayerSpec(3, 2, 1, 4, 0.5), layer_options())
    rows, positions = torch.zeros(1, 2, 4), torch.arange(2)
    layer.append(rows, rows, positions)
    with pytest.raises(CacheError, match=r"Layer 3 .* values in torch.bfloat16.* torch.float32: "):
        layer.append(rows, rows.bfloat16(), positions + 2)
    assert layer.lengths == (2,)
