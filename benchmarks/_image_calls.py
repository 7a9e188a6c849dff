"""Calls with images, of a server whose model sees, and of one whose model does not; run by
`client_calls.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import subprocess
import sys
import tempfile
import zlib
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _acceptance_calls import KEY, MODEL

RED, GREEN, BLUE = (200, 10, 30), (10, 220, 40), (5, 20, 240)
SIDE = 24  # pixels
TEXT = "What is this?"
TOKENS = 8  # of each answer
TYPED_TOKENS = 60  # of an answer in JSON, which ends by itself: the Agents client refuses cut ones
Call = Callable[[str], dict[str, Any] | None]  # with figures for its row


def png(color: tuple[int, int, int], side: int = SIDE) -> bytes:
    """File of an image of one color."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checked = kind + data
        return struct.pack(">I", len(data)) + checked + struct.pack(">I", zlib.crc32(checked))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    rows = zlib.compress((b"\0" + bytes(color) * side) * side)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", rows), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def data_url(color: tuple[int, int, int]) -> str:
    return f"data:image/png;base64,{b64encode(png(color)).decode()}"


def message(color: tuple[int, int, int], text: str = TEXT) -> dict[str, Any]:
    """Message of the user with an image, as OpenAI's chat has it."""
    image = {"type": "image_url", "image_url": {"url": data_url(color)}}
    return {"role": "user", "content": [image, {"type": "text", "text": text}]}


def item(color: tuple[int, int, int]) -> dict[str, Any]:
    """Message of the user with an image, as OpenAI's responses have it."""
    image = {"type": "input_image", "image_url": data_url(color), "detail": "auto"}
    return {"role": "user", "content": [image, {"type": "input_text", "text": TEXT}]}


def openai_images(url: str) -> dict[str, Any]:
    """Chat and responses; another image behind the same text is read, the same one is not."""
    from openai import OpenAI

    with OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:

        def cached(color: tuple[int, int, int]) -> tuple[int, int]:
            given: Any = {"model": MODEL, "max_tokens": TOKENS}
            texts = {"messages": [message(color), {"role": "assistant", "content": "A wall."}]}
            texts["messages"].append({"role": "user", "content": "And behind it?"})
            usage = client.chat.completions.create(**given, **texts).usage
            return usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens

        # The template's text before the images is all that these share.
        cached(GREEN)
        first, again, other = cached(RED), cached(RED), cached(BLUE)
        assert again[0] > again[1] // 2, f"{again[0]} of {again[1]} tokens cached"
        assert other[0] == first[0], f"{other[0]} tokens of another image"
        given: Any = {"model": MODEL, "messages": [message(RED)], "max_tokens": TOKENS}
        assert list(client.chat.completions.create(**given, stream=True))
        asked: Any = {"model": MODEL, "max_output_tokens": TOKENS, "input": [item(RED)]}
        result = client.responses.create(**asked)
        assert result.usage.output_tokens
        then = {"input": "And?", "previous_response_id": result.id}
        with client.responses.stream(**asked | then) as stream:
            last = list(stream)[-1]
        assert last.response.usage.input_tokens_details.cached_tokens > 0, last.type
    return {"cached_of_same_and_other_image": [again[0], other[0]]}


def anthropic_images(url: str) -> None:
    from anthropic import Anthropic

    source = {"type": "base64", "media_type": "image/png", "data": b64encode(png(RED)).decode()}
    content = [{"type": "image", "source": source}, {"type": "text", "text": TEXT}]
    given: Any = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
    with Anthropic(base_url=url, api_key=KEY, max_retries=0) as client:
        counted = client.messages.count_tokens(**given).input_tokens
        with client.messages.stream(**given, max_tokens=TOKENS) as stream:
            streamed = stream.get_final_message()
        for result in (client.messages.create(**given, max_tokens=TOKENS), streamed):
            used = result.usage
            read = used.cache_read_input_tokens + used.cache_creation_input_tokens
            assert used.output_tokens and used.input_tokens + read == counted


def langchain_images(url: str) -> None:
    from langchain_core.messages import HumanMessage
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(base_url=f"{url}/v1", api_key=KEY, model=MODEL, max_tokens=TOKENS)
    encoded = b64encode(png(RED)).decode()
    image = {"type": "image", "base64": encoded, "mime_type": "image/png"}
    asked = [HumanMessage([image, {"type": "text", "text": TEXT}])]
    assert model.invoke(asked).usage_metadata["output_tokens"]
    assert list(model.stream(asked))


