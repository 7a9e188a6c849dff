"""Bytes and operations of residuals, compared with keys and values."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from larder.models import GEMMA_3_4B, LLAMA_3_1_8B, KVSource, ModelShape
from tiny_models import tiny

KIB = 1024
TINY = ModelShape(layers=3, hidden=64, inner=96, query_heads=4, kv_heads=2, head_dim=16, itemsize=4)


@pytest.mark.parametrize(
    "shape, entries, one, every", [(GEMMA_3_4B, 136, 5, 170), (LLAMA_3_1_8B, 128, 8, 256)]
)
def test_bytes_per_token_of_known_models_hand_values(
    shape: ModelShape, entries: int, one: int, every: int
) -> None:
    found = [
        shape.bytes_per_token(held) for held in (KVSource.ENTRIES, KVSource.ONE, KVSource.EVERY)
    ]
    assert found == [entries * KIB, one * KIB, every * KIB]
    assert shape.bytes_per_token(KVSource.IDS) == 4


def test_layers_before_the_one_residual_keep_their_entries() -> None:
    half = LLAMA_3_1_8B.bytes_per_token(KVSource.ONE, depth=16)
    assert half == (64 + 8) * KIB


def test_projection_operations_match_the_estimate(three_layers) -> None:
    recompute = three_layers.recompute
    held = {layer: torch.randn(7, 64) for layer in range(3)}
    with FlopCounterMode(display=False) as counter:
        recompute.project(held, torch.arange(7))
    rotation = 7 * 8 * 2  # frequencies by positions, once a pass
    result = 7 * TINY.operations_per_token(KVSource.EVERY, 7)
    assert counter.get_total_flops() - result in (0, rotation)


def test_recompute_operations_hand_values() -> None:
    linear = [m for m in tiny("llama", layers=3).model.layers.modules() if isinstance(m, nn.Linear)]
    weights = sum(module.weight.numel() for module in linear)
    attention = 3 * 4 * 16 * 4 * (9 + 1) / 2  # logits and sums over half of the tokens
    assert TINY.operations_per_token(KVSource.IDS, 9) == 2 * weights + attention
    assert TINY.operations_per_token(KVSource.ONE, 9, depth=2) * 3 == 2 * weights + attention
    assert TINY.operations_per_token(KVSource.ENTRIES, 9) == 0
