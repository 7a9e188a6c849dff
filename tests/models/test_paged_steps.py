"""Decode steps over pages: equal logits, no host synchronization, few launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import larder
from builders import a_plan
from fake_device import FakeDevice, HostSynchronization
from larder.cache import PageArena, SequenceCache
from larder.core import CacheError, Mode
from larder.engine import Engine
from larder.interop import attached
from larder.models import BatchSegment, Decoder, ForwardBatch, LayerRunner
from larder.ops import PAGE_TOKENS, AttentionBackend
from model_runs import read_on, some_ids
from tiny_models import tiny

MOST_LAUNCHES = 6  # of a layer's attention and cache
PATHS = (AttentionBackend.REFERENCE, AttentionBackend.CPU, AttentionBackend.GATHERED)


@pytest.fixture
def decoder_over() -> Iterator[Callable[..., Decoder]]:
    """A decoder of its own, with an arena of pages of the given backend, or without one."""
    held: list[Decoder] = []

    def make(
        backend: AttentionBackend | None,
        architecture: str = "llama",
        dtype: torch.dtype = torch.float32,
        page_tokens: int = 8,
    ) -> Decoder:
        held.append(Decoder(tiny(architecture, dtype=dtype)))
        if backend is not None:
            held[-1].use_pages(PageArena(held[-1].spec, 80, page_tokens, backend))
        return held[-1]

    yield make
    for decoder in held:
        decoder.release()


def some_caches(decoder: Decoder, form: str, count: int = 2) -> list[SequenceCache]:
    """Caches of different lengths; heads of ragged ones differ too."""
    caches = [SequenceCache(decoder.spec, form) for _ in range(count)]
    for number, cache in enumerate(caches):
        read_on(decoder, cache, some_ids(30 + 7 * number, seed=number), 16)
        for layer in decoder.spec.managed if form == "ragged" else ():
            held = cache.lengths()[layer.index]
            kept = [range(head, length, 2 + head) for head, length in enumerate(held)]
            cache.apply(layer.index, a_plan(kept, held))
    return caches


def step(decoder: Decoder, caches: list[SequenceCache], token: int) -> Tensor:
    segments = [BatchSegment(cache, (token + row,)) for row, cache in enumerate(caches)]
    return decoder.forward_logits(segments, Mode.APPEND, range(len(caches)))


def run(decoder: Decoder, form: str) -> Tensor:
    """Logits of steps of two sequences, with evictions, a fork and a longer text between."""
    caches, outs = some_caches(decoder, form), list[Tensor]()
    caches[1].allocate(20)  # pages ahead are not where the present ones end
    for token in range(20, 40):
        outs.append(step(decoder, caches, token))
        if token == 30 and form == "ragged":
            index = decoder.spec.managed[0].index
            held = caches[0].lengths()[index]
            kept = [range(length - 5, length) for length in held]
            caches[0].evict(index, a_plan(kept, held))
    caches.append(caches[0].fork())
    outs.append(step(decoder, caches, 50))
    longer = [BatchSegment(caches[0], (5,)), BatchSegment(caches[1], some_ids(9))]
    outs.append(decoder.forward_logits(longer, Mode.APPEND, range(10)))
    outs.append(decoder.forward_logits(longer, Mode.SCRATCH, range(10)))
    return torch.cat(outs)


def test_bytes_grow_by_pages(decoder_over) -> None:
    decoder = decoder_over(AttentionBackend.GATHERED)
    caches = some_caches(decoder, "ragged")
    before = caches[0].nbytes
    for token in range(20, 40):
        step(decoder, caches, token)
        for cache in caches:
            leases = cache.page_leases()
            held = sum(len(own.pages) * own.pool.page_bytes for own in leases)
            assert cache.nbytes == held
    assert caches[0].nbytes > before


@pytest.mark.parametrize("form", ["dense", "ragged"])
@pytest.mark.parametrize(
    ("architecture", "backend"),
    [*(("llama", backend) for backend in PATHS), ("gemma3", AttentionBackend.GATHERED)],
)
def test_paged_logits_equal_unpaged(decoder_over, architecture, form, backend) -> None:
    expected = run(decoder_over(None, architecture), form)
    got = run(decoder_over(backend, architecture), form)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("form", ["dense", "ragged"])
def test_paged_sequence_is_independent_of_the_batch(decoder_over, form) -> None:
    decoder = decoder_over(AttentionBackend.CPU)
    together, alone = some_caches(decoder, form), some_caches(decoder, form)
    for token in range(20, 32):
        rows = step(decoder, together, token)
        for row, cache in enumerate(alone):
            segment = BatchSegment(cache, (token + row,))
            own = decoder.forward_logits([segment], Mode.APPEND, [0])
            torch.testing.assert_close(own[0], rows[row], atol=1e-5, rtol=0)
    for layer in range(2):
        for one, other in zip(together, alone, strict=True):
            sides = one.entries(layer), other.entries(layer)
            assert torch.equal(sides[0].positions, sides[1].positions)
            torch.testing.assert_close(sides[0].keys, sides[1].keys, atol=1e-5, rtol=0)


POLICIES = {
    "full": ("full", None),
    "window": ("streaming_llm", 48),
    "keydiff": ("keydiff", 48),
    **{name: (name, 48) for name in ("h2o", "d2o", "tova", "roco", "cam")},
}
TEXT = "The harbour master keeps a green ledger in the east tower. " * 6


@pytest.fixture(scope="module")
def seed_engine() -> Engine:
    return Engine.load("seed", dtype="float32")


@pytest.mark.parametrize("name", POLICIES)
def test_paged_engine_answers_the_same(seed_engine, name) -> None:
    engine, decoder = seed_engine.under(*POLICIES[name]), seed_engine.loaded.decoder
    logits: list[list[Tensor]] = []
    for has_pages in (False, True):
        decoder.spec = replace(decoder.spec, arena=None)
        if has_pages:
            arena = PageArena(decoder.spec, 200, 16, AttentionBackend.GATHERED)
            decoder.use_pages(arena)
        memory = engine.read(TEXT)
        with _RecordedLogits(decoder) as recorded:
            engine.ask(memory, ["What does the harbour master keep?"], max_new_tokens=6)
        logits.append(recorded)
    decoder.spec = replace(decoder.spec, arena=None)
    assert len(logits[0]) == len(logits[1]) > 4
    assert len(arena.pages[0]._free) < 200
    for plain, paged in zip(*logits, strict=True):
        torch.testing.assert_close(paged, plain, atol=1e-4, rtol=0)


def test_generate_runs_over_pages() -> None:
    ids = torch.tensor([some_ids(40)])
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = tiny("llama").generate(ids, **options)
    model = tiny("llama")
    with larder.applied(model, "full") as run:
        decoder = attached(model).decoder
        arena = PageArena(decoder.spec, 40, 16, AttentionBackend.GATHERED)
        decoder.use_pages(arena)
        assert model.generate(ids, **options).tolist() == expected.tolist()
        assert run.cache is not None
        assert len(arena.pages[0]._free) < 40


@pytest.mark.parametrize("form", ["dense", "ragged"])
@pytest.mark.parametrize("backend", [AttentionBackend.VARLEN, AttentionBackend.GATHERED])
def test_paged_step_does_not_synchronize(decoder_over, monkeypatch, form, backend) -> None:
    """Two sequences, ragged heads: the model's step never waits, and a layer launches little."""
    dtype = torch.bfloat16
    monkeypatch.setattr(Decoder, "layer_runner", LayerRunner())  # as on an accelerator
    decoder = decoder_over(AttentionBackend.GATHERED, "llama", dtype, PAGE_TOKENS)
    caches = some_caches(decoder, form)
    plain = decoder_over(None, "llama", dtype)
    twins = some_caches(plain, form)
    for pages in decoder.spec.arena.pages.values():
        pages.backend = backend
    counts: list[int] = []
    with FakeDevice() as device, monkeypatch.context() as counting:
        _count_launches(counting, device, counts)
        outs = [step(decoder, caches, token) for token in range(20, 24)]
    expected = [step(plain, twins, token) for token in range(20, 24)]
    torch.testing.assert_close(torch.cat(outs), torch.cat(expected), atol=0.05, rtol=0.05)
    assert len(counts) == 4 * len(decoder.spec.layers)
    if backend is AttentionBackend.VARLEN:
        assert max(counts) <= MOST_LAUNCHES


