"""Tools of a chat: their definitions, the choice among them, calls and results in messages."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Protocol

from fastapi.concurrency import run_in_threadpool
from pydantic import Field

from larder.core.errors import BadParameter, DependencyError
from larder.engine.constraint import Constraint, grammar_constraint, json_constraint
from larder.server.answer_form import AnswerForm, ParsedAnswer, canonical_answer
from larder.server.api_errors import invalid_request
from larder.server.http.protocol import InputMessage, Text, new_id
from larder.server.http.structured import Unsupported
from larder.server.http.unknown_fields import BodyPart
from larder.server.reasoning_stream import ReasoningStream
from larder.server.request import ApiError
from larder.server.session_info import ServedModel
from larder.server.tool_call_stream import CallDelta, CallStream
from larder.server.tool_parsers.base import ToolCall

MAX_TOOLS = 128
NAME_RULE = "a name of 1 to 64 letters, digits, dots, dashes and underscores"
_NAME = re.compile("[A-Za-z0-9_.-]{1,64}")
AUTO, NONE, REQUIRED, ALLOWED = "auto", "none", "required", "allowed_tools"
# Arguments of a tool that has no parameters, and of one whose schema says nothing.
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
ANY_ARGUMENTS = {"type": "object"}


class ConstrainedRequest(Protocol):
    """Body of a request whose answer may have to match a format."""

    def constraint(self, unsupported: Unsupported) -> Constraint | None:
        """Constraint that the answer must match.

        Raises:
            ApiError: 400 for a format that is malformed or cannot be enforced.
        """
        ...


class FunctionCall(BodyPart):
    """Function of a call in a message."""

    name: Text
    arguments: Text = ""


class CallPart(BodyPart):
    """Call in a message of the assistant."""

    ignored_fields: ClassVar[frozenset[str]] = frozenset({"index"})
    id: Text = ""
    type: Literal["function"] | None = None
    function: FunctionCall


class ToolMessage(InputMessage):
    """Message of a conversation in which tools may be called."""

    role: Literal["system", "developer", "user", "assistant", "tool"]  # pyright: ignore[reportIncompatibleVariableOverride]
    tool_calls: Annotated[list[CallPart], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: Text | None = None
    contexts: Annotated[list[Text], Field(max_length=1024, fail_fast=True)] | None = None

    def canonical_text(self, text: str) -> str:
        """Text of the message with marks of its calls."""
        calls = tuple(
            ToolCall.of(call.function.name, call.function.arguments)
            for call in self.tool_calls or ()
        )
        return canonical_answer(text, calls) if calls else text


def in_call_order(messages: Sequence[ToolMessage]) -> list[ToolMessage]:
    """Messages, with the results of tools in the order of the calls that they answer.

    Raises:
        ApiError: 400: a result answers no call of the assistant's message before it.
    """
    found, indices, results = list[ToolMessage](), dict[str, int](), dict[int, ToolMessage]()
    for message in messages:
        if message.role != "tool":
            found += [results[index] for index in sorted(results)]
            results = {}
            indices = {call.id: index for index, call in enumerate(message.tool_calls or ())}
            found.append(message)
            continue
        index = indices.get(message.tool_call_id) if message.tool_call_id else None
        if index is None or index in results:
            raise invalid_request(
                "A message of the role tool answers no call of the message before it, or one that "
                "another answers: send the assistant's message with its tool_calls, and the id of "
                "each as tool_call_id.",
                "messages",
            )
        results[index] = message
    return found + [results[index] for index in sorted(results)]


def check_results_follow(messages: Sequence[tuple[str, Collection[str]]]) -> None:
    """Check that results follow their calls at once.

    Args:
        messages: role of each, and types of its blocks.

    Raises:
        ApiError: 400: a system message is between the two.
    """
    for before, (role, _), behind in zip(messages, messages[1:], messages[2:], strict=False):
        if role == "system" and "tool_use" in before[1] and "tool_result" in behind[1]:
            raise invalid_request(
                "A system message stands between a tool_use and its tool_result: put it before the "
                "message with the tool_use, or behind that with the results.",
                "messages",
            )


def checked_tools(tools: Sequence[Any], model: ServedModel) -> list[dict[str, Any]]:
    """Definitions of tools, as chat templates take them.

    Raises:
        ApiError: 400: a definition is malformed, or the model takes no tools.
    """
    if len(tools) > MAX_TOOLS:
        raise _refused(f"tools has more than {MAX_TOOLS} entries: send fewer.")
    for index, tool in enumerate(tools):
        function: Any = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not is_tool_name(name) or tool.get("type") != "function":
            raise _refused(
                f"tools.{index} must be {{'type': 'function', 'function': {{'name': ..., "
                f"'parameters': ...}}}}, with {NAME_RULE}."
            )
        if not isinstance(function.get("parameters", {}), dict | None):
            raise _refused(f"tools.{index}.function.parameters must be a JSON schema.")
    names = _names(tools)
    if len(set(names)) < len(names):
        raise _refused("tools has two tools of one name: rename one.")
    if not model.takes_tools:
        raise _unsupported(
            "The chat template of this model ignores tools: serve a model whose template has them, "
            "or start the server with one that has by --chat-template."
        )
    if not model.answer_form.tool_parser:
        raise _unsupported(
            "This server does not know how the model writes tool calls: start it with "
            "--tool-call-parser."
        )
    return list(tools)


def is_tool_name(name: Any) -> bool:
    """Test if a value is the name of a tool, as `NAME_RULE` has it."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


