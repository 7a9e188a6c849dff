"""Fields of generation requests: sampling, log-probabilities and unknown fields."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx2
import openai
import pytest
from openai import OpenAI

from larder.server import CachedResponse, CachedUse
from larder.server.http import json_body
from server.fake_engine_client import NAME
from server.http.running_server import Running

ASKED: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "a b"}]}


def test_penalties_and_biases_reach_the_engine(anne: OpenAI, served: Running) -> None:
    anne.chat.completions.create(
        **ASKED,
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        logit_bias={"50": -100, "7": 2},
        extra_body={"min_p": 0.1, "repetition_penalty": 1.2},
    )
    sampling = served.hub.asked[-1].sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.25)
    assert sampling.logit_bias == {50: -100.0, 7: 2.0}
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.2)
    anne.completions.create(model=NAME, prompt="a", presence_penalty=1.5)
    assert served.hub.asked[-1].sampling.presence_penalty == 1.5
    anne.responses.create(model=NAME, input="a", extra_body={"min_p": 0.2})
    assert served.hub.asked[-1].sampling.min_p == 0.2


def test_contexts_reach_the_engine(anne: OpenAI, served: Running) -> None:
    anne.chat.completions.create(**ASKED, extra_body={"contexts": ["One.", "Two."]})
    assert served.hub.asked[-1].contexts == ("One.", "Two.")
    with pytest.raises(openai.BadRequestError) as raised:
        anne.chat.completions.create(**ASKED, extra_body={"contexts": "One."})
    assert str(raised.value.param).startswith("contexts")


def test_contexts_of_messages_reach_the_engine(anne: OpenAI, served: Running) -> None:
    first: dict[str, Any] = {"role": "user", "content": "a", "contexts": ["One."]}
    last: dict[str, Any] = {"role": "user", "content": "c", "contexts": ["Two.", "One."]}
    messages = [{"role": "system", "content": "s"}, first, {"role": "assistant", "content": "b"}]
    anne.chat.completions.create(model=NAME, messages=[*messages, last])  # type: ignore[list-item]
    assert served.hub.asked[-1].message_contexts == {1: ("One.",), 3: ("Two.", "One.")}
    assert served.hub.asked[-1].contexts == ()
    wrong: Any = [*messages[:2], messages[2] | {"contexts": ["Two."]}, last]
    with pytest.raises(openai.BadRequestError, match="role assistant has contexts"):
        anne.chat.completions.create(model=NAME, messages=wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"presence_penalty": 3},
        {"repetition_penalty": 0},
        {"min_p": 2},
        {"logit_bias": {"one": 1}},
        {"logit_bias": {"1": 1000}},
        {"logit_bias": {str(token): 1 for token in range(1025)}},
        {"logprobs": True, "top_logprobs": 21},
        {"top_logprobs": 2},
    ],
)
def test_fields_out_of_range_are_refused(
    anne: OpenAI, served: Running, wrong: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        anne.chat.completions.create(**ASKED, extra_body=wrong)
    assert str(raised.value.param).startswith(list(wrong)[-1])
    assert not served.hub.asked


def test_chat_logprobs_have_tokens_and_top_logprobs(anne: OpenAI, served: Running) -> None:
    whole = anne.chat.completions.create(**ASKED, logprobs=True, top_logprobs=2)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [each.token for each in logprobs.content] == ["You ", "said: ", "a ", "b "]
    first = logprobs.content[0]
    assert (first.logprob, bytes(first.bytes or ())) == (-1.0, b"You ")
    assert [(top.token, top.logprob) for top in first.top_logprobs] == [
        ("You 0", -2.0),
        ("You 1", -3.0),
    ]
    chunks = anne.chat.completions.create(**ASKED, logprobs=True, top_logprobs=2, stream=True)
    parts = [choice for chunk in chunks for choice in chunk.choices]
    streamed = [
        (part.delta.content, each)
        for part in parts
        if part.logprobs is not None
        for each in part.logprobs.content or ()
    ]
    assert [text for text, _ in streamed] == [each.token for each in logprobs.content]
    assert [each for _, each in streamed] == logprobs.content
    plain = anne.chat.completions.create(**ASKED)
    assert plain.choices[0].logprobs is None


def test_completion_logprobs_have_tokens_and_offsets(anne: OpenAI, served: Running) -> None:
    whole = anne.completions.create(model=NAME, prompt="a", logprobs=1)
    result = whole.choices[0].logprobs
    assert result is not None
    assert result.tokens == ["You ", "said: ", "a "] and result.text_offset == [0, 4, 10]
    assert result.token_logprobs == [-1.0] * 3
    assert result.top_logprobs is not None
    assert result.top_logprobs[0] == {"You 0": -2.0, "You ": -1.0}
    chunks = list(anne.completions.create(model=NAME, prompt="a", logprobs=1, stream=True))
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    assert [offset for part in parts if part for offset in part.text_offset or ()] == [0, 4, 10]


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
def test_unknown_fields_are_in_the_warnings(
    http: httpx2.Client, served: Running, path: str
) -> None:
    bodies = {
        "chat/completions": ASKED,
        "completions": {"model": NAME, "prompt": "a"},
        "responses": {"model": NAME, "input": "a"},
    }
    prediction = {"type": "content", "content": "a"}  # makes answers of others sooner, not other
    body = bodies[path] | {"frob": [{}], "temperat\u00fcre": 1, "prediction": prediction}
    whole = http.post(f"/v1/{path}", json=body).json()
    assert "warnings" in whole, whole
    result = whole["warnings"]
    for name in ("frob", "temperat\u00fcre", "prediction"):
        assert any(f"'{name}'" in one for one in result)
    assert not any("'model'" in one for one in result)
    if path != "responses":
        text = http.post(f"/v1/{path}", json=body | {"stream": True}).text
        assert "'frob'" in text


@pytest.mark.parametrize(
    ("path", "field"), [("chat/completions", "messages"), ("responses", "input")]
)
def test_refusal_parts_of_the_history_are_read_as_text(
    http: httpx2.Client, served: Running, path: str, field: str
) -> None:
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    body = {"model": NAME, field: [*ASKED["messages"], refusal, *ASKED["messages"]]}
    assert http.post(f"/v1/{path}", json=body).status_code == 200
    assert served.hub.asked[-1].turns[1].text == "No."


def test_requests_without_unknown_fields_have_no_warnings(
    http: httpx2.Client, served: Running
) -> None:
    assert "warnings" not in http.post("/v1/chat/completions", json=ASKED).json()


def test_warnings_for_unknown_fields_are_bounded(
    http: httpx2.Client, served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = ASKED | {f"name{place}": 1 for place in range(1000)} | {"x" * 5000: 2}
    result = http.post("/v1/chat/completions", json=many).json()["warnings"]
    assert len(result) == 16
    monkeypatch.setattr(json_body, "MAPPING_BYTES", 100)
    assert len(http.post("/v1/chat/completions", json=many).json()["warnings"]) == 16
    monkeypatch.setattr(json_body, "MAX_STRINGS", 1000)
    refused = http.post("/v1/chat/completions", json=many)
    assert refused.status_code == 400 and "more than 1000 names" in refused.text


def test_template_variables_known_to_the_template_reach_the_engine(
    http: httpx2.Client, served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    served_model = replace(served.hub.models()[0], template_variables=frozenset({"depth", "mood"}))
    monkeypatch.setattr(served.hub, "models", lambda: (served_model,))
    given = {"mood": "calm", "depth": 2, "tokenize": True}
    result = http.post("/v1/chat/completions", json=ASKED | {"chat_template_kwargs": given}).json()
    [first, *rest] = served.hub.asked[-1].turns
    assert (first.role, first.text) == ("template", '{"depth": 2, "mood": "calm"}')
    assert [turn.role for turn in rest] == ["user"]
    [warning] = result["warnings"]
    assert "chat_template_kwargs.tokenize" in warning and "depth, mood" in warning
    wrong = {"chat_template_kwargs": {"mood": ["calm"]}}
    assert http.post("/v1/chat/completions", json=ASKED | wrong).status_code == 400
    role = {"messages": [{"role": "template", "content": "{}"}]}
    assert http.post("/v1/chat/completions", json=ASKED | role).status_code == 400


def test_response_cache_field_reaches_the_engine(anne: OpenAI, served: Running) -> None:
    anne.chat.completions.create(
        **ASKED, extra_body={"response_cache": {"category": "faq", "use": "examples", "key": "k"}}
    )
    assert served.hub.asked[-1].cached_response == CachedResponse("faq", CachedUse.EXAMPLES, "k")
    private = {"response_cache": {"category": "faq", "keep": False}}
    anne.chat.completions.create(**ASKED, extra_body=private)
    assert served.hub.asked[-1].cached_response == CachedResponse("faq", is_kept=False)
    anne.chat.completions.create(**ASKED, extra_body={"kv_program": "run", "kv_tool": "test"})
    assert (served.hub.asked[-1].program, served.hub.asked[-1].tool) == ("run", "test")
    assert served.hub.asked[-1].cached_response is None
    for wrong in ({"use": "guess"}, {"category": "faq", "usage": "examples"}):
        with pytest.raises(openai.BadRequestError) as raised:
            anne.chat.completions.create(**ASKED, extra_body={"response_cache": wrong})
        assert str(raised.value.param).startswith("response_cache")
