"""Arguments of Engine.load that say where a model comes from and where it goes."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from larder import Engine
from larder.core import BadParameter, DependencyError, ModelError
from larder.models import loader
from server_core import characters
from tiny_models import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in bfloat16, without a tokenizer."""
    path = tmp_path_factory.mktemp("model")
    tiny("llama", dtype=torch.bfloat16).save_pretrained(path)
    return path


def test_every_argument_is_documented() -> None:
    result = inspect.getdoc(Engine.load) or ""
    for name in inspect.signature(Engine.load).parameters:
        assert f"\n    {name}: " in result, name


def test_separate_tokenizer_is_used(folder: Path, tmp_path: Path) -> None:
    tokenizer = characters().tokenizer
    tokenizer.save_pretrained(tmp_path)
    for given in (tokenizer, str(tmp_path)):
        engine = Engine.load(str(folder), policy="full", dtype="float32", tokenizer=given)
        assert engine.tokenizer.encode("Hi") == tuple(tokenizer("Hi")["input_ids"])
    with pytest.raises(BadParameter, match="tokens, but the model's embedding has 128 rows"):
        Engine.load(str(folder), tokenizer=loader.seed_tokenizer())
    with pytest.raises(BadParameter, match="tokenizer must be the tokenizer of the model"):
        Engine.load(str(folder), tokenizer=3)
    with pytest.raises(ModelError, match="'no/such' cannot be loaded"):
        Engine.load(str(folder), tokenizer="no/such")
    with pytest.raises(ModelError, match="Did you mean 'smollm2'?"):
        Engine.load("smolm2")


def test_device_map_places_the_weights(folder: Path) -> None:
    tokenizer = characters().tokenizer
    engine = Engine.load(str(folder), policy="full", device_map="cpu", tokenizer=tokenizer)
    spec = engine.loaded.decoder.spec
    assert (spec.device, spec.dtype) == (torch.device("cpu"), torch.bfloat16)
    with pytest.raises(BadParameter, match="'cuda:0' and device_map 'auto' both place"):
        Engine.load(str(folder), device="cuda:0", device_map="auto")


def test_missing_accelerate_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "find_spec", lambda name: None)
    with pytest.raises(DependencyError, match="pip install accelerate"):
        Engine.load(str(folder), device_map="auto")


def test_revision_is_passed_to_the_download(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def refuse(source: str, **options: Any) -> Any:
        seen.append((source, options))
        raise OSError("no network")

    from transformers import AutoConfig

    monkeypatch.setattr(AutoConfig, "from_pretrained", refuse)
    with pytest.raises(ModelError, match="'owner/model' cannot be loaded"):
        Engine.load("owner/model", revision="abc123")
    assert seen == [("owner/model", {"trust_remote_code": False, "revision": "abc123"})]


@pytest.mark.parametrize("name", ["seed", "folder"])
def test_revision_of_a_local_model_is_refused(name: str, folder: Path) -> None:
    given = name if name == "seed" else str(folder)
    with pytest.raises(BadParameter, match="revision 'main' names a version on the Hugging Face"):
        Engine.load(given, revision="main")
