"""Prefill of a text with images under a policy."""

from __future__ import annotations

import time
from dataclasses import dataclass

from larder.cache.sequence import SequenceCache
from larder.core.errors import UsageError
from larder.core.images import ImageSpans
from larder.core.observation import Prompts
from larder.models.merged_images import MergedText
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
    policy: Policy, ids: tuple[int, ...], images: ImageSpans, start: int, prompts: Prompts
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
