"""Batches of rows of different lengths, beams, several sequences and candidates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import larder
from interop.replay import assert_same_entries, decoder_of, replay
from larder.core import ModelError
from larder.interop import LarderCache
from model_runs import some_ids
from tiny_models import tiny

POLICIES = {
    "full": ("full", None),
    "snapkv": ("snapkv", 40),
    "keydiff": ("blockwise(tokens=16) > protect(sinks=2, recent=4) > keydiff() > pooled()", 24),
    "h2o": ("protect(sinks=2, recent=8) > column_mass() > uniform() > every_step()", 24),
    "share": ("protect(sinks=1, recent=2) > keynorm() > pooled()", "60%"),
    "share_min": ("protect(sinks=4, recent=8) > keydiff() > uniform()", "30% min 12"),
}
ROWS = [some_ids(50, seed=1), some_ids(33, seed=2), some_ids(9, seed=3)]
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def padded(rows: list[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    """Ids and mask of rows, padded on the left."""
    width = max(len(row) for row in rows)
    ids = [[0] * (width - len(row)) + list(row) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids), torch.tensor(mask)


@pytest.mark.parametrize("name", POLICIES)
def test_batch_equals_single_rows(model: Any, name: str) -> None:
    ids, mask = padded(ROWS)
    policy, budget = POLICIES[name]
    cache = LarderCache(model, policy, budget)
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=6, past_key_values=cache, **GREEDY
    )
    decoder = decoder_of(model.config.model_type.removesuffix("_text"))
    for number, row in enumerate(ROWS):
        new = out[number, ids.shape[1] :].tolist()
        alone = replay(decoder, policy, budget, [(row, new[:-1])])
        assert_same_entries(cache.sequences[number], alone.cache)
        assert new[1:] == alone.generated


@pytest.mark.parametrize("padding", ["own", "end"])
def test_padding_after_the_end_of_a_row_is_not_cached(
    llama: Any, padding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, mask = padded(ROWS)
    free = llama.generate(ids, attention_mask=mask, max_new_tokens=8, **GREEDY)
    end = int(free[2, ids.shape[1] + 2])  # what the last row says third ends rows
    monkeypatch.setattr(llama.generation_config, "eos_token_id", end)
    monkeypatch.setattr(llama.generation_config, "pad_token_id", 0)
    pad, cache = {"own": 0, "end": end}[padding], LarderCache(llama, "full")
    options = {"do_sample": False, "pad_token_id": pad, "past_key_values": cache}
    out = llama.generate(ids, attention_mask=mask, max_new_tokens=8, **options)
    assert out[2, ids.shape[1] + 3 :].tolist() == [pad] * (out.shape[1] - ids.shape[1] - 3)
    new = out[2, ids.shape[1] :].tolist()
    assert cache.sequences[2].next_position == len(ROWS[2]) + new.index(end) + 1
    assert cache.get_seq_length() == out.shape[1] - 1


@torch.no_grad()
def test_ignored_end_tokens_are_cached(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama.generation_config, "eos_token_id", 5)
    ids, cache = torch.tensor([[*ROWS[2], 5, 5, 5]]), LarderCache(llama, "full")
    parts = [ids[:, :-2], *ids[:, -2:].split(1, dim=1)]
    got = torch.cat([llama(part, past_key_values=cache).logits for part in parts], 1)
    torch.testing.assert_close(got, llama(ids).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["snapkv", "h2o"])
def test_beam_score_equals_its_token_scores(llama: Any, name: str) -> None:
    policy, budget = POLICIES[name]
    ids = torch.tensor([ROWS[0]])
    options = {**GREEDY, "return_dict_in_generate": True, "output_scores": True}
    with larder.applied(llama, policy, budget):
        out = llama.generate(ids, num_beams=3, max_new_tokens=5, length_penalty=0.0, **options)
    new = out.sequences[0, 50:].tolist()
    cache, score = LarderCache(llama, policy, budget), 0.0
    with torch.no_grad():
        logits = llama(ids, past_key_values=cache).logits[0, -1]
        for token in new:
            score += float(logits.log_softmax(-1)[token])
            logits = llama(torch.tensor([[token]]), past_key_values=cache).logits[0, -1]
    assert float(out.sequences_scores[0]) == pytest.approx(score, abs=1e-3)


def test_beams_and_sequences_under_a_full_budget_equal_the_model(llama: Any) -> None:
    ids = torch.tensor([ROWS[0]])
    options = {**GREEDY, "num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 6}
    expected = llama.generate(ids, **options)
    with larder.applied(llama, "full"):
        assert torch.equal(llama.generate(ids, **options), expected)


def test_candidates_change_neither_tokens_nor_entries(llama: Any) -> None:
    ids = torch.tensor([ROWS[0]])
    policy, budget = POLICIES["snapkv"]
    results = list[Any]()
    for assistance in ({}, {"prompt_lookup_num_tokens": 3}, {"assistant_model": tiny("llama")}):
        with larder.applied(llama, policy, budget) as run:
            out = llama.generate(ids, max_new_tokens=8, **GREEDY, **assistance)
        assert run.cache is not None
        results.append((out.tolist(), run.cache.lengths()))
    assert results[1:] == results[:1] * 2


def test_embeddings_give_the_tokens_and_lengths_of_ids(llama: Any) -> None:
    ids = torch.tensor([ROWS[0]])
    given = llama.get_input_embeddings()(ids).detach()
    with larder.applied(llama, *POLICIES["keydiff"]) as run:
        expected = llama.generate(ids, max_new_tokens=6, **GREEDY)[:, 50:]
        lengths = run.cache.lengths() if run.cache else None
        got = llama.generate(inputs_embeds=given, max_new_tokens=6, **GREEDY)
    assert got.tolist() == expected.tolist()
    assert run.cache is not None
    assert run.cache.lengths() == lengths


def test_chunked_prompt_under_a_full_budget_equals_the_model(llama: Any) -> None:
    ids = torch.tensor([ROWS[0]])
    expected = llama.generate(ids, max_new_tokens=6, **GREEDY)
    with larder.applied(llama, "full"):
        got = llama.generate(ids, max_new_tokens=6, prefill_chunk_size=16, **GREEDY)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("is_own", [False, True])
def test_chunked_prefill_under_a_policy_warns_once(llama: Any, is_own: bool) -> None:
    ids, options = torch.tensor([ROWS[0]]), {**GREEDY, "max_new_tokens": 3}
    own = {"past_key_values": LarderCache(llama, "snapkv", 40)} if is_own else {}
    with larder.applied(llama, "snapkv", 40):
        with pytest.warns(UserWarning, match="each chunk of a prompt for a text") as raised:
            llama.generate(ids, prefill_chunk_size=16, **options, **own)
        assert len(raised) == 1
        own |= {"past_key_values": LarderCache(llama, "snapkv", 40)} if is_own else {}
        first = llama.generate(ids, **options, **own)  # texts of two calls are no chunks
        llama.generate(torch.cat([first, ids], 1), **options, **own)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_adapter_for_each_row_is_refused() -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(tiny("llama"), settings).eval()
    ids = torch.tensor([ROWS[0], ROWS[0]])
    with larder.applied(adapted, "full"), pytest.raises(ModelError, match="set_adapter"):
        adapted.generate(
            input_ids=ids, adapter_names=["default", "__base__"], max_new_tokens=2, **GREEDY
        )


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_model_with_a_peft_adapter_under_a_full_budget_equals_itself() -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    adapted, ids = peft.get_peft_model(tiny("llama"), settings).eval(), torch.tensor([ROWS[0]])
    expected = adapted.generate(input_ids=ids, max_new_tokens=6, **GREEDY)
    with larder.applied(adapted, "full"):
        assert torch.equal(adapted.generate(input_ids=ids, max_new_tokens=6, **GREEDY), expected)
