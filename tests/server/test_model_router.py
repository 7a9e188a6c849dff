"""Adapters selected by `model`: answers, sessions and shared weights."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import NotFoundError, OpenAI
from peft import LoraConfig, get_peft_model  # pyright: ignore

from larder import Engine
from larder.cli.engine_clients import disk_budget
from larder.core import UsageError
from larder.engine import identity_of_model
from larder.models import LoadedModel, apply_adapter, with_adapters
from larder.server import (
    Archive,
    EngineOptions,
    HttpSettings,
    LocalEngineClient,
    LoopbackAuth,
    ModelRouter,
    TurnLock,
    create_app,
)
from larder.store import ByteBudgets, Tier
from server.http.running_server import listening
from server_core import characters
from tiny_models import tiny

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
IDS = torch.arange(3, 20)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random adapter of two projections."""
    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    made = tmp_path_factory.mktemp("adapter")
    get_peft_model(tiny("qwen3", layers=2), config).save_pretrained(str(made))
    return made


@pytest.fixture(scope="module")
def models(folder: Path) -> tuple[LoadedModel, LoadedModel]:
    own, adapted = with_adapters(characters(), {"lora": str(folder)})
    return own, adapted["lora"]


def logits_of(loaded: LoadedModel) -> torch.Tensor:
    decoder = loaded.decoder
    decoder.release()
    with torch.no_grad():
        return decoder.module(IDS).logits


def test_adapter_shares_unmodified_weights(folder: Path) -> None:
    own, adapted = with_adapters(characters(), {"lora": str(folder)})
    changed = adapted["lora"]
    theirs = dict(changed.decoder.module.named_parameters())
    for name, weight in own.decoder.module.named_parameters():
        is_own = "q_proj" in name or "v_proj" in name
        assert (theirs[name] is weight) is not is_own
    assert own.adapters == () and changed.adapters == (str(folder),)
    assert identity_of_model(own).key != identity_of_model(changed).key
    with torch.no_grad():
        merged = apply_adapter(tiny("qwen3", layers=2), str(folder))(IDS).logits
        plain = tiny("qwen3", layers=2)(IDS).logits
    assert torch.equal(logits_of(changed), merged) and torch.equal(logits_of(own), plain)
    assert not torch.allclose(merged, plain)


@pytest.fixture(scope="module")
def client(models: tuple[LoadedModel, LoadedModel]) -> Iterator[OpenAI]:
    lock = TurnLock()
    own, adapted = (
        LocalEngineClient(Engine(loaded, policy="full"), EngineOptions(names=names), step_lock=lock)
        for loaded, names in zip(models, (("base", "alias"), ("lora",)), strict=True)
    )
    hub = ModelRouter({"base": own, "lora": adapted})
    app = create_app(hub, LoopbackAuth(), Archive(), HttpSettings(max_new_tokens=8))
    with listening(app) as url, OpenAI(api_key="-", base_url=f"{url}/v1", max_retries=0) as found:
        yield found


def asked(client: OpenAI, model: str, text: str, **more: Any) -> Any:
    return client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": text}], **more
    )


def test_requests_choose_an_adapter(
    client: OpenAI, models: tuple[LoadedModel, LoadedModel]
) -> None:
    assert [model.id for model in client.models.list()] == ["base", "alias", "lora"]
    for name, answer_name, loaded in zip(
        ("base", "alias", "lora"), ("base", "base", "lora"), (*models[:1], *models), strict=True
    ):
        result = asked(client, name, f"Hello {name}")
        assert result.model == answer_name
        alone = LocalEngineClient(Engine(loaded, policy="full"), EngineOptions(names=("alone",)))
        with listening(
            create_app(alone, LoopbackAuth(), Archive(), HttpSettings(max_new_tokens=8))
        ) as url:
            with OpenAI(api_key="-", base_url=f"{url}/v1") as single:
                expected = asked(single, "alone", f"Hello {name}").choices[0].message.content
        assert result.choices[0].message.content == expected


def test_sessions_and_caches_are_not_shared_between_models(client: OpenAI) -> None:
    text = "The same text for both of them."
    named = {"extra_headers": {"x-session-id": "both"}}
    first = asked(client, "base", text, **named)
    other = asked(client, "lora", text, **named)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert other.usage.prompt_tokens_details.cached_tokens == 0
    assert first.kv["session"] == other.kv["session"] == "both"
    responses = [client.responses.create(model=name, input="x").model for name in ("lora", "base")]
    assert responses == ["lora", "base"]
    only = asked(client, "lora", "Of the adapter alone.", extra_headers={"x-session-id": "only"})
    assert only.kv["session"] == "only"
    listed = client.get("/sessions", cast_to=object)
    names = [each["id"] for each in listed["data"]]  # pyright: ignore
    assert {"both", "only"} <= set(names)
    client.delete("/sessions/both", cast_to=object)  # of either model
    with pytest.raises(NotFoundError):
        client.delete("/sessions/both", cast_to=object)
    left = client.get("/sessions", cast_to=object)
    assert "both" not in [each["id"] for each in left["data"]]  # pyright: ignore
    client.delete("/sessions/only", cast_to=object)


def test_turn_lock_is_granted_in_arrival_order() -> None:
    lock, order = TurnLock(), list[int]()

    def work(number: int) -> None:
        with lock:
            order.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
    with lock:
        for number, thread in enumerate(threads):
            thread.start()
            while lock._next <= number + 1:
                pass
    for thread in threads:
        thread.join()
    assert order == list(range(5))


def test_budgets_are_divided_between_models() -> None:
    budgets = ByteBudgets({Tier.DEVICE: 10}, {Tier.HOST: 9})
    shares = budgets.divided(3)
    assert (dict(shares.total), dict(shares.tenant)) == ({Tier.DEVICE: 3}, {Tier.HOST: 3})
    disk = disk_budget("9GB", ["disk=9KB"])  # one account under all models, in one store
    assert (dict(disk.total), dict(disk.tenant)) == ({Tier.DISK: 9 * 10**9}, {Tier.DISK: 9000})


def test_adapter_names_are_parsed(tmp_path: Path) -> None:
    from larder.cli.served_models import split_adapters

    odd = tmp_path / "a=b"
    odd.mkdir()
    found = split_adapters([str(odd), "x=folder", "org/y=f=g"])
    assert found.own == str(odd) and found.named == {"x": "folder", "org/y": "f=g"}
    for given, error in (
        (["a=b", "a=c"], "given twice: give each"),
        (["a", "b"], "twice without a name"),
        (["a b=c"], "not NAME=FOLDER"),
        (["a="], "not NAME=FOLDER"),
    ):
        with pytest.raises(UsageError, match=error):
            split_adapters(given)