def test_synchronization_in_a_layer_is_detected(decoder_over, monkeypatch) -> None:
    decoder = decoder_over(AttentionBackend.GATHERED)
    caches = some_caches(decoder, "ragged")
    attend = ForwardBatch.attend

    def reading(self: ForwardBatch, inputs: Any) -> Tensor:
        out = attend(self, inputs)
        out.sum().item()
        return out

    monkeypatch.setattr(ForwardBatch, "attend", reading)
    monkeypatch.setattr(ForwardBatch, "roll_back", lambda self: None)
    with FakeDevice(), pytest.raises(HostSynchronization):
        step(decoder, caches, 20)


def test_unpaged_step_synchronizes(decoder_over, monkeypatch) -> None:
    """Storage with lengths on the host is what the pages replace."""
    decoder = decoder_over(None)
    caches = some_caches(decoder, "ragged")
    monkeypatch.setattr(ForwardBatch, "roll_back", lambda self: None)
    with FakeDevice(), pytest.raises(HostSynchronization):
        step(decoder, caches, 20)


def test_full_arena_refuses_a_step_before_any_layer(decoder_over) -> None:
    decoder = decoder_over(AttentionBackend.CPU)
    caches = some_caches(decoder, "dense")
    pages = decoder.spec.arena.pages[1]
    held = pages.take(len(pages._free))
    before = caches[0].next_position, caches[0].lengths()
    with pytest.raises(CacheError, match="larger num_pages"):
        for token in range(20, 20 + 9):
            before = caches[0].next_position, caches[0].lengths()
            step(decoder, caches, token)
    assert (caches[0].next_position, caches[0].lengths()) == before
    pages.release(held)
    assert step(decoder, caches, 40).isfinite().all()


