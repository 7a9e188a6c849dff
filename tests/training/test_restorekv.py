"""RestoreKV: what its training sees is what its policy holds, and training comes nearer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
import torch

from larder.cache import SequenceCache
from larder.core import AddedEntries, BadParameter, Mode, ModelError, Plan
from larder.models import BatchSegment, Decoder, wrap_model
from larder.policy import PROVIDERS
from larder.prefill import soft_entries
from larder.training import (
    CorpusSplit,
    LayerText,
    Passage,
    PassageLimits,
    RestoreTraining,
    frozen,
    read_corpus,
    restored_entries,
    restored_loss,
    selection_masks,
    taught_text,
)
from learned_gates import random_soft_prompt
from model_runs import some_ids
from references import restorekv as loop
from references.lookahead_kv import updated
from tiny_models import tiny

NAME, REQUEST, CONTEXT = "restorekv", (5, 6), 140
PROVIDER = PROVIDERS.load(NAME)()
IDS = some_ids(CONTEXT + 48)
PASSAGE = Passage("text", "texts", CorpusSplit.TRAIN, 0, (*IDS, *REQUEST), (len(IDS),))


@pytest.fixture
def decoder() -> Iterator[Decoder]:
    with wrap_model(tiny("llama", layers=2)) as held:
        yield held


def read(decoder: Decoder) -> SequenceCache:
    cache = SequenceCache(decoder.spec, "ragged")
    decoder.read([BatchSegment(cache, IDS[:CONTEXT])], Mode.APPEND)
    return cache


def test_kept_masks_hand_values() -> None:
    nothing = torch.zeros(1, 6, 1)
    low, high = torch.zeros(1, 6), torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.1, 0.9]])
    layers = {n: LayerText(nothing, nothing, own) for n, own in ((3, low), (7, high))}
    masks = selection_masks(layers, 5 / 6, 0)  # the first four of each head, and the best two
    assert masks[3].tolist() == [[True] * 4 + [False] * 2]
    assert masks[7].tolist() == [[True] * 6]
    assert int(sum(own.sum() for own in selection_masks(layers, 5 / 6, 1).values())) == 8


def test_entries_and_logits_equal_a_planned_cache(decoder) -> None:
    """The pass of the policy gives the same entries; probes see what the cache would show."""
    layers = random_soft_prompt(decoder, tokens=loop.TOKENS)
    decoder.soft_prompts.put(NAME, layers)
    with frozen(decoder.module):
        text = taught_text(decoder, PASSAGE, Random(0))
        added = restored_entries(decoder, layers, PROVIDER, text)
        loss = float(restored_loss(decoder, text, 1 / 4, added).detach())
    cache, full = read(decoder), read(decoder)
    [found] = soft_entries(decoder, [full], {NAME: PROVIDER})
    masks = selection_masks(text.layers, 1 / 4, loop.TOKENS)
    for layer, sides in added.items():
        for side, own in zip(("keys", "values"), sides, strict=True):
            given = found[layer][f"{NAME}.{side}"]
            torch.testing.assert_close(given, own.detach(), atol=1e-5, rtol=1e-3)
        plan = Plan.from_mask(masks[layer].flatten(), cache.lengths()[layer])
        positions = torch.full((loop.TOKENS,), CONTEXT - 1)
        own = AddedEntries(*(side.detach() for side in sides), positions)
        cache.apply(layer, replace(plan, added=own))
    probes, logs = text.probes, []
    for one in (full, cache):
        rows, first = list[torch.Tensor](), 0
        for length in probes.lengths:
            segment = BatchSegment(one, probes.ids[first : first + length])
            rows.append(decoder.forward_logits([segment], Mode.SCRATCH, range(length)))
            first += length
        logs.append(torch.cat(rows)[list(probes.rows)].double().log_softmax(-1))
    expected = float((logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean())
    assert loss == pytest.approx(expected, rel=0.01) and loss > 1e-3
    assert float(restored_loss(decoder, text, 1.0, {}).detach()) < 1e-4


def test_learned_pass_equals_a_model_with_updated_weights(decoder) -> None:
    layers = random_soft_prompt(decoder, tokens=loop.TOKENS)
    decoder.soft_prompts.put(NAME, layers)
    cache = read(decoder)
    [found] = soft_entries(decoder, [cache], {NAME: PROVIDER})
    wanted = {}
    with torch.no_grad():
        decoder.module.get_input_embeddings().weight[: loop.TOKENS] = layers[0]["embeddings"]
        for own, linears in zip(layers, decoder.soft_prompts.modules.linears, strict=True):
            for name, linear in linears.items():
                linear.weight.copy_(
                    updated(linear.weight, own[f"{name}.down"], own[f"{name}.up"], alpha=16)
                )
    decoder.read(
        [BatchSegment(cache, tuple(range(loop.TOKENS)), shift=-loop.TOKENS)],
        Mode.SCRATCH,
        lambda row, layer, recorded: wanted.update({layer: recorded}),
    )
    for layer, recorded in wanted.items():
        for side in ("keys", "values"):
            got = found[layer][f"{NAME}.{side}"]
            torch.testing.assert_close(got, getattr(recorded, side), atol=1e-4, rtol=1e-3)


@pytest.mark.extended
def test_training_lowers_the_divergence_from_the_full_cache(decoder) -> None:
    part = RestoreTraining(rank=2, epochs=60, rate=0.02)
    steps: list[int] = []
    with frozen(decoder.module):
        layers = part.fit(decoder, [PASSAGE], 0, lambda done, total: steps.append(done))
        first = replace(part, epochs=1, rate=1e-9).fit(decoder, [PASSAGE], 0, lambda a, b: None)
        before, after = (part.test(decoder, own, [PASSAGE]) for own in (first, layers))
    assert after["kl_8"] < 0.9 * before["kl_8"] and after["kl_8"] < after["evicted_kl_8"]
    assert after["evicted_kl_8"] == before["evicted_kl_8"] and steps == [*range(1, 62)]
    shapes = [
        dict(part.shapes(spec, 64, own))
        for spec, own in zip(decoder.spec.managed, layers, strict=True)
    ]
    assert shapes == [{name: tuple(each.shape) for name, each in own.items()} for own in layers]


@pytest.mark.extended
def test_passages_end_with_the_request_to_recite_them(seed_model) -> None:
    from larder.session import TokenizerAdapter, common_prompts

    adapter = TokenizerAdapter(seed_model.tokenizer)
    limits = PassageLimits(400, 200, 200)
    found = RestoreTraining().passages(read_corpus(None), adapter, limits)[CorpusSplit.TRAIN]
    request = tuple(common_prompts(adapter)["repeat"])
    assert found and all(own.ids[own.predicting[0] :] == request for own in found)


def test_invalid_settings_and_sliding_window_models_are_refused() -> None:
    for wrong in ({"rank": 0}, {"epochs": 0}, {"rate": 0.0}):
        with pytest.raises(BadParameter, match="restorekv needs"):
            RestoreTraining(**wrong)
    with wrap_model(tiny("gemma3")) as sliding, pytest.raises(ModelError, match="sliding windows"):
        RestoreTraining().fit(sliding, [PASSAGE], 0, lambda done, total: None)
