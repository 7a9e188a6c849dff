"""A mask handed to a model under Larder is refused, whatever its dimensions."""

from __future__ import annotations

import pytest
import torch

from larder.core.errors import ModelError
from larder.models.introspection import AttentionSurvey
from larder.models.loader import wrap_model
from larder.models.tiny import tiny

TOKENS = 6
MASKS = {
    2: torch.tensor([[0, 0, 1, 1, 1, 1]]),
    3: torch.ones(1, TOKENS, TOKENS).tril(),
    4: torch.zeros(1, 1, TOKENS, TOKENS),
}


@pytest.mark.parametrize("dimensions", MASKS)
def test_a_mask_is_refused(dimensions: int) -> None:
    decoder = wrap_model(tiny("qwen3"))
    with pytest.raises(ModelError, match=f"mask of {dimensions} dimensions.*leave the mask out"):
        decoder.module.base_model(
            input_ids=torch.arange(TOKENS)[None],
            position_ids=torch.arange(TOKENS)[None],
            attention_mask=MASKS[dimensions],
            use_cache=False,
            larder=AttentionSurvey(),
        )
