"""Schema fields that all generation requests share, and their conversion to engine requests."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Literal

from fastapi.requests import Request as HttpRequest
from pydantic import BeforeValidator, ConfigDict, Field, PrivateAttr, WithJsonSchema

from larder.engine.constraint import Constraint
from larder.engine.sampler import MAX_BIASES, SamplingParams
from larder.server.answer_form import PLAIN_FORM, AnswerForm
from larder.server.api_errors import invalid_request, validate_session_name
from larder.server.http.app_state import AppState, Unsupported, app_state, principal_of, tenant_of
from larder.server.http.image_parts import RequestImages, placed_mark
from larder.server.http.json_body import JsonBody, Text
from larder.server.http.unknown_fields import BodyPart, unknown_names
from larder.server.request import ChatMessage, Report, Request

Tokens = Annotated[int, Field(ge=1, le=1 << 31)]
Steps = Annotated[int, Field(ge=0, le=1 << 31)]
Stop = Annotated[Text, Field(min_length=1, max_length=1024)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
LogitBias = Annotated[
    dict[Annotated[int, Field(ge=0, lt=1 << 31)], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MAX_BIASES),
]
SAMPLING_FIELDS = tuple(each.name for each in fields(SamplingParams))
MAX_PATH = 200  # characters of the path of an unknown field, in warnings
ROLES = {"developer": "system"}
# Unsupported fields that would change the answer, with the values that have no effect.
NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "background": (False,),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "container": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logprobs": (False, 0),
    "mcp_servers": ([],),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "prompt": (),
    "prompt_logprobs": (0, False),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking": ({"type": "disabled"},),
    "text": ({"format": {"type": "text"}}, {}),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
# Fields in place of unsupported ones.
REPLACEMENTS: Mapping[str, str] = {
    "best_of": "n",
    "documents": "contexts",
    "function_call": "tool_choice",
    "functions": "tools",
    **dict.fromkeys(
        ("guided_choice", "guided_grammar", "guided_json", "guided_regex"), "structured_outputs"
    ),
}

TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
IMAGE_PARTS = ("image_url", "input_image")


class GenerationRequest(JsonBody):
    """Fields of every generation request. Fields that no endpoint knows are named in the answer's
    `warnings`; known ones that would change the answer, and are not supported, are refused."""

    model_config = ConfigDict(extra="allow")
    extra_fields: ClassVar[frozenset[str]] = frozenset(NEUTRAL_VALUES)

    model: Text
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1 << 31)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    user: Text | None = None
    session_id: Text | None = None
    prompt_cache_key: Text | None = None
    kv_policy: Literal["exact", "budget"] | None = None
    kv_steps: Steps | Annotated[dict[Text, Steps], Field(max_length=10_000)] | None = None
    kv_program: Annotated[Text, Field(max_length=255)] | None = None
    kv_tool: Annotated[Text, Field(max_length=255)] | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None

    _warnings: list[str] = PrivateAttr(default_factory=list)

    def warn(self, warning: str) -> None:
        """Add a sentence to `warnings` of the answer."""
        self._warnings.append(warning)

    def warn_unknown(self, value: Any, known: Collection[str], path: str) -> None:
        """Add a warning for each name of an object that is not known, the first 16.

        Args:
            path: of the object in the body.
        """
        self._warnings += map(unknown_warning, unknown_names(value, known, path))

    @property
    def warnings(self) -> list[str]:
        """Warnings of the answer about what was ignored, a sentence each."""
        return [*map(unknown_warning, self.unknown_fields), *self._warnings]

    def check(self, unsupported: Unsupported = Unsupported.REFUSED) -> None:
        """Raise ApiError 400 for an invalid session name or an unsupported field."""
        for name in self.steps:
            if name:
                validate_session_name(name, "kv_steps")
        for name, value in (self.model_extra or {}).items():
            harmless = NEUTRAL_VALUES.get(name)
            if harmless is None or value is None or value in harmless:
                continue
            if unsupported is Unsupported.IGNORED:
                self.warn(f"{name} is not supported and was ignored.")
            else:
                way = f"send {REPLACEMENTS[name]}" if name in REPLACEMENTS else "leave it out"
                raise invalid_request(
                    f"{name} is not supported: {way}.", name, "unsupported_parameter"
                )

    @property
    def steps(self) -> Mapping[str, int]:
        """Steps until the next request of each session by name; "" is this request's session."""
        steps = self.kv_steps
        return {} if steps is None else {"": steps} if isinstance(steps, int) else steps

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """Sampling parameters; fields that are not set come from `defaults`."""
        given = {name: getattr(self, name) for name in SAMPLING_FIELDS}
        return replace(defaults, **{name: v for name, v in given.items() if v is not None})

    @property
    def num_logprobs(self) -> int | None:
        """Number of the most likely tokens beside each token; None for no log-probabilities."""
        return None


