"""Contract of the cache of a whole sequence, in every form."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from builders import FORM_NAMES, a_layer, a_plan, a_spec, draw, parking_of
from larder.cache import NewTokens, SequenceCache
from larder.core import CacheError, Mode
from tensor_memory import reachable_tensors, storage_bytes

LAYERS = (a_layer(2, 2), a_layer(1, 3, window=6, index=1), a_layer(3, 1, index=2))
SPEC = a_spec(*LAYERS)
# A rebuilt cache needs a model: see tests/models/test_recompute_hooks.py.
FORMS = [form for form in FORM_NAMES if form != "rebuilt"]
pytestmark = pytest.mark.parametrize("form", FORMS)


def read(
    cache: SequenceCache,
    count: int,
    mode: Mode = Mode.APPEND,
    sections: tuple[int, ...] = (),
    seed: int = 0,
) -> list[Tensor]:
    """One pass over all layers; the sections of a scratch pass each start at the next position."""
    start, outs = cache.next_position, []
    parts = sections or (count,)
    positions = torch.tensor([start + offset for part in parts for offset in range(part)])
    for layer in SPEC.layers:
        new = draw(layer, count, start, seed)
        tensors = (new.queries, new.keys, new.values, positions)
        outs.append(cache.attend(layer.index, NewTokens(*tensors, mode, parts)))
    if mode is Mode.APPEND:
        cache.advance(count)
    return outs


def filled(form: str) -> SequenceCache:
    cache = SequenceCache(SPEC, form, parking=parking_of(form))
    read(cache, 14)
    for index in (0, 2):
        heads = LAYERS[index].kv_heads
        kept = [range(0, 14, 2)] * heads
        if form != "dense":
            kept = [range(head, 14, 2 + head) for head in range(heads)]
        cache.apply(index, a_plan(kept, [14] * heads))
    return cache


def equal(left: SequenceCache, right: SequenceCache) -> bool:
    one, two = left.state(), right.state()
    return (
        one.keys() == two.keys()
        and all(torch.equal(one[name], two[name]) for name in one)
        and left.meta() == right.meta()
    )


def raw(cache: SequenceCache) -> list[Tensor]:
    """The bits of every tensor as it stands, slack included."""
    return [t.clone().flatten().view(torch.uint8) for t in reachable_tensors(cache._layers)]


@pytest.mark.parametrize("mode", [Mode.SCRATCH, Mode.PROBE])
@pytest.mark.parametrize("sections", [(5,), (1,), (2, 3)])
def test_scratch_and_probe_do_not_change_the_cache(form, mode, sections) -> None:
    cache = filled(form)
    cache.reserve(3)
    before, size, position = raw(cache), cache.nbytes, cache.next_position
    read(cache, sum(sections), mode, sections)
    after = raw(cache)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert (cache.nbytes, cache.next_position) == (size, position)


def test_probe_outputs_are_zero(form) -> None:
    assert not any(out.any() for out in read(filled(form), 4, Mode.PROBE))


def test_scratch_outputs_equal_append(form) -> None:
    cache = filled(form)
    scratch = read(cache, 5, Mode.SCRATCH)
    for a, b in zip(scratch, read(cache, 5), strict=True):
        torch.testing.assert_close(a, b)


def test_sections_do_not_see_each_other(form) -> None:
    cache = filled(form)
    together = read(cache, 7, Mode.SCRATCH, (4, 3))
    for layer, out in zip(SPEC.layers, together, strict=True):
        new = draw(layer, 7, cache.next_position)
        for start, stop in ((0, 4), (4, 7)):
            part = new.part(start, stop)
            positions = cache.next_position + torch.arange(stop - start)
            alone = cache.attend(
                layer.index,
                NewTokens(
                    part.queries, part.keys, part.values, positions, Mode.SCRATCH, (stop - start,)
                ),
            )
            torch.testing.assert_close(out[:, start:stop], alone, atol=1e-5, rtol=1e-4)


def test_sections_are_not_appended(form) -> None:
    cache = filled(form)
    twin = filled(form)
    with pytest.raises(CacheError, match="2 sections"):
        read(cache, 5, Mode.APPEND, (2, 3))
    assert equal(cache, twin)


def test_copy_from_a_file_continues_identically(form) -> None:
    cache = filled(form)
    copy = SequenceCache.restore(SPEC, load(save(cache.state())), cache.meta())
    assert equal(cache, copy)
    assert copy.next_position == 14
    for size in (3, 1, 9):
        for a, b in zip(read(cache, size), read(copy, size), strict=True):
            assert torch.equal(a, b)
    assert equal(cache, copy)


def test_one_state_restores_twice(form) -> None:
    cache = filled(form)
    state, meta = cache.state(), cache.meta()
    before = {name: tensor.clone() for name, tensor in state.items()}
    first = SequenceCache.restore(SPEC, state, meta)
    first.truncate(10)
    read(first, 3, seed=7)
    assert all(torch.equal(state[name], before[name]) for name in state)
    assert equal(SequenceCache.restore(SPEC, state, meta), cache)


def test_adopted_state_is_not_copied(form) -> None:
    cache = filled(form)
    state = cache.state()
    pointers = {t.untyped_storage().data_ptr() for t in state.values()}
    taken = SequenceCache.adopt(SPEC, state, cache.meta())
    assert equal(taken, cache)
    held = {t.untyped_storage().data_ptr() for store in taken._layers for t in store.tensors()[:3]}
    assert held <= pointers


def test_allocation_does_not_extend_a_window_and_reservation_does(form) -> None:
    plain, prepared = filled(form), filled(form)
    prepared.allocate(40)
    for each in (plain, prepared):
        read(each, 9)
    assert prepared.lengths() == plain.lengths()
    reserved = filled(form)
    reserved.reserve(40)
    read(reserved, 9)
    assert reserved.lengths()[1] > plain.lengths()[1]


def test_cache_of_another_model_is_not_restored(form) -> None:
    cache = filled(form)
    state = {name: t for name, t in cache.state().items() if not name.startswith("2.")}
    with pytest.raises(CacheError, match="no layer 2"):
        SequenceCache.restore(SPEC, state, cache.meta())


def test_fork_is_independent(form) -> None:
    cache, twin = filled(form), filled(form)
    copy = cache.fork()
    assert equal(copy, cache)
    read(copy, 4, seed=1)
    assert equal(cache, twin)
    assert (cache.next_position, copy.next_position) == (14, 18)


def test_truncate_applies_to_every_layer(form) -> None:
    cache, twin = filled(form), filled(form)
    for each in (cache, twin):
        each.reserve(12)
    read(cache, 5)
    read(cache, 1)
    cache.truncate(14)
    cache.compact()
    twin.compact()
    assert equal(cache, twin)
    for a, b in zip(read(cache, 4, seed=2), read(twin, 4, seed=2), strict=True):
        assert torch.equal(a, b)


def test_bytes_and_entries_are_counted(form) -> None:
    cache = filled(form)
    stores = sum(storage_bytes(reachable_tensors(store)) for store in cache._layers)
    assert cache.nbytes == stores == storage_bytes(reachable_tensors(cache))
    assert cache.lengths()[0] == ((7, 7) if form == "dense" else (7, 5))
    assert cache.managed_entries == sum(sum(cache.lengths()[index]) for index in (0, 2))


def test_compact_applies_to_every_layer(form) -> None:
    cache = filled(form)
    cache.reserve(40)
    before = cache.nbytes
    cache.compact()
    assert cache.nbytes < before
    assert cache.lengths()[1] == (6,)
