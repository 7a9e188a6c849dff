"""Calls of real clients in Python against a running server; one JSON line per call.

    python benchmarks/client_calls.py URL

Runs in an environment that has the clients, without Larder: those that are not installed are
skipped. `clients.py` starts the server.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

MODEL, KEY = "seed", "none"
WORDS = ["bread", "salt", "plum"]
COUNT = {
    "type": "object",
    "properties": {"what": {"enum": WORDS}, "kept": {"type": "boolean"}},
    "required": ["what", "kept"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "count", "parameters": COUNT}}
ASKED = [{"role": "user", "content": "I have bread and salt. What do I have?"}]
Call = Callable[[str], None]


def openai_chat(url: str) -> None:
    from openai import OpenAI

    with OpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
        given: Any = {"model": MODEL, "messages": ASKED, "max_tokens": 8}
        assert client.chat.completions.create(**given).usage.completion_tokens
        assert list(client.chat.completions.create(**given, stream=True))
        messages: list[Any] = list(ASKED)
        for step in range(3):
            tools: Any = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
            told = client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=60, **tools
            )
            message = told.choices[0].message
            assert json.loads(message.tool_calls[0].function.arguments)["what"] in WORDS
            result = {
                "role": "tool",
                "tool_call_id": message.tool_calls[0].id,
                "content": f"{step}",
            }
            messages += [message, result]
        assert told.usage.prompt_tokens_details.cached_tokens > 0


def openai_responses(url: str) -> None:
    from openai import OpenAI

    with OpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
        first = client.responses.create(model=MODEL, input="Hello", max_output_tokens=8)
        with client.responses.stream(
            model=MODEL, input="And?", previous_response_id=first.id, max_output_tokens=8
        ) as stream:
            assert list(stream)[-1].type in ("response.completed", "response.incomplete")


def openai_parse(url: str) -> None:
    from openai import OpenAI
    from pydantic import BaseModel

    class Held(BaseModel):
        bread: bool
        salt: bool

    with OpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
        told = client.chat.completions.parse(model=MODEL, messages=ASKED, response_format=Held)
        assert isinstance(told.choices[0].message.parsed, Held)


def anthropic_messages(url: str) -> None:
    from anthropic import Anthropic

    with Anthropic(base_url=url, api_key=KEY) as client:
        tool = {"name": "count", "input_schema": COUNT}
        given: Any = {"model": MODEL, "max_tokens": 60, "tools": [tool]}
        given["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
        messages: list[Any] = list(ASKED)
        for _ in range(2):
            with client.messages.stream(**given, messages=messages) as stream:
                told = stream.get_final_message()
            [block] = [each for each in told.content if each.type == "tool_use"]
            assert told.stop_reason == "tool_use" and block.input["what"] in WORDS
            result = {"type": "tool_result", "tool_use_id": block.id, "content": "3"}
            messages += [
                {"role": "assistant", "content": told.content},
                {"role": "user", "content": [result]},
            ]
        assert client.messages.count_tokens(model=MODEL, messages=ASKED).input_tokens


def langchain_tools(url: str) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(base_url=f"{url}/v1", api_key=KEY, model=MODEL, max_tokens=60)
    told = model.bind_tools([TOOL], tool_choice="required").invoke("What do I have?")
    assert told.tool_calls[0]["args"]["what"] in WORDS
    schema = {"title": "Count", **COUNT}
    for method in ("json_schema", "function_calling"):
        assert model.with_structured_output(schema, method=method).invoke("What?")["what"] in WORDS
    assert list(model.stream("Hello"))


def agents_loop(url: str) -> None:
    """Agent that must call tools until it has called four."""
    asyncio.run(_agents_loop(url))


async def _agents_loop(url: str) -> None:
    import agents
    from openai import AsyncOpenAI

    steps = list[str]()

    @agents.function_tool
    def count(kept: bool) -> str:
        """Count."""
        steps.append(f"count {kept}")
        return "3"

    @agents.function_tool
    def finish(kept: bool) -> str:
        """Finish."""
        steps.append(f"finish {kept}")
        return "done"

    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY)
    for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
        agent = agents.Agent(
            name="counter",
            instructions="Count, then finish.",
            model=kind(MODEL, client),
            tools=[count, finish],
            reset_tool_choice=False,
            tool_use_behavior=lambda _, results: agents.ToolsToFinalOutputResult(
                is_final_output=len(steps) >= 4, final_output="done"
            ),
            model_settings=agents.ModelSettings(
                tool_choice="required", parallel_tool_calls=False, max_tokens=60
            ),
        )
        steps.clear()
        assert (await agents.Runner.run(agent, "Go on.")).final_output == "done"
        assert len(steps) == 4
        steps.clear()
        result = agents.Runner.run_streamed(agent, "Go on.")
        assert [event async for event in result.stream_events()]
        assert result.final_output == "done" and len(steps) == 4


def inspect_evaluation(url: str) -> None:
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate

    os.environ["LARDER_API_KEY"], os.environ["LARDER_BASE_URL"] = KEY, f"{url}/v1"
    with tempfile.TemporaryDirectory() as folder:
        samples = [Sample(input=f"Say {word}.", target=word) for word in WORDS]
        task = Task(dataset=samples, solver=generate(), scorer=includes())
        [log] = eval(
            task,
            model=f"openai-api/larder/{MODEL}",
            log_dir=folder,
            display="none",
            max_tokens=8,
            logprobs=True,
            top_logprobs=2,
        )
    assert log.status == "success" and log.results.completed_samples == len(WORDS), log.error


def llm_command(url: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        entry = {"model_id": "larder", "model_name": MODEL, "api_base": f"{url}/v1"}
        entry |= {"supports_tools": True, "supports_schema": True, "api_key_name": "none"}
        lines = "\n".join(f"  {name}: {json.dumps(value)}" for name, value in entry.items())
        Path(folder, "extra-openai-models.yaml").write_text(f"-{lines[1:]}\n")
        base = [str(Path(sys.executable).parent / "llm"), "-m", "larder", "--key", KEY]
        environment = {**os.environ, "LLM_USER_PATH": folder}
        for more in (
            ["Hello", "-o", "max_tokens", "8"],
            ["Hello", "-o", "max_tokens", "8", "--no-stream"],
            ["-c", "And?", "-o", "max_tokens", "8"],
            ["What?", "--schema", json.dumps(COUNT)],
        ):
            done = subprocess.run([*base, *more], env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["what"] in WORDS


CALLS: list[tuple[str, str, Call]] = [
    ("openai", "chat, streamed, tool loop of 3 steps", openai_chat),
    ("openai", "responses, streamed, previous_response_id", openai_responses),
    ("openai", "chat.completions.parse", openai_parse),
    ("anthropic", "messages.stream with a tool, count_tokens", anthropic_messages),
    ("langchain-openai", "bind_tools, with_structured_output, stream", langchain_tools),
    ("openai-agents", "loop of 4 calls, both APIs, streamed or not", agents_loop),
    ("inspect-ai", "eval of openai-api/ with logprobs", inspect_evaluation),
    ("llm", "prompt, --no-stream, -c, --schema", llm_command),
]


def main() -> int:
    failed = 0
    for package, what, call in CALLS:
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        error = ""
        try:
            call(sys.argv[1])
        except BaseException as caught:
            error = f"{type(caught).__name__}: {str(caught)[:600]}"
        failed += bool(error)
        print(json.dumps({"client": package, "version": found, "call": what, "error": error}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
