"""Calls of real clients in Python against a running server; one JSON line per call.

    python benchmarks/client_calls.py URL [--images] [PACKAGE...]

Runs in an environment that has the clients, without Larder: those that are not installed are
skipped. `clients.py` starts the server, whose model is called `seed` whatever it is. With
`--images` the server has a model that sees, and calls have images.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from _acceptance_calls import KEY, MODEL, WORDS, hostile, lm_evaluation, other_prompts, schemas
from _image_calls import IMAGE_CALLS, REFUSED_IMAGE_CALLS, Call

EMBEDDER = "minilm"
IMAGES_OPTION = "--images"
COUNT = {
    "type": "object",
    "properties": {"what": {"enum": WORDS}, "kept": {"type": "boolean"}},
    "required": ["what", "kept"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "count", "parameters": COUNT}}
INSPECT_FORMS = ("openai-api/larder", "vllm")
STREAMS = {"stream": True}  # argument of a model of inspect
ASKED = [{"role": "user", "content": "I have bread and salt. What do I have?"}]


def openai_chat(url: str) -> None:
    from openai import OpenAI

    with OpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
        given: Any = {"model": MODEL, "messages": ASKED, "max_tokens": 8}
        assert client.chat.completions.create(**given).usage.completion_tokens
        assert list(client.chat.completions.create(**given, stream=True))
        messages: list[Any] = list(ASKED)
        forced: Any = {"tool_choice": "required", "parallel_tool_calls": False}
        for step in range(3):  # streamed at every second
            given = {"model": MODEL, "messages": messages, "max_tokens": 60, "tools": [TOOL]}
            reply = _completed(client, bool(step % 2), given | forced)
            message = reply.choices[0].message
            assert reply.choices[0].finish_reason == "tool_calls"
            assert json.loads(message.tool_calls[0].function.arguments)["what"] in WORDS
            result = {
                "role": "tool",
                "tool_call_id": message.tool_calls[0].id,
                "content": f"{step}",
            }
            messages += [message, result]
        assert reply.usage.prompt_tokens_details.cached_tokens > 0


def _completed(client: Any, is_streamed: bool, given: dict[str, Any]) -> Any:
    """Whole chat completion."""
    if not is_streamed:
        return client.chat.completions.create(**given)
    options = {"stream_options": {"include_usage": True}}
    with client.chat.completions.stream(**given, **options) as stream:
        return stream.get_final_completion()


def openai_responses(url: str) -> None:
    from openai import OpenAI

    with OpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
        first = client.responses.create(model=MODEL, input="Hello", max_output_tokens=8)
        with client.responses.stream(
            model=MODEL, input="And?", previous_response_id=first.id, max_output_tokens=8
        ) as stream:
            assert list(stream)[-1].type in ("response.completed", "response.incomplete")


def openai_response_tools(url: str) -> None:
    """Loop of calls by `previous_response_id`, and typed answers."""
    from openai import OpenAI

    kind, form = _stock_type(), {"type": "function", "name": "count", "parameters": COUNT}
    forced: Any = {"tools": [form], "tool_choice": "required", "parallel_tool_calls": False}
    with OpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
        given: Any = {"model": MODEL, "max_output_tokens": 60}
        asked: Any = ASKED
        for step in range(4):  # streamed at every second
            if step % 2:
                with client.responses.stream(**given, **forced, input=asked) as stream:
                    result = stream.get_final_response()
            else:
                result = client.responses.create(**given, **forced, input=asked)
            [call] = [item for item in result.output if item.type == "function_call"]
            assert json.loads(call.arguments)["what"] in WORDS
            given["previous_response_id"] = result.id
            asked = [{"type": "function_call_output", "call_id": call.call_id, "output": "3"}]
        assert result.usage.input_tokens_details.cached_tokens > 0
        typed: Any = {"model": MODEL, "input": ASKED, "text_format": kind}
        assert isinstance(client.responses.parse(**typed).output_parsed, kind)
        with client.responses.stream(**typed) as stream:
            assert isinstance(stream.get_final_response().output_parsed, kind)


def _stock_type() -> Any:
    """Type of an answer in JSON: which goods are in stock."""
    from pydantic import BaseModel

    class Stock(BaseModel):
        bread: bool
        salt: bool

    return Stock


def openai_parse(url: str) -> None:
    from openai import OpenAI

    kind = _stock_type()
    with OpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
        given: Any = {"model": MODEL, "messages": ASKED, "response_format": kind}
        whole = client.chat.completions.parse(**given)
        for result in (whole, _completed(client, True, given)):
            assert isinstance(result.choices[0].message.parsed, kind)


def anthropic_messages(url: str) -> None:
    from anthropic import Anthropic

    with Anthropic(base_url=url, api_key=KEY) as client:
        tool = {"name": "count", "input_schema": COUNT}
        given: Any = {"model": MODEL, "max_tokens": 60, "tools": [tool]}
        given["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
        messages: list[Any] = list(ASKED)
        for step in range(4):  # streamed at every second
            if step % 2:
                with client.messages.stream(**given, messages=messages) as stream:
                    reply = stream.get_final_message()
            else:
                reply = client.messages.create(**given, messages=messages)
            [block] = [each for each in reply.content if each.type == "tool_use"]
            assert reply.stop_reason == "tool_use" and block.input["what"] in WORDS
            result = {"type": "tool_result", "tool_use_id": block.id, "content": "3"}
            messages += [
                {"role": "assistant", "content": reply.content},
                {"role": "user", "content": [result]},
            ]
        assert reply.usage.cache_read_input_tokens > 0
        assert client.messages.count_tokens(model=MODEL, messages=ASKED).input_tokens


def anthropic_typed(url: str) -> None:
    from anthropic import Anthropic

    with Anthropic(base_url=url, api_key=KEY) as client:
        given: Any = {"model": MODEL, "max_tokens": 60, "messages": ASKED}
        given["output_config"] = {"format": {"type": "json_schema", "schema": COUNT}}
        with client.messages.stream(**given) as stream:
            streamed = stream.get_final_message()
        for result in (client.messages.create(**given), streamed):
            assert json.loads(result.content[0].text)["what"] in WORDS


def langchain_tools(url: str) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(base_url=f"{url}/v1", api_key=KEY, model=MODEL, max_tokens=60)
    bound = model.bind_tools([TOOL], tool_choice="required", parallel_tool_calls=False)
    messages: list[Any] = [HumanMessage("What do I have?")]
    for step in range(4):  # streamed at every second
        if step % 2:
            first, *rest = bound.stream(messages)
            result = sum(rest, first)
        else:
            result = bound.invoke(messages)
        [call] = result.tool_calls
        assert call["args"]["what"] in WORDS
        messages += [result, ToolMessage("3", tool_call_id=call["id"])]
    schema = {"title": "Count", **COUNT}
    for method in ("json_schema", "function_calling"):
        typed = model.with_structured_output(schema, method=method)
        for result in (typed.invoke("What?"), list(typed.stream("What?"))[-1]):
            assert result["what"] in WORDS
    assert list(model.stream("Hello"))


def langchain_embeddings(url: str) -> None:
    from langchain_openai import OpenAIEmbeddings

    model = OpenAIEmbeddings(
        base_url=f"{url}/v1", api_key=KEY, model=EMBEDDER, check_embedding_ctx_length=False
    )
    one, two = model.embed_documents(["bread", "salt"])
    query = model.embed_query("bread")
    assert _product(one, query) > 0.999 > _product(two, query)


def openai_embeddings(url: str) -> None:
    from openai import OpenAI

    with OpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
        given: Any = {"model": EMBEDDER, "input": ["bread", "salt"]}
        packed = client.embeddings.create(**given)  # the client asks for base64
        plain = client.embeddings.create(**given, encoding_format="float")
        assert packed.usage.total_tokens == plain.usage.total_tokens > 0
        for one, other in zip(packed.data, plain.data, strict=True):
            assert abs(_product(one.embedding, other.embedding) - 1) < 1e-5


def _product(one: list[float], other: list[float]) -> float:
    return sum(left * right for left, right in zip(one, other, strict=True))


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


def agents_typed(url: str) -> None:
    asyncio.run(_agents_typed(url))


async def _agents_typed(url: str) -> None:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    stock = _stock_type()
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY)
    for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
        settings = agents.ModelSettings(max_tokens=60)
        agent = agents.Agent(
            name="typed", model=kind(MODEL, client), output_type=stock, model_settings=settings
        )
        assert isinstance((await agents.Runner.run(agent, "What?")).final_output, stock)
        result = agents.Runner.run_streamed(agent, "What?")
        assert [event async for event in result.stream_events()]
        assert isinstance(result.final_output, stock)


def inspect_evaluation(url: str) -> None:
    for form in INSPECT_FORMS:
        _inspected(
            url, [f"Say {word}." for word in WORDS], form=form, logprobs=True, top_logprobs=2
        )


def inspect_tools(url: str) -> None:
    """Loop that must call tools until its messages are used up."""
    from inspect_ai.solver import generate, use_tools
    from inspect_ai.tool import tool

    called = list[bool]()

    @tool
    def count():
        async def execute(kept: bool) -> str:
            """Count.

            Args:
                kept: Whether it is kept.
            """
            called.append(kept)
            return "3"

        return execute

    forced = [use_tools([count()], tool_choice="any"), generate(tool_calls="loop")]
    for form in INSPECT_FORMS:
        for arguments in ({}, STREAMS):
            called.clear()
            more = {"parallel_tool_calls": False, "message_limit": 5, "model_args": arguments}
            _inspected(url, ["What?"], forced, form, **more)
            assert len(called) >= 2


def inspect_typed(url: str) -> None:
    from inspect_ai.model import ResponseSchema
    from inspect_ai.util import json_schema

    stock = _stock_type()
    schema = ResponseSchema(name="stock", json_schema=json_schema(stock))
    for form in INSPECT_FORMS:
        for arguments in ({}, STREAMS):
            given = {"form": form, "response_schema": schema, "model_args": arguments}
            [sample] = _inspected(url, ["What?"], **given)
            stock.model_validate_json(sample.output.completion)


def _inspected(
    url: str, inputs: list[str], solver: Any = None, form: str = INSPECT_FORMS[0], **more: Any
) -> list[Any]:
    """Samples of an evaluation."""
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate

    for name in ("LARDER", "VLLM"):
        os.environ[f"{name}_API_KEY"], os.environ[f"{name}_BASE_URL"] = KEY, f"{url}/v1"
    with tempfile.TemporaryDirectory() as folder:
        samples = [
            Sample(input=text, target=word) for text, word in zip(inputs, WORDS, strict=False)
        ]
        task = Task(dataset=samples, solver=solver or generate(), scorer=includes())
        given = {"log_dir": folder, "display": "none", "max_tokens": 60 if solver else 24, **more}
        [log] = eval(task, model=f"{form}/{MODEL}", **given)
        assert log.status == "success" and log.results.completed_samples == len(inputs), log.error
        return list(log.samples)  # read from the folder


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
            ["Hello", "-o", "max_tokens", "8", "--functions", "def count(kept: bool): return 3"],
            ["What?", "--schema", json.dumps(COUNT)],
            ["What?", "--schema", json.dumps(COUNT), "--no-stream"],
        ):
            done = subprocess.run([*base, *more], env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            assert "--schema" not in more or json.loads(done.stdout)["what"] in WORDS


def llm_tools(url: str) -> None:
    """Chain that calls a function and goes on with its result.

    llm has no option for `tool_choice`, and small models call nothing of themselves.
    """
    from llm import Tool
    from llm.default_plugins.openai_models import Chat

    class ForcedChat(Chat):
        def build_kwargs(self, prompt: Any, stream: bool) -> dict[str, Any]:
            given = super().build_kwargs(prompt, stream)
            forced = {"tool_choice": "required", "parallel_tool_calls": False}
            return given if prompt.tool_results else given | forced

    called = list[str]()

    def count(what: str, kept: bool) -> str:
        called.append(what)
        return "3"

    tool = Tool("count", "Count.", COUNT, count)
    model = ForcedChat("larder", model_name=MODEL, api_base=f"{url}/v1", supports_tools=True)
    model.default_max_tokens = 60
    for stream in (False, True):
        called.clear()
        chain = model.chain("What?", tools=[tool], stream=stream, key=KEY)
        first, second = chain.responses()
        assert [call.arguments["what"] for call in first.tool_calls()] == called
        assert called[0] in WORDS and second.prompt.tool_results[0].output == "3"
        assert second.text()


CALLS: list[tuple[str, str, Call]] = [
    ("openai", "chat, streamed, tool loop of 3 steps, the second streamed", openai_chat),
    ("openai", "responses, streamed, previous_response_id", openai_responses),
    (
        "openai",
        "responses: tool loop of 4 steps and typed answers, streamed or not",
        openai_response_tools,
    ),
    ("openai", "chat.completions.parse and .stream with a type", openai_parse),
    ("openai", "embeddings, base64 and float", openai_embeddings),
    ("anthropic", "tool loop of 4 steps, streamed or not, count_tokens", anthropic_messages),
    ("anthropic", "output_config.format, streamed or not", anthropic_typed),
    (
        "langchain-openai",
        "loop of 4 calls, every second streamed, with_structured_output, streamed or not, stream",
        langchain_tools,
    ),
    ("langchain-openai", "OpenAIEmbeddings", langchain_embeddings),
    ("openai-agents", "loop of 4 calls, both APIs, streamed or not", agents_loop),
    ("openai-agents", "output_type, both APIs, streamed or not", agents_typed),
    ("inspect-ai", "eval of openai-api/ and vllm/ with logprobs", inspect_evaluation),
    ("inspect-ai", "loop of 2 calls, both forms, streamed or not", inspect_tools),
    ("inspect-ai", "response_schema, both forms, streamed or not", inspect_typed),
    ("llm", "prompt, --no-stream, -c, --functions, --schema", llm_command),
    ("llm", "chain with a forced call, streamed or not", llm_tools),
    ("openai", "41 schemas: 32 answered as they say, 9 refused", schemas),
    ("openai", "60 MiB body, n of 10**9, endless header: /health within 1 s", hostile),
    ("openai", "same text, other tools, template variables, adapter: no cache", other_prompts),
    ("lm_eval", "three local tasks, batch 1 and 8", lm_evaluation),
    *REFUSED_IMAGE_CALLS,
]


def main() -> int:
    failed, (url, *only) = 0, sys.argv[1:]
    sees = IMAGES_OPTION in only
    only = [package for package in only if package != IMAGES_OPTION]
    for package, what, call in IMAGE_CALLS if sees else CALLS:
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        if only and package not in only:
            continue
        error, started, figures = "", time.monotonic(), {}
        try:
            figures = call(url) or {}
        except BaseException as caught:
            error = f"{type(caught).__name__}: {str(caught)[:600]}"
        failed += bool(error)
        seconds = round(time.monotonic() - started, 1)
        row = {"client": package, "version": found, "call": what, "seconds": seconds}
        print(json.dumps(row | figures | {"error": error}), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
