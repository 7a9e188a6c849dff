"""Answers leave a memory unchanged, bytes included; setup and prefill are timed apart."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache

import pytest
import torch

from chats import EPISODES, HISTORY, SINGLE, under
from larder import Engine
from larder.core import CacheError, UsageError
from larder.models import LoadedModel, wrap_model
from tiny_models import tiny
from topic_embedder import TopicEmbedder


@pytest.mark.extended
def test_answer_releases_its_memory(engine: Engine) -> None:
    memory = engine.read(HISTORY)
    memory.activate_for("My dog?")
    before = memory.caches.nbytes
    answer = engine.ask(memory, "My dog?", max_new_tokens=8)
    assert memory.caches.nbytes == before
    assert answer.held_bytes > before


def test_failed_answer_releases_its_memory(engine: Engine) -> None:
    memory = engine.read(HISTORY)
    memory.activate_for("My dog?")
    before = memory.caches.nbytes

    def fail(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.ask(memory, "My dog?", max_new_tokens=8, on_text=fail)
    assert memory.caches.nbytes == before


@pytest.mark.extended
def test_embedder_load_counts_as_setup_time(loaded: LoadedModel) -> None:
    engine, clock = under(loaded, EPISODES), [0.0]

    def slow(name: str) -> TopicEmbedder:
        clock[0] += 100
        return TopicEmbedder()

    with pytest.MonkeyPatch.context() as patch:
        now = time.perf_counter
        patch.setattr(time, "perf_counter", lambda: now() + clock[0])
        engine.runtime = replace(engine.runtime, embedder=cache(slow))
        figures = engine.read(HISTORY).figures
        again = engine.read(HISTORY).figures
    assert figures.setup_seconds >= 100 > figures.prefill_seconds
    assert again.setup_seconds < 100


def test_embedding_table_is_not_copied(loaded: LoadedModel) -> None:
    engine = Engine(loaded)
    embedder = engine.runtime.embedder("tokens")
    table = loaded.decoder.embedding_table()
    held = [value for value in vars(embedder).values() if isinstance(value, torch.Tensor)]
    assert [tensor.data_ptr() for tensor in held] == [table.data_ptr()]


def test_embedding_table_is_not_converted(loaded: LoadedModel) -> None:
    narrow = loaded.decoder.embedding_table().to(torch.bfloat16)
    engine = Engine(loaded)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(loaded.decoder), "embedding_table", lambda self: narrow)
        embedder = engine.runtime.embedder("tokens")
    held = [value for value in vars(embedder).values() if isinstance(value, torch.Tensor)]
    assert [tensor.dtype for tensor in held] == [torch.bfloat16]
    assert embedder.embed_segments(["a dog"]).dtype.name == "float32"


@pytest.mark.extended
def test_policy_scores_by_any_given_prompt(loaded: LoadedModel) -> None:
    engine = under(loaded, SINGLE.replace("keydiff()", 'patched(prompt="my_prompt")'))
    with pytest.raises(UsageError, match=r"only guidance, repeat, summarize are known.*prompts="):
        engine.read(HISTORY)
    dogs, cars = (
        engine.read(HISTORY, {"my_prompt": text}) for text in ("Which dogs?", "red car in lot 1?")
    )
    held = [memory.caches.activate(0).entries(0).packed_positions() for memory in (dogs, cars)]
    assert held[0].shape != held[1].shape or not torch.equal(*held)


@pytest.mark.extended
def test_stop_string_is_not_split_into_letters(engine: Engine) -> None:
    memory = engine.read(HISTORY)
    whole = engine.ask(memory, "My dog?", max_new_tokens=12).text
    letters = "".join(reversed(dict.fromkeys(whole))) + "\0"
    assert engine.ask(memory, "My dog?", max_new_tokens=12, stop=letters).text == whole
    stopped = engine.ask(memory, "My dog?", max_new_tokens=12, stop=whole[-1])
    assert stopped.text == whole[: whole.index(whole[-1])].strip()


@pytest.mark.extended
def test_memory_of_another_model_is_refused(engine: Engine) -> None:
    memory = engine.read(HISTORY)
    other = Engine(replace(engine.loaded, decoder=wrap_model(tiny("qwen3"))), policy="full")
    with pytest.raises(CacheError, match="made for another model than the Qwen3ForCausalLM"):
        other.ask(memory, "My dog?", max_new_tokens=4)