def unknown_warning(path: str) -> str:
    """Warning of an answer about a name in the body that is no field."""
    return f"{path[:MAX_PATH]!r} is no field of this endpoint and was ignored."


class ImageUrl(BodyPart):
    """Image of a part, as OpenAI's chat completions write it."""

    url: Text


class ContentPart(BodyPart):
    """Part of a message's content: a text, or an image as a data URL."""

    ignored_fields: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    type: Literal["text", "input_text", "output_text", "refusal", "image_url", "input_image"]
    text: Annotated[Text | None, WithJsonSchema({"title": "Text", "type": "string"})] = None
    refusal: Text | None = None
    image_url: ImageUrl | Text | None = None

    @property
    def url(self) -> str:
        """Address of the image."""
        given = self.image_url
        return given.url if isinstance(given, ImageUrl) else given or ""


def part_text(part: Any) -> str | None:
    """Text of a part, as it came or validated; None without one."""
    return part.refusal if part.type == "refusal" else part.text


def known_parts(content: Any) -> Any:
    """The content. Raise ValueError if a part is neither text nor an image."""
    for part in content if isinstance(content, list) else ():
        if part.type not in TEXT_PARTS + IMAGE_PARTS:
            raise ValueError(
                f"a part is of type {part.type!r}, but messages hold texts and images: send parts "
                "of the types text, input_text, output_text, image_url or input_image"
            )
        if part.type in TEXT_PARTS and part_text(part) is None:
            raise ValueError("a part has no text: send one")
        if part.type in IMAGE_PARTS and part.image_url is None:
            raise ValueError("an image has no image_url: send one, as data:image/png;base64,...")
    return content


class InputMessage(BodyPart):
    """One message of a conversation."""

    ignored_fields: ClassVar[frozenset[str]] = frozenset({"annotations", "reasoning_content"})

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Text | Annotated[list[ContentPart], Field(fail_fast=True)] | None,
        BeforeValidator(known_parts),
    ] = None

    def turn(self, images: RequestImages | None = None) -> ChatMessage:
        """Message in the form of the engine.

        Args:
            images: takes the images of user messages; None where there may be none.

        Raises:
            ApiError: 400: a message other than an answer has no content, or an image is not taken
                here, or cannot be read.
        """
        if self.content is None and self.role in ("system", "developer", "user"):
            raise invalid_request(
                f"A message of the role {self.role} has no content: send a text, or a list of "
                "parts.",
                "messages",
            )
        content = self.content or ""
        if not isinstance(content, str):
            content = "".join(self._text(part, images) for part in content)
        return ChatMessage(ROLES.get(self.role, self.role), self.canonical_text(content))

    def canonical_text(self, text: str) -> str:
        """Text of the message with what is beside its content."""
        return text

    def _text(self, part: ContentPart, images: RequestImages | None) -> str:
        if part.type not in IMAGE_PARTS:
            return part_text(part) or ""
        return placed_mark(part.url, self.role, images)


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """Strings that end an answer."""
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)


@dataclass(frozen=True)
class SessionHint:
    """Session name that a request gives, if any.

    Args:
        name: None if the request names no session.
        is_firm: the name identifies one conversation. A prompt cache key does not: many requests
            may carry the same one at the same time.
    """

    name: str | None
    is_firm: bool = True


