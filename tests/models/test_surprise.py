"""Surprise of tokens: equal to that of the model's logits, by block, predicted or later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from larder.cache import SequenceCache
from larder.core import Ledger, Mode
from larder.models import BatchSegment, Decoder, LMHead, wrap_model
from larder.models import lm_head as head_module
from larder.policy import Surprise
from model_runs import native_logits, some_ids
from references.novelty import surprises
from tiny_models import ARCHITECTURES, tiny

IDS = some_ids(20)
CUTS = [(0, 7), (7, 8), (8, 20)]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return wrap_model(tiny("qwen3", layers=2))


def following(decoder: Decoder) -> SequenceCache:
    return SequenceCache(decoder.spec, "ragged", Ledger(("surprise",)))


def surprise_of(
    decoder: Decoder, rows: list[BatchSegment], mode: Mode = Mode.APPEND
) -> list[Tensor]:
    numbers = decoder.forward_token_numbers(rows, mode, {"surprise": Surprise()})
    return [own["surprise"] for own in numbers]


def of_the_model(module: Any, ids: tuple[int, ...]) -> list[float]:
    result = surprises(native_logits(module, ids).log_softmax(-1).tolist(), list(ids), [])
    return [max(result[1 : CUTS[0][1]]), *result[1:]]


def weighed(decoder: Decoder, cache: SequenceCache, ids: tuple[int, ...]) -> list[float]:
    parts = [surprise_of(decoder, [BatchSegment(cache, ids[a:b])])[0] for a, b in CUTS]
    return torch.cat(parts).tolist()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_surprise_equals_the_models_logits(architecture) -> None:
    expected = of_the_model(tiny(architecture, layers=2), IDS)
    decoder = wrap_model(tiny(architecture, layers=2))
    got = weighed(decoder, following(decoder), IDS)
    assert got == pytest.approx(expected, abs=1e-3)
    assert max(got) - min(got) > 1


def test_surprise_uses_the_models_softcap() -> None:
    module, plain = tiny("gemma3", layers=2), tiny("gemma3", layers=2)
    expected = of_the_model(plain, IDS)
    for each in (module, plain):
        each.config.final_logit_softcapping = 1.5
    capped = of_the_model(plain, IDS)
    decoder = wrap_model(module)
    assert weighed(decoder, following(decoder), IDS) == pytest.approx(capped, abs=1e-3)
    assert max(abs(a - b) for a, b in zip(expected, capped, strict=True)) > 0.1


def test_surprise_is_computed_in_chunks(monkeypatch) -> None:
    decoder = wrap_model(tiny("qwen3", layers=2))
    whole, counts, real = weighed(decoder, following(decoder), IDS), [], LMHead.logits
    del decoder._head

    def counted(self: LMHead, hidden: Tensor) -> Tensor:
        counts.append(len(hidden))
        return real(self, hidden)

    monkeypatch.setattr(head_module, "LOGITS_CHUNK", 3 * 128 + 5)
    monkeypatch.setattr(LMHead, "logits", counted)
    assert weighed(decoder, following(decoder), IDS) == pytest.approx(whole, abs=1e-5)
    assert max(counts) == 3


def test_predicted_surprise_equals_the_later_one(decoder) -> None:
    caches = [following(decoder) for _ in range(3)]
    texts = [some_ids(12, seed=4), some_ids(1, seed=5), some_ids(3, seed=6)]
    for number, cache in enumerate(caches[:2]):
        decoder.read([BatchSegment(cache, some_ids(9, seed=number))], Mode.APPEND)
    before = [cache.state() for cache in caches]
    rows = [BatchSegment(cache, text) for cache, text in zip(caches, texts, strict=True)]
    predicted = decoder.predict_token_numbers(rows, {"surprise": Surprise()})
    seen = [own["surprise"] for own in predicted]
    for cache, state in zip(caches, before, strict=True):
        assert cache.state().keys() == state.keys()
        assert all(torch.equal(tensor, state[name]) for name, tensor in cache.state().items())
    alone = [surprise_of(decoder, [row], Mode.SCRATCH)[0] for row in rows]
    came = surprise_of(decoder, rows)
    for foreseen, single, later in zip(seen, alone, came, strict=True):
        torch.testing.assert_close(foreseen, later, atol=1e-4, rtol=0)
        torch.testing.assert_close(single, later, atol=1e-4, rtol=0)
    assert float(came[2][0]) == float(came[2][1:].max())  # nothing came before it
    assert float(came[0][0]) != float(came[0][1:].max())


def test_single_token_of_an_empty_cache_has_zero_surprise(decoder) -> None:
    assert surprise_of(decoder, [BatchSegment(following(decoder), (5,))])[0].tolist() == [0.0]


def test_predicting_leaves_the_same_logits_and_the_same_tail(decoder) -> None:
    plain, one, other = (SequenceCache(decoder.spec, "ragged"), *map(following, [decoder] * 2))
    wanted = [2, 6]
    expected = decoder.forward_logits([BatchSegment(plain, IDS[:7])], Mode.APPEND, wanted)
    got = decoder.forward_logits([BatchSegment(one, IDS[:7])], Mode.APPEND, wanted)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
    decoder.read([BatchSegment(other, IDS[:7])], Mode.APPEND)
    torch.testing.assert_close(one.latest.tail, other.latest.tail)
    assert not len(plain.latest.tail)


def test_tail_is_copied_and_counted_with_the_cache(decoder) -> None:
    cache = following(decoder)
    decoder.read([BatchSegment(cache, IDS[:8])], Mode.APPEND)
    tail, width = cache.latest.tail.clone(), decoder.embedding_table().shape[1]
    assert tail.shape == (width,)
    decoder.read([BatchSegment(cache, IDS[8:12])], Mode.SCRATCH)
    surprise_of(decoder, [BatchSegment(cache, IDS[8:12])], Mode.SCRATCH)
    bare = SequenceCache(decoder.spec, "ragged", Ledger(("surprise",)))
    decoder.read([BatchSegment(bare, IDS[:8])], Mode.APPEND)
    bare.latest.tail = torch.empty(0)
    assert cache.nbytes == bare.nbytes + 4 * width
    meta = cache.meta()
    restored = SequenceCache.restore(decoder.spec, cache.state(), meta)
    copies = [cache, cache.fork(), restored]
    copies.append(
        SequenceCache.adopt(decoder.spec, cache.fork().release_state(torch.device("cpu")), meta)
    )
    assert all(torch.equal(copy.latest.tail, tail) for copy in copies)
    assert len({copy.latest.tail.data_ptr() for copy in copies}) == len(copies)
    cache.truncate(8)
    assert torch.equal(cache.latest.tail, tail)
    cache.truncate(7)
    assert not len(cache.latest.tail) and torch.equal(copies[1].latest.tail, tail)
    cache.release_state(torch.device("cpu"))
    assert not len(cache.latest.tail)
