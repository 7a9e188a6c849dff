"""Several answers per request: prompt lists, choices and echoed prompts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import openai
import pytest
import torch
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
from server.fake_engine_client import NAME
from server.http.running_server import Running, listening
from tiny_models import tiny

USER: Any = [{"role": "user", "content": "a b"}]
TEXTS = ["Once upon a time", "x", "The harbour opened in 1871. " * 9]


def test_each_prompt_of_a_list_is_answered(anne: OpenAI, served: Running) -> None:
    whole = anne.completions.create(model=NAME, prompt=["a", "b c"], echo=True)
    assert [(each.index, each.text) for each in whole.choices] == [
        (0, "aYou said: a "),
        (1, "b cYou said: b c "),
    ]
    assert whole.usage is not None and whole.usage.completion_tokens == 3 + 4
    assert whole.usage.prompt_tokens == 2 * 9
    ids = anne.completions.create(model=NAME, prompt=[[97, 98], [99]])
    assert [each.text for each in ids.choices] == ["You said: ab ", "You said: c "]
    asked = {request.raw_prompt: request.raw_ids for request in served.hub.asked}
    assert asked == {"a": (), "b c": (), "ab": (97, 98), "c": (99,)}
    texts = ["", ""]
    for chunk in anne.completions.create(model=NAME, prompt=["a", "b"], echo=True, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == ["aYou said: a ", "bYou said: b "]


def test_choices_have_distinct_seeds(anne: OpenAI, served: Running) -> None:
    whole = anne.chat.completions.create(
        model=NAME, messages=USER, n=3, seed=7, extra_headers={"x-session-id": "one"}
    )
    assert [each.index for each in whole.choices] == [0, 1, 2]
    assert whole.usage is not None and whole.usage.prompt_tokens == 9
    by_choice = {each.choice: each for each in served.hub.asked}
    assert {choice: each.sampling.seed for choice, each in by_choice.items()} == {0: 7, 1: 8, 2: 9}
    assert len({each.choice_group for each in served.hub.asked}) == 1
    assert [each.is_ephemeral for each in by_choice.values()].count(False) == 1
    chunks = list(anne.chat.completions.create(model=NAME, messages=USER, n=2, stream=True))
    ends = [c.index for chunk in chunks for c in chunk.choices if c.finish_reason]
    assert sorted(ends) == [0, 1]
    openings = [c.index for chunk in chunks for c in chunk.choices if c.delta.role]
    assert openings == [0, 1]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"n": 10**9}, "n"),
        ({"n": 0}, "n"),
        ({"n": 2, "prompt": ["a"] * 65}, "n"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
    ],
)
def test_n_and_prompt_counts_out_of_range_are_refused(
    http: httpx2.Client, served: Running, more: dict[str, Any], param: str
) -> None:
    result = http.post("/v1/completions", json={"model": NAME, "prompt": "a"} | more)
    assert result.status_code == 400 and result.json()["error"]["param"] == param
    assert not served.hub.asked


@pytest.mark.parametrize("stream", [False, True])
def test_failed_choice_cancels_the_others(anne: OpenAI, served: Running, stream: bool) -> None:
    with pytest.raises(openai.APIError) as raised:
        list(anne.completions.create(model=NAME, prompt=["wait", "break"], stream=stream))
    assert raised.value.code == "overloaded"
    assert len(served.hub.tickets) == 2
    assert all(ticket.cancelled.wait(10) for ticket in served.hub.tickets)


def test_first_refused_choice_sets_the_status(anne: OpenAI, served: Running) -> None:
    with pytest.raises(openai.BadRequestError):
        anne.completions.create(model=NAME, prompt=["refuse no 400"], n=2, stream=True)


@pytest.fixture(scope="module")
def hub(small: LoadedModel) -> Iterator[LocalEngineClient]:
    budgets = ByteBudgets({Tier.DEVICE: 1 << 20, Tier.HOST: 1 << 20})
    yield LocalEngineClient(Engine(small, policy="full"), EngineOptions(budgets))


@pytest.fixture(scope="module")
def client(hub: LocalEngineClient) -> Iterator[OpenAI]:
    with connected(hub) as found:
        yield found


@contextmanager
def connected(hub: LocalEngineClient) -> Iterator[OpenAI]:
    """OpenAI's client of a server over a model."""
    app = create_app(hub, LoopbackAuth(), Archive(), HttpSettings(max_new_tokens=4))
    with listening(app) as url, OpenAI(api_key="-", base_url=f"{url}/v1", max_retries=0) as found:
        yield found


