"""Log-likelihoods under a policy, beside a loop that reads token by token."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from larder import Engine
from larder.cache import SequenceCache
from larder.core import AppendKind, InputError, Mode, UsageError
from larder.engine import (
    ContinuationRequest,
    EncodedPrompt,
    LikelihoodScorer,
    ScoredText,
    TokenScore,
    prefill_prompt,
)
from larder.models import BatchSegment
from larder.prefill import PeakMemoryMeter, PrefillSequence
from larder.session import block_tokens, common_prompts, empty_cache, prefill_reader, resolve_budget
from model_runs import cuts, native_logits, some_ids
from server_core import characters
from tiny_models import tiny

PARKED = (
    "protect(sinks=0, recent=8) > sinks_and_window() > uniform() > park() > flat(page=4, dense=0)"
)
SNAPKV = "protect(sinks=2, recent=4) > snapkv(window=4) > uniform()"
KVZIP = "protect(sinks=2, recent=4) > reconstruct() > global()"
BLOCKS = "blockwise(tokens=8) > protect(sinks=2, recent=4) > keydiff() > pooled()"
H2O = "blockwise(tokens=8) > protect(sinks=2, recent=8) > column_mass() > uniform() > every_step()"
POLICIES = [SNAPKV, KVZIP, BLOCKS, "streaming_llm", H2O, PARKED]
CONTEXT = some_ids(70)
CONTINUATIONS = (some_ids(5, seed=1), some_ids(1, seed=2), some_ids(1, seed=3), some_ids(9, seed=4))
REQUESTS = [
    ContinuationRequest(CONTEXT, CONTINUATIONS),
    ContinuationRequest(CONTEXT[:1], CONTINUATIONS[:1]),
    ContinuationRequest(some_ids(40, seed=5), CONTINUATIONS[2:]),
]
Scores = list[ScoredText]


@pytest.fixture(scope="module")
def engine_of() -> Callable[[str, str], Engine]:
    """Engine under a policy, over one model per architecture."""

    @cache
    def loaded(architecture: str) -> Engine:
        return Engine(tiny(architecture), characters().tokenizer, policy="full")

    def made(policy: str, architecture: str = "llama") -> Engine:
        return loaded(architecture).under(policy, None if policy == "full" else 32)

    return made


def scorer(engine: Engine) -> LikelihoodScorer:
    return LikelihoodScorer(engine.runtime, engine.policy, engine.sizes)


def expected_score(logits: Any, tokens: tuple[int, ...]) -> TokenScore:
    """Sum of the logarithms of softmax, token by token."""
    total, is_greedy = 0.0, True
    for row, token in zip(logits, tokens, strict=True):
        total += float(torch.log(torch.softmax(row.double(), 0)[token]))
        is_greedy = is_greedy and int(row.argmax()) == token
    return TokenScore(total, is_greedy)


def assert_close(got: TokenScore, expected: TokenScore) -> None:
    assert got.log_likelihood == pytest.approx(expected.log_likelihood, abs=1e-4)
    assert got.is_greedy == expected.is_greedy


def step(engine: Engine, cached: SequenceCache, token: int) -> Any:
    segment = BatchSegment(cached, (token,))
    return engine.loaded.decoder.forward_logits([segment], Mode.APPEND, [0])[0]


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_full_cache_scores_equal_the_model(
    engine_of: Callable[..., Engine], architecture: str
) -> None:
    engine = engine_of("full", architecture)
    logits = native_logits(engine.loaded.decoder.module, CONTEXT)
    greedy = int(logits[-1].argmax())
    requests = [*REQUESTS, ContinuationRequest(CONTEXT, ((greedy,),))]
    for request, scored in zip(requests, scorer(engine).score_continuations(requests), strict=True):
        for tokens, score in zip(request.continuations, scored.scores, strict=True):
            logits = native_logits(engine.loaded.decoder.module, request.context + tokens)
            start = len(request.context) - 1
            assert_close(score, expected_score(logits[start:-1], tokens))
    assert scored.scores[0].is_greedy


@pytest.mark.parametrize("policy", POLICIES)
def test_continuation_is_scored_over_the_kept_entries(
    engine_of: Callable[..., Engine], policy: str
) -> None:
    engine = engine_of(policy)
    scored = scorer(engine).score_continuations(REQUESTS)
    for request, each in zip(REQUESTS, scored, strict=True):
        prompt = EncodedPrompt("", request.context)
        read = prefill_prompt(engine.runtime, engine.policy, engine.sizes, prompt)
        assert each.kv_bytes == read.figures.kv_bytes
        for tokens, score in zip(request.continuations, each.scores, strict=True):
            fork = read.cache.fork()
            inputs = (request.context[-1], *tokens[:-1])
            logits = [step(engine, fork, token) for token in inputs]
            assert_close(score, expected_score(logits, tokens))
    full = scorer(engine_of("full")).score_continuations(REQUESTS[:1])[0]
    assert abs(full.scores[0].log_likelihood - scored[0].scores[0].log_likelihood) > 1e-2
    assert scored[0].full_kv_bytes == full.full_kv_bytes


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_text_scores_of_a_full_cache_equal_the_model(
    engine_of: Callable[..., Engine], architecture: str
) -> None:
    engine = engine_of("full", architecture)
    for num_scored in (69, 20):
        got = scorer(engine).score_text(CONTEXT, num_scored)
        logits = native_logits(engine.loaded.decoder.module, CONTEXT)[-num_scored - 1 : -1]
        assert_close(got.scores[0], expected_score(logits, CONTEXT[-num_scored:]))


@pytest.mark.parametrize("policy", ["streaming_llm", BLOCKS, KVZIP])
@pytest.mark.parametrize("num_scored", [69, 30])
def test_text_is_scored_block_by_block_over_the_kept_entries(
    engine_of: Callable[..., Engine], policy: str, num_scored: int
) -> None:
    """Beside each block read twice: one token after the other, and as the policy reads it."""
    engine = engine_of(policy).under(policy, 16)
    got = scorer(engine).score_text(CONTEXT, num_scored)
    runtime, spec = engine.runtime, engine.loaded.decoder.spec
    sized = engine.policy.with_sizes(
        resolve_budget(engine.policy, 16, 70, spec), engine.sizes.block
    )
    cached, logits = empty_cache(sized, spec), list[Any]()
    lane = PrefillSequence(cached, common_prompts(engine.tokenizer))
    for start, stop in cuts(len(CONTEXT) - 1, block_tokens(sized)):
        part = CONTEXT[start:stop]
        fork = cached.fork()
        logits += [step(engine, fork, token) for token in part]
        if cached.managed_entries // 4 + len(part) <= 16:
            segment = BatchSegment(cached, part, append_kind=AppendKind.TEXT)
            engine.loaded.decoder.read([segment], Mode.APPEND)
            continue
        reader = prefill_reader(runtime, sized, max(start + len(part), 16), PeakMemoryMeter())
        for _ in reader.read_and_evict_steps([lane], part, part, start):
            pass
    assert_close(got.scores[0], expected_score(logits[-num_scored:], CONTEXT[-num_scored:]))
    assert got.kv_bytes < got.full_kv_bytes


def test_stepwise_policy_bounds_the_cache_of_a_text(engine_of: Callable[..., Engine]) -> None:
    full = scorer(engine_of("full")).score_text(CONTEXT, 40)
    got = scorer(engine_of(H2O)).score_text(CONTEXT, 40)
    assert got.kv_bytes < 0.9 * full.kv_bytes
    assert abs(got.scores[0].log_likelihood - full.scores[0].log_likelihood) > 1e-2


def test_unscorable_inputs_are_refused(engine_of: Callable[..., Engine]) -> None:
    with pytest.raises(InputError, match="The context of a continuation has no tokens"):
        ContinuationRequest((), ((3,),))
    with pytest.raises(InputError, match="A continuation has no tokens"):
        ContinuationRequest((3,), ((4,), ()))
    with pytest.raises(InputError, match="1 of 1 tokens cannot be scored"):
        scorer(engine_of("full")).score_text((3,), 1)
    with pytest.raises(UsageError, match="recalls entries for generated tokens"):
        scorer(engine_of(PARKED)).score_text(CONTEXT, 4)
    with pytest.raises(UsageError, match="answers from one of several caches"):
        scorer(engine_of("epicache")).score_text(CONTEXT, 4)
