"""Drawing the next token: what is open to the draw, and values at the edges."""

from __future__ import annotations

import math

import pytest
import torch

from larder.core.errors import BadParameter
from larder.engine.sampler import SamplingParams

SHARES = [0.4, 0.3, 0.2, 0.1]
LOGITS = torch.tensor(SHARES).log()


def drawn(sampling: SamplingParams, logits: torch.Tensor = LOGITS) -> set[int]:
    source = sampling.generator()
    return {sampling.sample(logits, source) for _ in range(200)}


@pytest.mark.parametrize("temperature", [math.nan, math.inf, -math.inf, -0.1])
def test_a_temperature_that_is_no_number_is_refused(temperature: float) -> None:
    with pytest.raises(BadParameter, match="temperature must be a finite number"):
        SamplingParams(temperature=temperature)


@pytest.mark.parametrize("temperature", [5e-324, 1e-45, 1e-10])
def test_a_tiny_temperature_takes_the_most_likely_token(temperature: float) -> None:
    assert drawn(SamplingParams(temperature=temperature), 1e4 + LOGITS) == {0}


def test_tokens_that_are_ruled_out_are_never_drawn() -> None:
    assert drawn(SamplingParams(temperature=1.0), torch.tensor([0.0, -math.inf, 0.0])) == {0, 2}


def test_top_p_is_taken_of_what_top_k_leaves() -> None:
    # Of the best two, the first holds 4/7 = 0.57 and so all of 0.5; of all four it holds 0.4.
    assert drawn(SamplingParams(1.0, top_k=2, top_p=0.5)) == {0}
    assert drawn(SamplingParams(1.0, top_p=0.5)) == {0, 1}
    assert drawn(SamplingParams(1.0, top_k=3)) == {0, 1, 2}
    assert drawn(SamplingParams(1.0, top_k=9)) == {0, 1, 2, 3}
