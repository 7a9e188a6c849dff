"""The cache of a whole sequence at several precisions: saved, copied, counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load, save

from builders import a_layer, a_plan, a_spec, draw
from cache_stores import same_bits
from larder.cache import NewTokens, SequenceCache
from larder.core import LOG_COUNT, CacheError, Codec, Ledger, Mode
from tensor_memory import reachable_tensors, storage_bytes

LAYERS = (a_layer(2, 2), a_layer(1, 3, window=6, index=1))
SPEC = a_spec(*LAYERS)
CODECS = (Codec(8, 4, 4, outliers=0.1), Codec(2, 2, 4, balance=0.1))


def read(cache: SequenceCache, count: int) -> list[torch.Tensor]:
    outs = []
    for layer in LAYERS:
        new = draw(layer, count, cache.next_position)
        tensors = (new.queries, new.keys, new.values, new.positions)
        outs.append(cache.attend(layer.index, NewTokens(*tensors, Mode.APPEND)))
    cache.advance(count)
    return outs


def filled() -> SequenceCache:
    cache = SequenceCache(SPEC, "ragged", Ledger((LOG_COUNT,), ("mean",)), CODECS)
    read(cache, 12)
    plan = a_plan([range(h, 12) for h in range(2)], [12, 12])
    grades = torch.arange(len(plan.kept), dtype=torch.int8) % 3
    cache.apply(0, replace(plan, grades=grades))
    return cache


COPIES = {
    "fork": SequenceCache.fork,
    "restore": lambda c: SequenceCache.restore(SPEC, load(save(c.state())), c.meta()),
    "adopt": lambda c: SequenceCache.adopt(SPEC, c.state(), c.meta()),
    "surrender": lambda c: SequenceCache.adopt(
        SPEC, meta=c.meta(), state=c.release_state(torch.device("cpu"))
    ),
}


@pytest.mark.parametrize("way", COPIES)
def test_copy_has_the_same_codes_and_continues_identically(way) -> None:
    twin, copy = filled(), COPIES[way](filled())
    assert copy.cache_spec.codecs == CODECS and copy.meta() == twin.meta()
    assert same_bits(copy.state(), twin.state())
    for size in (1, 4):
        for a, b in zip(read(copy, size), read(twin, size), strict=True):
            assert torch.equal(a, b)
    assert same_bits(copy.state(), twin.state())


def test_bytes_and_entries_are_counted() -> None:
    cache = filled()
    assert cache.nbytes == storage_bytes(reachable_tensors(cache._layers))
    assert cache.lengths()[0] == (12, 11)
    assert cache.full_precision_lengths()[0] == (4, 4)
    assert cache.layers[0].entries_copy_bytes == 23 * (2 * 8 * 4 + 4 + 1 + 4)
    assert cache.layers[1].entries_copy_bytes == 0


def test_state_of_other_codecs_is_refused() -> None:
    cache = filled()
    meta = cache.meta() | {"codecs": SequenceCache(SPEC, "ragged").meta()["codecs"]}
    with pytest.raises(CacheError, match="2 quantized grades, .* build the cache again"):
        SequenceCache.restore(SPEC, cache.state(), meta)


@pytest.mark.parametrize("form", ["dense", "compact"])
def test_forms_without_codecs_refuse_them(form) -> None:
    with pytest.raises(CacheError, match="does not support codecs, .*ragged"):
        SequenceCache(SPEC, form, codecs=CODECS)
