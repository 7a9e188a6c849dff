"""A reading handed from one model to another of its shape, a range of layers computed again."""

from __future__ import annotations

import pytest
import torch

from larder.cache import ChunkEntries, SequenceCache
from larder.core import Mode, ModelError
from larder.models import (
    BatchSegment,
    Decoder,
    RangeProfile,
    SharedReading,
    pareto_ranges,
    range_profiles,
    receive_reading,
    recorded_states,
    share_reading,
)
from model_runs import similar_decoders, some_ids
from tiny_models import tiny

IDS, BEHIND = some_ids(18, seed=1), some_ids(9, seed=2)


@pytest.fixture(scope="module")
def pair() -> tuple[Decoder, Decoder]:
    return similar_decoders()


def own_reading(decoder: Decoder) -> ChunkEntries:
    cache = SequenceCache(decoder.spec, "dense")
    decoder.read([BatchSegment(cache, IDS)], Mode.APPEND)
    return ChunkEntries.of(cache, 0, len(IDS))


def test_full_range_equals_the_receivers_prefill(pair) -> None:
    sender, receiver = pair
    reading = share_reading(sender, IDS, (0, 2))
    whole, own = receive_reading(receiver, reading, (0, 4)), own_reading(receiver)
    for side, expected in zip((*whole.keys, *whole.values), (*own.keys, *own.values), strict=True):
        torch.testing.assert_close(side, expected, atol=1e-4, rtol=1e-4)
    copied, sent = receive_reading(receiver, reading, (0, 0)), own_reading(sender)
    assert all(torch.equal(a, b) for a, b in zip(copied.keys, reading.entries.keys, strict=True))
    for side, expected in zip(copied.keys, sent.keys, strict=True):  # that read without recording
        torch.testing.assert_close(side, expected, atol=1e-5, rtol=1e-5)


def test_range_continues_from_the_senders_states(pair) -> None:
    """Layers of the receiver, one by one, behind the first two of the sender."""
    sender, receiver = pair
    reading = share_reading(sender, IDS, (2,))
    got, sent = receive_reading(receiver, reading, (2, 3)), reading.entries
    own = own_reading(receiver)
    assert torch.equal(got.values[1], sent.values[1]) and torch.equal(got.keys[3], sent.keys[3])
    with torch.no_grad():
        ids = torch.tensor([IDS])
        sender.module.set_attn_implementation("eager")
        states = sender.module.base_model(ids, output_hidden_states=True).hidden_states[2]
        sender.module.set_attn_implementation("larder")
        layer = receiver.module.base_model.layers[2]
        values = layer.self_attn.v_proj(layer.input_layernorm(states))[0]
    expected = values.view(len(IDS), 2, -1).transpose(0, 1)
    torch.testing.assert_close(got.values[2], expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(got.values[2], own.values[2], atol=1e-3)
    assert not torch.allclose(got.values[2], sent.values[2], atol=1e-3)


def test_divergence_falls_between_a_copy_and_all_layers(pair) -> None:
    ranges = [(0, 0), (0, 2), (2, 4), (1, 4), (0, 4)]
    profiles = range_profiles(*pair, IDS, BEHIND, ranges)
    away = {own.layers: own.divergence for own in profiles}
    assert away[0, 4] == pytest.approx(0, abs=1e-8)
    assert away[0, 0] > 0 and all(away[one] < 2 * away[0, 0] for one in ranges)
    best = pareto_ranges(profiles)
    assert best[0].layers == (0, 0) and best[-1].layers == (0, 4)
    assert [own.num_layers for own in best] == sorted(own.num_layers for own in best)


def test_dominated_ranges_are_excluded() -> None:
    made = [((0, 0), 0.9), ((0, 1), 1.0), ((1, 2), 0.5), ((0, 2), 0.5), ((1, 3), 0.2)]
    profiles = [RangeProfile(*one) for one in made]
    assert [own.layers for own in pareto_ranges(profiles)] == [(0, 0), (1, 2), (1, 3)]


def test_full_range_after_a_prefix_equals_the_receivers_prefill(pair) -> None:
    sender, receiver = pair
    prefix, text = IDS[:5], IDS[5:]
    sent = SequenceCache(sender.spec, "dense")
    sender.read([BatchSegment(sent, prefix)], Mode.APPEND)
    with recorded_states(sender, (2,)) as recorder:
        sender.read([BatchSegment(sent, text[:6])], Mode.APPEND)
        sender.read([BatchSegment(sent, text[6:])], Mode.APPEND)
    states = recorder.states()
    assert states[2].shape == (1, len(text), sender.spec.width)
    reading = SharedReading(text, ChunkEntries.of(sent, 5, len(IDS)), states)
    own = own_reading(receiver)
    before = ChunkEntries(
        tuple(side[:, :5] for side in own.keys), tuple(side[:, :5] for side in own.values)
    )
    whole = receive_reading(receiver, reading, (0, 4), before)
    assert whole.start == 5
    for side, expected in zip((*whole.keys, *whole.values), (*own.keys, *own.values), strict=True):
        torch.testing.assert_close(side, expected[:, 5:], atol=1e-4, rtol=1e-4)
    part = receive_reading(receiver, reading, (2, 4), before)
    assert torch.equal(part.values[1], reading.entries.values[1])
    assert not torch.allclose(part.values[3], reading.entries.values[3], atol=1e-3)


def test_layers_out_of_range_are_refused(pair) -> None:
    sender, receiver = pair
    with pytest.raises(ModelError, match="has 4"), recorded_states(sender, (5,)):
        pass
    with pytest.raises(ModelError, match="Layer 8 is none of the model"):
        receive_reading(receiver, share_reading(sender, IDS, (2,)), (2, 9))


def test_other_shapes_and_missing_states_are_refused(pair) -> None:
    sender, receiver = pair
    reading = share_reading(sender, IDS, (2,))
    with pytest.raises(ModelError, match="needs the sender's states"):
        receive_reading(receiver, reading, (1, 3))
    with pytest.raises(ModelError, match="not those of the receiver"):
        receive_reading(Decoder(tiny("qwen3", layers=3)), reading, (2, 3))
