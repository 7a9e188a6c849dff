"""Completion of prompts with images by an Engine, against the model alone."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import CLIPImageProcessorPil, LlavaProcessor, PreTrainedTokenizerFast

import larder
from architectures.families_vision import IMAGE, PATCH, SIDE
from interop.image_prompts import IMAGE_TOKENS, NAMES, Prompt, inputs_of, model_of
from interop.replay import assert_same_entries
from larder.core import BadParameter, DependencyError, InputError, Mode, ModelError, UsageError
from larder.engine import EncodedPrompt, prefill_prompt
from larder.interop import LarderCache
from larder.models import PROCESSOR_FILES, BatchSegment
from larder.session import encode_image_prompts

PROMPT = Prompt((10, None, 12, None, 7))
OTHER = Prompt((5, None, 9), seed=9)
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
FREED = "blockwise(tokens=9) > protect(sinks=2, recent=4) > keydiff() > pooled()"
QWEN, GEMMA, LLAVA = NAMES[:3]


def tokenizer_of(model: Any) -> Any:
    """Tokenizer whose words are the token ids as decimal numbers."""
    rows = len(model.get_input_embeddings().weight)
    backend = Tokenizer(WordLevel({str(number): number for number in range(rows)}, "0"))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@dataclass
class FakeProcessor:
    """Processor that takes prompts of the test as images, and answers with their pixels."""

    name: str
    tokenizer: Any
    calls: list[str] = field(default_factory=list[str])

    def __call__(self, text: list[str], images: list[list[Any]], **options: Any) -> dict[str, Any]:
        assert options == {"return_tensors": "pt"}
        self.calls += text
        return inputs_of(self.name, images[0][0])


def engine_of(name: str, policy: str = "full", budget: int | None = None) -> larder.Engine:
    model = model_of(name)
    processor = FakeProcessor(name, tokenizer_of(model))
    return larder.Engine(model, policy=policy, budget=budget, processor=processor)


def words(prompt: Prompt, name: str) -> str:
    return " ".join(map(str, prompt.ids(name)))


def expected_ids(name: str, prompt: Prompt, tokens: int) -> list[int]:
    given = inputs_of(name, prompt)
    out = model_of(name).generate(**given, max_new_tokens=tokens, **GREEDY)
    return out[0, given["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("policy", ["full", "blockwise(tokens=6) > keydiff() > unlimited()"])
def test_full_budget_equals_the_model(name: str, policy: str) -> None:
    engine = engine_of(name, policy)
    engine.stop_ids = frozenset()
    prompts = [words(PROMPT, name), words(OTHER, name)]
    got = engine.generate(prompts, images=[[PROMPT], [OTHER]], max_new_tokens=12)
    assert list(got[0].ids) == expected_ids(name, PROMPT, 12)
    assert list(got[1].ids) == expected_ids(name, OTHER, 12)
    streamed = engine.stream(prompts[0], images=[PROMPT], max_new_tokens=12)
    assert "".join(streamed) == got[0].text


@pytest.mark.parametrize("name", NAMES)
def test_policy_keeps_the_same_entries_as_generate(name: str) -> None:
    engine = engine_of(name, FREED, 14)
    runtime, processor = engine.runtime, FakeProcessor(name, None)
    (read,) = encode_image_prompts(runtime, processor, [words(PROMPT, name)], [[PROMPT]])
    prompt = EncodedPrompt("x", *read)
    read = prefill_prompt(runtime, engine.policy, engine.sizes, prompt)
    shorter = Prompt((*PROMPT.parts[:-1], 6))
    cache = LarderCache(model_of(name), FREED, 14)
    given = inputs_of(name, shorter)
    model_of(name).generate(**given, past_key_values=cache, max_new_tokens=1, **GREEDY)
    assert prompt.ids[:-1] == tuple(shorter.ids(name))
    assert_same_entries(read.cache, cache.sequences[0])
    assert read.figures.kv_bytes < read.figures.full_kv_bytes


@pytest.mark.parametrize("name", NAMES)
def test_logits_after_images_equal_the_model(name: str) -> None:
    engine = engine_of(name)
    runtime, processor = engine.runtime, FakeProcessor(name, None)
    (read,) = encode_image_prompts(runtime, processor, ["x"], [[PROMPT]])
    prompt = EncodedPrompt("x", *read)
    assert prompt.merged is not None
    lengths = [stop - start for start, stop in prompt.merged.images.spans]
    assert lengths == [IMAGE_TOKENS[name]] * 2
    read = prefill_prompt(runtime, engine.policy, engine.sizes, prompt)
    segment = BatchSegment(read.cache, prompt.ids[-1:])
    (got,) = runtime.decoder.forward_logits([segment], Mode.APPEND, [0])
    given = inputs_of(name, PROMPT)
    expected = model_of(name)(**given).logits[0, -1]
    torch.testing.assert_close(got.flatten(), expected, atol=1e-4, rtol=0)
    swapped = model_of(name)(**given | {"pixel_values": -given["pixel_values"]}).logits[0, -1]
    assert (swapped - expected).abs().max() > 0.1  # images matter


def test_prompt_without_images_is_accepted() -> None:
    engine, text = engine_of(LLAVA), "5 6 7 8"
    both = engine.generate([text, words(OTHER, LLAVA)], images=[[], [OTHER]], max_new_tokens=4)
    assert both[0] == engine.generate(text, max_new_tokens=4)
    assert engine.under("full").generate(text, images=[], max_new_tokens=4) == both[0]


def test_invalid_image_arguments_are_refused() -> None:
    engine, text = engine_of(LLAVA), words(OTHER, LLAVA)
    without = larder.Engine(model_of(LLAVA), tokenizer_of(model_of(LLAVA)), policy="full")
    with pytest.raises(BadParameter, match="processor="):
        without.generate(text, images=[OTHER])
    with pytest.raises(BadParameter, match="in memory"):
        engine.generate(text, images=["https://example.org/cat.png"])
    with pytest.raises(InputError, match="2 lists of images were given for 1 prompts"):
        engine.generate([text], images=[[OTHER], [OTHER]])
    with pytest.raises(InputError, match="ends with an image"):
        engine.generate(text, images=[Prompt((5, None))])
    with pytest.raises(ModelError, match="merged no image"):
        engine.generate(text, images=[Prompt((5,))])
    with pytest.raises(UsageError, match="images"):
        engine.under("kvzip", 14).generate(text, images=[OTHER])
    with pytest.raises(UsageError, match="episodes"):
        engine.under("epicache_pooled", 14).generate(text, images=[OTHER])


class LossyProcessor(FakeProcessor):
    """Processor that drops all images of a prompt but the first."""

    def __call__(self, text: list[str], images: list[list[Any]], **options: Any) -> dict[str, Any]:
        given = super().__call__(text, images, **options)
        return given | {"pixel_values": given["pixel_values"][:1]}


def test_images_not_matching_the_prompt_are_refused() -> None:
    model = model_of(GEMMA)
    processor = LossyProcessor(GEMMA, tokenizer_of(model))
    engine = larder.Engine(model, policy="full", processor=processor)
    with pytest.raises(InputError, match="do not go together"):
        engine.generate("5", images=[PROMPT])
    assert engine.generate("5", images=[OTHER], max_new_tokens=4).ids  # the model is as before


def llava_processor(model: Any) -> LlavaProcessor:
    """Processor of Llava, with one word of the vocabulary as its image."""
    vocabulary = {str(n): n for n in range(len(model.get_input_embeddings().weight)) if n != IMAGE}
    backend = Tokenizer(WordLevel({**vocabulary, "<image>": IMAGE}, "0"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    sizes = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    return LlavaProcessor(
        CLIPImageProcessorPil(**sizes),
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


RED = Image.new("RGB", (20, 30), (200, 10, 30))


def expected_of_red(model: Any, processor: LlavaProcessor, text: str) -> list[int]:
    given = processor(text=[text], images=[[RED]], return_tensors="pt")
    return model.generate(**given, max_new_tokens=8, **GREEDY)[0, -8:].tolist()


def test_transformers_processor_is_used() -> None:
    model, text = model_of(LLAVA), "5 <image> 7 8"
    processor = llava_processor(model)
    engine = larder.Engine(model, policy="full", processor=processor)
    engine.stop_ids = frozenset()
    expected = expected_of_red(model, processor, text)
    assert list(engine.generate(text, images=[RED], max_new_tokens=8).ids) == expected
    with pytest.raises(InputError, match="do not go together"):
        engine.generate("5 7 8", images=[RED])
    with pytest.raises(BadParameter, match="images of prompt 1 must be images in memory.* got int"):
        engine.generate(text, images=[5])
    with pytest.raises(BadParameter, match="with a tokenizer.* got a CLIPImageProcessorPil"):
        larder.Engine(model, policy="full", processor=processor.image_processor)


@pytest.fixture(scope="module")
def llava_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model of Llava with its processor."""
    folder = tmp_path_factory.mktemp("llava")
    model_of(LLAVA).save_pretrained(folder)
    llava_processor(model_of(LLAVA)).save_pretrained(folder)
    return folder