async def answer_rules(
    body: ConstrainedRequest,
    tools: Sequence[Any] | None,
    choice: Any,
    is_parallel: bool | None,
    model: ServedModel,
    unsupported: Unsupported,
) -> tuple[AnswerForm, Constraint | None]:
    """Parsers of the answer to a request, and what the answer must match.

    Raises:
        ApiError: 400: the choice cannot be forced, the format is malformed, or there are both.
    """
    parser = model.answer_form.tool_parser if tools and choice != NONE else ""
    form = replace(model.answer_form, tool_parser=parser, is_parallel=is_parallel is not False)
    forced = await run_in_threadpool(_tool_constraint, tools, choice, form)
    wanted = await run_in_threadpool(body.constraint, unsupported)
    if forced is not None and wanted is not None:
        raise invalid_request(
            "tool_choice forces a call, so that the answer can have no other format: leave one of "
            "the two out.",
            "tool_choice",
        )
    return form, forced or wanted


def tool_variables(tools: Sequence[Any]) -> Mapping[str, Any]:
    """Variables of the chat template for tools."""
    return {"tools": tools} if tools else {}


def _tool_constraint(
    tools: Sequence[Any] | None, choice: Any, form: AnswerForm
) -> Constraint | None:
    """Constraint that forces the chosen calls; None where the model may choose.

    Raises:
        ApiError: 400: the choice is malformed, names no tool, or cannot be forced.
    """
    if choice in (None, AUTO, NONE):
        return None
    chosen, is_named = _chosen_names(choice, _names(tools or ()))
    schemas = {
        tool["function"]["name"]: _arguments_schema(tool["function"].get("parameters"))
        for tool in tools or ()
        if tool["function"]["name"] in chosen
    }
    if form.tools is None or not schemas:
        raise invalid_request("tool_choice needs tools: send them.", "tool_choice")
    most = 1 if is_named or not form.is_parallel else None
    try:
        return grammar_constraint(form.tools.grammar(schemas, most))
    except (BadParameter, DependencyError) as error:
        _check_schemas(schemas)
        raise invalid_request(f"tool_choice: {error}", "tool_choice") from error


def _chosen_names(choice: Any, names: Collection[str]) -> tuple[Collection[str], bool]:
    """Tools that a choice forces one of, and whether it names a single one.

    Raises:
        ApiError: 400: the choice is malformed, or names no tool.
    """
    if choice == REQUIRED:
        return names, False
    given: dict[str, Any] = choice if isinstance(choice, dict) else {}
    if given.get("type") == ALLOWED:
        allowed: Any = given.get(ALLOWED, given)  # flat in responses
        mode, tools = (allowed.get(name) for name in ("mode", "tools"))
        chosen = [_named(tool) for tool in tools] if isinstance(tools, list) else []
        if mode == REQUIRED and chosen and set(chosen) <= set(names):
            return chosen, False
        raise invalid_request(
            "tool_choice.allowed_tools must have the mode required and functions of tools: with "
            "the mode auto, leave the other tools out.",
            "tool_choice",
        )
    if _named(given) not in names:
        raise invalid_request(
            "tool_choice must be none, auto, required, allowed_tools, or name a function of tools.",
            "tool_choice",
        )
    return [_named(given)], True


