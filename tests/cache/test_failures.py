"""A change that fails for want of memory leaves a store as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from larder.cache.base import Store

# Operations that only write into memory that is there already.
IN_PLACE = ("copy_", "index_put_", "add_", "fill_", "zero_")


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


def refusals(make: Callable[[], Store], change: Callable[[Store], None]) -> int:
    """Try the change with every allocation refused in turn; how many were refused."""
    for refused in range(100):
        store, before = make(), make().state()
        try:
            with Scarce(refused):
                change(store)
        except MemoryError:
            after = store.state()
            assert all(torch.equal(after[name], before[name]) for name in before), refused
        else:
            return refused
    raise AssertionError("never enough memory")


@pytest.mark.parametrize("size", [1, 80])
def test_appending(subject, size) -> None:
    new = subject.tokens(size, 13)
    change = lambda store: store.append(new.keys, new.values, new.positions)  # noqa: E731
    assert refusals(lambda: subject.filled()[0], change) > 0


def test_reserving_and_compacting(subject) -> None:
    def slack() -> Store:
        store, _ = subject.filled()
        store.reserve(5)
        return store

    refusals(lambda: subject.filled()[0], lambda store: store.reserve(90))
    refusals(slack, lambda store: store.compact())


def test_carrying_out_a_plan(planned) -> None:
    lengths = planned.filled()[0].lengths
    heads = [list(range(0, length, 2)) for length in lengths]

    def change(store: Store) -> None:
        from builders import a_plan

        store.apply(a_plan(heads, lengths))

    assert refusals(lambda: planned.filled()[0], change) > 0


def test_truncating(subject) -> None:
    assert refusals(lambda: subject.filled()[0], lambda store: store.truncate(5)) > 0