def own_logprobs(ids: list[int]) -> torch.Tensor:
    """Log-probabilities of all tokens behind each of a text, by the plain model."""
    with torch.no_grad():
        logits = tiny("qwen3", layers=2)(torch.tensor([ids])).logits[0]
    return logits.float().log_softmax(-1)


@pytest.mark.parametrize("stream", [False, True])
def test_echoed_prompt_logprobs_match_the_model(
    client: OpenAI, hub: LocalEngineClient, stream: bool
) -> None:
    prompts = [[ord(sign) for sign in text] for text in TEXTS]
    asked: dict[str, Any] = {"model": "characters", "prompt": prompts, "temperature": 0}
    asked |= {"max_tokens": 1, "logprobs": 2, "echo": True, "seed": 1234}
    found: dict[int, list[Any]] = {number: [] for number in range(len(prompts))}
    if stream:
        for chunk in client.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                found[choice.index].append(choice.logprobs)
    else:
        for choice in client.completions.create(**asked).choices:
            assert choice.text.startswith(TEXTS[choice.index])
            found[choice.index].append(choice.logprobs)
    for ids, parts in zip(prompts, found.values(), strict=True):
        given = [part for part in parts if part is not None]
        numbers = [number for part in given for number in part.token_logprobs]
        tops = [top for part in given for top in part.top_logprobs]
        assert len(numbers) == len(ids) + 1 and numbers[0] is tops[0] is None
        own = own_logprobs(ids)
        for place, token in enumerate(ids[1:]):
            assert numbers[place + 1] == pytest.approx(own[place, token].item(), abs=1e-4)
            best = max(tops[place + 1].values())
            assert best == pytest.approx(own[place].max().item(), abs=1e-4)
        assert numbers[-1] == pytest.approx(own[-1].max().item(), abs=1e-4)
    assert hub.sessions("local") == ()


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_is_scored_without_an_answer(client: OpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "characters", "prompt": TEXTS[0], "echo": True, "logprobs": 0}
    asked |= {"stream_options": {"include_usage": True}, "stream": True} if stream else {}
    result = client.completions.create(**asked, max_tokens=0)
    chunks: list[Any] = list(result) if stream else [result]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == TEXTS[0]
    scores = [n for each in choices if each.logprobs for n in each.logprobs.token_logprobs]
    own = own_logprobs([ord(sign) for sign in TEXTS[0]])
    wanted = [own[place, ord(sign)].item() for place, sign in enumerate(TEXTS[0][1:])]
    assert scores[0] is None and scores[1:] == pytest.approx(wanted, abs=1e-4)
    assert choices[-1].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 0
    with pytest.raises(openai.BadRequestError, match="or 0 with echo: true"):
        client.completions.create(model="characters", prompt="a", max_tokens=0)


@pytest.mark.extended
def test_choices_share_the_prompt_and_keep_one_session(small: LoadedModel) -> None:
    hub = LocalEngineClient(
        Engine(small, policy="full"), EngineOptions(ByteBudgets({Tier.DEVICE: 1 << 20}))
    )
    with connected(hub) as client:
        check_choices(client, hub)


def check_choices(client: OpenAI, hub: LocalEngineClient) -> None:
    asked: dict[str, Any] = {"model": "characters", "temperature": 1.0, "max_tokens": 12}
    messages: Any = [{"role": "user", "content": TEXTS[2]}]
    whole = client.chat.completions.create(**asked, messages=messages, n=4, seed=5)
    texts = [each.message.content for each in whole.choices]
    [session] = hub.sessions("local")
    stats = hub.stats()
    assert stats.prompt_tokens - stats.cached_tokens < 1.5 * session.tokens
    alone = [
        client.chat.completions.create(
            **asked,
            messages=messages,
            seed=5 + number,
            extra_headers={"x-session-id": f"s{number}"},
        )
        .choices[0]
        .message.content
        for number in range(4)
    ]
    assert texts == alone and len(set(texts)) > 1
