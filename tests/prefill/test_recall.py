"""Generating over what is parked, found by every way there is: exact, bounded, and kept whole."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from _pytest.outcomes import Failed
from torch import Tensor

from covering import one_in
from larder import Policy
from larder.cache import PageFetcher, SequenceCache, SlowTier
from larder.core import RECALLS, BudgetError, Mode, PrefillRecall
from larder.engine import SamplingParams, StoppingCriteria
from larder.engine.generate import generate
from larder.models import BatchSegment, Decoder, wrap_model
from larder.policy import KeyDiff, Protect
from larder.prefill import PeakMemoryMeter, PrefillReader, PrefillSequence
from larder.session import (
    PRESETS,
    ModelRuntime,
    SessionCaches,
    build_caches,
    decode_planner,
    entries_per_head,
    recall_budget_tokens,
)
from model_runs import id_runtime, native_logits, some_ids
from tiny_models import tiny

CONTEXT, QUESTION, STEPS, HEADS = some_ids(24), some_ids(4, seed=5), 28, 2
STAYING, LAG = 8, 4  # entries of the fast tier, and those that may pile up
# Sizes for texts as short as these; all other parts find entries one by one.
SIZES = {
    "bounds": "page=4",
    "clusters": "size=4",
    "dci": "page=4",
    "graph": "least=8, links=4",
    "mpcache": "page=4",
    "infinigen": "most=1.0, channels=1.0",
    "lserve": "page=4, part=2",
    "rocket": "ratio=4",
    "wave": "page=4, size=4, update=8, segment=16",
}
PARTS = pytest.mark.parametrize("name", sorted(RECALLS.builtin_names()))


@dataclass(frozen=True)
class RecordingSampler(SamplingParams):
    """Sampling parameters that record the logits of every choice."""

    logits: list[Tensor] = field(default_factory=list)

    def sample(self, logits: Tensor, random_generator: Any) -> int:
        self.logits.append(logits.clone())
        return super().sample(logits, random_generator)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return wrap_model(tiny("qwen3"))


@pytest.fixture(scope="module")
def own() -> Any:
    """Reference model on its own attention."""
    return tiny("qwen3")


def policy(name: str, recalled: int) -> Policy:
    if name == "graph":
        pytest.importorskip("usearch")
    sizes = f"tokens={recalled}, dense=0, {SIZES.get(name, '')}".removesuffix(", ")
    parts = f"sinks_and_window(sinks=2) > uniform() > park() > {name}({sizes})"
    sentence = f"blockwise(tokens=8) > protect(sinks=2, recent=2) > {parts} > lagged(tokens={LAG})"
    return Policy.parse(sentence).with_sizes(STAYING + LAG + recalled, None)


def runtime(decoder: Decoder, closing: frozenset[int] = frozenset({7, 8})) -> ModelRuntime:
    """Args: closing: tokens that end a sentence."""
    return id_runtime(decoder, sentence_ends=closing)


def generate_with_logits(
    decoder: Decoder,
    wanted: Policy,
    cache: SequenceCache,
    ids: Any,
    steps: int,
    allowed: int = STAYING,
) -> Any:
    """The next tokens, and the logits of each; the bound is looked at after every pass."""
    sampler, most = RecordingSampler(), (allowed + LAG - 1) * HEADS * len(decoder.spec.layers)
    over: list[int] = []

    def watch(row: int, token: int) -> bool:
        over.extend([cache.managed_entries] * (cache.managed_entries > most))
        return True

    observer = decode_planner(runtime(decoder), wanted, [cache]).observer
    [tokens] = generate(decoder, [cache], [ids], sampler, StoppingCriteria(steps), watch, observer)
    assert over == []
    return tuple(tokens), torch.stack(sampler.logits)


def park_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have entries parked although the budget still has room for them."""
    for room in ("recall_budget_tokens", "prefill_allowance"):
        monkeypatch.setattr(f"larder.session.prefill.{room}", lambda policy: 0)


def read(decoder: Decoder, wanted: Policy) -> SessionCaches:
    return build_caches(runtime(decoder), wanted, CONTEXT, [{}], PeakMemoryMeter())


