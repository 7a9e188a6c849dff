"""Passes that read blocks by one attention call in each layer: bits, caches, and failures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import ref

import pytest
import torch

from larder.cache import DenseLayer, SequenceCache, divide, fork_prefix
from larder.core import CacheError, Mode
from larder.models import BatchSegment, Decoder, PassTables, batch_segment, decoder_stack
from larder.ops import PassAttention, block_attention, c_library
from larder.ops.cpu import decoder_layer
from model_runs import some_ids
from tiny_models import tiny

pytestmark = pytest.mark.skipif(c_library() is None, reason="no C compiler at installation")
ROOM = 64
by_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


@pytest.fixture(autouse=True)
def kernels_are_taken(monkeypatch):
    for module in (decoder_layer, decoder_stack):
        monkeypatch.setattr(module, "max_rows", lambda dtype: 256)
    for module in (batch_segment, block_attention):
        monkeypatch.setattr(module, "is_faster", lambda *_: True)


@pytest.fixture
def passes(monkeypatch) -> list[list[int]]:
    """Widths of every pass whose layers attended in one call."""
    seen, make = list[list[int]](), PassTables.__init__

    def noted(self, tables, widths):
        seen.append(list(widths))
        make(self, tables, widths)

    monkeypatch.setattr(PassTables, "__init__", noted)
    return seen


def without_tables(monkeypatch) -> None:
    monkeypatch.setattr(PassTables, "of", staticmethod(lambda *_: None))


def filled(decoder: Decoder, length: int, room: int = ROOM) -> SequenceCache:
    cache = SequenceCache(decoder.spec, "dense")
    if length:
        decoder.read([BatchSegment(cache, some_ids(length, seed=length))], Mode.APPEND)
    cache.allocate(room)
    return cache


def pass_logits(
    decoder: Decoder, caches: Sequence[SequenceCache], widths: Sequence[int]
) -> torch.Tensor:
    """Logits of all tokens of a pass, and of a decode step behind it."""
    segments = [
        BatchSegment(cache, some_ids(width, seed=7 + width))
        for cache, width in zip(caches, widths, strict=True)
    ]
    first = decoder.forward_logits(segments, Mode.APPEND, range(sum(widths)))
    steps = [BatchSegment(cache, (5,)) for cache in caches]
    return torch.cat([first, decoder.forward_logits(steps, Mode.APPEND, range(len(caches)))])


def check_equal(caches: Sequence[SequenceCache], others: Sequence[SequenceCache]) -> None:
    """Check that caches hold the same entries in as many bytes."""
    for cache, other in zip(caches, others, strict=True):
        own, expected = cache.state(), other.state()
        assert list(own) == list(expected)
        assert all(torch.equal(own[name], expected[name]) for name in own)
        assert cache.next_position == other.next_position
        assert (cache.nbytes, cache.managed_entries) == (other.nbytes, other.managed_entries)


@by_dtype
@pytest.mark.parametrize("widths", [(40,), (32, 1, 45, 1), (1, 33), (50, 32)])
def test_equals_attention_of_each_segment_bit_by_bit(monkeypatch, passes, dtype, widths):
    decoder = Decoder(tiny("qwen3", dtype=dtype, layers=3))
    lengths = [0, 20, 11, 33][: len(widths)]
    caches = [filled(decoder, length) for length in lengths]
    passes.clear()
    got = pass_logits(decoder, caches, widths)
    assert passes == [list(widths)]
    without_tables(monkeypatch)
    others = [filled(decoder, length) for length in lengths]
    assert torch.equal(got, pass_logits(decoder, others, widths))
    check_equal(caches, others)


@by_dtype
def test_entries_in_front_that_others_hold_are_read_where_they_are(monkeypatch, passes, dtype):
    decoder = Decoder(tiny("llama", dtype=dtype, layers=2))

    def logits() -> tuple[torch.Tensor, list[SequenceCache]]:
        base = filled(decoder, 70)
        caches = [fork_prefix(base, 66), fork_prefix(base, 69), base]
        for cache in caches:
            cache.allocate(ROOM)
        assert all(cache.layers[0].num_storages > 1 for cache in caches[1:])
        return pass_logits(decoder, caches, (1, 40, 35)), caches

    got, caches = logits()
    assert [1, 40, 35] in passes
    without_tables(monkeypatch)
    expected, others = logits()
    assert torch.equal(got, expected)
    check_equal(caches, others)


def test_short_texts_and_caches_without_room_attend_one_by_one(passes):
    decoder = Decoder(tiny("llama", dtype=torch.float32, layers=2))
    pass_logits(decoder, [filled(decoder, 5), filled(decoder, 0)], (40, 31))
    pass_logits(decoder, [filled(decoder, 5), filled(decoder, 20, room=8)], (1, 160))
    assert passes == []
    cache = filled(decoder, 20, room=8)
    cache.compact()
    layer = cache.layers[0]
    assert isinstance(layer, DenseLayer)
    mark = layer.storage_mark
    assert PassTables.of([BatchSegment(cache, some_ids(160))], torch.float32) is None
    assert layer.storage_mark is mark  # nothing was moved in vain


def test_a_pass_that_fails_leaves_the_caches_as_they_were(monkeypatch, passes):
    decoder, widths = Decoder(tiny("llama", dtype=torch.float32, layers=3)), (40, 1)
    caches = [filled(decoder, 9), filled(decoder, 20)]
    before = [cache.state() for cache in caches]
    attend = PassAttention.attend

    def fail(self, layer, *sides):
        if layer == 2:
            raise MemoryError
        return attend(self, layer, *sides)

    with monkeypatch.context() as patch:
        patch.setattr(PassAttention, "attend", fail)
        with pytest.raises(MemoryError):
            pass_logits(decoder, caches, widths)
    for cache, state in zip(caches, before, strict=True):
        own = cache.state()
        assert all(torch.equal(own[name], state[name]) for name in state)
    passes.clear()
    got = pass_logits(decoder, caches, widths)
    assert passes == [list(widths)]
    others = [filled(decoder, 9), filled(decoder, 20)]
    assert torch.equal(got, pass_logits(decoder, others, widths))
    check_equal(caches, others)


def interrupted_pass(
    between: Callable[[SequenceCache, SequenceCache], None],
) -> tuple[torch.Tensor, SequenceCache]:
    """Logits of a long block behind a shared prefix, and the cache that has read it.

    Args:
        between: called with the source of the prefix and the cache, before the second layer.
    """
    decoder = Decoder(tiny("llama", dtype=torch.float32, layers=3))
    source = filled(decoder, 90)
    cache, layers = fork_prefix(source, 80), list[int]()
    cache.allocate(140)

    def before_layer() -> None:
        layers.append(len(layers))
        if len(layers) == 2:
            between(source, cache)

    with decoder.interruptions.by(before_layer):
        segments = [BatchSegment(cache, some_ids(130, seed=3))]
        return decoder.forward_logits(segments, Mode.APPEND, range(130)), cache


def test_storage_that_is_divided_between_two_layers_is_read_to_the_end(passes):
    """As where a decode step between them fails, and its session gives up a part of the prefix."""

    def divide_prefix(source: SequenceCache, cache: SequenceCache) -> None:
        layers = [layer for layer in cache.layers if isinstance(layer, DenseLayer)]
        held = [ref(segment) for layer in layers for segment in layer.storages[2:]]
        divide(source, 40)
        assert len(held) == 3 and all(each() is not None for each in held)

    got, cache = interrupted_pass(divide_prefix)
    expected, other = interrupted_pass(lambda *_: None)
    assert torch.equal(got, expected) and [130] in passes
    assert (cache.layers[0].num_storages, other.layers[0].num_storages) == (3, 2)
    own, state = cache.state(), other.state()
    assert all(torch.equal(own[name], state[name]) for name in state)


def test_storage_that_is_replaced_between_two_layers_is_an_error(passes):
    found = list[SequenceCache]()

    def replace_storage(_: SequenceCache, cache: SequenceCache) -> None:
        cache.layers[1].compact()
        found.append(cache)

    with pytest.raises(CacheError, match="other storage"):
        interrupted_pass(replace_storage)
    assert [130] in passes
    assert found[0].next_position == 80 and set(found[0].layers[1].lengths) == {80}
