"""Structured outputs over HTTP, and their refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

pytest.importorskip("llguidance", reason="the extra structured is not installed")

from larder import Engine
from larder.server import (
    Archive,
    HttpSettings,
    LocalEngineClient,
    LoopbackAuth,
    Unsupported,
    create_app,
)
from server.http.running_server import listening
from server_core import LIMITED, byte_characters

MESSAGES: Any = [{"role": "user", "content": "Who lives here, and since when?"}]


class Pet(BaseModel):
    """A pet with two short fields."""

    kind: bool
    old: bool


@pytest.fixture(scope="module", params=["full", LIMITED])
def client(request: pytest.FixtureRequest) -> Iterator[OpenAI]:
    budget = None if request.param == "full" else 64
    hub = LocalEngineClient(Engine(byte_characters(), policy=request.param, budget=budget))
    app = create_app(hub, LoopbackAuth(), Archive(), HttpSettings(max_new_tokens=60))
    with listening(app) as url, OpenAI(api_key="-", base_url=f"{url}/v1", max_retries=0) as found:
        yield found


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "characters", "messages": MESSAGES} | more


def test_pydantic_model_is_parsed(client: OpenAI) -> None:
    completion = client.chat.completions.parse(**asked(response_format=Pet))
    assert isinstance(completion.choices[0].message.parsed, Pet)
    assert completion.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(**asked(response_format=Pet, seed=3)) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Pet)


def test_lenient_server_warns_about_ignored_keywords() -> None:
    settings = HttpSettings(max_new_tokens=60, unsupported=Unsupported.IGNORED)
    hub = LocalEngineClient(Engine(byte_characters(), policy="full"))
    app = create_app(hub, LoopbackAuth(), Archive(), settings)
    schema = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2, "uniqueItems": True}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    with listening(app) as url, OpenAI(api_key="-", base_url=f"{url}/v1") as found:
        completion: Any = found.chat.completions.create(
            **asked(response_format=wanted), extra_body={"min_tokens": 3}
        )
        assert isinstance(json.loads(completion.choices[0].message.content), list)
        assert any("uniqueItems" in each for each in completion.warnings)
        assert "min_tokens is not supported and was ignored." in completion.warnings
        form: Any = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
        more: Any = found.responses.create(model="characters", input="a", text=form)
        assert any("uniqueItems" in each for each in more.warnings)


def test_answers_of_one_session_follow_the_format_of_each_request(client: OpenAI) -> None:
    extra = {"x-session-id": "formats"}
    texts = {
        client.chat.completions.create(
            **asked(), extra_body={"structured_outputs": {"choice": [choice]}}, extra_headers=extra
        )
        .choices[0]
        .message.content
        for choice in ("one", "two", "one")
    }
    assert texts == {"one", "two"}


def test_structured_outputs_field_of_vllm_is_enforced(client: OpenAI) -> None:
    for given, check in (
        ({"regex": "[xy]{3}"}, lambda text: re.fullmatch("[xy]{3}", text)),
        ({"choice": ["red", "blue"]}, lambda text: text in ("red", "blue")),
        ({"grammar": 'start: "<" /[a-z]/ ">"'}, lambda text: re.fullmatch("<[a-z]>", text)),
        ({"json": Pet.model_json_schema()}, lambda text: Pet(**json.loads(text))),
    ):
        body = {"structured_outputs": given}
        chat = client.chat.completions.create(**asked(), extra_body=body)
        assert check(chat.choices[0].message.content), given
        text = client.completions.create(model="characters", prompt="Say it: ", extra_body=body)
        assert check(text.choices[0].text), given


@pytest.mark.parametrize(
    "wrong",
    [
        {"response_format": {"type": "yaml"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True}},
            }
        },
        {"response_format": {"type": "text", "x": "y" * (1 << 18)}},
        {"structured_outputs": {}},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        {"structured_outputs": {"regex": "(?=a)b"}},
        {"structured_outputs": {"choice": [1]}},
    ],
    ids=lambda wrong: str(wrong)[:60],
)
def test_invalid_format_error_names_its_parameter(client: OpenAI, wrong: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(**asked(), extra_body=wrong)
    assert raised.value.param == next(iter(wrong))


def test_non_strict_schema_warns_about_ignored_keywords(client: OpenAI) -> None:
    schema = {"type": "array", "uniqueItems": True, "maxItems": 2, "items": {"type": "boolean"}}
    described = {"name": "x", "schema": schema, "strict": False}
    body = {"response_format": {"type": "json_schema", "json_schema": described}}
    completion = client.chat.completions.create(**asked(), extra_body=body)
    assert isinstance(json.loads(completion.choices[0].message.content or ""), list)
    assert "uniqueItems" in (completion.model_extra or {})["warnings"][0]


def test_truncated_json_is_not_repaired(client: OpenAI) -> None:
    completion = client.chat.completions.create(
        **asked(response_format={"type": "json_object"}, max_tokens=2, logprobs=True)
    )
    assert completion.choices[0].finish_reason == "length"
    assert len(completion.choices[0].message.content or "") == 2
