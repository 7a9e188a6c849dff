"""Policies whose deeper layers get few tokens, inside `generate()` and in calls of a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import larder
from larder.core import UsageError
from model_runs import some_ids
from tiny_models import tiny

TOKENS = 60


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("qwen3", layers=4)


def generated(model: Any, ids: Any, **options: Any) -> Any:
    with larder.applied(model, **options) as run:
        return model.generate(ids, max_new_tokens=5, do_sample=False), run.cache


def test_generation_narrows_and_keeps_true_positions(model) -> None:
    ids = torch.tensor([some_ids(TOKENS)])
    plain = model.generate(ids, max_new_tokens=5, do_sample=False)
    whole, _ = generated(model, ids, policy="fastkv", budget=TOKENS)
    assert torch.equal(whole, plain)
    few = "narrowing(layer=1, tokens=20) > protect(sinks=0, recent=0)"
    narrowed, cache = generated(model, ids, policy=f"{few} > snapkv(window=8) > unlimited()")
    assert narrowed.shape == plain.shape
    assert cache.get_seq_length() == TOKENS + 4
    assert cache.nbytes < generated(model, ids, policy="full")[1].nbytes


def test_rows_of_a_batch_narrow_independently(model) -> None:
    rows = [torch.tensor([some_ids(TOKENS, seed=seed)]) for seed in (1, 2)]
    for policy in ("fastkv", "pyramidinfer"):
        both, _ = generated(model, torch.cat(rows), policy=policy, budget=50)
        alone = [generated(model, row, policy=policy, budget=50)[0] for row in rows]
        assert torch.equal(both, torch.cat(alone))


@torch.no_grad()
def test_logits_of_tokens_that_not_all_layers_computed_are_refused(model) -> None:
    ids = torch.tensor([some_ids(TOKENS)])
    cache = larder.LarderCache(model, "fastkv", 24)
    with pytest.raises(UsageError, match="logits_to_keep=1"):
        model(input_ids=ids, past_key_values=cache)
    cache = larder.LarderCache(model, "fastkv", 24)
    assert model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits.shape[1] == 1