def agents_images(url: str) -> None:
    asyncio.run(_agents_images(url))


async def _agents_images(url: str) -> None:
    import agents
    from openai import AsyncOpenAI
    from pydantic import BaseModel

    class Seen(BaseModel):
        is_red: bool

    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
        settings = agents.ModelSettings(max_tokens=TYPED_TOKENS)
        agent = agents.Agent(
            name="seer", model=kind(MODEL, client), output_type=Seen, model_settings=settings
        )
        asked: Any = [item(RED)]
        found = await agents.Runner.run(agent, asked)
        assert found.raw_responses[0].usage.output_tokens
        result = agents.Runner.run_streamed(agent, asked)
        assert [event async for event in result.stream_events()]
        assert isinstance(found.final_output, Seen) and isinstance(result.final_output, Seen)


def inspect_images(url: str) -> None:
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import ChatMessageUser, ContentImage, ContentText

    for name in ("LARDER", "VLLM"):
        os.environ[f"{name}_API_KEY"], os.environ[f"{name}_BASE_URL"] = KEY, f"{url}/v1"
    content = [ContentImage(image=data_url(RED)), ContentText(text=TEXT)]
    task = Task(dataset=[Sample(input=[ChatMessageUser(content=content)])])
    for form in ("openai-api/larder", "vllm"):
        with tempfile.TemporaryDirectory() as folder:
            given: Any = {"log_dir": folder, "display": "none", "max_tokens": TOKENS}
            [log] = eval(task, model=f"{form}/{MODEL}", **given)
            assert log.status == "success", log.error


def llm_images(url: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        entry = {"model_id": "larder", "model_name": MODEL, "api_base": f"{url}/v1"}
        entry |= {"vision": True, "api_key_name": "none"}
        lines = "\n".join(f"  {name}: {json.dumps(value)}" for name, value in entry.items())
        Path(folder, "extra-openai-models.yaml").write_text(f"-{lines[1:]}\n")
        image = Path(folder, "red.png")
        image.write_bytes(png(RED))
        base = [str(Path(sys.executable).parent / "llm"), "-m", "larder", "--key", KEY]
        asked = [*base, TEXT, "-a", str(image), "-o", "max_tokens", str(TOKENS)]
        environment = {**os.environ, "LLM_USER_PATH": folder}
        for more in ([], ["--no-stream"]):
            done = subprocess.run([*asked, *more], env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr


def openai_images_refused(url: str) -> None:
    """A model that does not see says so, in both forms, streamed or not."""
    from openai import BadRequestError, OpenAI

    with OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        for streamed in (False, True):
            for call, given in (
                (client.chat.completions.create, {"messages": [message(RED)]}),
                (client.responses.create, {"input": [item(RED)]}),
            ):
                asked: Any = {"model": MODEL, "stream": streamed, **given}
                _assert_refused(lambda call=call, asked=asked: call(**asked), BadRequestError)


def anthropic_images_refused(url: str) -> None:
    from anthropic import Anthropic, BadRequestError

    source = {"type": "base64", "media_type": "image/png", "data": b64encode(png(RED)).decode()}
    asked: Any = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    given: Any = {"model": MODEL, "max_tokens": TOKENS, "messages": asked}
    with Anthropic(base_url=url, api_key=KEY, max_retries=0) as client:
        for streamed in (False, True):
            _assert_refused(
                lambda streamed=streamed: client.messages.create(**given, stream=streamed),
                BadRequestError,
            )


def _assert_refused(call: Callable[[], Any], kind: type[Exception]) -> None:
    try:
        call()
    except kind as error:
        assert "image" in str(error), error
        return
    raise AssertionError("an image was not refused")


IMAGE_CALLS: list[tuple[str, str, Call]] = [
    ("openai", "images: chat and responses, streamed or not, another image", openai_images),
    ("anthropic", "images, streamed or not, count_tokens", anthropic_images),
    ("langchain-openai", "images, streamed or not", langchain_images),
    ("openai-agents", "images, both APIs, streamed or not", agents_images),
    ("inspect-ai", "images, both forms", inspect_images),
    ("llm", "images, streamed or not", llm_images),
]
REFUSED_IMAGE_CALLS: list[tuple[str, str, Call]] = [
    ("openai", "images refused where the model does not see", openai_images_refused),
    ("anthropic", "images refused where the model does not see", anthropic_images_refused),
]
