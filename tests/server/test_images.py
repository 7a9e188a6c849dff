"""Sessions with images: answers, prefix hits, the store and refusals."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass
from io import BytesIO
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from architectures.families_vision import IMAGE, SIDE
from interop.image_prompts import IMAGE_INPUTS, IMAGE_TOKENS, NAMES, model_of
from larder.engine import SamplingParams
from larder.models import LoadedModel, shared_decoder
from larder.server import (
    ApiError,
    ChatMessage,
    RequestImages,
    ServingPolicy,
    SessionState,
    image_prompts,
)
from server_core import LIMITED, Client, Served, answered, characters, user
from server_stores import Stored

QWEN, LLAVA = NAMES[0], NAMES[2]
STOP = 2  # token that ends an answer
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def file_of(shade: int) -> bytes:
    file = BytesIO()
    Image.new("RGB", (4, 4), (shade, 0, 0)).save(file, "PNG")
    return file.getvalue()


def pixels_of(image: Image.Image) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(int(image.tobytes()[0]))
    return torch.randn(3, SIDE, SIDE, generator=drawn)


@dataclass
class ShadeProcessor:
    """Processor of a family whose tokens are characters; an image is random by its shade."""

    name: str
    tokenizer: Any
    image_token: str = "<image>"

    def __call__(self, text: list[str], images: list[list[Image.Image]], **options: Any) -> Any:
        assert options == {"return_tensors": "pt", "add_special_tokens": False}
        first, *others = (self.tokenizer.encode(each) for each in text[0].split(self.image_token))
        ids = first + [t for each in others for t in [IMAGE] * IMAGE_TOKENS[self.name] + each]
        return self.inputs(ids, [pixels_of(image) for image in images[0]])

    def inputs(self, ids: list[int], pixels: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        row = torch.tensor([ids])
        return {"input_ids": row, "attention_mask": torch.ones_like(row)} | IMAGE_INPUTS[self.name](
            row, [pixels]
        )


def loaded(name: str) -> LoadedModel:
    tokenizer = characters().tokenizer
    processor = ShadeProcessor(name, tokenizer)
    return LoadedModel(shared_decoder(model_of(name)), tokenizer, name, processor)


@dataclass
class ImageClient:
    """Messages with images of some shades, as a client sends them."""

    served: Served | Stored
    images: RequestImages

    def ask(self, turns: list[ChatMessage], session: str = "x", **options: Any) -> Client:
        return self.served.ask(turns, session, images=self.images.files, **options)

    def message(self, *parts: str | int) -> ChatMessage:
        texts = (part if isinstance(part, str) else self.mark(part) for part in parts)
        return user("".join(texts))

    def mark(self, shade: int) -> str:
        data = b64encode(file_of(shade)).decode()
        return self.images.mark(f"data:image/png;base64,{data}")

    def session(self, name: str = "x") -> SessionState:
        return self.served.core.sessions.find("a", name)


def image_client(name: str, **options: Any) -> ImageClient:
    return ImageClient(Served(loaded(name), **options), RequestImages())


def model_answer(name: str, session: SessionState, shades: list[int], tokens: int = 4) -> list[int]:
    """Answer to the last prompt of a session by the model alone."""
    *past, last = session.turns
    ids = [t for turn in past for part in (turn.prompt_ids, turn.answer_ids) for t in part]
    vocabulary = session.serving.runtime.decoder.vocab_size
    real = [IMAGE if t >= vocabulary else t for t in (*ids, *last.prompt_ids)]
    pixels = [pixels_of(Image.open(BytesIO(file_of(shade)))) for shade in shades]
    given = ShadeProcessor(name, None).inputs(real, pixels)
    out = model_of(name).generate(**given, max_new_tokens=tokens, **GREEDY)
    return out[0, len(real) :].tolist()


def assert_answered(name: str, one: ImageClient, shades: list[int], session: str = "x") -> None:
    held = one.session(session)
    expected = list(takewhile(lambda t: t != STOP, model_answer(name, held, shades)))
    assert list(held.turns[-1].answer_ids[: len(expected)]) == expected


@pytest.fixture
def merges(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of images that the vision tower has read at once."""
    calls, merge = list[int](), image_prompts.merge_images

    def counted(decoder: Any, inputs: Any) -> Any:
        merged = merge(decoder, inputs)
        calls.append(len(merged.images.spans))
        return merged

    monkeypatch.setattr(image_prompts, "merge_images", counted)
    return calls


