"""`model.generate` with images over a LarderCache, against the model alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import larder
from architectures.families_vision import IMAGE
from interop.image_prompts import IMAGE_TOKENS, NAMES, Prompt, inputs_of, model_of
from interop.replay import assert_same_entries
from larder.core import UsageError
from larder.interop import LarderCache

GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
LOGITS = {**GREEDY, "return_dict_in_generate": True, "output_logits": True}
PROMPT = Prompt((10, None, 12, None, 7))
BATCH = (PROMPT, Prompt((5, None, 3), seed=9), Prompt((12,), seed=4))
BUDGET = 14
POLICIES = {
    "snapkv": "protect(sinks=2, recent=4) > snapkv(window=4) > uniform()",
    "h2o": "protect(sinks=2, recent=8) > column_mass() > uniform() > every_step()",
    "keydiff": "blockwise(tokens=9) > protect(sinks=2, recent=4) > keydiff() > pooled()",
    "streaming_llm": "blockwise(tokens=9) > protect(sinks=2, recent=4) > sinks_and_window(sinks=2)",
}
QWEN, GEMMA, LLAVA = NAMES[0], NAMES[1], NAMES[2]
SMALL_BLOCKS = "blockwise(tokens=6) > protect(sinks=1, recent=2) > keydiff() > unlimited()"


def assert_same_answers(got: Any, expected: Any) -> None:
    assert got.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(got.logits, expected.logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("policy", ["full", SMALL_BLOCKS])
def test_full_budget_equals_the_model(name: str, policy: str) -> None:
    model, given = model_of(name), inputs_of(name, PROMPT)
    expected = model.generate(**given, max_new_tokens=16, **LOGITS)
    with larder.applied(model, policy):
        assert_same_answers(model.generate(**given, max_new_tokens=16, **LOGITS), expected)
    other = model(**given | {"pixel_values": -given["pixel_values"]}).logits[:, -1]
    assert (other - expected.logits[0]).abs().max() > 0.1  # images matter


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("policy", ["snapkv", "keydiff"])
def test_batch_equals_single_rows(name: str, policy: str) -> None:
    model, given = model_of(name), inputs_of(name, *BATCH)
    together = LarderCache(model, POLICIES[policy], BUDGET)
    out = model.generate(**given, past_key_values=together, max_new_tokens=6, **GREEDY)
    for number, prompt in enumerate(BATCH):
        alone, own = LarderCache(model, POLICIES[policy], BUDGET), inputs_of(name, prompt)
        expected = model.generate(**own, past_key_values=alone, max_new_tokens=6, **GREEDY)
        assert out[number, -6:].tolist() == expected[0, -6:].tolist()
        assert_same_entries(together.sequences[number], alone.sequences[0])


@pytest.mark.parametrize("name", NAMES)
def test_policies_free_memory(name: str) -> None:
    model, given = model_of(name), inputs_of(name, PROMPT)
    whole = LarderCache(model, "full")
    model.generate(**given, past_key_values=whole, max_new_tokens=2, **GREEDY)
    for policy in POLICIES.values():
        cache = LarderCache(model, policy, BUDGET)
        model.generate(**given, past_key_values=cache, max_new_tokens=2, **GREEDY)
        held, every = (sum(map(sum, each.sequences[0].lengths())) for each in (cache, whole))
        assert held < every
        assert cache.nbytes < whole.nbytes


@pytest.mark.parametrize("name", NAMES)
def test_text_without_images_equals_the_model(name: str) -> None:
    model, given = model_of(name), inputs_of(name, Prompt((20,)))
    expected = model.generate(**given, max_new_tokens=8, **LOGITS)
    with larder.applied(model, "full"):
        assert_same_answers(model.generate(**given, max_new_tokens=8, **LOGITS), expected)


@pytest.mark.parametrize("name", NAMES)
def test_second_turn_with_another_image_equals_the_model(name: str) -> None:
    model, first = model_of(name), Prompt(PROMPT.parts[:3])
    whole = inputs_of(name, PROMPT)
    expected = model.generate(**whole, max_new_tokens=8, **LOGITS)
    cache = LarderCache(model, "full")
    model.generate(**inputs_of(name, first), past_key_values=cache, max_new_tokens=1, **GREEDY)
    more = inputs_of(name, PROMPT, seen=first)
    if name == QWEN:  # transformers counts positions by the grids of all images
        positions, _ = model.model.get_rope_index(**_without(whole, "pixel_values"))
        more["position_ids"] = positions
    got = model.generate(**more, past_key_values=cache, max_new_tokens=8, **LOGITS)
    assert_same_answers(got, expected)


def _without(given: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key != name}


@pytest.mark.parametrize("schedule", ["blockwise(tokens=9)", "whole()"])
def test_blocks_do_not_split_images(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("larder.prefill.schedules.whole.BLOCK_TOKENS", 9)
    model, read = model_of(LLAVA), list[int]()
    cache = LarderCache(model, f"{schedule} > protect(sinks=2, recent=4) > keydiff()", 90)
    layer = model.model.language_model.layers[0]  # hooked once the model was compared with itself
    handle = layer.register_forward_pre_hook(lambda layer, args: read.append(args[0].shape[1]))
    model.generate(**inputs_of(LLAVA, PROMPT), past_key_values=cache, max_new_tokens=1, **GREEDY)
    handle.remove()
    ids, ends = PROMPT.ids(LLAVA), torch.tensor(read).cumsum(0).tolist()
    inside = [n for n in range(1, len(ids)) if ids[n - 1] == ids[n] == IMAGE]
    assert len(inside) == 2 * (IMAGE_TOKENS[LLAVA] - 1)
    assert len(ids) in ends
    assert not set(ends).intersection(inside)
    assert max(read) <= 9 + IMAGE_TOKENS[LLAVA]


@pytest.mark.parametrize("name", [QWEN, GEMMA])
def test_beams_with_images_equal_the_model(name: str) -> None:
    model, given = model_of(name), inputs_of(name, PROMPT)
    options = {**GREEDY, "num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 5}
    expected = model.generate(**given, **options)
    with larder.applied(model, "full"):
        assert torch.equal(model.generate(**given, **options), expected)


def test_failed_call_leaves_the_model_unchanged() -> None:
    model, given = model_of(GEMMA), inputs_of(GEMMA, PROMPT)
    expected = model.generate(**given, max_new_tokens=4, **LOGITS)
    cache = LarderCache(model, "full")
    with pytest.raises(ValueError, match="do not match"):
        one = given["pixel_values"][:1]
        model.generate(
            **given | {"pixel_values": one}, past_key_values=cache, max_new_tokens=1, **GREEDY
        )
    assert_same_answers(model.generate(**given, max_new_tokens=4, **LOGITS), expected)
    got = model.generate(**given, past_key_values=cache, max_new_tokens=4, **LOGITS)
    assert_same_answers(got, expected)


def test_policy_that_reads_logits_of_images_is_refused() -> None:
    model, given = model_of(QWEN), inputs_of(QWEN, PROMPT)
    policy = "protect(sinks=1, recent=2) > novelty() > uniform()"
    with larder.applied(model, policy, BUDGET):
        model.generate(**inputs_of(QWEN, Prompt((40,))), max_new_tokens=2, **GREEDY)
        with pytest.raises(UsageError, match="images"):
            model.generate(**given, max_new_tokens=2, **GREEDY)


@pytest.mark.parametrize("name", [QWEN, GEMMA])
@pytest.mark.parametrize("schedule", ["whole()", "blockwise(tokens=9)"])
def test_scores_distinguish_images_from_text(name: str, schedule: str) -> None:
    model, given = model_of(name), inputs_of(name, PROMPT)
    is_image, kept = torch.tensor(PROMPT.ids(name)) == IMAGE, list[int]()
    for factor in (0, 1, 1000):
        policy = f"{schedule} > protect(sinks=1, recent=1) > snapkv(window=1) > max() > group_max()"
        with larder.applied(
            model, f"{policy} > image_weight(factor={factor}) > uniform()", BUDGET
        ) as run:
            model.generate(**given, max_new_tokens=1, **GREEDY)
        assert run.cache is not None
        entries = run.cache.sequences[0].entries(1)
        assert torch.equal(entries.column("image") > 0, is_image[entries.packed_positions().long()])
        kept.append(int(entries.column("image").sum()))
    assert kept[0] == 0
    assert kept[1] < kept[2] == 2 * int(is_image.sum())
