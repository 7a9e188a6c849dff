"""Contexts that one model has read, taken by another of its shape (DroidSpeak)."""

from __future__ import annotations

import pytest
import torch

from larder.core import ModelError, UsageError
from larder.models import Decoder
from larder.prefill import (
    Blended,
    ChunkMemory,
    ChunkReader,
    ChunkSource,
    NoChunks,
    ReusedChunks,
    SenderChunks,
    Whole,
)
from model_runs import similar_decoders, some_ids

PREFIX, TEXT = some_ids(5, seed=1), some_ids(13, seed=2)


@pytest.fixture(scope="module")
def pair() -> tuple[Decoder, Decoder]:
    return similar_decoders()


def sent(sender: Decoder, layers: tuple[int, ...] = (2,)) -> SenderChunks:
    """Chunk of a sender behind the prefix."""
    chunks = ChunkMemory(state_layers=layers)
    ChunkReader(sender, PREFIX, chunks).chunk(TEXT)
    return SenderChunks(chunks, sender.spec)


def taken(receiver: Decoder, source: ChunkSource):
    return ChunkReader(receiver, PREFIX, source).chunk(TEXT)


@pytest.mark.parametrize("layers", [(0, 4), (2, 4), (0, 2), (1, 1)])
def test_layers_outside_the_range_are_taken_from_the_sender(pair, layers):
    sender, receiver = pair
    chunks = sent(sender)
    theirs = chunks.source.find(sender.spec, PREFIX, TEXT)
    own, _ = taken(receiver, NoChunks())
    got, found = taken(receiver, ReusedChunks(NoChunks(), chunks, receiver, layers))
    assert theirs is not None
    assert found and got.start == len(PREFIX)
    for layer in range(4):
        if layers[0] <= layer < layers[1]:
            assert not torch.equal(got.values[layer], theirs.values[layer])
        else:
            assert torch.equal(got.values[layer], theirs.values[layer])
            assert torch.equal(got.keys[layer], theirs.keys[layer])
    if layers[0] == 0:
        for layer in range(layers[1]):
            torch.testing.assert_close(got.keys[layer], own.keys[layer], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(got.values[layer], own.values[layer], atol=1e-4, rtol=1e-4)


def test_own_chunks_take_precedence_and_transferred_ones_are_not_cached(pair) -> None:
    sender, receiver = pair
    mine = ChunkMemory()
    source = ReusedChunks(mine, sent(sender), receiver, (2, 4))
    approximate, _ = taken(receiver, source)
    assert mine.find(receiver.spec, PREFIX, TEXT) is None
    assert mine.find(receiver.spec, (), PREFIX) is not None  # read by the receiver itself
    own, found = taken(receiver, mine)
    assert not found
    again, found = taken(receiver, source)
    assert found and torch.equal(again.values[0], own.values[0])
    assert not torch.equal(again.values[0], approximate.values[0])


def test_chunks_missing_at_the_sender_are_prefilled(pair) -> None:
    sender, receiver = pair
    empty = SenderChunks(ChunkMemory(state_layers=(2,)), sender.spec)
    own, _ = taken(receiver, NoChunks())
    got, found = taken(receiver, ReusedChunks(NoChunks(), empty, receiver, (2, 4)))
    assert not found
    torch.testing.assert_close(got.values[3], own.values[3], atol=1e-5, rtol=1e-5)


def test_chunk_cached_without_states_is_prefilled_again(pair) -> None:
    sender, _ = pair
    chunks = ChunkMemory()
    taken(sender, chunks)
    sharing = ChunkMemory(state_layers=(2,))
    sharing._held.update(chunks._held)
    assert not taken(sender, sharing)[1]
    assert taken(sender, sharing)[1]
    states = sharing.states(sender.spec, PREFIX, TEXT)
    assert states is not None and states.by_layer[2].shape == (1, len(TEXT), sender.spec.width)
    assert states.nbytes == states.by_layer[2].nbytes > 0


def test_ranges_without_states_and_unknown_layers_are_refused(pair) -> None:
    sender, receiver = pair
    with pytest.raises(ModelError, match="keeps those before 2"):
        ReusedChunks(NoChunks(), sent(sender), receiver, (1, 4))
    with pytest.raises(ModelError, match="Layer 8 is none"):
        ReusedChunks(NoChunks(), sent(sender), receiver, (2, 9))


def test_exact_context_schedules_refuse_transfers(pair) -> None:
    sender, receiver = pair
    source = ReusedChunks(NoChunks(), sent(sender), receiver, (2, 4))
    Blended().check_chunks(source)
    Whole().check_chunks(NoChunks())
    with pytest.raises(UsageError, match="reads them as one text"):
        Whole().check_chunks(source)
