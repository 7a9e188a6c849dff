"""Engines of models with recurrent layers, latents or shared entries: prompts, chats, saving."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from chats import EPISODES, HISTORY, SINGLE, same, state, states, under
from larder import Chat, Engine
from larder.engine import StorePersistence
from larder.session import ChatCache
from larder.store import Store
from server_core import family_characters

PROMPTS = ["The harbour opened in 1871, and its master was called Ida. " * 2, "Ann has a dog."]
# Evicting between blocks, before, while and never while generating.
POLICIES = {
    "blocks": "blockwise(tokens=16) > protect(sinks=2, recent=4) > keydiff() > pooled()",
    "snapkv": "protect(sinks=2, recent=4) > snapkv(window=4) > uniform()",
    "h2o": "protect(sinks=2, recent=4) > column_mass() > uniform() > every_step()",
    "streaming_llm": "protect(sinks=2, recent=4) > sinks_and_window(sinks=2) > uniform()",
    "kvzip": "blockwise(tokens=16) > protect(sinks=2, recent=4) > reconstruct() > pooled()",
}
STEPWISE = SINGLE + " > every_step()"


def engine_of(name: str, policy: str, budget: int | None = None) -> Engine:
    return Engine(family_characters(name), policy=policy, budget=budget)


EXTENDED = [pytest.param(name, marks=pytest.mark.extended) for name in ("LFM2", "Qwen3-Next")]
LATENT = ["DeepSeek-V3", "Gemma 3n"]  # the second shares the entries of layers


@pytest.mark.parametrize("name", [*EXTENDED, *LATENT])
@torch.no_grad()
def test_full_cache_completion_equals_transformers(name: str) -> None:
    engine, loaded = engine_of(name, "full"), family_characters(name)
    got = engine.generate(PROMPTS, max_new_tokens=12)
    for completion, prompt in zip(got, PROMPTS, strict=True):
        ids = loaded.tokenizer(prompt, return_tensors="pt")["input_ids"]
        out = loaded.decoder.module.generate(ids, max_new_tokens=12, do_sample=False)
        assert completion.text == loaded.tokenizer.decode(
            out[0, ids.shape[1] :], skip_special_tokens=True
        )
        assert completion.kv_bytes >= completion.full_kv_bytes


LONG = ("blocks", "kvzip")  # policies whose case is extended
FREED = [
    *(("Falcon-H1", policy) for policy in POLICIES if policy not in LONG),
    *(pytest.param("Falcon-H1", policy, marks=pytest.mark.extended) for policy in LONG),
    *((name, "h2o") for name in LATENT),
]


@pytest.mark.parametrize("name, policy", FREED)
def test_policies_free_memory(name: str, policy: str) -> None:
    engine = engine_of(name, POLICIES[policy], 24)
    [batched, _] = engine.generate(PROMPTS, max_new_tokens=6)
    alone = engine.generate(PROMPTS[0], max_new_tokens=6)
    recurrent = family_characters(name).decoder.spec.recurrent_bytes
    assert batched.ids == alone.ids
    assert recurrent < alone.kv_bytes < 0.8 * alone.full_kv_bytes


@pytest.mark.extended
def test_answer_does_not_change_the_memory() -> None:
    engine = under(family_characters("Falcon-H1"), SINGLE)
    memory = engine.read(HISTORY)
    before = state(memory.caches.activate(0).fork())
    answers = [engine.ask(memory, "My dog?", max_new_tokens=40) for _ in range(2)]
    assert answers[0].ids == answers[1].ids
    assert same(state(memory.caches.activate(0)), before)
    figures, spec = memory.figures, family_characters("Falcon-H1").decoder.spec
    assert figures.full_kv_bytes == spec.full_bytes(figures.context_tokens)


SAVED = [
    *(("LFM2", policy, 40) for policy in (SINGLE, STEPWISE, "full")),
    pytest.param("LFM2", EPISODES, 40, marks=pytest.mark.slow),
    *((name, policy, 20) for name in LATENT for policy in (SINGLE, "full")),
]


@pytest.mark.extended
@pytest.mark.parametrize("name, policy, new_tokens", SAVED)
def test_saved_chat_continues_identically(
    name: str, policy: str, new_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = family_characters(name)
    engine, store = under(loaded, policy), Store(str(tmp_path / "store"), tmp_path)
    chat = Chat(engine, "mine", HISTORY, keeper=StorePersistence(store, loaded))
    chat.say("My dog is old.", max_new_tokens=new_tokens)
    assert chat.keep() == ""
    monkeypatch.setattr(ChatCache, "prefill", lambda *_: pytest.fail("read again"))
    back = Chat(engine, "mine", keeper=StorePersistence(store, loaded))
    assert all(same(a, b) for a, b in zip(states(back), states(chat), strict=True))
    del chat._log_store  # only one of the two may write the file
    asked = [engine.ask(each.memory, "Old?", max_new_tokens=8).ids for each in (back, chat)]
    assert asked[0] == asked[1]
    store.close()


@pytest.mark.parametrize("policy", [SINGLE, STEPWISE, "full"])
def test_turn_that_fails_is_undone(policy: str) -> None:
    chat = Chat(under(family_characters("LFM2"), policy), None, HISTORY)
    before = states(chat)

    def fail(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chat.say("My dog is old. " * 4, fail, max_new_tokens=40)
    assert all(same(a, b) for a, b in zip(states(chat), before, strict=True))
    chat.say("My dog is old.", max_new_tokens=4)
    assert len(chat.turns) == 1