@pytest.mark.extended
@PARTS
def test_full_recall_generates_as_the_full_cache(decoder, own, name, monkeypatch) -> None:
    wanted = policy(name, 320)
    park_at_once(monkeypatch)
    cache = read(decoder, wanted).activate(0)
    tokens, logits = generate_with_logits(decoder, wanted, cache, QUESTION, STEPS)
    ids = (*CONTEXT, *QUESTION, *tokens)
    expected = native_logits(own, ids)[-STEPS - 1 : -1]
    assert torch.allclose(logits, expected, atol=1e-3)
    assert cache.pages[0] > 0


def test_full_recall_prefills_blocks_exactly(decoder, own, monkeypatch) -> None:
    wanted = policy("votes", 320)
    wanted = replace(wanted, recall=replace(wanted.recall, prefill=PrefillRecall.RECALLED))
    park_at_once(monkeypatch)
    monkeypatch.setattr(
        SlowTier, "attention_calls", lambda self, queries: pytest.fail("attended to all")
    )
    cache = read(decoder, wanted).activate(0)
    tokens, logits = generate_with_logits(decoder, wanted, cache, QUESTION, 5)
    expected = native_logits(own, (*CONTEXT, *QUESTION, *tokens))[-6:-1]
    assert torch.allclose(logits, expected, atol=1e-3)


@pytest.mark.parametrize("closing", [frozenset(range(128)), frozenset[int]()])
def test_first_token_of_a_sentence_attends_to_all(decoder, closing, monkeypatch) -> None:
    """Every token is the first of one, or the first of all is."""
    wanted, steps, seen = policy("sentences", 8), 6, list[int]()
    cache = build_caches(
        runtime(decoder, closing), wanted, CONTEXT, [{}], PeakMemoryMeter()
    ).activate(0)
    recalled = PageFetcher.step_calls

    def noting(self: PageFetcher, *args: Any) -> Any:
        parts = recalled(self, *args)
        seen.append(parts is None)
        return parts

    monkeypatch.setattr(PageFetcher, "step_calls", noting)
    observer = decode_planner(runtime(decoder, closing), wanted, [cache]).observer
    generate(
        decoder,
        [cache],
        [QUESTION],
        RecordingSampler(),
        StoppingCriteria(steps),
        lambda *_: True,
        observer,
    )
    layers = len(decoder.spec.layers)
    later = [bool(closing)] * (len(seen) - layers)
    assert len(later) == (steps - 2) * layers
    assert seen == [True] * layers + later


def test_correction_without_misses_changes_nothing(decoder, own, monkeypatch) -> None:
    wanted = policy("flat", 320)
    park_at_once(monkeypatch)
    recall = replace(wanted.recall, corrected=2)  # as many as are protected; keydiff spares none
    wanted = replace(wanted, recall=recall, scorer=KeyDiff())
    tokens, logits = generate_with_logits(
        decoder, wanted, read(decoder, wanted).activate(0), QUESTION, 12
    )
    expected = native_logits(own, (*CONTEXT, *QUESTION, *tokens))[-13:-1]
    assert torch.allclose(logits, expected, atol=1e-3)


@pytest.mark.parametrize("variant", ["held='every'", "held='one', depth=1", "held='ids'"])
def test_recomputed_entries_equal_the_full_cache(decoder, own, variant) -> None:
    """The smallest of budgets answers as the full cache, also after it was offloaded."""
    ends = f"sinks_and_window(sinks=2) > uniform() > recompute({variant}) > lagged(tokens={LAG})"
    sentence = f"blockwise(tokens=8) > protect(sinks=2, recent=2) > {ends}"
    wanted, steps = Policy.parse(sentence).with_sizes(STAYING, None), 6
    cache = read(decoder, wanted).activate(0)
    first, logits = generate_with_logits(decoder, wanted, cache, QUESTION, steps)
    session_caches = SessionCaches(decoder.spec, [cache])
    second, later = generate_with_logits(
        decoder, wanted, session_caches.activate(0), some_ids(2, seed=9), steps
    )
    cache = session_caches.activate(0)
    ids = (*CONTEXT, *QUESTION, *first[: steps - 1], *some_ids(2, seed=9), *second)
    expected = native_logits(own, ids)
    at = len(CONTEXT) + len(QUESTION) - 1
    assert torch.allclose(logits, expected[at : at + steps], atol=1e-3)
    assert torch.allclose(later, expected[-steps - 1 : -1], atol=1e-3)


