"""Contexts and saved caches that a model takes from another of its shape, in memory and a store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from larder import Engine
from larder.core import ModelError, UsageError
from larder.engine import (
    LayerTransfer,
    StoreChunks,
    StorePersistence,
    check_sender,
    identity_of_model,
    parse_layers,
    prefill_or_restore,
    reused_chunks,
)
from larder.models import LoadedModel, wrap_model
from larder.prefill import ChunkMemory
from larder.session import conversation_of
from larder.store import Store
from server_core import characters
from tiny_models import tiny

ONE, TWO = "Box 7 holds 12 coins. " * 3, "Box 9 holds 4 keys. " * 3
ASKED = "What does box 7 hold?"


@pytest.fixture(scope="module")
def models() -> tuple[LoadedModel, LoadedModel]:
    """A model and one tuned from it, of four layers."""
    base, module = replace(characters(layers=4), name="base"), tiny("qwen3", layers=4)
    source = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in module.parameters():
            weight += 0.1 * weight.std() * torch.randn(weight.shape, generator=source)
    return base, replace(base, decoder=wrap_model(module), name="tuned")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(str(tmp_path / "store"), tmp_path / "home")
    opened.parts.throughput.initialize({"disk": 1e15})
    yield opened
    opened.close()


def text_of(engine: Engine, memory) -> str:
    return engine.ask(memory, ASKED, max_new_tokens=6).text


@pytest.mark.parametrize("policy", ["cacheblend", "ape"])
def test_contexts_in_memory_serve_another_model(models, policy: str) -> None:
    base, tuned = (Engine(each, policy=policy) for each in models)
    kept = ChunkMemory(state_layers=(2,))
    base.read(contexts=[ONE, TWO], chunks=kept)
    own = tuned.read(contexts=[TWO, ONE])
    whole = reused_chunks(ChunkMemory(), kept, models[0], models[1], (0, 4))
    memory = tuned.read(contexts=[TWO, ONE], chunks=whole)
    assert memory.reuse.cached == (True, True) and not any(own.reuse.cached)
    assert text_of(tuned, memory) == text_of(tuned, own)
    part = tuned.read(
        contexts=[TWO], chunks=reused_chunks(ChunkMemory(), kept, models[0], models[1], (2, 4))
    )
    assert part.reuse.cached == (True,)
    with pytest.raises(UsageError, match="keeps what it makes of them as exact"):
        tuned.under("kvcomm").read(contexts=[ONE], chunks=whole)
    with pytest.raises(UsageError, match="reads them as one text"):
        tuned.under("full").read(contexts=[ONE], chunks=whole)


def test_contexts_in_a_store_serve_another_model_of_the_tenant(models, store: Store) -> None:
    base, tuned = models
    engine = Engine(base, policy="ape")
    engine.read(contexts=[ONE], chunks=StoreChunks(store, base, state_layers=(2,)))
    sharing = LayerTransfer(sender="base", layers=(2, 4))
    taking = Engine(tuned, policy="ape")
    keeper = StorePersistence(store, tuned, layers=sharing)
    memory = taking.read(contexts=[ONE, TWO], chunks=keeper.chunks())
    assert memory.reuse.cached == (True, False)
    # What was taken is not kept; what was read is.
    again = taking.read(contexts=[ONE, TWO], chunks=StoreChunks(store, tuned))
    assert again.reuse.cached == (False, True)
    with pytest.raises(UsageError, match="nothing that base shares"):
        StorePersistence(store, tuned, "another", layers=sharing).chunks()


def test_saved_cache_serves_another_model(models, store: Store) -> None:
    base, tuned = (Engine(each, policy="full") for each in models)
    conversation = conversation_of(ONE + TWO)
    sender = StorePersistence(store, models[0], layers=LayerTransfer(state_layers=(2,)))
    prefill_or_restore(base, sender, conversation, {})
    assert prefill_or_restore(base, sender, conversation, {})[1].state is not None

    taking = LayerTransfer(sender="base", layers=(2, 4))
    memory, resumed = prefill_or_restore(
        tuned, StorePersistence(store, models[1], layers=taking), conversation, {}
    )
    assert resumed.state is not None
    assert "of base, layers 2 to 3 computed again" in resumed.summary
    own = tuned.read(conversation)
    taken, read = (each.caches.activate(0).state() for each in (memory, own))
    differing = {
        int(name.partition(".")[0])
        for name in taken
        if name.endswith(("keys", "values")) and not torch.allclose(taken[name], read[name])
    }
    assert {0, 1} <= differing, "the first two layers are the sender's"
    whole = LayerTransfer(sender="base", layers=(0, 4))
    memory, resumed = prefill_or_restore(
        tuned, StorePersistence(store, models[1], layers=whole), conversation, {}
    )
    assert resumed.state is not None and text_of(tuned, memory) == text_of(tuned, own)
    # The receiver has saved nothing in the place of the sender's.
    assert prefill_or_restore(base, sender, conversation, {})[1].state is not None


def test_incompatible_transfers_are_refused(models, store: Store) -> None:
    base, tuned = models
    conversation = conversation_of(ONE)
    sender = StorePersistence(store, base, layers=LayerTransfer(state_layers=(2,)))
    with pytest.raises(UsageError, match="under the policy full"):
        prefill_or_restore(Engine(base, policy="kvzip", budget=32), sender, conversation, {})
    prefill_or_restore(Engine(base, policy="full"), sender, conversation, {})
    engine = Engine(tuned, policy="full")
    missing = StorePersistence(store, tuned, layers=LayerTransfer(sender="base", layers=(1, 4)))
    with pytest.raises(ModelError, match="keeps those before 2"):
        prefill_or_restore(engine, missing, conversation, {})
    itself = StorePersistence(store, base, layers=LayerTransfer(sender="base", layers=(2, 4)))
    with pytest.raises(ModelError, match="this model itself"):
        prefill_or_restore(Engine(base, policy="full"), itself, conversation, {})
    identity = identity_of_model(base)
    for name, result in {"tokenizer": "tokenizer", "rope": "rotation", "kv_dtype": "type"}.items():
        with pytest.raises(ModelError, match=result):
            check_sender(replace(identity, **{name: "other"}), identity_of_model(tuned))
    check_sender(identity, identity_of_model(tuned))


def test_ranges_are_parsed() -> None:
    assert parse_layers("10-30") == (10, 30)
    for text in ("10", "30-10", "a-b", "10-10", "-3"):
        with pytest.raises(UsageError, match="START-STOP"):
            parse_layers(text)
