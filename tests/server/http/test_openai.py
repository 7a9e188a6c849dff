"""OpenAI's client against chat completions, completions and models."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import OpenAI

from server.fake_engine_client import NAME
from server.http.running_server import Running


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_chat_is_answered_with_usage(anne: OpenAI, served: Running) -> None:
    first = anne.chat.completions.create(
        model=NAME, messages=user("hello there"), extra_headers={"x-session-id": "one"}
    )
    assert first.choices[0].message.content == "You said: hello there "
    assert first.choices[0].finish_reason == "stop"
    again = anne.chat.completions.create(
        model=NAME, messages=user("again"), extra_body={"session_id": "one"}
    )
    usage = again.usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 8
    assert usage.prompt_tokens_details.cache_write_tokens == 9
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens == 17 + 3
    assert again.model_extra is not None
    assert again.model_extra["kv"]["session"] == "one"
    assert again.model_extra["kv"]["lossless"] is False


@pytest.mark.parametrize("has_usage", [True, False])
def test_chat_is_streamed(anne: OpenAI, served: Running, has_usage: bool) -> None:
    chunks = list(
        anne.chat.completions.create(
            model=NAME,
            messages=user("long"),
            stream=True,
            stream_options={"include_usage": has_usage},
        )
    )
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "You said: long "
    ends = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert ends == [None] * (len(ends) - 1) + ["length"]
    used = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert [each.completion_tokens for each in used] == ([3] if has_usage else [])
    assert len({chunk.id for chunk in chunks}) == 1


def test_request_fields_reach_the_engine(anne: OpenAI, served: Running) -> None:
    anne.chat.completions.create(
        model=NAME,
        messages=[
            {"role": "developer", "content": "Be short."},
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        ],
        temperature=0.5,
        top_p=0.9,
        seed=3,
        max_completion_tokens=7,
        stop=["END"],
        prompt_cache_key="key",
        extra_body={"top_k": 5, "kv_policy": "exact", "kv_steps": {"critic": 4}},
    )
    [asked] = served.hub.asked
    assert [vars(turn) for turn in asked.turns] == [
        {"role": "system", "text": "Be short."},
        {"role": "user", "text": "hello"},
    ]
    sampling = asked.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.5, 5, 0.9, 3)
    assert (asked.tenant, asked.session, asked.max_new_tokens) == ("anne", "key", 7)
    assert (asked.stop, asked.exact, asked.steps) == (("END",), True, {"critic": 4})
    request = {"model": NAME, "messages": [{"role": "user", "content": "hello"}]}
    anne.chat.completions.create(**request, extra_body={"kv_steps": 3})
    assert served.hub.asked[-1].steps == {"": 3}
    with pytest.raises(openai.BadRequestError, match="kv_steps"):
        anne.chat.completions.create(**request, extra_body={"kv_steps": -1})


def test_priority_below_zero_is_for_operators(anne: OpenAI, bob: OpenAI, served: Running) -> None:
    given: Any = {"model": NAME, "messages": [{"role": "user", "content": "hello"}]}
    for client, priority in ((anne, -2), (anne, None), (bob, 0), (bob, 7)):
        client.chat.completions.create(**given, extra_body={"priority": priority})
        assert served.hub.asked[-1].priority == (priority or 0)
    with pytest.raises(openai.BadRequestError, match="only operators go before"):
        bob.chat.completions.create(**given, extra_body={"priority": -1})
    with pytest.raises(openai.BadRequestError, match="priority"):
        anne.chat.completions.create(**given, extra_body={"priority": "high"})


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "image_url", "image_url": {"url": "data:,"}}, "only texts are read.*model sees"),
        ({"type": "image", "text": "a"}, "'image'.*texts and images"),
        ({"type": "text"}, "no text"),
    ],
)
def test_unsupported_content_parts_are_refused(anne: OpenAI, part: Any, reason: str) -> None:
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, part]}]
    with pytest.raises(openai.BadRequestError, match=reason):
        anne.chat.completions.create(model=NAME, messages=messages)


def test_completion_continues_text_or_tokens(anne: OpenAI, served: Running) -> None:
    whole = anne.completions.create(model=NAME, prompt="a b", max_tokens=4)
    assert whole.choices[0].text == "You said: a b "
    assert served.hub.asked[0].raw_prompt == "a b" and not served.hub.asked[0].turns
    chunks = list(anne.completions.create(model=NAME, prompt=[97, 98], stream=True))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == "You said: ab "


def test_models_are_listed(anne: OpenAI, served: Running) -> None:
    assert [model.id for model in anne.models.list()] == [NAME]
    assert anne.models.retrieve(NAME).owned_by == "larder"
    for ask in (
        lambda: anne.models.retrieve("other"),
        lambda: anne.chat.completions.create(model="other", messages=user("x")),
    ):
        with pytest.raises(openai.NotFoundError) as raised:
            ask()
        assert raised.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("prompt", "kind", "code"),
    [
        ("refuse kv_budget_exceeded 400", openai.BadRequestError, "kv_budget_exceeded"),
        ("refuse context_length_exceeded 400", openai.BadRequestError, "context_length_exceeded"),
        ("refuse overloaded 503", openai.InternalServerError, "overloaded"),
        ("crash", openai.InternalServerError, "internal_error"),
        ("break", openai.InternalServerError, "overloaded"),
    ],
)
def test_refusals_raise_the_matching_client_error(
    anne: OpenAI, served: Running, prompt: str, kind: type[openai.APIStatusError], code: str
) -> None:
    with pytest.raises(kind) as raised:
        anne.chat.completions.create(model=NAME, messages=user(prompt))
    assert raised.value.code == code
    assert "secret" not in str(raised.value)


def test_failed_stream_raises_a_client_error(anne: OpenAI, served: Running) -> None:
    stream = anne.chat.completions.create(model=NAME, messages=user("break"), stream=True)
    with pytest.raises(openai.APIError) as raised:
        list(stream)
    assert raised.value.code == "overloaded"


@pytest.mark.extended
def test_client_retries_only_transient_errors(server: Running, served: Running) -> None:
    from server.http.conftest import ANNE

    with OpenAI(api_key=ANNE, base_url=f"{server.url}/v1", max_retries=1) as client:
        for prompt, times in (
            ("refuse store_full 503", 1),
            ("refuse budget 400", 1),
            ("break", 2),
        ):
            served.hub.asked.clear()
            with pytest.raises(openai.APIStatusError):
                client.chat.completions.create(model=NAME, messages=user(prompt))
            assert len(served.hub.asked) == times, prompt


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"bad_words": ["no"]},
        {"min_tokens": 5},
    ],
)
def test_unsupported_parameters_are_refused(
    anne: OpenAI, served: Running, more: dict[str, object]
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        anne.chat.completions.create(model=NAME, messages=user("x"), extra_body=more)
    assert (raised.value.code, raised.value.param) == ("unsupported_parameter", next(iter(more)))
    assert not served.hub.asked
