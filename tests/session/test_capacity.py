"""A budget in bytes is one of all that a cache holds."""

from __future__ import annotations

import pytest

from larder import Policy
from larder.core import BudgetError
from larder.models import Decoder, wrap_model
from larder.prefill import PeakMemoryMeter
from larder.session import build_caches, resolve_budget, resolve_budget_without_context
from model_runs import id_runtime, some_ids
from tiny_models import tiny

CONTEXT = 1000
ASKED = 96 << 10


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return wrap_model(tiny("qwen3", layers=2))


@pytest.mark.parametrize(
    "sentence",
    [
        "sinks_and_window() > uniform()",
        "column_mass() > uniform()",
        "roco() > uniform()",
        "column_mass() > pooled() > elastic()",
        "sinks_and_window() > ladder()",
        "novelty() > uniform()",
        "roco() > uniform() > quantized(bits=2, group=32)",
        "morph(window=8) > uniform()",
    ],
)
def test_cache_fills_its_byte_budget_without_exceeding_it(decoder, sentence) -> None:
    policy = Policy.parse(sentence)
    spec = decoder.spec
    tokens = resolve_budget(policy, f"{ASKED // 1024}KiB", CONTEXT, spec)
    runtime = id_runtime(decoder)
    caches = build_caches(
        runtime, policy.with_sizes(tokens, None), some_ids(CONTEXT), [{}], PeakMemoryMeter()
    )
    assert 0.8 * ASKED < caches.nbytes <= ASKED
    tail = caches.activate(0).latest.tail
    assert len(tail) == ("novelty" in sentence) * spec.width


def test_byte_budget_of_one_entry_is_the_minimum(decoder) -> None:
    policy, spec = Policy.parse("column_mass() > uniform()"), decoder.spec
    heads = sum(layer.kv_heads for layer in spec.managed)
    least = spec.managed_bytes_per_token() + heads * (4 + 4 + 16)  # position, column; where it is
    assert resolve_budget_without_context(policy, f"{least / 1024}KiB", spec) == 1
    with pytest.raises(BudgetError, match=f"one takes {least} bytes"):
        resolve_budget_without_context(policy, f"{(least - 1) / 1024}KiB", spec)
