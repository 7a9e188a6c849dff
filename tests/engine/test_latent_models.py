"""Engines of models that cache latents, or share the entries of layers."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from architectures.families import families
from chats import HISTORY, SINGLE, same, states, under
from larder import Chat, Engine
from larder.engine import StorePersistence
from larder.models import LoadedModel, wrap_model
from larder.session import ChatCache
from larder.store import Store
from server_core import characters

PROMPTS = ["The harbour opened in 1871, and its master was called Ida. " * 2, "Ann has a dog."]
H2O = "protect(sinks=2, recent=4) > column_mass() > uniform() > every_step()"

by_name = pytest.mark.parametrize("name", ["DeepSeek-V3", "Gemma 3n"])


@cache
def loaded_of(name: str) -> LoadedModel:
    [family] = [family for family in families() if family.name == name]
    decoder = wrap_model(family.model())
    decoder.share()
    return LoadedModel(decoder, characters().tokenizer, name)


@by_name
@torch.no_grad()
def test_a_full_cache_continues_as_transformers_does(name: str) -> None:
    loaded = loaded_of(name)
    got = Engine(loaded, policy="full").generate(PROMPTS, max_new_tokens=12)
    for completion, prompt in zip(got, PROMPTS, strict=True):
        ids = loaded.tokenizer(prompt, return_tensors="pt")["input_ids"]
        out = loaded.decoder.module.generate(ids, max_new_tokens=12, do_sample=False)
        assert completion.text == loaded.tokenizer.decode(
            out[0, ids.shape[1] :], skip_special_tokens=True
        )


@by_name
def test_a_batch_is_each_prompt_alone(name: str) -> None:
    engine = Engine(loaded_of(name), policy=H2O, budget=24)
    [batched, _] = engine.generate(PROMPTS, max_new_tokens=6)
    alone = engine.generate(PROMPTS[0], max_new_tokens=6)
    assert batched.ids == alone.ids
    assert alone.kv_bytes < 0.8 * alone.full_kv_bytes


@pytest.mark.extended
@by_name
@pytest.mark.parametrize("policy", [SINGLE, "full"])
def test_a_saved_chat_continues_alike(
    name: str, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = loaded_of(name)
    engine, store = under(loaded, policy), Store(str(tmp_path / "store"), tmp_path)
    chat = Chat(engine, "mine", HISTORY, keeper=StorePersistence(store, loaded))
    chat.say("My dog is old.", max_new_tokens=20)
    assert chat.keep() == ""
    monkeypatch.setattr(ChatCache, "prefill", lambda *_: pytest.fail("read again"))
    back = Chat(engine, "mine", keeper=StorePersistence(store, loaded))
    assert all(same(a, b) for a, b in zip(states(back), states(chat), strict=True))
    del chat._log_store  # only one of the two may write the file
    asked = [engine.ask(each.memory, "Old?", max_new_tokens=8).ids for each in (back, chat)]
    assert asked[0] == asked[1]
    store.close()
