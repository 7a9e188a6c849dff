"""Presses of kvpress that need a question, gates, classes of heads or curves keep what we keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpress_hooks import ARCHITECTURES, read_by_kvpress, with_hooks
from larder import Policy
from larder.cache import SequenceCache
from larder.models import Decoder, wrap_model
from larder.policy import CURVE_POINTS, greedy_shares
from larder.prefill import Whole, no_progress
from learned_gates import CHANNELS, SINKS, every_gate, give_gates, random_weights
from measurements import made_up
from model_runs import some_ids
from tiny_models import tiny

Positions = list[list[list[int]]]  # by layer and kv head, ascending
CONTEXT, KEPT = 80, 20
IDS = some_ids(CONTEXT)
WINDOW = 5  # tokens of the question
SINKS_AND_RECENT = 2, 6


def unmasked(architecture: str, press: Any) -> Positions:
    """Positions that a press does not mask."""
    module, cache = read_by_kvpress(architecture, press, IDS)
    found: Positions = []
    for layer, held in zip(module.model.layers, cache.layers, strict=True):
        seen = torch.ones(held.keys.shape[:3], dtype=torch.bool)
        seen[layer.self_attn.masked_key_indices] = False
        found.append([head.nonzero().flatten().tolist() for head in seen[0]])
    return found


@pytest.fixture
def read(reader_for: Any, lane_for: Any) -> Any:
    """Cache of the text under a sentence."""

    def read_text(decoder: Decoder, sentence: str, tokens: int = KEPT, **prompts: Any) -> Any:
        planner = Policy.parse(f"whole() > {sentence}").planner
        lane = lane_for(decoder, planner, **prompts)
        Whole().read(reader_for(decoder, planner, tokens, CONTEXT), [lane], IDS, no_progress)
        return lane.cache

    return read_text


def positions(cache: SequenceCache, layers: int = 2) -> Positions:
    held = [cache.entries(layer) for layer in range(layers)]
    return [
        [sorted(own.head_positions(head).tolist()) for head in range(len(own.lengths))]
        for own in held
    ]


@with_hooks
@pytest.mark.parametrize("rest", ["", " > compact()"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_finch_equals_its_press_including_rotation(architecture, rest, read) -> None:
    from kvpress import FinchPress  # pyright: ignore

    question = [3, 1, 4, 1, 5]
    removed = 1 - (KEPT + WINDOW + 0.5) / (CONTEXT + WINDOW)  # it keeps the question as well
    press = FinchPress(compression_ratio=removed, rerotate_keys=bool(rest))
    press.delimiter_token_id = next(n for n in range(99) if n not in {*IDS, *question})
    ids = [*IDS, press.delimiter_token_id, *question]
    _, theirs = read_by_kvpress(architecture, press, ids)
    score = 'patched(prompt="question", variant="paper") > scaled_mean() > group_mean()'
    sentence = f"protect(sinks=0, recent=0) > {score} > uniform(){rest}"
    cache = read(wrap_model(tiny(architecture)), sentence, question=tuple(question))
    for layer, held in enumerate(theirs.layers):
        entries = cache.entries(layer)
        for head, keys in enumerate(held.keys[0]):
            distances = torch.cdist(entries.head_keys(head), keys)
            assert distances.shape == (KEPT, KEPT + WINDOW)
            assert distances.amin(1).amax() < 1e-3


@with_hooks
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_fast_kvzip_equals_its_press(architecture, read) -> None:
    from kvpress import FastKVzipPress  # pyright: ignore
    from kvpress.presses.fastkvzip_press import FastKVzipGate  # pyright: ignore

    decoder = wrap_model(tiny(architecture))
    give_gates(decoder)
    learned = random_weights("fast_kvzip", every_gate()["fast_kvzip"], decoder.spec)
    press = FastKVzipPress(compression_ratio=1 - KEPT / CONTEXT, window_ratio=0.05)
    press.gates = []
    for layer, tensors in zip(decoder.spec.managed, learned.layers, strict=True):
        sizes = decoder.spec.width, layer.kv_heads, layer.group
        gate = FastKVzipGate(layer.index, *sizes, torch.float32, CHANNELS, SINKS)
        gate.load_state_dict(tensors)
        press.gates.append(gate)
    cache = read(decoder, "protect(sinks=4, recent=4) > fast_kvzip() > global()")
    assert positions(cache) == unmasked(architecture, press)


@with_hooks
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_duo_attention_equals_its_press(architecture, read) -> None:
    import numpy as np
    from kvpress import DuoAttentionPress  # pyright: ignore

    decoder = wrap_model(tiny(architecture))
    errors = np.array(made_up(decoder.spec.managed)["streaming_error"]).reshape(2, -1)
    press = DuoAttentionPress(head_compression_ratio=0.5)
    press.load_attention_pattern = lambda model: (*SINKS_AND_RECENT, errors)
    sinks, recent = SINKS_AND_RECENT
    sentence = f"protect(sinks={sinks}, recent={recent}) > snapkv(window=8) > retrieval_heads("
    sentence += 'share=0.5, trial="passkeys")'
    kept = positions(read(decoder, sentence, (CONTEXT + sinks + recent) // 2))
    assert kept == unmasked(architecture, press)
    lengths = sorted(len(own) for layer in kept for own in layer)
    assert lengths == [sinks + recent] * 2 + [CONTEXT] * 2


@with_hooks
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_think_prunes_the_same_channels_as_its_press(architecture, read) -> None:
    from kvpress import ComposedPress, SnapKVPress, ThinKPress  # pyright: ignore

    sentence = 'protect(sinks=0, recent=0) > snapkv(window=8, kernel=5, pool="mean") > uniform()'
    thin = " > think(channels=0.5, group=8, window=8)"
    cache = read(wrap_model(tiny(architecture)), sentence + thin)
    [kept] = {length for lengths in cache.lengths() for length in lengths}
    assert 8 < kept < CONTEXT
    evict = SnapKVPress(compression_ratio=1 - (kept + 0.5) / CONTEXT, window_size=8)
    press = ComposedPress([evict, ThinKPress(key_channel_compression_ratio=0.5, window_size=8)])
    _, theirs = read_by_kvpress(architecture, press, IDS)
    for layer, held in enumerate(theirs.layers):
        assert held.keys.shape[2] == kept
        for head, keys in enumerate(held.keys[0]):
            ours = cache.entries(layer).head_keys(head)
            assert ((ours[0] != 0) == (keys != 0).any(0)).all()
            assert (ours[-1] != 0).all()  # the latest stay whole here


@with_hooks
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_lukv_differs_from_its_press_by_rounding_only(architecture, read) -> None:
    """Theirs rounds the entries of a layer, ours the entries per head of a layer."""
    import numpy as np
    from kvpress import LUKVPress  # pyright: ignore

    decoder = wrap_model(tiny(architecture))
    curves = made_up(decoder.spec.managed)["utility"]
    starts = range(0, len(curves), CURVE_POINTS)
    heads = [curves[start : start + CURVE_POINTS] for start in starts]
    free = CONTEXT - 5
    shares = np.array(greedy_shares(heads, len(heads) * (KEPT - 5) / free)).reshape(2, -1)
    press = LUKVPress(compression_ratio=1 - KEPT / CONTEXT)
    press._budget_curves = np.tile(1 - (5 + shares * free) / CONTEXT, (99, 1, 1))
    sentence = "protect(sinks=4, recent=1) > expected(future=512, sinks=4, epsilon=0.02) > lukv()"
    kept, theirs = positions(read(decoder, sentence)), unmasked(architecture, press)
    per_layer = shares.shape[1]
    for ours, other in zip(kept, theirs, strict=True):
        assert abs(sum(map(len, ours)) - sum(map(len, other))) < per_layer
        for one, two in zip(ours, other, strict=True):
            assert set(one) <= set(two) or set(two) <= set(one)
            assert abs(len(one) - len(two)) <= per_layer
