"""Log-probabilities of tokens: values, texts and stop strings."""

from __future__ import annotations

import math

import pytest
import torch

from larder.engine import SamplingParams
from larder.models import LoadedModel
from larder.server import AnswerText, ApiError, TokenLogprob, TokenTexts
from larder.server.token_logprobs import token_logprobs
from larder.session import TokenizerAdapter
from server_core import Client, Served, box_question
from tiny_models import tiny


def log_share(row: list[float], token: int) -> float:
    """Log-probability of a token by a plain loop."""
    largest = max(row)
    return row[token] - largest - math.log(sum(math.exp(each - largest) for each in row))


def test_logprobs_match_a_plain_loop(small: LoadedModel) -> None:
    texts = TokenTexts(TokenizerAdapter(small.tokenizer))
    logits = torch.randn((5, 128), generator=torch.Generator().manual_seed(3)) * 4
    logits[0, 70] = -math.inf
    ids = [70, 66, 67, 68, 69]
    found = token_logprobs(logits, ids, 3, texts)
    assert found[0].logprob == -9999.0
    for place, (token, each) in enumerate(zip(ids, found, strict=True)):
        row = logits[place].tolist()
        ranked = sorted(range(128), key=lambda t, row=row: -row[t])[:3]
        assert [top.token for top in each.top] == ranked
        for one in (each, *each.top)[place == 0 :]:
            assert one.logprob == pytest.approx(log_share(row, one.token), abs=1e-4)
        assert (each.token, each.text, each.data) == (token, chr(token), chr(token).encode())


def test_token_texts_keep_white_space_and_bytes(seed_model: LoadedModel) -> None:
    tokenizer = TokenizerAdapter(seed_model.tokenizer)
    texts = TokenTexts(tokenizer)
    for text in ("Once upon  a time\n", "naïve 日本 \U0001f600"):
        parts = [texts.of(token) for token in tokenizer.encode(text)]
        assert b"".join(data for _, data in parts).decode() == text
        whole = [part for part, data in parts if "\ufffd" not in part]
        assert all(part in text for part in whole) and whole
    for token in seed_model.tokenizer.all_special_ids:
        assert texts.of(token)[0] == seed_model.tokenizer.convert_ids_to_tokens(token)


def entry(text: str) -> TokenLogprob:
    return TokenLogprob(ord(text), text, text.encode(), -1.0)


def streamed_answer(text: str, stops: tuple[str, ...]) -> tuple[Client, list[tuple[int, int]]]:
    """Client of an answer whose tokens are characters, and lengths of its text and logprobs."""
    client, counts = Client(), list[tuple[int, int]]()
    stream = AnswerText(lambda ids: "".join(map(chr, ids)), stops, client)
    for sign in text:
        goes_on = stream.push(ord(sign), entry(sign))
        counts.append((len(client.text), len(client.logprobs)))
        if not goes_on:
            break
    stream.finish()
    return client, counts


def test_logprobs_are_held_back_with_their_stop_string() -> None:
    client, counts = streamed_answer("an END", ("END",))
    assert (client.text, "".join(each.text for each in client.logprobs)) == ("an ", "an ")
    assert counts == [(1, 1), (2, 2), (3, 3), (3, 3), (3, 3), (3, 3)]
    client, counts = streamed_answer("an EN.", ("END",))
    assert client.text == "".join(each.text for each in client.logprobs) == "an EN."
    assert counts[4:] == [(3, 3), (6, 6)]
    client, _ = streamed_answer("an E", ("END",))
    assert client.text == "".join(each.text for each in client.logprobs) == "an E"


def test_answer_logprobs_match_the_model(small: LoadedModel) -> None:
    served = Served(small)
    client = served.ask(box_question(1), logprobs=2, max_new_tokens=6)
    [session] = served.core.sessions
    ids = list(session.transcript.ids)
    assert "".join(each.text for each in client.logprobs) == client.text
    with torch.no_grad():
        logits = tiny("qwen3", layers=2)(torch.tensor([ids])).logits[0].float()
    first = len(session.turns[0].prompt_ids)
    assert len(client.logprobs) == 6
    for place, each in enumerate(client.logprobs):
        row = logits[first + place - 1].tolist()
        assert each.token == ids[first + place]
        assert each.logprob == pytest.approx(log_share(row, each.token), abs=1e-4)
        assert [one.token for one in each.top][0] == each.token  # greedy


def test_bias_and_temperature_do_not_change_logprobs(small: LoadedModel) -> None:
    served = Served(small)
    plain = served.ask(box_question(1), "plain", logprobs=0, max_new_tokens=1)
    biased = SamplingParams(temperature=0.3, logit_bias={plain.logprobs[0].token: 100.0})
    other = served.ask(box_question(1), "other", logprobs=0, max_new_tokens=1, sampling=biased)
    assert other.logprobs[0].logprob == pytest.approx(plain.logprobs[0].logprob, abs=1e-5)


def test_bias_beyond_the_vocabulary_is_refused_before_the_prompt(small: LoadedModel) -> None:
    served, size = Served(small), small.decoder.vocab_size
    for token, is_refused in ((size, True), (size - 1, False)):
        params = SamplingParams(logit_bias={3: 1.0, token: -100.0})
        if is_refused:
            with pytest.raises(ApiError, match=f"token id {size}, but the model has") as refused:
                served.submit(box_question(1), "x", sampling=params)
            assert (refused.value.status, refused.value.param) == (400, "logit_bias")
            assert not list(served.core.sessions)
        else:
            assert served.ask(box_question(1), "x", sampling=params).result.new_tokens


def test_repeated_request_computes_logprobs(small: LoadedModel) -> None:
    served = Served(small)
    first = served.ask(box_question(1), "x", logprobs=1)
    again = served.ask(box_question(1), "x", logprobs=1)
    assert [each.token for each in again.logprobs] == [each.token for each in first.logprobs]
    assert again.result.session == "x~2"
