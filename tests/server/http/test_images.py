"""Messages with images over HTTP, against the model alone."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import openai
import pytest
from openai import OpenAI
from PIL import Image

from engine.test_images import GREEDY, LLAVA, llava_processor, model_of
from larder import Engine
from larder.server import Archive, HttpSettings, LocalEngineClient, LoopbackAuth, create_app
from larder.server.http import image_parts
from server.http.running_server import listening

NAME = "LlavaForConditionalGeneration in memory"
RED, BLUE = (Image.new("RGB", (20, 30), color) for color in ((200, 10, 30), (5, 20, 240)))
PARTS = (
    "{% for m in messages %}{{ m.role }} : {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %} <image> {% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %} 9 {% endfor %}{% if add_generation_prompt %}11 {% endif %}"
)


def data_url(image: Image.Image, kind: str = "PNG") -> str:
    file = BytesIO()
    image.save(file, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def shown(image: Image.Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(image)}}


def user(*parts: str | Image.Image) -> dict[str, Any]:
    content = [{"type": "text", "text": p} if isinstance(p, str) else shown(p) for p in parts]
    return {"role": "user", "content": content}


@pytest.fixture(scope="module", params=["marks", "parts"])
def engine(request: pytest.FixtureRequest) -> Engine:
    model = model_of(LLAVA)
    processor = llava_processor(model)
    if request.param == "parts":
        processor.tokenizer.chat_template = PARTS
    return Engine(model, policy="full", processor=processor)


@pytest.fixture(scope="module")
def client(engine: Engine) -> Iterator[OpenAI]:
    engine.stop_ids = frozenset()
    hub = LocalEngineClient(engine)
    app = create_app(hub, LoopbackAuth(), Archive(), HttpSettings(max_new_tokens=8))
    with listening(app) as url, OpenAI(api_key="-", base_url=f"{url}/v1", max_retries=0) as found:
        yield found


def asked(client: OpenAI, *messages: Any, **more: Any) -> Any:
    return client.chat.completions.create(model=NAME, messages=messages, temperature=0, **more)


def model_answer(engine: Engine, text: str, *images: Image.Image) -> list[int]:
    """Answer of the model alone, 8 tokens."""
    model = model_of(LLAVA)
    processor: Any = llava_processor(model)
    given = processor(text=[text], images=[list(images)], return_tensors="pt")
    return model.generate(**given, max_new_tokens=8, **GREEDY)[0, -8:].tolist()


def test_image_chat_matches_the_processor_and_model(client: OpenAI, engine: Engine) -> None:
    answer = asked(client, user("5 ", RED, " 7 8"))
    text = "User: 5 <image> 7 8\nAssistant:"
    if engine.tokenizer.tokenizer.chat_template:
        text = "user : 5  <image>  7 8 9 11 "
    expected = model_answer(engine, text, RED)
    assert answer.choices[0].message.content == engine.tokenizer.decode(expected)
    again = asked(client, user("5 ", RED, " 7 8"), stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in again if c.choices) == (
        answer.choices[0].message.content
    )
    past = [
        user("5 ", RED, " 7 8"),
        {"role": "assistant", "content": answer.choices[0].message.content},
    ]
    second = asked(client, *past, user("6 ", BLUE, " 7"))
    assert second.usage.prompt_tokens_details.cached_tokens >= answer.usage.prompt_tokens


def test_responses_accept_image_items(client: OpenAI) -> None:
    content: Any = [
        {"type": "input_text", "text": "5 "},
        {"type": "input_image", "detail": "auto", "image_url": data_url(RED)},
        {"type": "input_text", "text": " 7 8"},
    ]
    given: Any = {"model": NAME, "temperature": 0}
    answer = client.responses.create(input=[{"role": "user", "content": content}], **given)
    expected = asked(client, user("5 ", RED, " 7 8")).choices[0].message.content
    assert answer.output_text == expected
    [item] = client.responses.input_items.list(answer.id).data
    shape = [(p.type, getattr(p, "text", None)) for p in item.content]  # pyright: ignore
    assert shape == [("input_text", "5 "), ("input_image", None), ("input_text", " 7 8")]
    second = client.responses.create(input="6", previous_response_id=answer.id, **given)
    assert second.usage is not None and answer.usage is not None
    assert second.usage.input_tokens_details.cached_tokens >= answer.usage.input_tokens


@pytest.mark.parametrize(
    ("part", "error"),
    [
        (
            {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
            "nothing is fetched",
        ),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,!"}}, "base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "formats"),
        ({"type": "image_url", "image_url": {"url": data_url(RED)[:-40]}}, "cannot be read|base64"),
        ({"type": "image_url"}, "no image_url"),
        ({"type": "input_audio", "text": "x"}, "input_audio"),
        ({"type": "text", "text": "what is <image> here"}, "image tokens"),
    ],
)
def test_invalid_image_parts_are_refused(client: OpenAI, part: dict[str, Any], error: str) -> None:
    content = [part, {"type": "text", "text": " 5"}, shown(BLUE)]
    with pytest.raises(openai.BadRequestError, match=error):
        asked(client, {"role": "user", "content": [*content, {"type": "text", "text": " 6"}]})


def test_misplaced_or_oversized_images_are_refused(
    client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    for role in ("system", "assistant"):
        with pytest.raises(openai.BadRequestError, match="message of the user"):
            asked(client, {"role": role, "content": [shown(RED)]}, user("5"))
    with pytest.raises(openai.BadRequestError, match="chat/completions"):
        content: Any = [{"type": "input_image", "image_url": data_url(RED)}]
        client.conversations.create(items=[{"role": "user", "content": content}])
    with pytest.raises(openai.BadRequestError, match=r"U.FDD0"):
        asked(client, {"role": "user", "content": "a\ufdd0image"})
    monkeypatch.setattr(image_parts, "MAX_IMAGES", 1)
    with pytest.raises(openai.BadRequestError, match="more than 1 images"):
        asked(client, user("5 ", RED, " 6", RED))
    monkeypatch.setattr(image_parts, "MAX_PIXELS", 100)
    with pytest.raises(openai.BadRequestError, match="20 x 30 pixels"):
        asked(client, user("5 ", RED, " 6"))
    monkeypatch.setattr(image_parts, "MAX_IMAGES", 3)
    monkeypatch.setattr(image_parts, "MAX_PIXELS", 1200)
    assert asked(client, user("5 ", RED, RED, " 6")).choices
    with pytest.raises(openai.BadRequestError, match="request has more than 1,200"):
        asked(client, user("5 ", RED, RED, RED, " 6"))
