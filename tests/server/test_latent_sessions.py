"""Sessions of models that cache latents, or share the entries of layers, run together as alone."""

from __future__ import annotations

from functools import cache

import pytest

from architectures.families import families
from larder.models import LoadedModel, wrap_model
from server_core import Served, answered, characters, told


@cache
def loaded_of(name: str) -> LoadedModel:
    [family] = [family for family in families() if family.name == name]
    return LoadedModel(wrap_model(family.model()), characters().tokenizer, name)


@pytest.mark.extended
@pytest.mark.parametrize("name", ["DeepSeek-V2", "Gemma 3n"])
@pytest.mark.parametrize("policy", ["full", "stepwise"])
def test_sessions_answer_as_each_alone(policy: str, name: str) -> None:
    together, alone = (Served(loaded_of(name), policy) for _ in range(2))
    texts = {number: told(number) for number in range(2)}
    for more in ("Why?", "Sure?"):
        own = {n: alone.ask(turns, f"n{n}").text for n, turns in texts.items()}
        clients = {n: together.submit(turns, f"n{n}")[0] for n, turns in texts.items()}
        together.run()
        assert {n: client.text for n, client in clients.items()} == own
        texts = {n: answered(turns, clients[n], more) for n, turns in texts.items()}
    assert together.core.scheduler.steps < alone.core.scheduler.steps
