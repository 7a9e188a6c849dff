"""Names and context length of the served model."""

from __future__ import annotations

import httpx2
import openai
import pytest
from openai import OpenAI

from larder import Engine
from larder.core import UsageError
from larder.models import LoadedModel
from larder.server import (
    Archive,
    EngineOptions,
    HttpSettings,
    LocalEngineClient,
    LoopbackAuth,
    create_app,
)
from server.http.running_server import listening


def test_model_is_served_under_its_names_up_to_max_model_len(small: LoadedModel) -> None:
    hub = LocalEngineClient(
        Engine(small, policy="full"), EngineOptions(names=("one", "two"), max_model_len=50)
    )
    app = create_app(hub, LoopbackAuth(), Archive(), HttpSettings(max_new_tokens=4))
    with listening(app) as url, OpenAI(api_key="-", base_url=f"{url}/v1", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["one", "two"]
        result = [
            client.completions.create(model=name, prompt="a").model for name in ("one", "two")
        ]
        assert result == ["one", "one"]
        assert client.responses.create(model="two", input="a").model == "one"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="characters", prompt="a")
        lengths = httpx2.post(f"{url}/tokenize", json={"prompt": "abc"}).json()
        assert (lengths["max_model_len"], lengths["count"]) == (50, 3)
        cut = client.completions.create(model="one", prompt="a" * 48, max_tokens=9)
        assert cut.usage is not None and cut.usage.completion_tokens <= 2
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model="one", prompt="a" * 50)
        assert refused.value.code == "context_length_exceeded"


def test_max_model_len_beyond_the_model_is_refused(small: LoadedModel) -> None:
    with pytest.raises(UsageError, match="max_model_len 99999999"):
        LocalEngineClient(Engine(small, policy="full"), EngineOptions(max_model_len=99_999_999))
