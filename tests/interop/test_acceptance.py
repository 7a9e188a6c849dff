"""Ten policies over rows of three lengths, long answers, and a model of the package index."""

from __future__ import annotations

from threading import Thread
from typing import Any

import pytest
import torch
from transformers import TextIteratorStreamer

import larder
from interop.replay import assert_same_entries, decoder_of, replay
from interop.test_batches import GREEDY, ROWS, padded
from larder.core import LarderError, UsageError
from larder.interop import LarderCache
from larder.models import load
from model_runs import some_ids
from tiny_models import ARCHITECTURES

POLICIES = (
    "full",
    "snapkv",
    "h2o",
    "d2o",
    "keydiff",
    "streaming_llm",
    "tova",
    "pyramidkv",
    "adakv",
    "expected",
)
BUDGET = 44  # above what every policy protects


@pytest.fixture(scope="module")
def bundled() -> tuple[Any, Any]:
    """The bundled model on its own attention, and its tokenizer."""
    loaded = load("seed")
    loaded.decoder.share()
    return loaded.decoder.module, loaded.tokenizer


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_rows_of_three_lengths_equal_single_rows_under_ten_policies(
    llama: Any, policy: str
) -> None:
    ids, mask = padded(ROWS)
    cache = LarderCache(llama, policy, None if policy == "full" else BUDGET)
    out = llama.generate(
        ids, attention_mask=mask, max_new_tokens=12, past_key_values=cache, **GREEDY
    )
    for number, row in enumerate(ROWS):
        new = out[number, ids.shape[1] :].tolist()
        budget = None if policy == "full" else BUDGET
        alone = replay(decoder_of("llama"), policy, budget, [(row, new[:-1])])
        assert_same_entries(cache.sequences[number], alone.cache)
        assert new[1:] == alone.generated


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_64_greedy_tokens_under_a_full_budget_equal_the_model(
    models: Any, architecture: str
) -> None:
    model, ids = models(architecture), torch.tensor([some_ids(50)])
    options = {**GREEDY, "return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(ids, max_new_tokens=64, **options)
    with larder.applied(model, "full"):
        got = model.generate(ids, max_new_tokens=64, **options)
    assert got.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(got.logits, expected.logits, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_64_greedy_tokens_of_smollm2_equal_the_model() -> None:
    try:
        loaded = load("smollm2", dtype="float32")
    except LarderError as error:
        pytest.skip(str(error))
    loaded.decoder.share()
    model = loaded.decoder.module
    ids = torch.tensor([loaded.tokenizer.encode("The history of the steam engine begins with")])
    options = {"do_sample": False, "max_new_tokens": 64, "return_dict_in_generate": True}
    expected = model.generate(ids, output_logits=True, **options)
    with larder.applied(model, "full"):
        got = model.generate(ids, output_logits=True, **options)
    assert got.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(got.logits, expected.logits, atol=1e-3, rtol=0)


def test_streamer_in_another_thread_gives_the_text(bundled: tuple[Any, Any]) -> None:
    model, tokenizer = bundled
    ids = torch.tensor([tokenizer.encode("The key is 1234. " * 6)])
    with larder.applied(model, "snapkv", 64):
        expected = model.generate(ids, max_new_tokens=8, do_sample=False)
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
        options = {"max_new_tokens": 8, "do_sample": False, "streamer": streamer}
        thread = Thread(target=model.generate, args=(ids,), kwargs=options)
        thread.start()
        text = "".join(streamer)
        thread.join()
    assert text == tokenizer.decode(expected[0, ids.shape[1] :])


def test_policy_that_reads_ids_refuses_embeddings(bundled: tuple[Any, Any]) -> None:
    model, tokenizer = bundled
    ids = torch.tensor([tokenizer.encode("The key is 1234. " * 20)])
    given = model.get_input_embeddings()(ids).detach()
    with larder.applied(model, "kvzip", 64, tokenizer=tokenizer) as run:
        with pytest.raises(UsageError, match="reads token ids"):
            model.generate(inputs_embeds=given, max_new_tokens=2)
        model.generate(ids, max_new_tokens=4, do_sample=False)
    assert run.cache is not None
    assert run.cache.sequences[0].next_position == ids.shape[1] + 3
