"""Memory is a bound: at every layer of every pass, for any input, budget, block and policy."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import runnable
from larder.policy import Drop, Planner, Protect
from larder.prefill import Blockwise, Episodic, Together, no_progress
from larder.session import FAMILIES
from model_runs import read_and_evict, some_ids

SMALL: dict[str, dict[str, Any]] = {
    "snapkv": {"window": 3, "kernel": 3},
    "reconstruct": {"chunk": 7},
    "lookahead": {"tokens": 3, "kernel": 3},
    "positions_first": {"tokens": 4},
    **dict.fromkeys(("sinks_and_window", "lagkv", "expected", "capkv", "curdkv"), {"sinks": 2}),
    **dict.fromkeys(("morph", "recent_attention"), {"window": 2}),
}


def built(slot: str, name: str) -> Any:
    return FAMILIES[slot].load(name)(**SMALL.get(name, {}))


SCORERS = [built("scorer", name) for name in runnable(FAMILIES["scorer"].names())]
BUDGETS = [built("budget", n) for n in FAMILIES["budget"].names() if n != "unlimited"]
KINDS = {"blockwise": Blockwise, "episodic": lambda block: Episodic(block, Together.ALL)}


@pytest.mark.extended
@settings(max_examples=16)
@given(
    length=st.integers(1, 70),
    tokens=st.integers(6, 40),
    block=st.integers(1, 40),
    scorer=st.sampled_from(SCORERS),
    budget=st.sampled_from(BUDGETS),
    sinks=st.integers(0, 2),
    recent=st.integers(0, 3),
    kind=st.sampled_from(sorted(KINDS)),
    lanes=st.integers(1, 2),
)
def test_entries_never_exceed_budget_and_block(
    watched,
    reader_for,
    lane_for,
    true_entries,
    length,
    tokens,
    block,
    scorer,
    budget,
    sinks,
    recent,
    kind,
    lanes,
) -> None:
    block = min(block, tokens)
    planner = Planner(Protect(sinks, recent), scorer, budget, Drop())
    reader = reader_for(watched, planner, tokens, length)
    built_lanes = [lane_for(watched, planner, episode=some_ids(4, seed=n)) for n in range(lanes)]
    watched.appended.clear()
    KINDS[kind](block).read(reader, built_lanes, some_ids(length), no_progress)

    heads = sum(layer.kv_heads for layer in watched.spec.managed)
    assert sum(reader.quotas.values()) == tokens * len(watched.spec.managed)
    assert reader.meter.highest <= heads * (tokens + block)
    assert reader.wrong == []
    for lane in built_lanes:
        assert lane.cache.next_position == length
        assert lane.cache.managed_entries <= heads * min(tokens, length)
        true_entries(watched, lane.cache)
        for layer in watched.spec.managed:
            entries = lane.cache.entries(layer.index)
            protected = {*range(min(sinks, length)), *range(max(0, length - recent), length)}
            for head in range(layer.kv_heads):
                assert protected <= set(entries.head_positions(head).tolist())


def test_bound_check_detects_an_excess(watched, reader_for, lane_for) -> None:
    planner = Planner(Protect(0, 0), built("scorer", "keydiff"), built("budget", "pooled"), Drop())
    reader = reader_for(watched, planner, 10, 40)
    before = dict(reader.quotas)
    lane = lane_for(watched)
    Blockwise(8).read(reader, [lane], some_ids(24), no_progress)
    assert reader.wrong == []
    reader.quotas.update({index: quota + 1 for index, quota in before.items()})
    object.__setattr__(reader, "quotas", UnderstatedQuotas(reader.quotas))
    read_and_evict(reader, [lane], some_ids(8), some_ids(8), 24)
    assert reader.wrong


class UnderstatedQuotas(dict[int, int]):
    """Quotas that read one larger than what is asked of them in sum."""

    def values(self) -> Any:
        return [value - 1 for value in super().values()]


@pytest.mark.extended
@pytest.mark.parametrize("architecture", ["gemma3", "mistral"])
def test_sliding_layers_are_outside_the_budget(architecture, reader_for, lane_for) -> None:
    from larder.models import wrap_model
    from tiny_models import WINDOW_TOKENS, tiny

    module = tiny(architecture, layers=4)
    if architecture == "mistral":  # every layer slides: nothing is left to manage
        module.config.sliding_window = WINDOW_TOKENS
        for layer in module.model.layers:
            layer.self_attn.config.sliding_window = WINDOW_TOKENS
    decoder = wrap_model(module)
    parts = [built("scorer", "snapkv"), built("budget", "sensitivity"), Drop()]
    planner = Planner(Protect(1, 2), *parts)
    for kind in KINDS.values():
        reader, lane = reader_for(decoder, planner, 12, 60), lane_for(decoder)
        kind(6).read(reader, [lane], some_ids(60), no_progress)
        for layer, lengths in zip(decoder.spec.layers, lane.cache.lengths(), strict=True):
            if layer.sliding_window is not None:
                assert lengths == (WINDOW_TOKENS,) * layer.kv_heads
            else:
                assert sum(lengths) == reader.quotas[layer.index] * layer.kv_heads
        assert reader.wrong == []
