"""Policies by trained gates, from a prompt to logits: gates that are open, and what is cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from larder import Policy
from larder.cache import SequenceCache
from larder.core import Mode
from larder.models import BatchSegment, Decoder, wrap_model
from larder.policy import PROVIDERS
from larder.prefill import PeakMemoryMeter
from larder.session import build_caches
from learned_gates import random_weights
from model_runs import id_runtime, some_ids
from tiny_models import tiny

CONTEXT, QUESTION = 40, 5
# Bias of the last map of each gate, and the policy that reads it.
LAST = {"trim": "2.bias", "global_retention": "4.bias", "attention_gate": "output.bias"}
SENTENCES = {
    "trim": "whole() > protect(sinks=0, recent=0) > trim() > uniform()",
    "global_retention": "whole() > protect(sinks=0, recent=4) > global_retention() > global()",
    "attention_gate": "whole() > protect(sinks=0, recent=1) > attention_gate() > "
    "fixed_threshold(score=0.5, kept=1.0)",
}


@pytest.fixture(scope="module")
def decoder() -> Iterator[Decoder]:
    with wrap_model(tiny("qwen3", layers=3)) as decoder:
        yield decoder


def put(decoder: Decoder, name: str, bias: float) -> None:
    """Random weights with a constant added to the last bias."""
    gate = PROVIDERS.load(name)()
    learned = random_weights(name, gate, decoder.spec)
    layers = tuple({**own, LAST[name]: own[LAST[name]] + bias} for own in learned.layers)
    decoder.gates.put(name, gate, replace(learned, layers=layers))


def a_cache(decoder: Decoder, sentence: str, tokens: int) -> SequenceCache:
    policy = Policy.parse(sentence).with_sizes(tokens, None)
    runtime = id_runtime(decoder)
    return build_caches(runtime, policy, some_ids(CONTEXT), [{}], PeakMemoryMeter()).activate(0)


def answers(decoder: Decoder, cache: SequenceCache) -> Tensor:
    segment = BatchSegment(cache, some_ids(QUESTION, seed=5))
    return decoder.forward_logits([segment], Mode.SCRATCH, range(QUESTION))


def positions(cache: SequenceCache, layer: int = 0) -> list[list[int]]:
    entries = cache.entries(layer)
    return [entries.head_positions(head).tolist() for head in range(len(entries.lengths))]


@pytest.mark.parametrize("name", LAST)
def test_open_gates_equal_the_full_cache(decoder, name) -> None:
    put(decoder, name, 50.0)
    full = answers(decoder, a_cache(decoder, "whole() > unlimited()", CONTEXT))
    assert torch.equal(answers(decoder, a_cache(decoder, SENTENCES[name], CONTEXT)), full)


def test_closed_gate_keeps_protected_entries(decoder) -> None:
    put(decoder, "attention_gate", -50.0)
    cache = a_cache(decoder, SENTENCES["attention_gate"], CONTEXT)
    assert all(positions(cache, n) == [[CONTEXT - 1]] * 2 for n in range(3))


def test_size_limits_gated_entries(decoder) -> None:
    put(decoder, "attention_gate", 0.0)
    whole, bounded = (
        SENTENCES["attention_gate"],
        SENTENCES["attention_gate"].replace(", kept=1.0", ""),
    )
    free = sum(sum(own) for own in a_cache(decoder, whole, CONTEXT).lengths())
    held = [sum(map(sum, a_cache(decoder, bounded, n).lengths())) for n in (5, CONTEXT)]
    assert held[0] == 5 * 2 * 3 < free < CONTEXT * 2 * 3 and held[1] == free


@pytest.mark.parametrize("name", ["trim", "global_retention"])
def test_equal_decay_gates_keep_the_latest(decoder, name) -> None:
    """Weights of zeros but for the last bias: the age alone decides."""
    gate = PROVIDERS.load(name)()
    learned = random_weights(name, gate, decoder.spec)
    still = tuple(
        {key: torch.full_like(each, float(key == LAST[name])) for key, each in own.items()}
        for own in learned.layers
    )
    decoder.gates.put(name, gate, replace(learned, layers=still))
    cache = a_cache(decoder, SENTENCES[name], 6)
    assert all(positions(cache, n) == [[*range(CONTEXT - 6, CONTEXT)]] * 2 for n in range(3))
