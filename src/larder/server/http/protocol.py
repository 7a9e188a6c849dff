"""What requests for text have in common, and how they become one of ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from fastapi.requests import Request as HttpRequest
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from larder.engine.sampler import SamplingParams
from larder.server.api_errors import validate_session_name
from larder.server.http.app_state import AppState, tenant_of
from larder.server.http.error_responses import invalid_field
from larder.server.http.json_body import JsonBody
from larder.server.http.session_hint import SessionHint, session_hint
from larder.server.request import ChatMessage, Report, Request


def _valid_unicode(text: str) -> str:
    """Raises: ValueError: JSON can spell halves of characters, which are no text."""
    if not text.isascii() and any("\ud800" <= sign <= "\udfff" for sign in text):
        raise ValueError("it holds half of a surrogate pair, which is no text")
    return text


Text = Annotated[str, AfterValidator(_valid_unicode)]
Tokens = Annotated[int, Field(ge=1, le=1 << 31)]
Steps = Annotated[int, Field(ge=0, le=1 << 31)]
Stop = Annotated[Text, Field(min_length=1, max_length=1024)]
ROLES = {"developer": "system"}
# Fields that would change the answer if they were obeyed, with the values that change nothing.
NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "background": (False,),
    "bad_words": ([],),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "ignore_eos": (False,),
    "logit_bias": ({},),
    "logprobs": (False, 0),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "suffix": ("",),
    "text": ({"format": {"type": "text"}}, {}),
    "tools": ([],),
    "top_logprobs": (0,),
    "web_search_options": (),
}


class GenerationRequest(JsonBody):
    """Fields of every request for text. Fields that are not known are passed over, as long as
    they do not change the answer."""

    model_config = ConfigDict(extra="allow")
    extra_fields: ClassVar[frozenset[str]] = frozenset(NEUTRAL_VALUES)

    model: Text
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1 << 31)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    user: Text | None = None
    session_id: Text | None = None
    prompt_cache_key: Text | None = None
    kv_policy: Literal["exact", "budget"] | None = None
    kv_steps: Steps | Annotated[dict[Text, Steps], Field(max_length=10_000)] | None = None

    def check(self) -> None:
        """Raises: Refusal: 400 for a name that is none, or a field that cannot be obeyed."""
        for name in self.steps:
            if name:
                validate_session_name(name, "kv_steps")
        for name, value in (self.model_extra or {}).items():
            harmless = NEUTRAL_VALUES.get(name)
            if harmless is not None and value is not None and value not in harmless:
                raise invalid_field(
                    f"{name} is not supported: leave it out.", name, "unsupported_parameter"
                )

    @property
    def steps(self) -> Mapping[str, int]:
        """Until sessions are asked again, by name; by "" the one of this request."""
        said = self.kv_steps
        return {} if said is None else {"": said} if isinstance(said, int) else said

    def sampling(self, usual: SamplingParams) -> SamplingParams:
        """How to draw; what is not said is as usual."""
        return SamplingParams(
            usual.temperature if self.temperature is None else self.temperature,
            usual.top_k if self.top_k is None else self.top_k,
            usual.top_p if self.top_p is None else self.top_p,
            usual.seed if self.seed is None else self.seed,
        )


@dataclass(frozen=True)
class ChunkHeader:
    """What every part of one answer begins with."""

    id: str
    object: str
    created: int
    model: str

    def with_(self, more: Mapping[str, Any]) -> dict[str, Any]:
        """A part: the head and its own fields."""
        return {**vars(self), **more}


class ContentPart(BaseModel):
    """A piece of a message's content."""

    type: Literal["text", "input_text", "output_text"]
    text: Text


class InputMessage(BaseModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None

    def turn(self) -> ChatMessage:
        """It as one of ours."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return ChatMessage(ROLES.get(self.role, self.role), text)


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """Strings that end an answer."""
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)


def request_session_hint(
    http: HttpRequest, desk: AppState, asked: GenerationRequest
) -> SessionHint:
    """Which session a request names."""
    names = desk.settings.session_headers
    return session_hint(http.headers, names, asked.session_id, asked.prompt_cache_key)


def engine_request(
    http: HttpRequest,
    desk: AppState,
    asked: GenerationRequest,
    session: str | None,
    max_new_tokens: int | None,
    stop: tuple[str, ...] = (),
    turns: tuple[ChatMessage, ...] = (),
    raw_prompt: str | None = None,
) -> Request:
    """A request of ours.

    Raises:
        Refusal: 400 for what is not supported, 404 `model_not_found`.
    """
    asked.check()
    desk.check_model(asked.model)
    return Request(
        tenant=tenant_of(http),
        turns=turns,
        session=session,
        sampling=asked.sampling(desk.settings.sampling),
        max_new_tokens=desk.settings.max_new_tokens if max_new_tokens is None else max_new_tokens,
        stop=stop,
        exact=asked.kv_policy == "exact",
        raw_prompt=raw_prompt,
        steps=asked.steps,
    )


def usage(report: Report) -> dict[str, Any]:
    """What was used, as chat completions and completions tell it."""
    return {
        "prompt_tokens": report.prompt_tokens,
        "completion_tokens": report.new_tokens,
        "total_tokens": report.prompt_tokens + report.new_tokens,
        "prompt_tokens_details": _details(report),
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def input_usage(report: Report) -> dict[str, Any]:
    """What was used, as responses tell it."""
    return {
        "input_tokens": report.prompt_tokens,
        "input_tokens_details": _details(report),
        "output_tokens": report.new_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": report.prompt_tokens + report.new_tokens,
    }


def kv_usage(report: Report) -> dict[str, Any]:
    """What the cache did for an answer, and whether its turn is in the store where that was waited
    for: a field beside OpenAI's own."""
    told = {} if report.durable is None else {"durable": report.durable}
    return {
        **told,
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
