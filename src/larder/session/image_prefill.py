"""Prompts with images, as the processor of a model encodes them, and prefill of their texts under a
policy.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from larder.cache.sequence import SequenceCache
from larder.core.arguments import check_type
from larder.core.errors import BadParameter, InputError, UsageError
from larder.core.images import ImageSpans
from larder.core.observation import Prompts
from larder.core.types import TokenIds
from larder.models.processor import MergedText, merge_images
from larder.prefill.base import Progress, run_steps
from larder.prefill.memory import PeakMemoryMeter
from larder.prefill.reader import PrefillSequence
from larder.session.caches import SessionCaches
from larder.session.capacity import cache_figures, check_recent_fits, empty_cache, entries_per_head
from larder.session.memory import CacheFigures
from larder.session.policy import Policy
from larder.session.prefill import (
    ModelRuntime,
    common_prompts,
    prefill_reader,
    require_prompts,
    warm_up,
)


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


@dataclass(frozen=True)
class ImagePrefill:
    """Cache of a text with images.

    Args:
        prompts: scratch prompts by name that its entries are scored with.
    """

    cache: SequenceCache
    prompts: Prompts
    figures: CacheFigures


def check_images(
    policy: Policy, ids: TokenIds, images: ImageSpans, start: int, prompts: Prompts
) -> None:
    """Check that a policy can read a text with images, whose tokens ids do not tell.

    Args:
        start: true position of the first token.
        prompts: scratch prompts by name.

    Raises:
        UsageError: a part of the policy reads image tokens again, or what predicted them.
    """
    planner = policy.planner
    scratches = planner.scorer.scratch(ids, start, prompts)
    shown = {ids[place] for first, stop in images.spans for place in range(first, stop)}
    rereads = any(shown.intersection(scratch.ids) for scratch in scratches)
    if rereads or planner.token_providers or policy.rebuilding:
        raise UsageError(
            f"The policy {policy} reads tokens again by their ids, but the text has "
            "images, whose tokens have none: use a policy that scores by attention, keys or "
            "values, such as snapkv or keydiff."
        )


def prefill_images(
    runtime: ModelRuntime, policy: Policy, text: MergedText, progress: Progress
) -> ImagePrefill:
    """Read a text with images, all tokens but the last, into a cache of its own.

    Args:
        policy: policy with every size filled in.

    Raises:
        UsageError: the policy forms episodes, or reads image tokens again.
    """
    if policy.session.embedders():
        raise UsageError(
            f"The policy {policy} forms episodes by the words of a conversation, but the text has "
            "images: use a policy without episodes(), such as snapkv or keydiff."
        )
    spec, context = runtime.decoder.spec, text.ids[:-1]
    started, meter = time.perf_counter(), PeakMemoryMeter()
    prompts = common_prompts(runtime.tokenizer)
    require_prompts(prompts, policy.scorer.required_prompts())
    check_recent_fits(policy, entries_per_head(policy, spec))
    check_images(policy, context, text.images, 0, prompts)
    warm_up(runtime, policy)
    read_at, cache = time.perf_counter(), empty_cache(policy, spec)
    text.place(cache)
    reader = prefill_reader(runtime, policy, len(context), meter)
    sequence = PrefillSequence(cache, prompts, images=text.images)
    with text.embedded(runtime.decoder, cache):
        run_steps(policy.schedule.steps(reader, [sequence], context), progress)
    figures = cache_figures(
        policy,
        spec,
        SessionCaches.of_active(spec, cache),
        context_tokens=len(context),
        peak_kv_bytes=meter.peak_bytes,
        peak_entries=meter.peak_entries,
        prefill_seconds=time.perf_counter() - read_at,
        setup_seconds=read_at - started,
    )
    return ImagePrefill(cache, prompts, figures)