@pytest.mark.extended
def test_model_folder_is_loaded_with_its_processor(llava_folder: Path) -> None:
    text, model = "5 <image> 7 8", model_of(LLAVA)
    expected = expected_of_red(model, llava_processor(model), text)
    for given in (None, str(llava_folder), llava_processor(model)):
        engine = larder.Engine.load(str(llava_folder), policy="full", processor=given)
        engine.stop_ids = frozenset()
        assert list(engine.generate(text, images=[RED], max_new_tokens=8).ids) == expected
        under = engine.under("full").generate(text, images=[RED], max_new_tokens=1)
        assert list(under.ids) == expected[:1]


def test_folder_without_a_processor_is_refused(llava_folder: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(llava_folder, tmp_path / "bare")
    for name in PROCESSOR_FILES:
        (bare / name).unlink(missing_ok=True)
    with pytest.raises(BadParameter, match="processor="):
        larder.Engine.load(str(bare), policy="full").generate("5 <image> 7", images=[RED])
    with pytest.raises(ModelError, match="processor of nowhere"):
        larder.Engine.load(str(bare), policy="full", processor="nowhere")


def test_missing_vision_extra_is_named(llava_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("larder.models.processor.find_spec", lambda name: None)
    engine = larder.Engine.load(str(llava_folder), policy="full")
    assert engine.generate("5 6 7", max_new_tokens=1).ids  # texts need no Pillow
    with pytest.raises(DependencyError, match=r"larder\[vision\]"):
        engine.generate("5 <image> 7", images=[RED])
