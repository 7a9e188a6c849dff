"""Random models for tests: the same for the same seed, and small."""

from __future__ import annotations

import pytest
import torch

from larder.core import BadParameter, UnknownName
from larder.models import fingerprint, wrap_model
from model_runs import native_logits, some_ids
from tiny_models import tiny


def test_seed_determines_the_model(architecture) -> None:
    state = torch.get_rng_state()
    first, again, other = (tiny(architecture, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert fingerprint(first) == fingerprint(again) != fingerprint(other)
    assert torch.equal(native_logits(first, some_ids(9)), native_logits(again, some_ids(9)))
    assert sum(weight.numel() for weight in first.parameters()) < 200_000


def test_layers_and_heads_match_the_arguments(architecture, kv_heads, adopted) -> None:
    layers = adopted(architecture, kv_heads).spec.layers
    assert [(layer.query_heads, layer.kv_heads) for layer in layers] == [(4, kv_heads)] * 2
    windows = [layer.sliding_window for layer in layers]
    assert windows == ([8, None] if architecture == "gemma3" else [None, None])
    assert len(wrap_model(tiny(architecture, layers=3)).spec.layers) == 3


def test_unknown_architectures_and_heads_are_refused() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'llama'"):
        tiny("lama")
    with pytest.raises(BadParameter, match="must divide 4, got 3"):
        tiny("llama", kv_heads=3)
