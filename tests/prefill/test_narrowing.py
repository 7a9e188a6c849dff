"""Narrowing: few tokens go deeper, at their true positions, and the rest is exact."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from larder import Policy
from larder.core import BadParameter, ImageSpans, SpellingError, UsageError
from larder.models import wrap_model
from larder.policy import WITHOUT_LIMIT
from larder.prefill import (
    NarrowingShape,
    PeakMemoryMeter,
    PrefillReader,
    PrefillSequence,
    no_progress,
)
from larder.session import PRESETS, empty_cache, entries_per_head
from model_runs import native_logits, read_on, some_ids
from references.narrowing import go_on, layer_lengths, narrowed_logits
from tiny_models import WINDOW_TOKENS, tiny

LAYERS, LENGTH, MORE = 5, 40, 6
ENDS = "protect(sinks=1, recent=2)"


@cache
def decoder_of(architecture: str) -> Any:
    return wrap_model(tiny(architecture, layers=LAYERS))


OTHERS = ("llama", "qwen2", "mistral", "phi3")


@pytest.fixture(
    params=["qwen3", "gemma3", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


def managed(decoder: Any) -> tuple[int, ...]:
    return tuple(layer.index for layer in decoder.spec.managed)


def read(decoder: Any, sentence: str, ids: tuple[int, ...], tokens: int = 10) -> Any:
    """Cache of a text under a policy."""
    policy = Policy.parse(sentence).with_sizes(tokens, None)
    budget, layers = entries_per_head(policy, decoder.spec), managed(decoder)
    planner = policy.planner.with_calibration({}, layers)
    quotas = {} if budget == WITHOUT_LIMIT else planner.quotas(budget, len(ids), layers, {})
    reader = PrefillReader(decoder, planner, budget, quotas, PeakMemoryMeter())
    own = empty_cache(policy, decoder.spec)
    lane = PrefillSequence(own, {"repeat": (5, 6)})
    policy.schedule.read(reader, [lane], ids, no_progress)
    return own


def reached(own: Any, stop: int = LENGTH) -> dict[int, set[int]]:
    """Positions that each layer holds of a text."""
    layers = {layer.index: own.entries(layer.index) for layer in own.spec.managed}
    return {
        index: {position for position in entries.head_positions(0).tolist() if position < stop}
        for index, entries in layers.items()
    }


def test_narrowing_that_keeps_all_tokens_is_exact(architecture) -> None:
    ids = some_ids(LENGTH + MORE)
    expected = native_logits(tiny(architecture, layers=LAYERS), ids)[LENGTH:]
    for budget in ("unlimited()", f"uniform(tokens={LENGTH})"):
        sentence = f"narrowing(tokens={LENGTH}) > {ENDS} > snapkv(window=4) > {budget}"
        own = read(decoder_of(architecture), sentence, ids[:LENGTH])
        got = read_on(decoder_of(architecture), own, ids[LENGTH:], 1)
        assert (got - expected).abs().max() < 1e-4


@pytest.mark.parametrize("schedule", ["narrowing(layer=1, tokens=12)", "layerwise_narrowing"])
def test_deeper_layers_hold_only_propagated_tokens(architecture, schedule) -> None:
    ids, decoder = some_ids(LENGTH + MORE), decoder_of(architecture)
    schedule = (
        schedule.replace("ing", "ing(share=0.5, least=3)") if schedule[0] == "l" else schedule
    )
    own = read(decoder, f"{schedule} > {ENDS} > snapkv(window=4) > unlimited()", ids[:LENGTH])
    assert own.next_position == LENGTH
    layers = reached(own)
    counts = [len(layers[layer.index]) for layer in decoder.spec.managed]
    assert counts == sorted(counts, reverse=True) and counts[-1] < LENGTH == counts[0]
    assert all({0, LENGTH - 1, LENGTH - 4} <= layer for layer in layers.values())
    there = dict(layers)
    for layer in decoder.spec.layers:  # a sliding layer gets what the one before let go on
        if layer.index not in there and layer.index:
            behind = [i for i in there if i > layer.index]
            there[layer.index] = layers[min(behind)] if behind else there[layer.index - 1]
    expected = narrowed_logits(tiny(architecture, layers=LAYERS), ids, there, LENGTH)
    got = read_on(decoder, own, ids[LENGTH:], 1)
    assert (got - expected[LENGTH:]).abs().max() < 1e-4
    assert (got - native_logits(tiny(architecture, layers=LAYERS), ids)[LENGTH:]).abs().max() > 0.01


def test_propagated_tokens_equal_the_reference() -> None:
    """By the scores of the layer that chooses, which holds all of its tokens without a limit."""
    decoder, ids = decoder_of("qwen3"), some_ids(LENGTH)
    found: list[Any] = []
    policy = Policy.parse(
        f"narrowing(layer=1, tokens=12) > {ENDS} > snapkv(window=4) > unlimited()"
    )
    planner = policy.planner
    score = type(planner).score

    def watched(self: Any, observation: Any, *args: Any, **named: Any) -> Any:
        scores = score(self, observation, *args, **named)
        found.append((observation.layer.index, scores.split(list(observation.entries.lengths))))
        return scores

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(planner), "score", watched)
        own = read(decoder, str(policy), ids)
    heads = next(scores for layer, scores in found if layer == 1)
    always = [position < 1 or position >= LENGTH - 4 for position in range(LENGTH)]
    expected = go_on([head.tolist() for head in heads], always, 12)
    assert sorted(reached(own)[2]) == expected


def test_token_selection_hand_values() -> None:
    heads = [[0.1, 0.4, 0.0, 0.3, 0.2], [0.5, 0.1, 0.0, 0.1, 0.2]]  # sums .6 .5 0 .4 .4
    always = [False, False, False, False, True]
    assert go_on(heads, always, 3) == [0, 1, 4]
    assert go_on(heads, always, 4) == [0, 1, 3, 4]
    assert go_on(heads, [False] * 5, 3) == [0, 1, 3]  # the earlier of two equals
    assert go_on(heads, [True] * 5, 1) == [0, 1, 2, 3, 4]


def test_pyramidinfer_hand_values() -> None:
    """Of 32 layers the first cuts nothing, the middle one 5 percent, all together four fifths."""
    shape = NarrowingShape(32, tuple(range(32)), 0, 0)
    assert shape.count(0, 1000, 0.1) == 1000
    assert shape.count(16, 1000, 0.1) == 950
    assert shape.lengths(100000, 0.1) == layer_lengths(100000, 32, 0.9, 0, 0)
    assert shape.count(31, shape.lengths(100000, 0.1)[-1], 0.1) == pytest.approx(19500, rel=0.05)
    lengths = NarrowingShape(32, tuple(range(32)), 200, 64).lengths(1000, 0.1)
    assert lengths == layer_lengths(1000, 32, 0.9, 200, 64)
    assert lengths == sorted(lengths, reverse=True) and min(lengths) >= 264


def test_open_share_is_the_largest_that_fits() -> None:
    shape = NarrowingShape(30, tuple(range(30)), 50, 10)
    for budget in (150, 300, 400, 500, 800):
        fall = shape.least_fall(1000, budget)
        assert (fall > 1) == (budget < 375)
        lengths, more = shape.lengths(1000, fall), shape.lengths(1000, 0.99 * fall)
        assert sum(lengths) <= 30 * budget < sum(more)
        assert lengths == sorted(lengths, reverse=True)
    assert sum(shape.lengths(1000, shape.least_fall(1000, 60))) > 30 * 60


@pytest.mark.parametrize("preset", ["fastkv", "pyramidinfer"])
def test_presets_fill_their_budgets(preset) -> None:
    decoder, ids = decoder_of("qwen3"), some_ids(200)
    sentence = PRESETS[preset].replace("layerwise_narrowing()", "layerwise_narrowing(least=4)")
    for tokens in (100, 140):
        own = read(decoder, sentence, ids, tokens)
        heads = sum(layer.kv_heads for layer in decoder.spec.managed)
        assert 0.8 * tokens * heads <= own.managed_entries <= tokens * heads
        assert own.next_position == 200
    held = [len(positions) for positions in reached(own, 200).values()]
    assert held == [140] * LAYERS if preset == "fastkv" else held == sorted(held, reverse=True)
    whole = read(decoder, preset, ids, 200)
    assert whole.managed_entries == 200 * heads


def test_windows_hold_propagated_tokens_of_their_span() -> None:
    decoder, ids = decoder_of("gemma3"), some_ids(LENGTH)
    policy = f"narrowing(layer=1, tokens=6) > {ENDS} > snapkv(window=2) > unlimited()"
    own = read(decoder, policy, ids)
    (before, *_), windows = decoder.spec.windows, [own.entries(2), own.entries(4)]
    assert own.entries(before.index).lengths == (WINDOW_TOKENS,) * 2
    for entries in windows:
        positions = entries.head_positions(0).tolist()
        deeper = reached(own)[3]
        assert set(positions) == {p for p in deeper if p >= LENGTH - WINDOW_TOKENS}


def test_narrowing_scorer_is_separate_from_eviction_scorer() -> None:
    decoder, ids = decoder_of("qwen3"), some_ids(LENGTH)
    plain = f"narrowing(layer=1, tokens=12) > {ENDS} > keydiff() > uniform(tokens=12)"
    other = plain.replace("12)", '12, scorer="snapkv(window=4) > max() > group_max()")', 1)
    assert reached(read(decoder, plain, ids))[0] == reached(read(decoder, other, ids))[0]
    assert reached(read(decoder, plain, ids))[3] != reached(read(decoder, other, ids))[3]


@pytest.mark.parametrize(
    "rest",
    [
        "h2o",
        "d2o",
        "patched",
        "park() > dci(dense=0, page=4)",
        "quantized(bits=4, group=8)",
        "compact()",
    ],
)
def test_narrowing_composes_with_other_parts(rest) -> None:
    """Statistics, merges, prompts, recall, precisions and positions without gaps."""
    decoder, ids = decoder_of("qwen3"), some_ids(LENGTH + MORE)
    schedule = "narrowing(layer=1, tokens=20)"
    sentences = {
        "h2o": f"{schedule} > column_mass() > uniform() > every_step()",
        "d2o": f"{schedule} > protect(sinks=1, recent=4) > column_mass() > inverse_variance() > "
        "fold_ema() > every_step()",
        "patched": 'narrowing(layer=1, tokens=20, scorer="keydiff()") > reconstruct(chunk=8) > '
        "uniform()",
    }
    sentence = sentences.get(rest, f"{schedule} > {ENDS} > snapkv(window=4) > uniform() > {rest}")
    if "protect" not in sentence:
        sentence = sentence.replace(" > ", f" > {ENDS} > ", 1)
    own = read(decoder, sentence, ids[:LENGTH], 16)
    assert torch.isfinite(read_on(decoder, own, ids[LENGTH:], 1)).all()
    again = read(decoder, sentence, ids[:LENGTH], 16).fork()
    assert torch.isfinite(read_on(decoder, again, ids[LENGTH:], 1)).all()
    assert again.lengths() == own.lengths()


def test_unsupported_narrowings_name_the_way_out() -> None:
    for sentence, match in (
        ('narrowing() > patched(prompt="question")', "two_passes"),
        ("narrowing() > novelty()", "does not compute for all"),
        ('narrowing(scorer="column_mass()") > snapkv()', "no other part"),
        ("narrowing() > snapkv() > uniform() > recompute()", "leaves some out"),
    ):
        with pytest.raises(SpellingError, match=match):
            Policy.parse(sentence)
    for sentence in (
        *(
            "narrowing(layer=1.5)",
            "narrowing(layer=-1)",
            "narrowing(tokens=0)",
            "narrowing(kept=2)",
        ),
        *("narrowing(tokens=3, kept=0.5)", 'narrowing(scorer="drop()")'),
        *("layerwise_narrowing(share=0)", "layerwise_narrowing(least=-1)", "rising_mean(last=0)"),
    ):
        with pytest.raises(BadParameter):
            Policy.parse(sentence if sentence[0] != "r" else f"snapkv() > {sentence}")
    decoder = decoder_of("qwen3")
    with pytest.raises(UsageError, match="layers 0 to 4"):
        read(decoder, f"narrowing(layer=9) > {ENDS} > snapkv(window=4) > uniform()", some_ids(40))
    policy = Policy.parse(f"narrowing() > {ENDS} > snapkv(window=4) > uniform(tokens=10)")
    reader = PrefillReader(decoder, policy.planner, 10, {0: 10}, PeakMemoryMeter())
    lane = PrefillSequence(empty_cache(policy, decoder.spec), {}, images=ImageSpans(((2, 6),)))
    with pytest.raises(UsageError, match="images"):
        policy.schedule.read(reader, [lane], some_ids(40), no_progress)
