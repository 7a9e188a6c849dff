"""Prompts with images, as the processor of a model encodes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from larder.core.arguments import check_type
from larder.core.errors import BadParameter, InputError
from larder.models.merged_images import MergedText, merge_images
from larder.session.prefill import ModelRuntime


def encode_image_prompts(
    runtime: ModelRuntime, processor: Any, prompts: Sequence[str], images: Sequence[Sequence[Any]]
) -> list[tuple[tuple[int, ...], MergedText | None]]:
    """Token ids of prompts, and the texts with images that the model merges into embeddings.

    Args:
        images: images of each prompt, in the order of its image tokens; empty for none.

    Raises:
        BadParameter: there is no processor, or an image is no image in memory.
        InputError: prompts and images differ in number, or a prompt ends with an image.
        ModelError: the model does not take images.
    """
    if processor is None:
        raise BadParameter(
            "images were given, but the engine has no processor: make it with "
            "Engine(model, processor=transformers.AutoProcessor.from_pretrained(name)), or with "
            "Engine.load(name, processor=name)."
        )
    if not callable(processor):
        raise BadParameter(
            "processor must be one of transformers, as AutoProcessor loads it, got a "
            f"{type(processor).__name__}: give it to the engine."
        )
    check_type("images", images, (list, tuple), "a list of images, or one for each prompt")
    if len(images) != len(prompts):
        raise InputError(
            f"{len(images)} lists of images were given for {len(prompts)} prompts: give a list of "
            "images for each prompt, an empty one where it has none."
        )
    pairs = zip(prompts, images, strict=True)
    return [_encoded(runtime, processor, *pair, n) for n, pair in enumerate(pairs, start=1)]


def _encoded(
    runtime: ModelRuntime, processor: Any, prompt: str, images: Sequence[Any], number: int
) -> tuple[tuple[int, ...], MergedText | None]:
    """Token ids of prompt `number`, and its text with images; None where it has none."""
    check_type("images", images, (list, tuple), "a list of images, or one for each prompt")
    if not images:
        ids = runtime.tokenizer.encode_prompt(prompt)
        if not ids:
            raise InputError(f"Prompt {number} has no tokens: give it at least one character.")
        return ids, None
    for image in images:
        # A processor reads paths and fetches addresses, which the caller is to decide about.
        if isinstance(image, (str, bytes)):
            raise BadParameter(
                f"images holds a {type(image).__name__}, but takes images in memory: open it "
                "first, as in PIL.Image.open(path)."
            )
    try:
        inputs = processor(text=[prompt], images=[list(images)], return_tensors="pt")
    except TypeError as error:
        kinds = ", ".join(sorted({type(image).__name__ for image in images}))
        raise BadParameter(
            f"images of prompt {number} must be images in memory, such as PIL's, got {kinds}: "
            f"the processor refuses them ({error})."
        ) from error
    except ValueError as error:
        raise _mismatch(number, images, error) from error
    try:
        merged = merge_images(runtime.decoder, inputs)
    except ValueError as error:
        raise _mismatch(number, images, error) from error
    if merged.images.spans[-1][1] == len(merged.ids):
        raise InputError(f"Prompt {number} ends with an image: give text behind it.")
    return merged.ids, merged


def _mismatch(number: int, images: Sequence[Any], error: ValueError) -> InputError:
    return InputError(
        f"Prompt {number} and its {len(images)} images do not go together ({error}): give an "
        "image for each image token of the prompt, as a chat template writes it."
    )
