"""Forks that share storage: equal to deep copies, whatever is done to any of a family."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from builders import Tokens, a_layer, a_plan, a_spec, draw, layer_options
from cache_stores import attend, extend, same_bits
from larder.cache import (
    FORMS,
    MANY_SEGMENTS,
    SHORT_SEGMENT,
    CacheLayer,
    CompactLayer,
    DenseLayer,
    GradedLayer,
    NewTokens,
    RaggedLayer,
    SequenceCache,
    SlidingWindowLayer,
    TransformLayer,
    unique_nbytes,
)
from larder.core import LOG_COUNT, Codec, Ledger, Mode, RecomputeSpec
from larder.ops import StepWork, c_library
from tensor_memory import reachable_tensors, storage_bytes
from transforms import a_transform_layer

LAYER = a_layer(2, 2)
CPU = torch.device("cpu")
STORES = {
    "dense": lambda: DenseLayer(LAYER, layer_options()),
    "ragged": lambda: RaggedLayer(LAYER, layer_options()),
    "counting": lambda: RaggedLayer(LAYER, layer_options(ledger=Ledger((LOG_COUNT, "age")))),
}
AGES = Ledger(("age",))
CODECS = Codec(8, 4, 8), Codec(2, 2, 4)
COMPOSITES = {
    "compact": lambda: CompactLayer(LAYER, layer_options(ledger=AGES)),
    "graded": lambda: GradedLayer(LAYER, layer_options(ledger=AGES, codecs=CODECS)),
    "transform": lambda: a_transform_layer(LAYER, ledger=AGES),
    "window": lambda: SlidingWindowLayer(replace(LAYER, sliding_window=40), layer_options()),
}


def step(store: CacheLayer, new: Tokens) -> Tensor:
    """Attention of a token that is appended, by the kernel of decode steps where there is one."""
    storage = None if c_library() is None else store.step_storage()
    if storage is None:
        return extend(store, new)
    position = int(new.positions[0])
    sides = new.queries, new.keys, new.values
    work = StepWork(*sides, [position], [storage], LAYER.scaling)
    work.run()
    store.count_step(position)
    return work.state[0]


@dataclass
class Twin:
    """A layer that shares storage, its deep copy, and the next position of both."""

    store: CacheLayer
    copy: CacheLayer
    next: int

    def forked(self) -> Twin:
        deep = type(self.copy).restore(self.copy.layer, self.copy.state())
        return Twin(self.store.fork(), deep, self.next)

    def grow(self, count: int) -> None:
        new = draw(LAYER, count, self.next, self.next)
        self.next += count
        act = extend if count > 1 else step
        assert torch.equal(act(self.store, new), act(self.copy, new))

    def evict(self, name: str, every: int) -> None:
        lengths = self.copy.lengths
        shifts = [0] * len(lengths) if isinstance(self.copy, DenseLayer) else range(len(lengths))
        heads = [
            [entry for entry in range(length) if (entry + shift) % every]
            for length, shift in zip(lengths, shifts, strict=True)
        ]
        plan = a_plan(heads, lengths)
        if isinstance(self.copy, GradedLayer | TransformLayer):
            wanted = (torch.arange(len(plan.kept)) // every % 3).to(torch.int8)
            entries = self.copy.entries()  # whose grades never rise in precision
            held = entries.pack(entries.grades)[plan.kept] if len(entries.grades) else wanted
            plan = replace(plan, grades=torch.maximum(wanted, held))
        for twin in (self.store, self.copy):
            getattr(twin, name)(plan)

    def write_columns(self, number: int) -> None:
        for twin in (self.store, self.copy):
            entries = twin.entries()
            if entries.columns:
                packed = torch.arange(sum(entries.lengths)) * 0.25 + number
                twin.write_columns({"age": entries.unpack(packed)})

    def check(self) -> None:
        assert same_bits(self.store.state(), self.copy.state())
        assert self.store.lengths == self.copy.lengths
        assert self.store.nbytes == storage_bytes(reachable_tensors(self.store))


ACTIONS = st.tuples(
    st.sampled_from(
        ["fork", "step", "step", "block", "long", "apply", "evict", "cut", "compact"]
        + ["reserve", "note", "look", "drop", "divide", "seal"]
    ),
    st.integers(0, 3),
    st.integers(2, 7),
)


def act(family: list[Twin], action: str, which: int, number: int) -> None:
    twin = family[which % len(family)]
    if action == "fork" and len(family) < 4:
        family.append(twin.forked())
    elif action == "drop" and len(family) > 1:
        family.remove(twin)
    elif action in ("step", "block", "long"):
        twin.grow({"step": 1, "block": number, "long": SHORT_SEGMENT + number}[action])
    elif action in ("apply", "evict"):
        if not isinstance(twin.copy, SlidingWindowLayer):
            twin.evict(action, number)
    elif action == "cut":
        twin.next = max(0, twin.next - number * number)
        for each in (twin.store, twin.copy):
            each.truncate(twin.next)
    elif action in ("compact", "reserve"):
        for each in (twin.store, twin.copy):
            each.compact() if action == "compact" else each.reserve(number)
    elif action in ("divide", "seal"):  # what is read stays the same
        twin.store.divide(twin.next - number * number) if action == "divide" else twin.store.seal()
    elif action == "note":
        twin.write_columns(number)
    elif action == "look":
        new = draw(LAYER, number, twin.next, 3)
        assert torch.equal(attend(twin.store, new), attend(twin.copy, new))


@pytest.mark.extended
@pytest.mark.parametrize("kind", [*STORES, *COMPOSITES])
@settings(max_examples=25, deadline=None)
@given(st.lists(ACTIONS, min_size=4, max_size=14))
def test_forks_equal_deep_copies(kind: str, actions) -> None:
    create = (STORES | COMPOSITES)[kind]
    family = [Twin(create(), create(), 0)]
    family[0].grow(SHORT_SEGMENT + 9)
    for each in actions:
        act(family, *each)
        for twin in family:
            twin.check()


def grown(kind: str = "ragged", count: int = 3 * SHORT_SEGMENT) -> CacheLayer:
    store = STORES[kind]()
    extend(store, draw(LAYER, count, 0, 1))
    return store


@pytest.mark.parametrize("kind", STORES)
def test_append_does_not_copy_shared_entries(kind) -> None:
    store = grown(kind)
    store.reserve(3)
    held, entries = store.nbytes, [t.data_ptr() for t in store.tensors()[:2]]
    fork = store.fork()
    assert fork.nbytes - fork.shared_nbytes < 200  # lengths, starts and numbers per head
    for start in range(3 * SHORT_SEGMENT, 3 * SHORT_SEGMENT + 3):
        step(fork, draw(LAYER, 1, start, start))
        step(store, draw(LAYER, 1, start, start + 5))
    if c_library() is not None:
        assert fork.nbytes - fork.shared_nbytes < held
        both = storage_bytes(reachable_tensors([store, fork]))
        assert both < 1.7 * held
    assert [t.data_ptr() for t in store.tensors()[:2]] == entries  # the source writes its slack


def test_last_holder_regains_its_slack() -> None:
    store = grown()
    store.reserve(8)
    addresses = [t.data_ptr() for t in store.tensors()[:2]]
    fork = store.fork()
    assert store.shared_nbytes == fork.shared_nbytes > 0
    del store
    gc.collect()
    assert fork.shared_nbytes == 0
    extend(fork, draw(LAYER, 8, 3 * SHORT_SEGMENT, 2))
    assert [t.data_ptr() for t in fork.tensors()[:2]] == addresses


def test_plan_on_a_fork_does_not_change_the_source() -> None:
    store = grown("counting")
    before, fork = store.state(), store.fork()
    fork.write_columns({"age": torch.ones(len(fork.entries().positions))})
    kept = [list(range(0, length, 2)) for length in fork.lengths]
    fork.evict(a_plan(kept, fork.lengths))
    assert same_bits(store.state(), before)
    assert store.shared_nbytes == 0


def test_truncated_source_does_not_overwrite_its_fork() -> None:
    store = grown()
    fork = store.fork()
    before = fork.state()
    store.truncate(SHORT_SEGMENT)
    extend(store, draw(LAYER, 5, SHORT_SEGMENT, 9))
    assert same_bits(fork.state(), before)


@pytest.mark.parametrize("form", ["dense", "ragged"])
def test_shared_bytes_of_forks_are_counted_once(form) -> None:
    cache = SequenceCache(a_spec(LAYER, LAYER), form)
    new = draw(LAYER, 200, 0, 1)
    for layer in range(2):
        sides = new.queries, new.keys, new.values, new.positions
        cache.attend(layer, NewTokens(*sides, Mode.APPEND))
    cache.advance(200)
    forks = [cache.fork() for _ in range(3)]
    family = [cache, *forks]
    assert unique_nbytes(family) == storage_bytes(reachable_tensors(family))
    assert unique_nbytes(family) - cache.nbytes < 1000
    forks[0].truncate(150)
    forks[1].reserve(4)
    assert unique_nbytes(family) == storage_bytes(reachable_tensors(family))
    assert all(each.shared_device_nbytes == each.shared_nbytes > 0 for each in forks)


@pytest.mark.parametrize("form", STORES)
def test_separate_fork_shares_nothing(form: str) -> None:
    store, tokens = STORES[form](), draw(LAYER, 100)
    store.append(tokens.keys, tokens.values, tokens.positions)
    store.reserve(50)
    fork = store.fork()
    fork.truncate(90)
    alone = type(store).restore(LAYER, fork.state())
    fork.separate()
    assert fork.shared_nbytes == store.shared_nbytes == 0
    assert same_bits(fork.state(), alone.state()) and fork.nbytes == alone.nbytes < store.nbytes
    pointers = {t.untyped_storage().data_ptr() for t in store.tensors() if t.numel()}
    held = [t for t in fork.tensors()[:3] if t.numel()]
    assert pointers.isdisjoint(t.untyped_storage().data_ptr() for t in held)


def test_fork_shares_the_inputs_for_recomputing_evicted_entries() -> None:
    store = FORMS.load("rebuilt")(LAYER, layer_options(rebuilding=RecomputeSpec()))
    tokens = draw(LAYER, 100)
    store.append(tokens.keys, tokens.values, tokens.positions)
    store.append_source(torch.randn(100, 8))
    store.apply(a_plan([range(0, 100, 2), range(50)], store.lengths))
    before, fork = store.state(), store.fork()
    assert same_bits(fork.state(), before)
    assert fork.nbytes - fork.shared_nbytes < 200  # lengths and starts
    fork.truncate(60)
    assert same_bits(store.state(), before)
    assert fork.reread_tokens == store.reread_tokens - 40


@pytest.mark.parametrize("kind", COMPOSITES)
def test_separate_fork_copies_codes(kind: str) -> None:
    twin = Twin(COMPOSITES[kind](), COMPOSITES[kind](), 0)
    twin.grow(100)
    if not isinstance(twin.copy, SlidingWindowLayer):
        twin.evict("apply", 5)
    fork = twin.store.fork()
    fork.separate()
    assert fork.shared_nbytes == twin.store.shared_nbytes == 0
    assert same_bits(fork.state(), twin.copy.state())


def a_dense_twin(length: int) -> Twin:
    twin = Twin(STORES["dense"](), STORES["dense"](), 0)
    twin.grow(length)
    return twin


def pointers(store: CacheLayer) -> dict[int, int]:
    """Bytes of the storages of keys, values and positions, by address."""
    storages = [t.untyped_storage() for t in store.tensors() if t.dtype is not torch.int64]
    return {each.data_ptr(): each.nbytes() for each in storages if each.nbytes()}


@pytest.mark.skipif(c_library() is None, reason="attention would copy divided storage")
def test_fork_of_a_prefix_does_not_hold_later_entries() -> None:
    twin = a_dense_twin(300)
    twin.store.reserve(40)
    wanted = twin.store.prefix_nbytes(200)
    twin.store.divide(200)
    fork = twin.store.fork()
    fork.truncate(200)
    assert sum(pointers(fork).values()) == wanted == 200 * (2 * 2 * LAYER.head_dim * 4 + 4)
    assert pointers(fork).items() <= pointers(twin.store).items()
    twin.check()
    before = pointers(twin.store)
    twin.grow(40)  # in the slack that it had reserved
    assert pointers(twin.store) == before
    twin.check()


@pytest.mark.skipif(c_library() is None, reason="attention would copy divided storage")
def test_shared_storage_is_split_for_all_holders() -> None:
    twins = [a_dense_twin(300)]
    twins[0].store.compact()
    twins[0].copy.compact()
    for length in (250, 200, 220):
        twins[0].store.divide(length)
        twins.append(twins[0].forked())
        for store in (twins[-1].store, twins[-1].copy):
            store.truncate(length)
        twins[-1].next = length
        twins[-1].store.seal()
    held = {address: n for each in twins for address, n in pointers(each.store).items()}
    assert sum(held.values()) == twins[0].store.prefix_nbytes(300)  # once, by all four
    for twin in twins:
        twin.check()
    own = pointers(twins[0].store).items() - pointers(twins[1].store).items()
    del twins[0]
    gc.collect()
    left = {address: n for each in twins for address, n in pointers(each.store).items()}
    assert held.items() - left.items() == own and own
    assert sum(left.values()) == twins[0].store.prefix_nbytes(250)
    for twin in twins:
        twin.grow(3)
        twin.grow(1)
        twin.check()


@pytest.mark.skipif(c_library() is None, reason="attention would copy divided storage")
def test_segments_of_deleted_forks_are_joined() -> None:
    twin = a_dense_twin(80)
    for _ in range(3 * MANY_SEGMENTS):
        twin.store.divide(twin.next)
        fork = twin.store.fork()
        twin.store.seal()
        twin.grow(SHORT_SEGMENT)
        twin.grow(1)
        assert twin.store.num_storages <= MANY_SEGMENTS + 2
        twin.check()
        assert fork.num_storages
        del fork
