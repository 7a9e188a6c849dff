"""HTTP server over a model with scripted output and a chat template with tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from openai import OpenAI

from larder import Engine
from larder.server import (
    Archive,
    EngineOptions,
    HttpSettings,
    LocalEngineClient,
    LoopbackAuth,
    create_app,
)
from server.http.running_server import listening
from server_core import byte_characters

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}"
    "</tool_call>{% endfor %}.{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
END = 2
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
Write = Callable[..., None]


def call_text(**arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'look', 'arguments': arguments})}\n</tool_call>"


def served(
    template: str = TEMPLATE,
    options: EngineOptions = EngineOptions(),  # noqa: B008, frozen
    **parsers: str | None,
) -> LocalEngineClient:
    loaded = byte_characters()
    loaded.tokenizer.chat_template = template
    return LocalEngineClient(Engine(loaded, policy="full"), options, **parsers)  # pyright: ignore


def client_of(hub: LocalEngineClient) -> Iterator[OpenAI]:
    app = create_app(hub, LoopbackAuth(), Archive(), HttpSettings(max_new_tokens=300))
    with listening(app) as url, OpenAI(api_key="-", base_url=f"{url}/v1", max_retries=0) as found:
        yield found
