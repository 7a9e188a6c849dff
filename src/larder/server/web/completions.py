"""`POST /v1/completions`: a bare text to continue, without a chat template."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool
from fastapi.requests import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from larder.server.web.asking import (
    Asked,
    Head,
    Stop,
    Text,
    Tokens,
    hinted,
    kv,
    request,
    stops,
    usage,
)
from larder.server.web.chat import StreamOptions
from larder.server.web.desk import Desk, desk_of
from larder.server.web.hearing import DONE, EventStream, Heard, data, framed, listen, whole
from larder.server.web.json_route import JsonRoute
from larder.server.web.naming import new_id
from larder.server.web.refusing import invalid

router = APIRouter(tags=["text"], route_class=JsonRoute)
Texts = Annotated[list[Text], Field(max_length=128, fail_fast=True)]
Ids = Annotated[list[int], Field(max_length=1 << 20, fail_fast=True)]


class CompletionAsked(Asked):
    """A text to continue: itself, a list of one text, or its token ids."""

    prompt: Text | Texts | Ids | tuple[Ids]
    max_tokens: Tokens | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16, fail_fast=True)] | None = None
    stream_options: StreamOptions | None = None


@router.post("/v1/completions")
async def completions(http: HttpRequest, asked: CompletionAsked) -> Response:
    """Continue a text, in one piece or as it comes."""
    desk, hint = desk_of(http), hinted(http, desk_of(http), asked)
    wanted = request(
        http,
        desk,
        asked,
        hint.name,
        asked.max_tokens,
        stops(asked.stop),
        raw_prompt=await run_in_threadpool(_prompt, desk, asked.prompt),
    )
    heard = await listen(http, desk, wanted, hint.is_firm)
    head = Head(new_id("cmpl-"), "text_completion", int(time.time()), asked.model)
    if asked.stream:
        has_usage = asked.stream_options is not None and asked.stream_options.include_usage
        return EventStream(_chunks(head, heard, has_usage))
    text, report = await whole(heard)
    told = {"choices": [_choice(text, report.reason)], "usage": usage(report), "kv": kv(report)}
    return JSONResponse(head.with_(told))


async def _chunks(head: Head, heard: Heard, has_usage: bool) -> AsyncGenerator[bytes, None]:
    async for frame in framed(heard):
        if isinstance(frame, bytes):
            yield frame
        elif isinstance(frame, str):
            yield data(head.with_({"choices": [_choice(frame)]}))
        else:
            yield data(head.with_({"choices": [_choice("", frame.reason)], "kv": kv(frame)}))
            if has_usage:
                yield data(head.with_({"choices": [], "usage": usage(frame), "kv": kv(frame)}))
            yield DONE


def _choice(text: str, reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}


def _prompt(desk: Desk, prompt: str | list[str] | list[int] | tuple[list[int]]) -> str:
    """The one text that is meant."""
    if isinstance(prompt, str):
        return prompt
    if prompt and isinstance(prompt[0], int):
        return desk.hub.detokenize([each for each in prompt if isinstance(each, int)])
    if len(prompt) != 1:
        raise invalid(f"prompt holds {len(prompt)} texts: send one per request.", "prompt")
    [only] = prompt
    if isinstance(only, list):
        return desk.hub.detokenize(only)
    return str(only)
