"""Answers to one HTTP request, one per prompt and choice, as one body or as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import accumulate, count
from typing import Any

from fastapi.requests import Request as HttpRequest

from larder.core.errors import LarderError
from larder.server.answer_form import PLAIN_FORM, AnswerForm
from larder.server.api_errors import server_stopping
from larder.server.http.app_state import AppState
from larder.server.http.error_responses import as_api_error, error_body
from larder.server.http.protocol import kv_usage, new_id, usage
from larder.server.http.streaming import (
    DONE,
    PING,
    Logprobs,
    StreamIdle,
    chain_stream,
    sse_event,
    stream_answer,
)
from larder.server.http.tools import AnswerParser, message_json
from larder.server.request import Report, Request, TokenLogprob

MAX_CHOICES = 128  # answers to one request: prompts times choices
SEEDS = 1 << 64
Item = str | Logprobs | Report | StreamIdle
ChoiceStream = AsyncGenerator[tuple[int, Item], None]


def chat_logprobs(logprobs: Logprobs, start: int) -> dict[str, Any]:
    """Log-probabilities in the form of chat completions.

    Args:
        start: not used; `text_logprobs` has it.
    """
    content = [
        _chat_token(each) | {"top_logprobs": [_chat_token(other) for other in each.top]}
        for each in logprobs
    ]
    return {"content": content, "refusal": None}


def text_logprobs(logprobs: Logprobs, start: int) -> dict[str, Any]:
    """Log-probabilities in the form of completions.

    Tokens of the same text are one name, with the larger number. The token itself is always among
    the most likely ones, unless it is the first of a text, which has none.

    Args:
        start: character at which the first token begins.
    """
    ends = accumulate((len(each.text) for each in logprobs), initial=start)
    return {
        "tokens": [each.text for each in logprobs],
        "token_logprobs": [each.logprob for each in logprobs],
        "top_logprobs": [_ranked(each) for each in logprobs],
        "text_offset": list(ends)[:-1],
    }


def _chat_token(logprob: TokenLogprob) -> dict[str, Any]:
    return {"token": logprob.text, "logprob": logprob.logprob, "bytes": list(logprob.data)}


def _ranked(logprob: TokenLogprob) -> dict[str, float] | None:
    if logprob.logprob is None:
        return None
    ranked: dict[str, float] = {}
    for text, number in _numbered(logprob):
        ranked[text] = max(number, ranked.get(text, number))
    return ranked


def _numbered(logprob: TokenLogprob) -> Iterator[tuple[str, float]]:
    for each in (*logprob.top, logprob):
        if each.logprob is not None:
            yield each.text, each.logprob


@dataclass(frozen=True)
class AnswerFormat:
    """JSON of an answer at one endpoint.

    Args:
        prefix: of the answer's id.
        object: type of a whole answer.
        chunk_object: type of a streamed part.
        choice: what a choice of a whole answer has of its text.
        chunk: what a choice of a streamed part has of its text; of None at the end.
        logprobs: log-probabilities of tokens, the first of which begins at a character.
        opening: what the choice before the text has, if there is one.
    """

    prefix: str
    object: str
    chunk_object: str
    choice: Callable[[str], dict[str, Any]]
    chunk: Callable[[str | None], dict[str, Any]]
    logprobs: Callable[[Logprobs, int], dict[str, Any]]
    opening: dict[str, Any] | None = None


def _message(text: str) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": text, "refusal": None}}


def _delta(text: str | None) -> dict[str, Any]:
    return {"delta": {} if text is None else {"content": text}}


def _text(text: str | None) -> dict[str, Any]:
    return {"text": text or ""}


def _choice(
    number: int,
    content: dict[str, Any],
    reason: str | None = None,
    logprobs: dict[str, Any] | None = None,
) -> dict[str, Any]:
    return {"index": number, **content, "logprobs": logprobs, "finish_reason": reason}


CHAT_FORMAT = AnswerFormat(
    "chatcmpl-",
    "chat.completion",
    "chat.completion.chunk",
    _message,
    _delta,
    chat_logprobs,
    {"delta": {"role": "assistant", "content": ""}},
)


TEXT_FORMAT = AnswerFormat(
    "cmpl-", "text_completion", "text_completion", _text, _text, text_logprobs
)


@dataclass(frozen=True)
class PromptChoices:
    """Answers to one prompt.

    Args:
        requests: one per answer. The others wait for the first, which reads the prompt.
        echo: text before each answer.
        is_prompt_alone: only the echoed prompt is returned, of answers of one token.
    """

    requests: tuple[Request, ...]
    echo: str = ""
    is_prompt_alone: bool = False


def prompt_choices(request: Request, num_choices: int, is_echoed: bool = False) -> PromptChoices:
    """Answers to the prompt of a request, each with a seed of its own."""
    echo = request.raw_prompt or "" if is_echoed else ""
    if num_choices == 1:
        return PromptChoices((request,), echo)
    first = replace(request, choice_group=new_id("choices-"))
    seeds = (first.sampling.seed + index for index in range(num_choices))
    requests = tuple(
        replace(
            first,
            choice=index,
            sampling=replace(first.sampling, seed=seed if seed < SEEDS else seed - SEEDS),
        )
        for index, seed in enumerate(seeds)
    )
    return PromptChoices(requests, echo)


async def choice_stream(
    http: HttpRequest, state: AppState, prompts: Sequence[PromptChoices], is_firm: bool
) -> ChoiceStream:
    """Submit all requests and wait until one answer starts, or a ping is due.

    Args:
        is_firm: as for `stream_answer`.

    Returns:
        Items with the number of their choice, those of all answers as they come.

    Raises:
        ApiError: a request is refused before an answer starts.
        ClientClosedRequest: the client disconnected.
    """
    merged = _merged(http, state, prompts, is_firm)
    try:
        first = await anext(merged)
    except BaseException:
        await merged.aclose()
        raise
    return chain_stream(first, merged)


async def whole_answer(
    choices: ChoiceStream, prompts: Sequence[PromptChoices], form: AnswerFormat
) -> dict[str, Any]:
    """Fields of a whole answer."""
    texts = _choice_texts(prompts)
    async with aclosing(choices):
        async for number, item in choices:
            texts[number].add(item)
    answers = [
        _choice(number, each.choice(form), each.reason, each.all_logprobs(form))
        for number, each in enumerate(texts)
    ]
    reports = [each.final_report for each in texts]
    return {
        "choices": answers,
        "usage": usage(_total(reports, prompts)),
        "kv": kv_usage(reports[0]),
    }


async def chunk_events(
    head: dict[str, Any],
    choices: ChoiceStream,
    prompts: Sequence[PromptChoices],
    form: AnswerFormat,
    has_usage: bool,
    warnings: dict[str, list[str]],
) -> AsyncGenerator[bytes, None]:
    """Server-sent events of a streamed answer; an error is the last one."""
    texts = _choice_texts(prompts)
    for number, each in enumerate(texts):
        if form.opening is not None:
            yield sse_event({**head, "choices": [_choice(number, form.opening)]})
        if each.text:
            yield sse_event({**head, "choices": [_choice(number, form.chunk(each.text))]})
    try:
        async with aclosing(choices):
            async for number, item in choices:
                if isinstance(item, StreamIdle):
                    yield PING
                for event in texts[number].events(number, item, form):
                    extra = warnings if isinstance(item, Report) else {}
                    yield sse_event({**head, **event, **extra})
    except LarderError as error:
        yield sse_event(error_body(as_api_error(error)))
        return
    if has_usage:
        reports = [each.final_report for each in texts]
        total = {"usage": usage(_total(reports, prompts)), "kv": kv_usage(reports[0])}
        yield sse_event({**head, "choices": [], **total})
    yield DONE


@dataclass
class _ChoiceText:
    """Text and log-probabilities of one answer so far.

    Args:
        text: text so far, the echoed prompt included.
        answer_form: parsers of the text.
        is_prompt_alone: the one token behind the echoed prompt is not returned.
        logprobs: log-probabilities that are not sent yet.
        start: character at which the first of them begins.
        report: set at the end.
    """

    text: str
    answer_form: AnswerForm = PLAIN_FORM
    is_prompt_alone: bool = False
    logprobs: list[TokenLogprob] = field(default_factory=list)
    start: int = 0
    report: Report | None = None
    parser: AnswerParser = field(init=False)

    def __post_init__(self) -> None:
        self.parser = AnswerParser(self.answer_form)

    @property
    def final_report(self) -> Report:
        assert self.report is not None
        return self.report

    def add(self, item: Item) -> None:
        """Add an item of the answer."""
        if self.is_prompt_alone and isinstance(item, Report):
            self.report = replace(item, new_tokens=0, reason="length")
            del self.logprobs[-1:]
        elif isinstance(item, str):
            self.text += "" if self.is_prompt_alone else item
        elif isinstance(item, tuple):
            self.logprobs += item
        elif isinstance(item, Report):
            self.report = item

    def choice(self, form: AnswerFormat) -> dict[str, Any]:
        """Fields of the choice of a whole answer that its text fills."""
        if self.answer_form.is_plain:
            return form.choice(self.text)
        return {"message": message_json(self.answer_form.parse(self.text))}

    @property
    def reason(self) -> str:
        """End of the answer; not `tool_calls` where a call that was streamed is no JSON."""
        if self.final_report.reason != "stop" or self.answer_form.is_plain or self.parser.is_broken:
            return self.final_report.reason
        has_calls = self.parser.num_calls or self.answer_form.parse(self.text).calls
        return "tool_calls" if has_calls else "stop"

    def all_logprobs(self, form: AnswerFormat) -> dict[str, Any] | None:
        """Log-probabilities that are not sent yet; None if there are none."""
        return form.logprobs(tuple(self.logprobs), self.start) if self.logprobs else None

    def events(self, number: int, item: Item, form: AnswerFormat) -> list[dict[str, Any]]:
        """Add an item; the events that it makes ready."""
        if self.is_prompt_alone and isinstance(item, str):
            return []
        self.add(item)
        events = list[dict[str, Any]]()
        is_text, is_plain = isinstance(item, str), self.answer_form.is_plain
        if not is_plain and isinstance(item, str | Report):
            deltas = self.parser.push(item) if isinstance(item, str) else self.parser.finish()
            events += [{"choices": [_choice(number, {"delta": delta})]} for delta in deltas]
        if (is_text and is_plain) or (isinstance(item, str | Report) and self.logprobs):
            text = form.chunk(item if isinstance(item, str) and is_plain else "")
            events.append({"choices": [_choice(number, text, None, self.all_logprobs(form))]})
            self.start += sum(len(each.text) for each in self.logprobs)
            self.logprobs.clear()
        if isinstance(item, Report):
            last = _choice(number, form.chunk(None), self.reason)
            events.append({"choices": [last], "kv": kv_usage(item)})
        return events


def _choice_texts(prompts: Sequence[PromptChoices]) -> list[_ChoiceText]:
    """All answers, empty."""
    return [
        _ChoiceText(prompt.echo, request.answer_form, prompt.is_prompt_alone)
        for prompt in prompts
        for request in prompt.requests
    ]


def _total(reports: Sequence[Report], prompts: Sequence[PromptChoices]) -> Report:
    """Sums over all answers; a prompt with several counts once."""
    index, first = 0, list[Report]()
    for prompt in prompts:
        first.append(reports[index])
        index += len(prompt.requests)
    return replace(
        reports[0],
        prompt_tokens=sum(each.prompt_tokens for each in first),
        cached_tokens=sum(each.cached_tokens for each in first),
        new_tokens=sum(each.new_tokens for each in reports),
    )


async def _merged(
    http: HttpRequest, state: AppState, prompts: Sequence[PromptChoices], is_firm: bool
) -> ChoiceStream:
    """Items of all answers; closing the generator cancels their requests."""
    items, tasks = asyncio.Queue[tuple[int, Item | BaseException]](), list[asyncio.Task[None]]()
    numbers = count()

    async def pump(number: int, request: Request, has_begun: asyncio.Event) -> None:
        if request.choice:
            await has_begun.wait()
        async with aclosing(await stream_answer(http, state, request, is_firm)) as answer:
            async for item in answer:
                items.put_nowait((number, item))
                if not isinstance(item, StreamIdle):
                    has_begun.set()

    def on_done(task: asyncio.Task[None], number: int) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            items.put_nowait((number, error))

    try:
        for prompt in prompts:
            has_begun = asyncio.Event()
            for request in prompt.requests:
                number = next(numbers)
                task = asyncio.create_task(pump(number, request, has_begun))
                task.add_done_callback(lambda task, number=number: on_done(task, number))
                tasks.append(task)
        left = len(tasks)
        while left:
            try:
                number, item = await items.get()
            except asyncio.CancelledError:  # the server stops before the answers end
                raise server_stopping() from None
            if isinstance(item, BaseException):
                raise item
            left -= isinstance(item, Report)
            yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