@pytest.mark.parametrize("name", one_in(4, sorted(RECALLS.builtin_names())))
def test_deactivated_cache_continues_identically_within_its_budget(decoder, name) -> None:
    wanted = policy(name, 8)
    cache = read(decoder, wanted).activate(0)
    generate_with_logits(decoder, wanted, cache, QUESTION, 7)
    pages, moved = cache.pages
    assert 0 < moved <= pages
    twin = cache.fork()
    session_caches = SessionCaches(decoder.spec, [cache.fork()])
    ways = cache, twin, session_caches.activate(0)
    live, forked, shelved = (
        generate_with_logits(decoder, wanted, own, some_ids(3, seed=9), 4) for own in ways
    )
    assert forked[0] == shelved[0] and torch.equal(forked[1], shelved[1])
    assert live[0] == forked[0] and torch.allclose(live[1], forked[1], atol=1e-4)


def test_pages_without_room_for_kept_entries_are_refused(decoder) -> None:
    wanted = replace(policy("flat", 6), protect=Protect(sinks=2, recent=9))
    message = "of 18 tokens has no room for the 6 that flat.* the 4 that lagged.* the 11"
    with pytest.raises(BudgetError, match=message):
        read(decoder, wanted)


def test_recall_presets_fit_their_lag_in_the_budget(decoder) -> None:
    presets = [Policy.parse(name).with_sizes(256, None) for name in PRESETS]
    recalling = [each for each in presets if each.recall is not None]
    assert len(recalling) > 10
    for each in recalling:
        most = entries_per_head(each, decoder.spec) + (each.timing.excess() or 0) + 1
        assert most + recall_budget_tokens(each) == 256


def test_full_budget_offloads_nothing(decoder, own) -> None:
    wanted = policy("flat", len(CONTEXT) + len(QUESTION) + 4 - STAYING)
    cache = read(decoder, wanted).activate(0)
    tokens, logits = generate_with_logits(
        decoder, wanted, cache, QUESTION, 5, allowed=wanted.budget.tokens
    )
    expected = native_logits(own, (*CONTEXT, *QUESTION, *tokens))[-6:-1]
    assert torch.allclose(logits, expected, atol=1e-5)
    assert cache.pages == (0, 0) and not any(tier.has_offloaded for tier in cache.tiers)
    assert cache.tiers[0].foreseen_bytes == 0
    generate_with_logits(decoder, wanted, cache, some_ids(1), LAG, allowed=wanted.budget.tokens)
    assert all(tier.has_offloaded for tier in cache.tiers)  # it is full, and makes room for pages
    assert cache.managed_entries <= (STAYING + LAG - 1) * HEADS * len(decoder.spec.layers)


def test_block_of_one_token_and_a_question_of_one_are_exact(decoder, own, monkeypatch) -> None:
    wanted = policy("flat", 8)
    monkeypatch.setattr(PageFetcher, "step_calls", lambda *args: pytest.fail("recalled"))
    cache = read(decoder, wanted).activate(0)
    logits = generate_with_logits(decoder, wanted, cache, some_ids(1, seed=3), 1)[1]
    expected = native_logits(own, (*CONTEXT, *some_ids(1, seed=3)))[-1:]
    assert torch.allclose(logits, expected, atol=1e-5)
    lane = PrefillSequence(cache, {})
    reader = PrefillReader(decoder, wanted.planner, STAYING, {}, PeakMemoryMeter())
    reader.append([lane], (5,))
    reader.append([lane], (6,))
    with pytest.raises(Failed, match="recalled"):
        decoder.read([BatchSegment(cache, (7,))], Mode.APPEND)
