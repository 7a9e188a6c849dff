"""A mask handed to a model under Larder is refused, whatever its dimensions."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from transformers import AttentionMaskInterface
from transformers.masking_utils import blockwise_overlay, causal_mask_function, or_masks

from larder.core import ModelError
from larder.models import NAME, AttentionSurvey, register_backend, wrap_model
from tiny_models import tiny

TOKENS = 6
MASKS = {
    2: torch.tensor([[0, 0, 1, 1, 1, 1]]),
    3: torch.ones(1, TOKENS, TOKENS).tril(),
    4: torch.zeros(1, 1, TOKENS, TOKENS),
}


@pytest.mark.parametrize("dimensions", MASKS)
def test_attention_mask_is_refused(dimensions: int) -> None:
    decoder = wrap_model(tiny("qwen3"))
    with pytest.raises(ModelError, match=f"mask of {dimensions} dimensions.*leave the mask out"):
        decoder.module.base_model(
            input_ids=torch.arange(TOKENS)[None],
            position_ids=torch.arange(TOKENS)[None],
            attention_mask=MASKS[dimensions],
            use_cache=False,
            larder=AttentionSurvey(),
        )


@pytest.mark.parametrize("groups", [[-1, 0, 0, 0, -1, 1, 1], [-1] * 7])
def test_bidirectional_image_tokens_are_detected(groups: list[int]) -> None:
    """Images that a model masks in both directions, after five cached tokens."""
    register_backend()
    blocks = torch.tensor([[-1] * 5 + groups])
    got = AttentionMaskInterface()[NAME](
        batch_size=1,
        q_length=len(groups),
        q_offset=5,
        mask_function=or_masks(causal_mask_function, blockwise_overlay(blocks)),
        allow_is_causal_skip=False,
    )
    joined = [a == b != -1 for a, b in pairwise(groups)]
    assert (got.sees_next[0].tolist() if got else [False] * 6) == joined
