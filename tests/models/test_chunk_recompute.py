"""Given tokens of a text of chunks, computed in all layers, against loops over tokens."""

from __future__ import annotations

import pytest
import torch

from larder.cache import ChunkEntries, SequenceCache
from larder.core import Mode
from larder.models import BatchSegment, ContextChunk, Decoder, recompute_tokens
from model_attention import heads_of
from model_runs import some_ids
from references import blending
from tiny_models import tiny

ONE, TWO, THREE = some_ids(5, seed=1), some_ids(7, seed=2), some_ids(4, seed=3)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(tiny("llama", layers=3))


def entries_of(decoder: Decoder, ids: tuple[int, ...]) -> ChunkEntries:
    cache = SequenceCache(decoder.spec, "dense")
    decoder.read([BatchSegment(cache, ids)], Mode.APPEND)
    return ChunkEntries.of(cache, 0, len(ids))


def test_recomputed_tokens_equal_their_reference(decoder: Decoder) -> None:
    parts = [(ONE, True), (TWO, True), (THREE, False)]
    pieces = [
        ContextChunk(ids, entries_of(decoder, ids) if known else None) for ids, known in parts
    ]
    held = []
    for layer in range(3):
        rows: list = []
        for ids, known in parts:
            own = pieces[[ids for ids, _ in parts].index(ids)].entries
            for n in range(len(ids)):
                if not known:
                    rows.append(None)
                    continue
                key = blending.turned(own.keys[layer][:, n], -n, decoder.spec.layers[0].radians)
                rows.append((key, own.values[layer][:, n]))
        held.append(rows)
    chosen = [1, 6, 9, 12, 13, 14, 15]
    with torch.no_grad():
        found, _ = blending.blended(decoder.module, (*ONE, *TWO, *THREE), held, 0.0, given=chosen)
    got = recompute_tokens(decoder, pieces, torch.tensor(chosen)).entries
    for layer, (keys, values) in enumerate(found):
        torch.testing.assert_close(got.keys[layer], torch.stack(keys, 1), atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(got.values[layer], torch.stack(values, 1), atol=1e-4, rtol=1e-3)


def test_no_recomputed_tokens_only_rotates_keys(decoder: Decoder) -> None:
    one, two = entries_of(decoder, ONE), entries_of(decoder, TWO)
    pieces = [ContextChunk(ONE, one), ContextChunk(TWO, two)]
    got = recompute_tokens(decoder, pieces, torch.empty(0, dtype=torch.int64)).entries
    moved = two.moved_to(5, decoder.spec)
    assert torch.equal(got.keys[1][:, 5:], moved.keys[1])
    assert torch.equal(got.values[2][:, :5], one.values[2])


def test_profiles_equal_sums_over_the_models_own_attention(decoder: Decoder) -> None:
    pieces = [ContextChunk(ids) for ids in (ONE, TWO, THREE)]
    every = torch.arange(16)
    made = recompute_tokens(decoder, pieces, every, profiled=(1, 2), first=0)
    later = recompute_tokens(decoder, pieces, every, profiled=(2,), first=1).profiles[2]
    profile, spans = made.profiles[2], {0: range(5), 1: range(5, 12), 2: range(12, 16)}
    tokens = [0.0] * 4
    for layer, heads in enumerate(heads_of(decoder, (*ONE, *TWO, *THREE))):
        masses = {position: 0.0 for position in spans}
        for token in spans[2]:
            rows = [heads.row(head, token) for head in range(4)]
            for position, span in spans.items():
                mass = sum(row[other] for row in rows for other in span if other <= token) / 4
                masses[position] += mass
                tokens[token - 12] += mass if position < 2 else 0.0
        assert profile.inter[layer] == pytest.approx((masses[0], masses[1]), rel=1e-3)
        assert later.inter[layer] == pytest.approx((masses[1],), rel=1e-3)
        assert profile.intra[layer] == pytest.approx(masses[2], rel=1e-3)
    assert profile.tokens == pytest.approx(tokens, rel=1e-3)
    assert profile.before == (ONE, TWO) and made.profiles[1].before == (ONE,)
