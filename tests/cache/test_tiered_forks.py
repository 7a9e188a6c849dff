"""Forks of a tiered store share what is parked until one of them changes it."""

from __future__ import annotations

from random import Random

import pytest
import torch

from builders import a_layer, a_plan, draw, layer_options
from cache_stores import append, assert_close, extend
from larder.cache import StorageOwners, TieredLayer
from larder.core import CacheError, Ledger, OffloadSpec, Plan, RecallPart
from larder.recall import Dci, Flat, Votes

LAYER = a_layer(2, 2)
PARTS = {
    "flat": Flat(tokens=8, page=4, dense=0),
    "dci": Dci(tokens=8, page=4, dense=0),
    "votes": Votes(tokens=8, dense=0),
}


def a_store(recall: RecallPart = PARTS["flat"], count: int = 90) -> TieredLayer:
    """With room in its slow tier, given back as far as it is."""
    place = torch.device("cpu")
    store = TieredLayer(
        LAYER, layer_options(device=place, ledger=Ledger(("mass",)), parking=OffloadSpec(recall))
    )
    for start in range(0, count, 30):
        append(store, draw(LAYER, 30, start))
        store.apply(keeping(store, Random(start), 0.5))
    store.compact()
    return store


def keeping(store: TieredLayer, source: Random, share: float) -> Plan:
    """Any entries of each head of the fast tier, the latest always."""
    chosen = [sorted({*source.sample(range(n), int(n * share)), n - 1}) for n in store.lengths]
    return a_plan(chosen, list(store.lengths))


def places(store: TieredLayer) -> tuple[int, int]:
    """Where the parked keys and values are."""
    held = store.parked()
    return held.keys.data_ptr(), held.values.data_ptr()


def alike(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    same = all(torch.equal(tensor, right[name]) for name, tensor in left.items())
    return same and left.keys() == right.keys()


def decode_steps(store: TieredLayer, start: int, seed: int, steps: int = 4) -> list[torch.Tensor]:
    """Attend, park, and attend again."""
    source, outs = Random(seed), []
    for position in range(start, start + steps):
        outs.append(extend(store, draw(LAYER, 1, position, seed)))
        store.evict(keeping(store, source, 0.9))
    return outs


@pytest.mark.parametrize("name", PARTS)
def test_fork_equals_a_deep_copy(name) -> None:
    store = a_store(PARTS[name])
    extend(store, draw(LAYER, 1, 90, 0))
    before = {key: tensor.clone() for key, tensor in store.state().items()}
    twin, fork = TieredLayer.restore(LAYER, store.state()), store.fork()
    assert places(fork) == places(store)
    for got, expected in zip(decode_steps(fork, 91, 1), decode_steps(twin, 91, 1), strict=True):
        assert torch.equal(got, expected)
    assert alike(store.state(), before)
    assert alike(fork.state(), twin.state())
    other, again = TieredLayer.restore(LAYER, before), decode_steps(store, 91, 2)
    for got, expected in zip(again, decode_steps(other, 91, 2), strict=True):
        assert_close(got, expected)  # pages may lie in other slots
    assert alike(store.state(), other.state()) and alike(fork.state(), twin.state())


def test_first_growing_fork_keeps_the_shared_storage() -> None:
    store = a_store()
    first, second, at = store.fork(), store.fork(), places(store)
    decode_steps(first, 91, 1, 1)
    assert places(first) == at
    decode_steps(second, 91, 2, 1)
    assert places(second) != at
    assert places(store) == at


def test_deleted_fork_releases_the_shared_storage() -> None:
    store = a_store()
    at = places(store)
    for seed in range(3):
        fork = store.fork()
        decode_steps(fork, 91, seed, 1)
        assert places(fork) == at
        del fork
    assert store.shared_nbytes == 0


def test_shared_bytes_are_reported_until_forks_diverge() -> None:
    store = a_store()
    assert store.shared_nbytes == 0
    fork = store.fork()
    slow = store._slow.nbytes + sum(t.nbytes for t in store.fetcher.shared_index.index.tensors())
    assert store.shared_host_nbytes == fork.shared_host_nbytes == slow
    assert store.shared_nbytes == fork.shared_nbytes == slow + store._ragged.shared_nbytes
    assert fork.nbytes == store.nbytes > fork.shared_nbytes
    extend(fork, draw(LAYER, 1, 91, 0))
    fork.evict(keeping(fork, Random(0), 0.9))
    extend(fork, draw(LAYER, 1, 92, 0))  # learns of what was parked
    assert store.shared_nbytes == store._slow.nbytes
    fork.compact()
    fork.truncate(20)
    assert store.shared_nbytes == fork.shared_nbytes == 0


def test_search_state_of_an_index_is_not_shared() -> None:
    store = a_store(PARTS["votes"])
    assert store.fork().fetcher.shared_index.index is not store.fetcher.shared_index.index


def test_failed_index_of_a_fork_does_not_affect_others(monkeypatch) -> None:
    store = a_store()
    fork, before = store.fork(), store.state()
    decode_steps(fork, 91, 1, 1)

    def refuse(*args: object) -> None:
        raise CacheError("no")

    with monkeypatch.context() as patch:
        patch.setattr(type(fork.fetcher.shared_index.index), "add", refuse)
        with pytest.raises(CacheError, match="no"):
            extend(fork, draw(LAYER, 1, 92, 1))
    assert alike(store.state(), before)
    assert fork.fetcher.shared_index.indexed == (0, 0)


class Holder:
    """Holder of a part of a storage."""


CLAIMS: dict[str, tuple[tuple[int, int], bool]] = {
    "behind all": ((5, 4), True),
    "where another has entries": ((4, 5), False),
    "nothing": ((4, 4), True),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_rows_are_claimed_per_head(name) -> None:
    wanted, granted = CLAIMS[name]
    one, other = Holder(), Holder()
    owners = StorageOwners(one, (4, 4))
    owners.join(other, (4, 4))
    assert owners.claim(other, (4, 6))
    assert owners.claim(one, wanted) is granted
    owners.leave(other)
    assert not owners.is_shared
    assert owners.claim(one, (9, 9))
