"""HTTP server with a model, used through OpenAI's client."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import openai
import pytest
from openai import OpenAI

from larder import Engine
from larder.models import LoadedModel
from larder.server import (
    Archive,
    EngineOptions,
    HttpSettings,
    LocalEngineClient,
    LoopbackAuth,
    create_app,
)
from larder.store import ByteBudgets, Tier
from server.http.running_server import listening

SAID = ("My cat is called Mira.", "My dog is called Rex.", "What is my cat called?")


@pytest.fixture(scope="module")
def url(seed_model: LoadedModel) -> Iterator[str]:
    hub = LocalEngineClient(
        Engine(seed_model, policy="full"), EngineOptions(ByteBudgets({Tier.DEVICE: 8 << 20}))
    )
    app = create_app(hub, LoopbackAuth(), Archive(), HttpSettings(max_new_tokens=8))
    with listening(app) as found:
        yield found


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(api_key="-", base_url=f"{url}/v1", max_retries=0) as found:
        yield found


@pytest.mark.extended
def test_conversation_prefills_only_new_tokens(client: OpenAI, url: str) -> None:
    conversation = client.conversations.create()
    result = [
        client.responses.create(model="seed", input=text, conversation=conversation.id)
        for text in SAID
    ]
    assert "Mira" in result[-1].output_text
    used = [each.usage for each in result if each.usage is not None]
    for before, now in zip(used, used[1:], strict=False):
        assert now.input_tokens_details.cached_tokens >= before.total_tokens - 1
    kept = httpx2.get(f"{url}/v1/sessions/{conversation.id}/kept").json()
    assert [turn["text"] for turn in kept["turns"][::2]] == list(SAID)
    assert kept["layers"] and all(
        head == [0, kept["tokens"]] for layer in kept["layers"] for head in layer
    )


def test_streamed_chat_in_another_session_has_the_same_text(client: OpenAI, url: str) -> None:
    messages = [{"role": "user", "content": text} for text in SAID[:2]]
    whole = client.chat.completions.create(model="seed", messages=messages)
    chunks = client.chat.completions.create(
        model="seed", messages=messages, stream=True, extra_headers={"x-session-id": "other"}
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content != ""
    names = {session["id"] for session in httpx2.get(f"{url}/v1/sessions").json()["data"]}
    assert "other" in names
    file = httpx2.post(f"{url}/v1/sessions/other/export").content
    assert httpx2.post(f"{url}/v1/sessions/moved/import", content=file).json()["turns"] == 3
    assert httpx2.post(f"{url}/v1/sessions/bad/import", content=file[:-9]).status_code == 400
    assert httpx2.delete(f"{url}/v1/sessions/other").json()["deleted"]


def test_request_larger_than_budget_or_context_is_refused(client: OpenAI, url: str) -> None:
    for text, code in (("x", "kv_budget_exceeded"), ("x " * 40_000, "context_length_exceeded")):
        with pytest.raises(openai.BadRequestError) as raised:
            client.chat.completions.create(
                model="seed", messages=[{"role": "user", "content": text}], max_tokens=20_000
            )
        assert raised.value.code == code
    numbers = httpx2.get(f"{url}/metrics").text
    assert "larder_budget_violations_total 0.0" in numbers
    assert 'larder_admission_rejections_total{code="kv_budget_exceeded"} 1.0' in numbers
