"""Body of a request for a response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from larder.engine.constraint import Constraint
from larder.server.api_errors import invalid_request
from larder.server.http.app_state import Unsupported
from larder.server.http.conversations import Metadata
from larder.server.http.protocol import GenerationRequest, Text, Tokens
from larder.server.http.response_items import ResponseInputItem
from larder.server.http.structured import SCHEMA_FIELDS, answer_constraint
from larder.server.http.tools import checked_tools
from larder.server.http.unknown_fields import BodyPart
from larder.server.session_info import ServedModel

FUNCTION_FIELDS = ("name", "description", "parameters")


class ConversationParam(BodyPart):
    """Reference to a conversation by id."""

    id: Text


class ResponsesRequest(GenerationRequest):
    """Body of a request: new items of a conversation, or all of it."""

    json_fields: ClassVar[frozenset[str]] = frozenset({"tools", "tool_choice", "text"})
    input: (
        Text
        | Annotated[list[ResponseInputItem], Field(min_length=1, max_length=10_000, fail_fast=True)]
    )
    instructions: Text | None = None
    conversation: Text | ConversationParam | None = None
    previous_response_id: Text | None = None
    max_output_tokens: Tokens | None = None
    metadata: Metadata | None = None
    store: bool = True
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None

    def items(self) -> Sequence[ResponseInputItem]:
        """The new items."""
        if isinstance(self.input, str):
            return (ResponseInputItem(role="user", content=self.input),)
        return self.input

    def chat_tools(self, model: ServedModel) -> list[dict[str, Any]]:
        """Tools in the form of chat completions.

        Raises:
            ApiError: 400: as `checked_tools`, or a tool is no function.
        """
        for index, tool in enumerate(self.tools or ()):
            if not isinstance(tool, dict) or tool.get("type") != "function":
                raise invalid_request(
                    f"tools.{index} is no function: this server runs no tools of its own; send "
                    "{'type': 'function', 'name': ..., 'parameters': ...}.",
                    "tools",
                    "unsupported_parameter",
                )
            self.warn_unknown(tool, ("type", "strict", *FUNCTION_FIELDS), f"tools.{index}")
        self.warn_unknown(self.tool_choice, ("type", "name", "mode", "tools"), "tool_choice")
        tools = [
            {"type": "function", "function": {name: tool.get(name) for name in FUNCTION_FIELDS}}
            for tool in self.tools or ()
        ]
        for tool in tools:
            named = {name: value for name, value in tool["function"].items() if value is not None}
            tool["function"] = named
        return checked_tools(tools, model) if tools else []

    @property
    def chat_choice(self) -> Any:
        """Choice among tools in the form of chat completions."""
        given = self.tool_choice
        if isinstance(given, dict) and given.get("type") == "function":
            return {"type": "function", "function": {"name": given.get("name")}}
        return given

    def constraint(self, unsupported: Unsupported) -> Constraint | None:
        """Constraint that the answer must match, by `text.format`.

        Raises:
            ApiError: 400 for a format that is malformed or cannot be enforced.
        """
        given = self.text or {}
        wanted = given.get("format")
        self.warn_unknown(given, ("format",), "text")
        if wanted is None:
            return None
        if not isinstance(wanted, dict):
            raise invalid_request("text.format must be an object with a type.", "text")
        self.warn_unknown(wanted, ("type", *SCHEMA_FIELDS), "text.format")
        if wanted.get("type") == "json_schema":
            described = {name: wanted.get(name) for name in ("name", "schema", "strict")}
            wanted = {"type": "json_schema", "json_schema": described}
        found = answer_constraint(wanted, None, "text.format", unsupported)
        for each in () if found is None else found.warnings:
            self.warn(f"text.format is not enforced here: {each[:200]}.")
        return found
