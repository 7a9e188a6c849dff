"""Pieces read elsewhere, put together: as by hand, and exact where everything is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from larder.cache import ChunkEntries, SequenceCache
from larder.core import BadParameter, CacheError, Mode, ModelError
from larder.models import BatchSegment, ContextChunk, Decoder, blend
from larder.ops import rerotate
from model_runs import some_ids
from references.blending import blended
from tiny_models import tiny

ONE, TWO, ASKED = some_ids(7, seed=1), some_ids(9, seed=2), some_ids(3, seed=3)
TEXT = ONE + TWO + ASKED


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(tiny("llama", layers=4))


def read(decoder: Decoder, ids: Any, form: str = "dense") -> SequenceCache:
    cache = SequenceCache(decoder.spec, form)
    decoder.read([BatchSegment(cache, tuple(ids))], Mode.APPEND)
    return cache


def chunk(cache: SequenceCache, ids: tuple[int, ...], start: int = 0) -> ContextChunk:
    return ContextChunk(ids, ChunkEntries.of(cache, start, start + len(ids)))


def pieces(decoder: Decoder) -> list[ContextChunk]:
    """The second piece stood behind other tokens when it was read."""
    behind = read(decoder, (*some_ids(4, seed=9), *TWO))
    return [chunk(read(decoder, ONE), ONE), chunk(behind, TWO, 4), ContextChunk(ASKED)]


def difference(one: SequenceCache, other: SequenceCache) -> float:
    states = one.state(), other.state()
    assert states[0].keys() == states[1].keys() and one.meta() == other.meta()
    return max(float((states[0][n] - states[1][n]).abs().max()) for n in states[0])


@pytest.mark.parametrize(("share", "num_exact"), [(0.0, 0), (0.3, 0), (0.3, 7)])
def test_blending_equals_its_reference(decoder: Decoder, share: float, num_exact: int) -> None:
    parts = pieces(decoder)
    held: list[Any] = [[] for _ in decoder.spec.layers]
    for piece in parts:
        for layer in decoder.spec.layers:
            if piece.entries is None:
                held[layer.index] += [None] * len(piece.ids)
                continue
            keys, values = piece.entries.keys[layer.index], piece.entries.values[layer.index]
            positions = piece.entries.start + torch.arange(len(piece.ids))
            radians = torch.tensor(layer.radians)
            bare = rerotate(keys, positions, torch.zeros_like(positions), radians)
            held[layer.index] += [(bare[:, n], values[:, n]) for n in range(len(piece.ids))]
    with torch.no_grad():
        expected, chosen = blended(decoder.module, TEXT, held, share, num_exact=num_exact)
    found = blend(decoder, parts, share, num_exact)
    assert found.chosen.tolist() == chosen
    state = found.cache(decoder.spec).state()
    for index, (keys, values) in enumerate(expected):
        assert torch.allclose(state[f"{index}.keys"], torch.stack(keys, 1), atol=1e-4)
        assert torch.allclose(state[f"{index}.values"], torch.stack(values, 1), atol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral", "phi3"])
def test_full_recompute_equals_prefill(architecture: str) -> None:
    decoder = Decoder(tiny(architecture, layers=3))
    full = read(decoder, TEXT)
    found = blend(decoder, pieces(decoder), 1.0)
    assert found.chosen.tolist() == list(range(len(TEXT)))
    cache = found.cache(decoder.spec)
    assert difference(cache, full) < 1e-4
    nexts = [
        decoder.forward_logits([BatchSegment(c, (5,))], Mode.APPEND, [0]) for c in (cache, full)
    ]
    assert torch.allclose(*nexts, atol=1e-3)


def test_first_context_has_no_deviation(decoder: Decoder) -> None:
    found = blend(decoder, [chunk(read(decoder, ONE), ONE), ContextChunk(ASKED)], 0.0)
    assert difference(found.cache(decoder.spec), read(decoder, ONE + ASKED)) < 1e-4
    assert float(found.deviations[: len(ONE)].max()) < 1e-6
    assert found.chosen.tolist() == list(range(len(ONE), len(ONE + ASKED)))


def test_share_applies_to_tokens_after_the_exact_ones(decoder: Decoder) -> None:
    found = blend(decoder, pieces(decoder), 0.3, len(ONE))
    inside = found.chosen[found.chosen < len(ONE + TWO)]
    assert len(inside) == 3 and int(inside.min()) >= len(ONE)  # 0.3 of 9, rounded up
    assert len(blend(decoder, pieces(decoder), 0.3).chosen) == 5 + len(ASKED)  # 0.3 of 16


def test_error_decreases_with_recomputed_tokens(decoder: Decoder) -> None:
    full = read(decoder, TEXT).state()["3.values"]
    errors = [
        float((blend(decoder, pieces(decoder), s).entries.values[3] - full).norm())
        for s in (0.0, 0.5, 1.0)
    ]
    assert errors[0] > errors[1] > errors[2]


def test_incompatible_contexts_are_refused(decoder: Decoder) -> None:
    whole = read(decoder, ONE)
    for share, parts in ((1.1, [ContextChunk(ONE)]), (0.5, [])):
        with pytest.raises(BadParameter, match="share"):
            blend(decoder, parts, share)
    for cache, start in ((read(decoder, ONE, "ragged"), 0), (whole, 1), (whole, -1)):
        with pytest.raises(CacheError):
            chunk(cache, ONE, start)
    with pytest.raises(CacheError, match="entries of 7"):
        ContextChunk(TWO, ChunkEntries.of(whole, 0, len(ONE)))
    with pytest.raises(CacheError, match="move them first"):
        ChunkEntries.of(whole, 2, 4).append_to(whole)
    for other in (tiny("gemma3", layers=3), tiny("llama", layers=1)):
        with pytest.raises(ModelError, match="prefill"):
            blend(Decoder(other), [ContextChunk(ONE)])
    assert not decoder.body.layers[1]._forward_pre_hooks, "no hook is left"