def _named(choice: Any) -> str:
    """Name of a function, flat or not; empty without one."""
    given: Any = choice if isinstance(choice, dict) else {}
    function = given.get("function", given)
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def _arguments_schema(parameters: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Schema of the arguments of a call."""
    return NO_ARGUMENTS if parameters is None else parameters or ANY_ARGUMENTS


def _check_schemas(schemas: Mapping[str, Any]) -> None:
    """Raise ApiError 400 if the arguments of a tool cannot be enforced."""
    for name, schema in schemas.items():
        try:
            json_constraint(schema)
        except BadParameter as error:
            raise invalid_request(
                f"The parameters of the tool {name!r}: {error} Or send tool_choice: auto, which "
                "enforces nothing.",
                "tools",
            ) from error


def _names(tools: Sequence[Any]) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


def _unsupported(message: str) -> ApiError:
    return invalid_request(message, "tools", "unsupported_parameter")


def _refused(message: str) -> ApiError:
    return invalid_request(message, "tools")


class AnswerParser:
    """Parser of a streamed answer.

    Content is given as soon as it cannot be reasoning or a call any more, arguments of calls as
    they are written.
    """

    def __init__(self, form: AnswerForm) -> None:
        self._reasoning = ReasoningStream(form.reasoning_parser)
        self._calls = None if form.tools is None else CallStream(form.tools, form.max_calls)

    @property
    def num_calls(self) -> int:
        """Number of calls, complete or in progress."""
        return 0 if self._calls is None else self._calls.num_calls

    @property
    def is_broken(self) -> bool:
        """True if the last call is incomplete or invalid."""
        return self._calls is not None and self._calls.is_broken

    def push(self, text: str) -> list[dict[str, Any]]:
        """Deltas that a part makes final, as OpenAI's chat completions write them."""
        return self._deltas(text, is_done=False)

    def finish(self) -> list[dict[str, Any]]:
        """Deltas of what was withheld."""
        return self._deltas("", is_done=True)

    def _deltas(self, text: str, is_done: bool) -> list[dict[str, Any]]:
        reasoning, content = self._reasoning.push(text, is_done)
        calls = list[CallDelta]()
        if self._calls is not None:
            content, calls = self._calls.push(content, is_done)
        found: list[dict[str, Any]] = [{"reasoning_content": reasoning}] if reasoning else []
        if content:
            found.append({"content": content})
        return found + [{"tool_calls": [delta_json(call)]} for call in calls]


def delta_json(call: CallDelta) -> dict[str, Any]:
    """Part of a call in a delta; the first has an id."""
    function = {"arguments": call.arguments}
    if not call.name:
        return {"index": call.index, "function": function}
    named = {"name": call.name, **function}
    return {"index": call.index, "id": new_id("call_"), "type": "function", "function": named}


def whole_call_json(call: ToolCall) -> dict[str, Any]:
    """Call of a message, with an id of its own."""
    function = {"name": call.name, "arguments": call.text}
    return {"id": new_id("call_"), "type": "function", "function": function}


def answer_deltas(parsed: ParsedAnswer) -> list[dict[str, Any]]:
    """Deltas of a whole answer, one for each part."""
    calls = [whole_call_json(call) for call in parsed.calls]
    parts = {"reasoning_content": parsed.reasoning, "content": parsed.content, "tool_calls": calls}
    return [{name: part} for name, part in parts.items() if part]


def message_json(parsed: ParsedAnswer) -> dict[str, Any]:
    """Message of a whole answer."""
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content, "refusal": None}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        message["content"] = parsed.content.strip() or None
        message["tool_calls"] = [whole_call_json(call) for call in parsed.calls]
    return message