def session_hint(http: HttpRequest, body: GenerationRequest) -> SessionHint:
    """Session hint from headers and body, without `conversation` and `previous_response_id`.

    Raises:
        ApiError: 400 for an invalid name.
    """
    for name in app_state(http).settings.session_headers:
        if http.headers.get(name):
            text = _header_text(http.headers[name], name)
            return SessionHint(validate_session_name(text, name))
    if body.session_id is not None:
        return SessionHint(validate_session_name(body.session_id, "session_id"))
    if body.prompt_cache_key:
        key = validate_session_name(body.prompt_cache_key, "prompt_cache_key")
        return SessionHint(key, is_firm=False)
    return SessionHint(None)


def new_id(kind: str) -> str:
    """Unguessable id, such as `resp_0c1f...`."""
    return f"{kind}{secrets.token_hex(16)}"


def _header_text(value: str, name: str) -> str:
    """Header value decoded as UTF-8 instead of HTTP's Latin-1.

    Raises:
        ApiError: 400: the bytes are not UTF-8.
    """
    try:
        return value.encode("latin-1").decode()
    except UnicodeDecodeError as error:
        raise invalid_request(
            f"{name} must be UTF-8, got other bytes: encode it, or send session_id in the body.",
            name,
            "invalid_session_id",
        ) from error


def engine_request(
    http: HttpRequest,
    state: AppState,
    body: GenerationRequest,
    session: str | None,
    max_new_tokens: int | None,
    stop: tuple[str, ...] = (),
    turns: tuple[ChatMessage, ...] = (),
    raw_prompt: str | None = None,
    constraint: Constraint | None = None,
    images: Mapping[str, bytes] | None = None,
    answer_form: AnswerForm = PLAIN_FORM,
) -> Request:
    """Engine request of a validated HTTP request.

    Raises:
        ApiError: 400 for unsupported fields, 404 `model_not_found`.
    """
    body.check(state.settings.unsupported)
    model, priority = state.check_model(body.model), body.priority or 0
    if priority < 0 and not principal_of(http).is_operator:
        raise invalid_request(
            f"priority is {priority}, but only operators go before requests without one: take 0 or "
            "more.",
            "priority",
        )
    return Request(
        tenant=tenant_of(http),
        turns=turns,
        session=session,
        sampling=body.sampling(state.settings.sampling),
        max_new_tokens=state.settings.max_new_tokens if max_new_tokens is None else max_new_tokens,
        stop=stop,
        exact=body.kv_policy == "exact",
        raw_prompt=raw_prompt,
        steps=body.steps,
        constraint=constraint,
        logprobs=body.num_logprobs,
        images=images or {},
        answer_form=answer_form,
        model=model.answer_name,
        priority=priority,
        program=body.kv_program or "",
        tool=body.kv_tool or "",
    )


def warnings_of(body: GenerationRequest) -> dict[str, list[str]]:
    """Field `warnings` of an answer; absent if there is nothing to say."""
    return {"warnings": body.warnings} if body.warnings else {}


def usage(report: Report) -> dict[str, Any]:
    """Token usage in the form of chat completions and completions."""
    return {
        "prompt_tokens": report.prompt_tokens,
        "completion_tokens": report.new_tokens,
        "total_tokens": report.prompt_tokens + report.new_tokens,
        "prompt_tokens_details": _details(report),
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def input_usage(report: Report) -> dict[str, Any]:
    """Token usage in the form of responses."""
    return {
        "input_tokens": report.prompt_tokens,
        "input_tokens_details": _details(report),
        "output_tokens": report.new_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": report.prompt_tokens + report.new_tokens,
    }


def kv_usage(report: Report) -> dict[str, Any]:
    """Cache statistics of an answer for the field `kv`, beside OpenAI's own fields. `durable` is
    present if the server waited for the store."""
    durability = {} if report.durable is None else {"durable": report.durable}
    return {
        **durability,
        "session": report.session,
        "tier": report.tier,
        "lossless": report.lossless,
        "restored_tokens": report.restored_tokens,
        "recomputed_tokens": report.recomputed_tokens,
        "evicted_tokens": report.evicted_tokens,
        "merged_tokens": report.merged_tokens,
        "wait_seconds": report.wait_seconds,
        "first_seconds": report.first_seconds,
        "seconds": report.seconds,
    }


def _details(report: Report) -> dict[str, int]:
    return {
        "cached_tokens": report.cached_tokens,
        "cache_write_tokens": report.prompt_tokens - report.cached_tokens,
    }
