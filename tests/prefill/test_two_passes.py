"""Two passes: what the first layers find is read again, and nothing else is held."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from larder import Policy
from larder.core import BadParameter, SpellingError
from larder.models import wrap_model
from larder.policy import WITHOUT_LIMIT
from larder.prefill import (
    PeakMemoryMeter,
    PrefillReader,
    PrefillSequence,
    no_progress,
    selected_tokens,
)
from larder.prefill.schedules import two_passes
from larder.session import empty_cache, entries_per_head
from model_runs import native_logits, read_on, some_ids
from references.narrowing import narrowed_logits
from references.two_passes import found
from tiny_models import tiny

LAYERS, LENGTH, MORE = 4, 40, 6
ENDS = "protect(sinks=1, recent=2)"


@cache
def decoder_of(architecture: str) -> Any:
    return wrap_model(tiny(architecture, layers=LAYERS))


def read(
    decoder: Any, sentence: str, ids: tuple[int, ...], tokens: int = 10, calibration: Any = None
) -> Any:
    """Cache of a text under a policy, and the meter of its prefill."""
    policy = Policy.parse(sentence).with_sizes(tokens, None)
    layers = tuple(own.index for own in decoder.spec.managed)
    budget, planner = entries_per_head(policy, decoder.spec), policy.planner
    planner = planner if calibration is None else planner.with_calibration(calibration, layers)
    quotas = {} if budget == WITHOUT_LIMIT else planner.quotas(budget, len(ids), layers, {})
    reader = PrefillReader(decoder, planner, budget, quotas, PeakMemoryMeter())
    own = empty_cache(policy, decoder.spec)
    policy.schedule.read(reader, [PrefillSequence(own, {"question": (5, 6, 7)})], ids, no_progress)
    return own, reader.meter


def places(own: Any, layer: int = 0) -> set[int]:
    return {p for p in own.entries(layer).head_positions(0).tolist() if p < LENGTH}


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
def test_selection_of_all_tokens_is_exact(architecture) -> None:
    ids, decoder = some_ids(LENGTH + MORE), decoder_of(architecture)
    expected = native_logits(tiny(architecture, layers=LAYERS), ids)[LENGTH:]
    for sentence in (
        f"two_passes(tokens={LENGTH}) > {ENDS} > snapkv(window=4) > unlimited()",
        f"two_passes(tokens=3) > {ENDS} > snapkv(window=4) > uniform(tokens={LENGTH})",
    ):
        own, _ = read(decoder, sentence, ids[:LENGTH])
        assert (read_on(decoder, own, ids[LENGTH:], 1) - expected).abs().max() < 1e-4


def test_calibrated_heads_search_up_to_their_deepest_layer(monkeypatch) -> None:
    """Of eight kv heads the two best, head 1 of layer 0 and head 0 of layer 2, are asked."""
    searched = list[frozenset[int]]()

    class RecordingSearch(two_passes.TokenSearch):
        def __init__(self, reader, lane, ids, layers, scoring) -> None:
            searched.append(layers)
            super().__init__(reader, lane, ids, layers, scoring)

        @property
        def scores(self) -> torch.Tensor:
            self.own = super().scores
            found.append(self.own)
            return self.own

    found = list[torch.Tensor]()
    monkeypatch.setattr(two_passes, "TokenSearch", RecordingSearch)
    ids, decoder = some_ids(LENGTH), decoder_of("qwen3")
    order = (0.5, 0.0, 0.25, 0.375, 0.125, 0.625, 0.75, 0.875)
    sentence = f"two_passes(layer=1, tokens=9) > {ENDS} > key_cosine({{}}) > unlimited()"
    own, _ = read(decoder, sentence.format("share=0.25"), ids, calibration={"needle_rank": order})
    assert searched == [frozenset({0, 2})] and len(places(own)) == 9
    alone = []
    for head, layer in ((1, 0), (4, 2)):
        one = tuple(0.0 if number == head else 0.9 for number in range(8))
        read(decoder, sentence.format("share=0.25"), ids, calibration={"needle_rank": one})
        assert searched[-1] == {layer}
        alone.append(found[-1])
    assert torch.allclose(found[0], alone[0] + alone[1], atol=1e-5)


@pytest.mark.parametrize("scorer", ["snapkv(window=4)", 'patched(prompt="question")', "keydiff()"])
def test_selected_tokens_are_prefilled_without_the_others(scorer, monkeypatch) -> None:
    """At their true positions, whatever the blocks of the first pass."""
    monkeypatch.setattr(two_passes, "BLOCK_TOKENS", 11)
    ids, decoder = some_ids(LENGTH + MORE), decoder_of("qwen3")
    own, _ = read(
        decoder, f"two_passes(layer=1, tokens=9) > {ENDS} > {scorer} > unlimited()", ids[:LENGTH]
    )
    assert own.next_position == LENGTH
    assert len(places(own)) == 9 if "snap" not in scorer else 9
    assert {0, LENGTH - 1} <= places(own)
    assert all(places(own, layer) == places(own) for layer in range(LAYERS))
    reached = dict.fromkeys(range(LAYERS), places(own))
    expected = narrowed_logits(tiny("qwen3", layers=LAYERS), ids, reached, LENGTH)[LENGTH:]
    assert (read_on(decoder, own, ids[LENGTH:], 1) - expected).abs().max() < 1e-4
    monkeypatch.setattr(two_passes, "BLOCK_TOKENS", 1000)
    again, _ = read(
        decoder, f"two_passes(layer=1, tokens=9) > {ENDS} > {scorer} > unlimited()", ids[:LENGTH]
    )
    assert places(again) == places(own)


def test_budget_sets_the_number_of_selected_tokens() -> None:
    ids, decoder = some_ids(200), decoder_of("qwen3")
    for preset in ("ilre", "reform"):
        order = (0.9, 0.9, 0.9, 0.9, 0.9, 0.0, 0.9, 0.9)  # the best head is in layer 2
        own, meter = read(decoder, preset, ids, 40, {"needle_rank": order})
        assert own.lengths() == ((40, 40),) * LAYERS
        assert own.next_position == 200
        entry = own.nbytes / own.managed_entries
        lower = 2 if preset == "ilre" else 3  # layers of the first pass
        assert meter.peak_bytes < entry * (2 * 200 * lower + 2 * LAYERS * 40) * 1.3
    cut, _ = read(decoder, f"two_passes(tokens=30) > {ENDS} > keydiff() > uniform()", ids, 20)
    assert cut.lengths() == ((20, 20),) * LAYERS


def test_scores_of_several_layers_are_added() -> None:
    ids, decoder, kept = some_ids(LENGTH), decoder_of("qwen3"), []
    for layers in ("layer=2", "layer=1", "layer=2, layers=3"):
        sentence = f"two_passes({layers}, tokens=9) > {ENDS} > keydiff() > unlimited()"
        kept.append(places(read(decoder, sentence, ids)[0]))
    assert len({frozenset(one) for one in kept}) == 3


def test_hand_values_of_several_widths() -> None:
    scores = torch.tensor([0.0, 0.9, 0.1, 0.0, 0.0, 0.8, 0.0, 0.7])
    none = torch.zeros(8, dtype=torch.bool)
    assert selected_tokens(scores, none, 2, [1]).tolist() == [1, 5]
    assert selected_tokens(scores, none, 3, [3]).tolist() == [0, 1, 2]  # a peak and its neighbors
    assert selected_tokens(scores, none, 3, [1, 3]).tolist() == [0, 1, 5]
    last = torch.tensor([False] * 7 + [True])
    assert selected_tokens(scores, last, 2, [1]).tolist() == [1, 7]
    source = torch.Generator().manual_seed(0)
    for count in (1, 7, 20, 30):
        drawn = torch.rand(30, generator=source)
        always = torch.rand(30, generator=source) < 0.1
        expected = found(drawn.tolist(), always.tolist(), count, [1, 5, 9])
        assert selected_tokens(drawn, always, count, [1, 5, 9]).tolist() == expected


def test_invalid_options_are_refused() -> None:
    for inside in ("layers=0", 'widths="2"', 'widths=""', "layer=-1", "tokens=0", "kept=0"):
        with pytest.raises(BadParameter, match="two_passes"):
            Policy.parse(f"two_passes({inside})")
    with pytest.raises(SpellingError, match="does not compute for all"):
        Policy.parse("two_passes() > novelty()")
