"""Completion endpoints: `POST /v1/chat/completions` continues a conversation, `POST
/v1/completions` continues raw text without a chat template."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool
from fastapi.requests import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from pydantic import ConfigDict, Field

from larder.engine.constraint import Constraint
from larder.server.api_errors import invalid_request
from larder.server.context_order import ContextOrder
from larder.server.http.app_state import AppState, Unsupported, app_state
from larder.server.http.choices import (
    CHAT_FORMAT,
    MAX_CHOICES,
    TEXT_FORMAT,
    AnswerFormat,
    PromptChoices,
    choice_stream,
    chunk_events,
    prompt_choices,
    whole_answer,
)
from larder.server.http.image_parts import RequestImages
from larder.server.http.json_route import PromptRoute
from larder.server.http.protocol import (
    GenerationRequest,
    Stop,
    Text,
    Tokens,
    engine_request,
    new_id,
    session_hint,
    stop_strings,
    warnings_of,
)
from larder.server.http.streaming import EventStream
from larder.server.http.structured import FORMAT_FIELDS, SCHEMA_FIELDS, answer_constraint
from larder.server.http.tools import (
    ALLOWED,
    ToolMessage,
    answer_rules,
    checked_tools,
    in_call_order,
    tool_variables,
)
from larder.server.http.unknown_fields import BodyPart
from larder.server.request import ApiError, CachedResponse, CachedUse, ChatMessage
from larder.session.transcript.chat_template import VARIABLES_ROLE

router = APIRouter(tags=["text"], route_class=PromptRoute)
Texts = Annotated[list[Text], Field(max_length=MAX_CHOICES, fail_fast=True)]
Ids = Annotated[list[int], Field(max_length=1 << 20, fail_fast=True)]
Prompts = str | list[str] | list[int] | list[list[int]]
TemplateValue = Text | bool | int | float | None
TopLogprobs = Annotated[int, Field(ge=0, le=20)]


class StreamOptions(BodyPart):
    """Options of a streamed answer."""

    include_usage: bool = False


class AnswerRequest(GenerationRequest):
    """Fields of both endpoints."""

    json_fields: ClassVar[frozenset[str]] = frozenset({"response_format", "structured_outputs"})
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    max_tokens: Tokens | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16, fail_fast=True)] | None = None
    stream_options: StreamOptions | None = None

    def constraint(self, unsupported: Unsupported) -> Constraint | None:
        """Constraint that the answer must match; warnings name what is not enforced.

        Raises:
            ApiError: 400 for a constraint that is malformed or cannot be enforced.
        """
        found = answer_constraint(
            self.response_format, self.structured_outputs, unsupported=unsupported
        )
        given = self.response_format or {}
        self.warn_unknown(given, FORMAT_FIELDS, "response_format")
        schema = given.get("json_schema")
        self.warn_unknown(schema, SCHEMA_FIELDS, "response_format.json_schema")
        for each in () if found is None else found.warnings:
            self.warn(f"response_format is not enforced here: {each[:200]}.")
        return found


class ResponseCacheOptions(BodyPart):
    """Options of a request for the semantic cache of answers."""

    model_config = ConfigDict(extra="forbid")

    category: Text
    use: CachedUse = CachedUse.ANSWER
    key: Annotated[Text, Field(max_length=8192)] = ""
    sampled: bool = False
    keep: bool = True

    @property
    def options(self) -> CachedResponse:
        """The options in the form of the engine."""
        return CachedResponse(self.category, self.use, self.key, self.sampled, self.keep)


class ChatCompletionRequest(AnswerRequest):
    """A conversation to continue."""

    json_fields: ClassVar[frozenset[str]] = AnswerRequest.json_fields | {"tools", "tool_choice"}
    messages: Annotated[list[ToolMessage], Field(min_length=1, max_length=10_000, fail_fast=True)]
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    chat_template_kwargs: Annotated[dict[Text, TemplateValue], Field(max_length=32)] | None = None
    contexts: Annotated[list[Text], Field(max_length=1024, fail_fast=True)] | None = None
    context_order: ContextOrder = ContextOrder.GIVEN
    response_cache: ResponseCacheOptions | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Number of the most likely tokens beside each token.

        Raises:
            ApiError: 400: `top_logprobs` without `logprobs`.
        """
        if self.top_logprobs and not self.logprobs:
            raise invalid_request("top_logprobs needs logprobs: true; add it.", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def turns(
        self, variables: frozenset[str], images: RequestImages | None = None
    ) -> tuple[ChatMessage, ...]:
        """Messages in the form of the engine, variables of the chat template before them.

        Args:
            variables: those that the template has; a warning names others.
            images: takes the images; None for a model without a vision tower.
        """
        given = self.chat_template_kwargs or {}
        for name in given.keys() - variables:
            known = ", ".join(sorted(variables)) or "none"
            self.warn(
                f"chat_template_kwargs.{name[:100]} is no variable of the model's chat template "
                f"(it has: {known}) and was ignored."
            )
        messages = tuple(message.turn(images) for message in in_call_order(self.messages))
        used: dict[str, Any] = {name: given[name] for name in sorted(given.keys() & variables)}
        used |= tool_variables(self.tools or ())
        first = (ChatMessage(VARIABLES_ROLE, json.dumps(used)),) if used else ()
        return (*first, *messages)

    def message_contexts(self, num_turns: int) -> dict[int, tuple[str, ...]]:
        """Contexts of messages by number of the turn.

        Args:
            num_turns: turns of the conversation, with those before its messages.

        Raises:
            ApiError: 400: a message of another role than `user` has contexts.
        """
        messages = in_call_order(self.messages)
        numbers = range(num_turns - len(messages), num_turns)
        found = {
            number: (message.role, tuple(message.contexts))
            for number, message in zip(numbers, messages, strict=True)
            if message.contexts
        }
        for role, _ in found.values():
            if role != "user":
                raise invalid_request(
                    f"A message of the role {role} has contexts, which stand in front of messages "
                    "of the user: send them with one.",
                    "messages",
                )
        return {number: contexts for number, (_, contexts) in found.items()}


class CompletionRequest(AnswerRequest):
    """Texts to continue: a string, token ids, which are read as they are, or a list of either."""

    prompt: Text | Texts | Ids | Annotated[list[Ids], Field(max_length=MAX_CHOICES)]
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    max_tokens: Annotated[int, Field(ge=0, le=1 << 31)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Number of the most likely tokens beside each token."""
        return self.logprobs

    @property
    def new_tokens(self) -> int | None:
        """Longest answer; where only the prompt is wanted, one token, which the answer leaves out.

        Raises:
            ApiError: 400: nothing is wanted.
        """
        if self.max_tokens == 0 and not self.echo:
            raise invalid_request(
                "max_tokens must be at least 1, or 0 with echo: true, for the prompt alone.",
                "max_tokens",
            )
        return None if self.max_tokens is None else max(1, self.max_tokens)


@router.post("/v1/chat/completions")
async def chat_completions(http: HttpRequest, body: ChatCompletionRequest) -> Response:
    """Answer a conversation, as one body or as a stream."""
    state, hint = app_state(http), session_hint(http, body)
    max_new_tokens = body.max_completion_tokens or body.max_tokens
    model, images = state.check_model(body.model), RequestImages()
    taken = images if model.takes_images else None
    if body.tools:
        checked_tools(body.tools, model)
    body.warn_unknown(body.tool_choice, ("type", "function", ALLOWED), "tool_choice")
    turns = await run_in_threadpool(body.turns, model.template_variables, taken)
    parallel, unsupported = body.parallel_tool_calls, state.settings.unsupported
    form, constraint = await answer_rules(
        body, body.tools, body.tool_choice, parallel, model, unsupported
    )
    stop = stop_strings(body.stop)
    request = engine_request(
        http,
        state,
        body,
        hint.name,
        max_new_tokens,
        stop,
        turns,
        constraint=constraint,
        images=images.files,
        answer_form=form,
    )
    request = replace(
        request,
        contexts=tuple(body.contexts or ()),
        message_contexts=body.message_contexts(len(turns)),
        context_order=body.context_order,
    )
    if body.response_cache is not None:
        request = replace(request, cached_response=body.response_cache.options)
    return await _answer(
        http, body, [prompt_choices(request, body.n or 1)], hint.is_firm, CHAT_FORMAT
    )


@router.post("/v1/completions")
async def completions(http: HttpRequest, body: CompletionRequest) -> Response:
    """Continue a text, as one body or as a stream."""
    state, hint = app_state(http), session_hint(http, body)
    request = engine_request(
        http,
        state,
        body,
        hint.name,
        body.new_tokens,
        stop_strings(body.stop),
        raw_prompt="",
        constraint=await run_in_threadpool(body.constraint, state.settings.unsupported),
    )
    prompts, count = await run_in_threadpool(_prompts, state, body.prompt), body.n or 1
    if len(prompts) * count > MAX_CHOICES:
        raise invalid_request(
            f"{len(prompts)} prompts with n={count} are {len(prompts) * count} answers, more than "
            f"{MAX_CHOICES}: send several requests.",
            "n" if count > 1 else "prompt",
        )
    is_scored = bool(body.echo) and body.logprobs is not None
    requests = [
        replace(
            request,
            raw_prompt=text,
            raw_ids=ids,
            prompt_logprobs=is_scored,
            session=None if index else hint.name,
        )
        for index, (text, ids) in enumerate(prompts)
    ]
    is_alone = body.max_tokens == 0
    choices = [
        replace(prompt_choices(each, count, is_echoed=bool(body.echo)), is_prompt_alone=is_alone)
        for each in requests
    ]
    return await _answer(http, body, choices, hint.is_firm, TEXT_FORMAT)


async def _answer(
    http: HttpRequest,
    body: AnswerRequest,
    prompts: Sequence[PromptChoices],
    is_firm: bool,
    form: AnswerFormat,
) -> Response:
    choices = await choice_stream(http, app_state(http), prompts, is_firm)
    head = {
        "id": new_id(form.prefix),
        "object": form.chunk_object if body.stream else form.object,
        "created": int(time.time()),
        "model": app_state(http).check_model(body.model).answer_name,
    }
    if body.stream:
        has_usage = body.stream_options is not None and body.stream_options.include_usage
        return EventStream(chunk_events(head, choices, prompts, form, has_usage, warnings_of(body)))
    response = await whole_answer(choices, prompts, form)
    return JSONResponse({**head, **response, **warnings_of(body)})


def _prompts(state: AppState, prompt: Prompts) -> list[tuple[str, tuple[int, ...]]]:
    """Text of each prompt; with its token ids, where it was given as such."""
    if isinstance(prompt, str):
        return [(prompt, ())]
    if not prompt:
        raise invalid_request("prompt is an empty list: send a text, or token ids.", "prompt")
    if isinstance(prompt[0], int):
        prompt = [[each for each in prompt if isinstance(each, int)]]
    return [_prompt(state, each) for each in prompt if not isinstance(each, int)]


def _prompt(state: AppState, prompt: str | list[int]) -> tuple[str, tuple[int, ...]]:
    if isinstance(prompt, str):
        return prompt, ()
    if not prompt:
        raise invalid_request("A prompt has no token ids: send at least one.", "prompt")
    try:
        return state.client.detokenize(prompt), tuple(prompt)
    except ApiError as error:
        raise invalid_request(str(error), "prompt") from error