@pytest.mark.parametrize("name", NAMES)
def test_image_conversation_matches_the_model(name: str, merges: list[int]) -> None:
    one = image_client(name)
    turns = [one.message("Look with care: ", 10, " an", 20, "?")]
    first = one.ask(turns)
    assert_answered(name, one, [10, 20])
    assert len(first.text) > 2
    turns = answered(turns, first, "Why?")
    second = one.ask(turns)
    assert_answered(name, one, [10, 20])
    assert merges == [2] and second.result.cached_tokens > first.result.prompt_tokens
    turns = answered(turns, second, "")[:-1] + [one.message("An this one? ", 30, " So?")]
    third = one.ask(turns)
    assert_answered(name, one, [10, 20, 30])
    assert merges == [2, 1] and third.result.cached_tokens > second.result.prompt_tokens
    if not one.session().serving.can_truncate:
        return
    other = one.ask([one.message("Look with care: ", 11, " an", 20, "?")], "y").result
    assert other.cached_tokens == len("User: Look with care: ")
    same = one.ask([one.message("Look with care: ", 10, " an", 20, "!")], "z").result
    assert same.cached_tokens == first.result.prompt_tokens - len("?\nAssistant:")


def test_dropped_image_cache_is_recomputed(merges: list[int]) -> None:
    one = image_client(QWEN)
    turns = [one.message("Look: ", 10, " here?")]
    turns = answered(turns, one.ask(turns), "Why?")
    turns = answered(turns, one.ask(turns), "")[:-1] + [one.message("An", 30, "?")]
    one.served.core.tiers.drop(one.session())
    again = one.ask(turns)
    assert again.result.cached_tokens == 0
    assert_answered(QWEN, one, [10, 30])
    assert merges == [1, 1, 1]
    one.served.core.tiers.drop(one.session())
    one.images.files.clear()
    with pytest.raises(AssertionError, match="no longer in a cache"):
        one.ask(answered(turns, again, "So?"))


@pytest.mark.extended
def test_sessions_share_no_prefix_past_a_different_image() -> None:
    one, text = image_client(QWEN), "Look with care, an then say: " * 4  # so long that it is shared
    before, asked = len(f"User: {text}"), " here? An "
    first = [one.message(text, 10, asked, 20, "?")]
    answer = one.ask(first)
    for name, shades, cached in (
        ("y", (11, 20), before),
        ("z", (10, 21), before),  # one image of a turn, and none of them is reused
        ("w", (10, 20), answer.result.prompt_tokens - 1),
    ):
        result = one.ask([one.message(text, shades[0], asked, shades[1], "?")], name).result
        assert result.cached_tokens == cached
        assert_answered(QWEN, one, [*shades], name)
    for shade in (30, 31):  # two branches of one session
        turns = [*answered(first, answer, "")[:-1], one.message(asked, shade, "?")]
        report = one.ask(turns).result
        assert answer.result.prompt_tokens < report.cached_tokens < report.prompt_tokens - 1
        assert_answered(QWEN, one, [10, 20, shade], report.session)


@pytest.mark.usefixtures("loads")
def test_stored_image_session_continues(tmp_path: Path, merges: list[int]) -> None:
    model, images = loaded(QWEN), RequestImages()
    store = Stored(model, tmp_path)
    before = ImageClient(store, images)
    turns = [before.message("Look with care: ", 10, " here?")]
    turns = answered(turns, before.ask(turns), "Why?")
    store.close()
    store = Stored(model, tmp_path)
    after = ImageClient(store, images)
    again = after.ask(turns)
    assert_answered(QWEN, after, [10])
    assert again.result.restored_tokens > 0 and merges == [1]
    store.close()


def test_repetition_penalty_is_accepted_with_images() -> None:
    one = image_client(LLAVA)
    sampling = SamplingParams(temperature=0.0, repetition_penalty=1.5)
    assert one.ask([one.message("Look: ", 10, "?")], sampling=sampling).text


def test_prefill_blocks_do_not_split_images(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = ("Look: ", 10, " an", 20, " an", 30, "?")
    whole, cut = image_client(QWEN), image_client(QWEN)
    expected = whole.ask([whole.message(*parts)]).text
    monkeypatch.setattr(ServingPolicy, "block", 3)
    assert cut.ask([cut.message(*parts)]).text == expected
    assert cut.served.core.scheduler.blocks > 3


def test_unsupported_image_requests_are_refused() -> None:
    one = image_client(LLAVA)
    with pytest.raises(ApiError, match="image tokens"):
        one.ask([one.message("What is <image> in ", 10, "?")])
    with pytest.raises(ApiError, match="earlier message"):
        ImageClient(one.served, RequestImages()).ask([one.message("Look: ", 10, "?")])
    limited = image_client(LLAVA, policy=LIMITED)
    with pytest.raises(ApiError, match="kv_policy 'exact'"):
        limited.ask([limited.message("Look: ", 10, "?")])
    assert limited.ask([limited.message("Look: ", 10, "?")], exact=True).text
    apart, context = image_client(LLAVA, policy="ape"), ("A man is here.",)
    with pytest.raises(ApiError, match="read apart in front of text alone: ask with kv_policy"):
        apart.ask([apart.message("Look: ", 10, "?")], contexts=context)
    assert apart.ask([apart.message("Look: ", 10, "?")], contexts=context, exact=True).text
