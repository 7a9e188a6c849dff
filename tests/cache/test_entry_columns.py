"""Numbers that a policy has a store remember: each moves with its entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
import torch
from torch import Tensor

from builders import a_layer, a_plan, layer_options
from cache_stores import append, extend, same_bits
from larder.cache import CacheLayer, RaggedLayer
from larder.core import LOG_COUNT, CacheError, Ledger
from tensor_memory import reachable_tensors, storage_bytes


def identities(store: CacheLayer) -> Tensor:
    """A number for every packed entry that tells it from all others."""
    entries = store.entries()
    heads = range(len(entries.lengths))
    return torch.cat([1000.0 * (h + 1) + entries.head_positions(h) for h in heads])


def signed(store: CacheLayer) -> CacheLayer:
    """Write into every entry who it is, and a scalar into every head."""
    entries = store.entries()
    own = identities(store)
    store.write_columns({"mass": entries.unpack(own), "age": entries.unpack(-own)})
    scalars = {"mean": torch.arange(len(entries.lengths)) + 0.5}
    everything = a_plan([range(n) for n in store.lengths], store.lengths)
    store.evict(replace(everything, scalars=scalars))
    return store


def assert_signed(store: CacheLayer, until: int) -> None:
    """Entries before position `until` still know who they are; later ones are new."""
    entries = store.entries()
    old = entries.packed_positions() < until
    expected = torch.where(old, identities(store), 0.0)
    assert torch.equal(entries.column("mass"), expected)
    assert torch.equal(entries.column("age"), -expected)
    assert not entries.column(LOG_COUNT).any()
    heads = len(store.lengths)
    assert torch.equal(entries.scalars["mean"], torch.arange(heads) + 0.5)
    assert entries.scalars["threshold"].isnan().all()


def a_change(name: str, subject, store: CacheLayer) -> tuple[CacheLayer, int]:
    """The store after a change, and the position behind the last that was there before."""
    lengths = store.lengths
    losing = a_plan(subject.losing(Random(6), lengths, 2), lengths)
    if name == "append":
        append(store, subject.tokens(3, 13))
    elif name == "append_beyond_the_room":
        append(store, subject.tokens(90, 13))
    elif name == "extend_by_one":
        extend(store, subject.tokens(1, 13))
    elif name in ("apply", "evict"):
        getattr(store, name)(losing)
    elif name == "append_where_evicted_entries_lay":
        store.evict(losing)
        append(store, subject.tokens(2, 13))
    elif name == "append_where_truncated_entries_lay":
        store.truncate(9)
        append(store, subject.tokens(4, 9))
        return store, 9
    elif name == "allocate":
        store.allocate(50)
    elif name == "compact":
        store.allocate(50)
        store.compact()
    elif name == "fork":
        return store.fork(), 13
    elif name == "restore":
        return type(store).restore(store.layer, store.state()), 13
    elif name == "adopt":
        return type(store).adopt(store.layer, store.state()), 13
    else:
        raise AssertionError(name)
    return store, 13


CHANGES = (
    "append",
    "append_beyond_the_room",
    "extend_by_one",
    "apply",
    "evict",
    "append_where_evicted_entries_lay",
    "append_where_truncated_entries_lay",
    "allocate",
    "compact",
    "fork",
    "restore",
    "adopt",
)


@pytest.mark.parametrize("change", CHANGES)
def test_columns_move_with_their_entries(remembering, change) -> None:
    store, until = a_change(change, remembering, signed(remembering.filled()[0]))
    assert sum(store.lengths) > 0
    assert_signed(store, until)
    assert storage_bytes(reachable_tensors(store)) == store.nbytes
    assert store.entries().columns.keys() == set(remembering.kind.ledger.columns)


def test_columns_follow_entries_through_random_operations(remembering) -> None:
    source, until = Random(7), 13
    store = signed(remembering.filled()[0])
    for turn in range(24):
        store = store.fork() if turn % 9 == 8 else store
        append(store, remembering.tokens(source.randint(1, 3), until))
        assert_signed(store, until)
        until = 1 + int(store.entries().positions.max())
        signed(store)
        chosen = remembering.losing(source, store.lengths, source.randint(0, 4))
        (store.apply if turn % 5 == 4 else store.evict)(a_plan(chosen, store.lengths))
        assert_signed(store, until)


def test_new_store_has_zero_columns(remembering) -> None:
    store = remembering.new()
    append(store, remembering.tokens(5))
    entries = store.entries()
    assert entries.columns.keys() == {"mass", LOG_COUNT, "age"}
    assert not any(entries.column(name).any() for name in entries.columns)
    for copy in (store, store.fork(), type(store).restore(store.layer, store.state())):
        scalars = copy.entries().scalars
        assert scalars.keys() == {"threshold", "mean"}
        assert all(held.isnan().all() for held in scalars.values())


def test_plan_writes_columns_and_scalars(remembering, carry_out) -> None:
    store = signed(remembering.filled()[0])
    store.allocate(3)
    plan = a_plan(remembering.losing(Random(8), store.lengths, 2), store.lengths)
    kept, heads = identities(store)[plan.kept], len(store.lengths)
    written = torch.arange(len(kept)) + 0.25
    scalars = {"threshold": torch.arange(heads) * 1.5}
    carry_out(store, replace(plan, columns={"age": written}, scalars=scalars))
    entries = store.entries()
    assert torch.equal(entries.column("age"), written)
    assert torch.equal(entries.column("mass"), kept)
    assert torch.equal(entries.scalars["threshold"], scalars["threshold"])
    assert torch.equal(entries.scalars["mean"], torch.arange(heads) + 0.5)


def test_columns_of_another_dtype_are_converted(remembering, carry_out) -> None:
    store = remembering.filled()[0]
    plan = a_plan([range(n) for n in store.lengths], store.lengths)
    counts, heads = torch.arange(len(plan.kept)), len(store.lengths)
    columns, scalars = {"age": counts.double()}, {"mean": torch.ones(heads).bfloat16()}
    carry_out(store, replace(plan, columns=columns, scalars=scalars))
    entries = store.entries()
    assert entries.column("age").dtype is entries.scalars["mean"].dtype is torch.float32
    assert torch.equal(entries.column("age"), counts.float())


def test_writing_columns_replaces_them(remembering) -> None:
    store = signed(remembering.filled()[0])
    store.allocate(4)
    rows = len(store.entries().positions)
    written = torch.arange(rows) / 7
    store.write_columns({"age": written})
    entries = store.entries()
    assert torch.equal(entries.columns["age"], written)
    assert torch.equal(entries.column("mass"), identities(store))
    written.zero_()
    assert store.entries().columns["age"].any()
    append(store, remembering.tokens(4, 13))  # into rows that were written
    new = store.entries().packed_positions() >= 13
    assert new.any() and not store.entries().column("age")[new].any()


def wrong(store: CacheLayer) -> dict[str, tuple[str, Callable[[], None]]]:
    """Refused writes by name, each with its error message."""
    entries = store.entries()
    rows, heads, ones = len(entries.positions), len(entries.lengths), torch.ones
    plan = a_plan([range(n) for n in entries.lengths], entries.lengths)
    kept = len(plan.kept)

    def noting(**columns: Tensor) -> Callable[[], None]:
        return lambda: store.write_columns(columns)

    def carrying_out(**parts) -> Callable[[], None]:
        def both() -> None:
            with pytest.raises(CacheError):
                store.apply(replace(plan, **parts))
            store.evict(replace(plan, **parts))

        return both

    known = "mass, log_count, age"
    return {
        "note_unknown": (rf"no 'moss' \(it holds: {known}\): name", noting(moss=ones(rows))),
        "note_half_known": ("no 'moss'", noting(mass=ones(rows), moss=ones(rows))),
        "note_few": (rf"\[{rows + 1}\], .* is \[{rows}\]", noting(age=ones(rows + 1))),
        "columns_unknown": ("no 'moss'", carrying_out(columns={"moss": ones(kept)})),
        "columns_few": ("one number per row", carrying_out(columns={"age": ones(kept + 1)})),
        "scalars_unknown": (
            r"no 'age' \(it holds: threshold, mean\)",
            carrying_out(scalars={"mean": ones(heads), "age": ones(heads)}),
        ),
        "scalars_few": ("per kv head", carrying_out(scalars={"mean": ones(heads + 1)})),
    }


def test_columns_of_unknown_name_or_wrong_length_are_refused_unchanged(remembering) -> None:
    store = signed(remembering.filled()[0])
    before = store.state()
    for message, write in wrong(store).values():
        with pytest.raises(CacheError, match=message):
            write()
        assert same_bits(store.state(), before)


def test_store_without_a_ledger_refuses_columns(subject) -> None:
    if subject.kind.ledger.columns:
        return
    store, _ = subject.filled()
    before, entries = store.state(), store.entries()
    assert not entries.columns and not entries.scalars
    if not subject.kind.parks:
        assert before.keys() <= {"keys", "values", "positions", "lengths"}
    with pytest.raises(CacheError, match="'?mass"):
        store.write_columns({"mass": torch.zeros(len(entries.positions))})
    store.write_columns({})
    plan = a_plan([range(n) for n in store.lengths], store.lengths)
    for written in (
        {"columns": {"mass": torch.zeros(len(plan.kept))}},
        {"scalars": {"mean": torch.zeros(len(store.lengths))}},
    ):
        for carry_out in (store.apply, store.evict):
            with pytest.raises(CacheError):
                carry_out(replace(plan, **written))
    assert same_bits(store.state(), before)


def test_columns_and_scalars_count_in_bytes() -> None:
    layer = a_layer(2, 2)
    sizes = []
    for ledger in (Ledger(), Ledger(("a", "b", "c"), ("d", "e"))):
        store = RaggedLayer(layer, layer_options(ledger=ledger))
        store.allocate(10)
        assert storage_bytes(reachable_tensors(store)) == store.nbytes
        sizes.append(store.nbytes)
    rows, heads = 20, 2
    assert sizes[1] - sizes[0] == 4 * (3 * rows + 2 * heads)


def test_ledgers_of_several_parts_are_joined() -> None:
    parts = [Ledger(("b", "a"), ("t",)), Ledger(), Ledger(("a", "c"), ("s", "t"))]
    assert Ledger.union(parts) == Ledger(("a", "b", "c"), ("s", "t"))
    assert Ledger.union([]) == Ledger()
