"""Sampling of the next token: candidates, penalties, and extreme parameters."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from larder.core import BadParameter
from larder.engine import SamplingParams, TokenSampler

SHARES = [0.4, 0.3, 0.2, 0.1]
LOGITS = torch.tensor(SHARES).log()


def drawn(sampling: SamplingParams, logits: torch.Tensor = LOGITS) -> set[int]:
    source = sampling.generator()
    return {sampling.sample(logits, source) for _ in range(200)}


@pytest.mark.parametrize("temperature", [math.nan, math.inf, -math.inf, -0.1])
def test_non_finite_or_negative_temperature_is_refused(temperature: float) -> None:
    with pytest.raises(BadParameter, match="temperature must be a finite number"):
        SamplingParams(temperature=temperature)


@pytest.mark.parametrize("temperature", [5e-324, 1e-45, 1e-10])
def test_tiny_temperature_is_greedy(temperature: float) -> None:
    assert drawn(SamplingParams(temperature=temperature), 1e4 + LOGITS) == {0}


def test_masked_tokens_are_never_sampled() -> None:
    assert drawn(SamplingParams(temperature=1.0), torch.tensor([0.0, -math.inf, 0.0])) == {0, 2}


def test_top_p_applies_after_top_k() -> None:
    # Of the best two, the first holds 4/7 = 0.57 and so all of 0.5; of all four it holds 0.4.
    assert drawn(SamplingParams(1.0, top_k=2, top_p=0.5)) == {0}
    assert drawn(SamplingParams(1.0, top_p=0.5)) == {0, 1}
    assert drawn(SamplingParams(1.0, top_k=3)) == {0, 1, 2}
    assert drawn(SamplingParams(1.0, top_k=9)) == {0, 1, 2, 3}


def penalized(
    params: SamplingParams, logits: list[float], prompt: list[int], answer: list[int]
) -> list[float]:
    """Bias and penalties of every token, one after the other."""
    changed = list(logits)
    for token in range(len(logits)):
        changed[token] += params.logit_bias.get(token, 0)
        if token in prompt or token in answer:
            by = params.repetition_penalty
            changed[token] = changed[token] * by if changed[token] < 0 else changed[token] / by
        changed[token] -= params.frequency_penalty * answer.count(token)
        changed[token] -= params.presence_penalty * (token in answer)
    return changed


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_bias_and_penalties_change_sampled_logits(temperature: float) -> None:
    source = torch.Generator().manual_seed(1)
    parts: dict[str, Any] = {
        "logit_bias": {3: 2.5, 7: -1.0},
        "repetition_penalty": 1.4,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.3,
    }
    prompt, seen = [1, 2, 2, 9], set[int]()
    for names in ([name] for name in parts):
        params = SamplingParams(temperature, seed=5, **{name: parts[name] for name in names})
        seen.add(run_beside_reference(params, prompt, source))
    seen.add(run_beside_reference(SamplingParams(temperature, seed=5, **parts), prompt, source))
    assert sum(seen) > 0


def run_beside_reference(params: SamplingParams, prompt: list[int], source: torch.Generator) -> int:
    """Sample an answer beside the reference; how often the parameters changed the best token."""
    sampler, draws = TokenSampler(params, prompt), params.generator()
    answer, changes = list[int](), 0
    for _ in range(40):
        logits = torch.randn(12, generator=source)
        before = logits.clone()
        wanted = torch.tensor(penalized(params, logits.tolist(), prompt, answer))
        token = sampler.sample(logits, answer)
        assert token == params.sample(wanted, draws)
        assert torch.equal(before, logits)
        changes += int(wanted.argmax()) != int(logits.argmax())
        answer.append(token)
    assert changes
    return changes


def test_min_p_keeps_tokens_above_its_threshold() -> None:
    logits = torch.tensor([0.0, math.log(0.5), math.log(0.2), math.log(0.05)])
    assert drawn(SamplingParams(1.0, min_p=0.3), logits) == {0, 1}
    assert drawn(SamplingParams(1.0, min_p=0.1), logits) == {0, 1, 2}
    assert drawn(SamplingParams(2.0, min_p=0.3), logits) == {0, 1, 2}  # behind the temperature


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_p": 1.1},
        {"min_p": -0.1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": math.inf},
        {"presence_penalty": math.nan},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1: math.inf}},
        {"logit_bias": dict.fromkeys(range(1025), 1.0)},
    ],
)
def test_penalties_outside_their_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadParameter, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_bias_beyond_the_vocabulary_is_refused() -> None:
    with pytest.raises(BadParameter, match="token id 12"):
        TokenSampler(SamplingParams(logit_bias={12: 1.0}), []).sample(torch.zeros(12), [])
