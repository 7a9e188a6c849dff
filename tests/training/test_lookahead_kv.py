"""LookaheadKV: what its learned tokens see, what they change, and what training finds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from larder import Policy
from larder.cache import SequenceCache
from larder.core import BadParameter, Mode, ModelError, ScratchPrompt
from larder.models import BatchSegment, Card, Decoder, LearnedWeights, learned_file, wrap_model
from larder.policy import PROVIDERS
from larder.prefill import EvictionPass, ScoringPhase
from larder.session import TokenizerAdapter, common_prompts
from larder.training import (
    CorpusSplit,
    LookaheadTraining,
    Passage,
    PassageLimits,
    best_share,
    divergence,
    frozen,
    greedy_answer,
    predicted_shares,
    read_corpus,
    read_prompt,
)
from learned_gates import random_soft_prompt
from model_attention import heads_of
from references import lookahead_kv as loop
from tiny_models import tiny

IDS = tuple(range(3, 27))
NAME = "lookahead_kv"
PROVIDER = PROVIDERS.load(NAME)()
SMALL = LookaheadTraining(rank=2, answer=4, epochs=40, rate=0.02)


@pytest.fixture
def decoder() -> Iterator[Decoder]:
    with wrap_model(tiny("llama", layers=2)) as held:
        yield held


def read(decoder: Decoder) -> SequenceCache:
    cache = SequenceCache(decoder.spec, "dense")
    decoder.read([BatchSegment(cache, IDS)], Mode.APPEND)
    return cache


def next_logits(decoder: Decoder, cache: SequenceCache) -> torch.Tensor:
    return decoder.forward_logits([BatchSegment(cache, (40, 41, 42))], Mode.SCRATCH, [0, 1, 2])


def test_learned_pass_equals_a_model_with_updated_weights(decoder) -> None:
    layers, found = random_soft_prompt(decoder), []
    cache = read(decoder)
    with decoder.soft_prompts.modules.installed(layers, PROVIDER):
        decoder.read(
            [BatchSegment(cache, (0,) * 32)],
            Mode.SCRATCH,
            lambda row, layer, recorded: found.append(recorded.queries),
        )
    with wrap_model(tiny("llama", layers=2)) as other:
        plain = read(other)
        with torch.no_grad():
            other.module.get_input_embeddings().weight[:32] = layers[0]["embeddings"]
            for own, linears in zip(layers, other.soft_prompts.modules.linears, strict=True):
                for name, linear in linears.items():
                    weight = loop.updated(linear.weight, own[f"{name}.down"], own[f"{name}.up"])
                    linear.weight.copy_(weight)
        wanted = []
        other.read(
            [BatchSegment(plain, tuple(range(32)))],
            Mode.SCRATCH,
            lambda row, layer, recorded: wanted.append(recorded.queries),
        )
    assert len(found) == len(wanted) == 2
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entries_and_logits_of_the_prompt_are_unchanged_bitwise(dtype) -> None:
    with wrap_model(tiny("llama", layers=2, dtype=dtype)) as decoder:
        cache = read(decoder)
        before, state = next_logits(decoder, cache), cache.lengths()
        kept = [cache.entries(0).head_keys(1).clone(), cache.entries(1).head_values(0).clone()]
        decoder.soft_prompts.put(NAME, random_soft_prompt(decoder))
        with decoder.soft_prompts.soft_pass(NAME, PROVIDER):
            decoder.read([BatchSegment(cache, (0,) * 32)], Mode.SCRATCH)
        assert cache.lengths() == state and torch.equal(next_logits(decoder, cache), before)
        assert torch.equal(cache.entries(0).head_keys(1), kept[0])
        assert torch.equal(cache.entries(1).head_values(0), kept[1])
        assert torch.equal(next_logits(decoder, read(decoder)), before)


def test_learned_tokens_are_added_per_sequence(decoder) -> None:
    decoder.soft_prompts.put(NAME, random_soft_prompt(decoder))
    found: dict[tuple[int, int], torch.Tensor] = {}
    caches = [read(decoder), read(decoder)]
    with decoder.soft_prompts.soft_pass(NAME, PROVIDER):
        decoder.read(
            [BatchSegment(cache, (0,) * 32) for cache in caches],
            Mode.SCRATCH,
            lambda row, layer, recorded: found.update({(row, layer): recorded.queries}),
        )
    for layer in range(2):
        torch.testing.assert_close(found[0, layer], found[1, layer])


def test_scorer_requests_the_number_of_learned_tokens() -> None:
    [scratch] = Policy.parse("whole() > lookahead_kv()").scorer.scratch((5, 6, 7), 10, {})
    assert scratch == ScratchPrompt((0,) * PROVIDER.tokens, (0, 13))


def test_targets_are_the_mean_attention_of_the_answer(decoder) -> None:
    answer = greedy_answer(decoder, IDS, 3)
    text = (*IDS, *answer)
    with torch.no_grad(), decoder.attention:
        for index, token in enumerate(answer):
            logits = decoder.forward_logits(
                [BatchSegment(SequenceCache(decoder.spec, "dense"), text[: len(IDS) + index])],
                Mode.SCRATCH,
                [len(IDS) + index - 1],
            )
            assert int(logits.argmax()) == token
    prompt = read_prompt(decoder, IDS, 3)
    for layer, heads in enumerate(heads_of(decoder, text)):
        for head in range(2):
            for rows, got in (
                (range(len(IDS), len(text)), prompt[layer].targets),
                (range(len(IDS)), prompt[layer].window),
            ):
                sums = [0.0] * len(IDS)
                for query_head in (2 * head, 2 * head + 1):
                    for token in rows:
                        row = heads.row(query_head, token)[: len(IDS)]
                        row += [0.0] * (len(IDS) - len(row))
                        sums = [a + b for a, b in zip(sums, row, strict=True)]
                expected = torch.tensor(sums) / sum(sums)
                torch.testing.assert_close(got[head], expected, atol=1e-5, rtol=1e-3)
        torch.testing.assert_close(prompt[layer].keys, heads.keys[:, : len(IDS)])


def test_training_predicts_what_the_policy_scores(decoder) -> None:
    layers = random_soft_prompt(decoder)
    shares = predicted_shares(decoder, layers, read_prompt(decoder, IDS, 2))
    decoder.soft_prompts.put(NAME, layers)
    planner = Policy.parse("whole() > lookahead_kv() > uniform(tokens=8)").planner
    cache, found = read(decoder), {}
    observer = EvictionPass(
        planner,
        [cache],
        8,
        [{0: 8, 1: 8}],
        None,
        [len(IDS)],
        listener=lambda layer, seen, scores: found.update({layer: scores}),
    )
    scratch = ScratchPrompt((0,) * 32, (0, len(IDS)))
    observer.begin_pass([scratch], [ScoringPhase.ACCUMULATE], 32)
    with decoder.soft_prompts.soft_pass(NAME, PROVIDER):
        decoder.read([BatchSegment(cache, scratch.ids)], Mode.SCRATCH, observer)
    for layer in range(2):
        own = found[layer].view(2, -1)
        torch.testing.assert_close(
            own / own.sum(1, keepdim=True), shares[layer].detach(), atol=1e-5, rtol=1e-3
        )


@pytest.mark.extended
def test_training_lowers_the_divergence_from_the_answers_attention(decoder) -> None:
    passage = Passage("text", "texts", CorpusSplit.TRAIN, 0, IDS)
    steps: list[int] = []
    with frozen(decoder.module):
        layers = SMALL.fit(decoder, [passage], 0, lambda done, total: steps.append(done))
    first = replace(SMALL, epochs=1, rate=1e-9).fit(decoder, [passage], 0, lambda a, b: None)
    before, after = (SMALL.test(decoder, own, [passage]) for own in (first, layers))
    assert after["kl"] < 0.5 * before["kl"] and steps == [*range(1, 41)]
    assert after["most_share"] == pytest.approx(1.0)  # 64 entries hold all 24
    shapes = [dict(SMALL.shapes(spec, 64, own)) for spec, own in _pairs(decoder, layers)]
    found = [{name: tuple(each.shape) for name, each in own.items()} for own in layers]
    assert shapes == found and found[0]["embeddings"] == (32, 64)


def _pairs(decoder: Decoder, layers):
    return zip(decoder.spec.managed, layers, strict=True)


def test_divergence_and_shares_hand_values() -> None:
    targets = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.25, 0.75]])
    predicted = torch.tensor([[0.25, 0.25, 0.5], [0.0, 0.25, 0.75]])
    assert float(divergence(targets, predicted)) == pytest.approx(math.log(2))
    assert best_share(targets, predicted, 1).tolist() == [0.0, 0.75]
    assert best_share(targets, predicted, 9).tolist() == [1.0, 1.0]


@pytest.mark.extended
def test_training_prompts_have_three_kinds(seed_model) -> None:
    adapter, limits = TokenizerAdapter(seed_model.tokenizer), PassageLimits(180, 60, 60)
    given = [p for p in read_corpus(None).passages(adapter, 60, 0) if p.split is CorpusSplit.TRAIN]
    found = SMALL.passages(read_corpus(None), adapter, limits)[CorpusSplit.TRAIN]
    assert len(found) == 3 and found[0].ids == given[0].ids
    request = tuple(common_prompts(adapter)["summarize"])
    assert found[1].ids == (*given[1].ids, *request)
    answer = adapter.decode(found[2].ids)
    assert answer.count("the secret words of") == 5 and answer.endswith("They are")
    name = answer.rsplit("the secret words of ", 1)[1].split("?")[0]
    assert answer.count(name) == 2


def test_weights_that_do_not_fit_are_refused(decoder, larder_home) -> None:
    with pytest.raises(ModelError, match="`larder train lookahead_kv`"):
        decoder.soft_prompts.soft_pass(NAME, PROVIDER)
    layers = random_soft_prompt(decoder)
    path = learned_file(decoder.spec.fingerprint, NAME)
    card = Card(NAME, (decoder.spec.fingerprint,))
    LearnedWeights(card, tuple(layers)).save(path)
    with decoder.soft_prompts.soft_pass(NAME, PROVIDER):
        pass
    without = [{k: v for k, v in own.items() if k != "embeddings"} for own in layers]
    with pytest.raises(ModelError, match="no 'embeddings' in the first layer"):
        decoder.soft_prompts.put(NAME, without)
    narrow = [*layers[:1], {**layers[1], "mlp.up_proj.down": torch.zeros(2, 3)}]
    with pytest.raises(ModelError, match="do not fit the linear layers"):
        decoder.soft_prompts.put(NAME, narrow)
    short = [{**layers[0], "embeddings": torch.zeros(31, 64)}, layers[1]]
    LearnedWeights(card, tuple(short)).save(path)
    decoder.__dict__.pop("soft_prompts")
    with pytest.raises(ModelError, match="have shapes"):
        decoder.soft_prompts.soft_pass(NAME, PROVIDER)


def test_settings_of_learned_tokens_out_of_range_are_refused() -> None:
    for wrong in ({"rank": 0}, {"answer": 0}, {"rate": 0.0}):
        with pytest.raises(BadParameter, match="lookahead_kv needs"):
            LookaheadTraining(**wrong)