def test_caches_of_two_arenas_are_in_one_batch(decoder_over) -> None:
    alike, decoder = decoder_over(None), decoder_over(AttentionBackend.CPU)
    caches = some_caches(decoder, "dense", 1)
    decoder.use_pages(PageArena(decoder.spec, 60, 8, AttentionBackend.CPU))
    caches, expected = [*caches, *some_caches(decoder, "dense")], some_caches(alike, "dense", 1)
    expected += some_caches(alike, "dense")
    for order in (slice(None), slice(None, None, -1)):
        for token in range(20, 30):
            found, plain = step(decoder, caches[order], token), step(alike, expected[order], token)
            torch.testing.assert_close(found, plain, atol=1e-5, rtol=1e-4)


class _RecordedLogits:
    """Context that records the logits of every pass of a decoder."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self._logits = decoder, list[Tensor]()

    def __enter__(self) -> list[Tensor]:
        forward = self._decoder.forward_logits

        def recording(*args: Any, **named: Any) -> Tensor:
            self._logits.append(forward(*args, **named))
            return self._logits[-1]

        self._decoder.forward_logits = recording
        return self._logits

    def __exit__(self, *error: object) -> None:
        del self._decoder.forward_logits


def _count_launches(monkeypatch: Any, device: FakeDevice, counts: list[int]) -> None:
    """Count what each call of attention launches."""
    attend = ForwardBatch.attend

    def counting(self: ForwardBatch, inputs: Any) -> Tensor:
        before = device.launch_count
        out = attend(self, inputs)
        counts.append(device.launch_count - before)
        return out

    monkeypatch.setattr(ForwardBatch, "attend", counting)
