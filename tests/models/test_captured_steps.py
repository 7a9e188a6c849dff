"""Captured decode steps of a decoder: what is replayed, what is not, and that answers are alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from builders import a_plan
from larder.cache import PageArena, SequenceCache
from larder.core import BadParameter, CacheError, InputError, Mode
from larder.engine import Engine
from larder.models import BatchSegment, CapturedSteps, Decoder, PageUse, describe_steps, set_pages
from larder.ops import AttentionBackend
from larder.session import empty_cache
from larder_bench.profiling.eager_capture import EagerCapture
from model_runs import read_on, some_ids
from tiny_models import tiny

PAGE = 8
TEXT = "The harbour master keeps a green ledger in the east tower. " * 6
QUESTION = "What does the harbour master keep?"
POLICIES = {
    "full": ("full", None),
    "streaming_llm": ("streaming_llm", 48),
    "keydiff": ("keydiff", 48),
    "snapkv": ("snapkv", 48),
    "h2o": ("h2o", 48),
    "d2o": ("d2o", 48),
}


def give_pages(decoder: Decoder, num_pages: int = 4, most: int = 4000) -> PageArena:
    backend = AttentionBackend.GATHERED
    arena = PageArena(decoder.spec, num_pages, PAGE, backend, max_pages=most)
    decoder.use_pages(arena, EagerCapture())
    return arena


@pytest.fixture
def decoder() -> Iterator[Decoder]:
    with Decoder(tiny("llama")) as own:
        give_pages(own)
        yield own


@pytest.fixture
def replayed(monkeypatch) -> list[int]:
    """Numbers of sequences of the batches that were replayed."""
    found: list[int] = []
    logits = CapturedSteps.logits

    def counting(self: CapturedSteps, segments: Any, *args: Any) -> Tensor | None:
        out = logits(self, segments, *args)
        if out is not None:
            found.append(len(segments))
        return out

    monkeypatch.setattr(CapturedSteps, "logits", counting)
    return found


@pytest.fixture(scope="module")
def seed_engine() -> Engine:
    return Engine.load("seed", dtype="float32")


def some_caches(decoder: Decoder, count: int = 2) -> list[SequenceCache]:
    caches = [SequenceCache(decoder.spec, "ragged") for _ in range(count)]
    for number, cache in enumerate(caches):
        read_on(decoder, cache, some_ids(12 + 5 * number, seed=number), 40)
    return caches


def step(decoder: Decoder, caches: list[SequenceCache], token: int, observer: Any = None) -> Tensor:
    segments = [BatchSegment(cache, (token + row,)) for row, cache in enumerate(caches)]
    return decoder.forward_logits(segments, Mode.APPEND, range(len(caches)), observer)


@pytest.mark.extended
@pytest.mark.parametrize("name", POLICIES)
def test_engine_with_captured_steps_answers_the_same(seed_engine, replayed, name) -> None:
    """Reading, then a step for each token of the answer, with evictions between them."""
    engine, decoder = seed_engine.under(*POLICIES[name]), seed_engine.loaded.decoder
    answers: list[Any] = []
    for has_pages in (False, True):
        if has_pages:
            give_pages(decoder)
        answers.append(engine.ask(engine.read(TEXT), QUESTION, max_new_tokens=20).ids)
        assert not replayed or has_pages
    decoder.use_pages(None)
    assert answers[0] == answers[1]
    assert len(replayed) >= len(answers[1]) - 1 > 1


def test_observers_receive_the_same_as_without_capture(decoder, replayed) -> None:
    """Queries, keys, values and positions of every layer, with evictions by the observer."""
    seen: list[list[Any]] = []
    for is_captured in (True, False):
        caches, own = some_caches(decoder), list[Any]()

        def observe(row: int, layer: int, recorded: Any, caches: Any = caches, own: Any = own):
            sides = recorded.queries, recorded.keys, recorded.values, recorded.positions
            own.append((row, layer, [side.clone() for side in sides]))
            held = caches[row].lengths()[layer]
            kept = [range(1 + head % 2, length) for head, length in enumerate(held)]
            caches[row].evict(layer, a_plan(kept, held))

        hook = None
        if not is_captured:  # a hook on the model, which no graph calls
            hook = decoder.module.register_forward_hook(lambda *_: None)
        own += [step(decoder, caches, token, observe) for token in range(20, 30)]
        if hook is not None:
            hook.remove()
        own += [cache.lengths() for cache in caches]
        seen.append(own)
    assert len(replayed) == 10
    for one, other in zip(*map(_by_layer, seen), strict=True):
        assert one[:2] == other[:2]
        for mine, theirs in zip(one[2], other[2], strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)


def _by_layer(seen: list[Any]) -> list[Any]:
    """Calls of the observer, those of a step in one order, and logits and lengths behind them."""
    calls = [each for each in seen if isinstance(each, tuple) and isinstance(each[0], int)]
    rest = [each for each in seen if isinstance(each, Tensor)]
    by_step = [sorted(calls[first : first + 4]) for first in range(0, len(calls), 4)]
    return [each for own in by_step for each in own] + [(0, 0, rest)]


def test_step_whose_observer_fails_is_rolled_back(decoder) -> None:
    caches, twins = some_caches(decoder), some_caches(decoder)

    def fail(row: int, layer: int, recorded: Any) -> None:
        if layer == 1:
            raise InputError("refused")

    before = [(cache.next_position, cache.lengths()) for cache in caches]
    with pytest.raises(InputError, match="refused"):
        step(decoder, caches, 20, fail)
    assert [(cache.next_position, cache.lengths()) for cache in caches] == before
    torch.testing.assert_close(step(decoder, caches, 21), step(decoder, twins, 21))


def test_other_batches_run_layer_by_layer(decoder, replayed) -> None:
    """Several tokens, logits of some rows, and a former arena."""
    caches = some_caches(decoder)
    former = caches[0]
    segments = [BatchSegment(caches[0], (5, 6)), BatchSegment(caches[1], (7,))]
    decoder.forward_logits(segments, Mode.APPEND, range(3))
    decoder.forward_logits([BatchSegment(c, (5,)) for c in caches], Mode.APPEND, [1])
    decoder.forward_logits([BatchSegment(caches[0], (5,))], Mode.SCRATCH, [0])
    give_pages(decoder)
    step(decoder, [former], 5)
    assert replayed == []
    step(decoder, some_caches(decoder, 1), 5)
    assert replayed == [1]


def test_tokens_outside_the_vocabulary_are_refused(decoder) -> None:
    caches = some_caches(decoder, 1)
    before = caches[0].lengths()
    with pytest.raises(InputError, match="vocabulary"):
        step(decoder, caches, decoder.vocab_size)
    assert caches[0].lengths() == before


def test_step_that_cannot_be_captured_runs_layer_by_layer(decoder) -> None:
    class FailingCapture:
        def capture(self, call: Any) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")

    twins = some_caches(decoder)
    expected = [step(decoder, twins, token) for token in range(20, 24)]
    decoder.use_pages(decoder.spec.arena, FailingCapture())
    caches = some_caches(decoder)
    got = [step(decoder, caches, token) for token in range(20, 24)]
    torch.testing.assert_close(torch.cat(got), torch.cat(expected), atol=1e-5, rtol=0)
    assert "not permitted when stream is capturing" in describe_steps(decoder, caches[0])


def test_weights_that_moved_are_captured_again(decoder) -> None:
    caches = some_caches(decoder, 1)
    step(decoder, caches, 20)
    weight = decoder.module.lm_head.weight
    weight.data = torch.zeros_like(weight)
    assert not step(decoder, caches, 21).any()


@pytest.mark.extended
def test_arena_grows_between_captured_steps(decoder, replayed) -> None:
    """Four pages at first, and wider tables later: logits are those of a large arena."""
    with Decoder(tiny("llama")) as large:
        give_pages(large, 400)
        expected, got = some_caches(large, 3), some_caches(decoder, 3)
        for token in range(20, 60):
            wanted, found = step(large, expected, token), step(decoder, got, token)
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    assert decoder.spec.arena.pages[0].num_pages > 40
    assert len(replayed) == 80
    for one, other in zip(expected, got, strict=True):
        assert torch.equal(one.entries(1).positions, other.entries(1).positions)


def test_arena_grows_to_its_most_pages_only(decoder) -> None:
    arena = give_pages(decoder, 4, most=9)
    with pytest.raises(CacheError, match="larger num_pages"):
        some_caches(decoder, 3)
    assert arena.pages[0].num_pages <= 10


def test_no_memory_to_grow_refuses_and_keeps_what_was_there(decoder, monkeypatch) -> None:
    caches, arena = some_caches(decoder, 1), decoder.spec.arena
    held = caches[0].entries(0).positions.clone(), caches[0].entries(1).keys.clone()
    pages = arena.pages[1]

    def refuse(num_pages: int) -> None:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as full:
        full.setattr(pages, "grow", refuse)
        with pytest.raises(CacheError, match="more pages"):
            pages.take(len(pages._free) + 1)
    assert torch.equal(caches[0].entries(0).positions, held[0])
    assert torch.equal(caches[0].entries(1).keys, held[1])
    pages.release(pages.take(len(pages._free) + 1))
    assert step(decoder, caches, 20).isfinite().all()


def test_steps_are_captured_again_after_growth_that_failed_halfway(
    decoder, monkeypatch, replayed
) -> None:
    """Positions have moved before there was no memory, keys and values move later."""
    arena, pages = decoder.spec.arena, decoder.spec.arena.pages[0]
    with Decoder(tiny("llama")) as large:
        give_pages(large, 400)
        expected, got = some_caches(large, 1), some_caches(decoder, 1)

        def refuse(num_pages: int) -> None:
            raise torch.OutOfMemoryError("no memory")

        with monkeypatch.context() as full:
            full.setattr(pages, "grow", refuse)
            with pytest.raises(CacheError, match="more pages"):
                pages.take(len(pages._free) + 1)
        for token in (20, 21):
            torch.testing.assert_close(step(decoder, got, token), step(large, expected, token))
        positions, keys = arena.positions, pages.keys
        pages.release(pages.take(len(pages._free) + 1))
        assert arena.positions is positions and pages.keys is not keys
        torch.testing.assert_close(step(decoder, got, 22), step(large, expected, 22))
    assert not decoder.captured.refusal and len(replayed) == 6


def test_pages_are_used_as_configured() -> None:
    with Decoder(tiny("llama")) as decoder:
        set_pages(decoder, PageUse.AUTO)
        assert decoder.spec.arena is None
        set_pages(decoder, PageUse.ON)
        assert decoder.spec.arena is not None
        cache = SequenceCache(decoder.spec, "dense")
        assert "nothing captures graphs" in describe_steps(decoder, cache)
        set_pages(decoder, PageUse.OFF)
        assert decoder.spec.arena is None
    with pytest.raises(BadParameter, match="pages must be auto, on or off, got 'never'"):
        Engine.load("seed", pages="never")


def test_engine_over_pages_on_a_cpu_answers_the_same() -> None:
    engine = Engine.load("seed", dtype="float32", pages="on", policy="full")
    answer = engine.ask(engine.read(TEXT), QUESTION, max_new_tokens=8)
    engine.loaded.decoder.use_pages(None)
    assert answer.ids == engine.ask(engine.read(TEXT), QUESTION, max_new_tokens=8).ids


def test_steps_are_described(seed_engine) -> None:
    decoder, spelled = seed_engine.loaded.decoder, dict[str, str]()
    give_pages(decoder)
    for name in ("full", "h2o"):
        memory = seed_engine.under(name, 64 if name != "full" else None).read(TEXT)
        spelled[name] = describe_steps(decoder, empty_cache(memory.policy, decoder.spec))
    decoder.use_pages(None)
    assert spelled["full"] == "over pages, as captured graphs"
    assert spelled["h2o"] == spelled["full"]
    with Decoder(tiny("gemma3")) as windowed:
        give_pages(windowed)
        cache = SequenceCache(windowed.spec, "dense")
        assert "have windows or shared entries" in describe_steps(windowed, cache)
