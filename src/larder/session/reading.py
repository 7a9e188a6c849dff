"""Read a conversation under a policy: from messages to a memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from larder.cache.sequence import Form, SequenceCache
from larder.core.conversation import Conversation
from larder.core.errors import InputError
from larder.core.observation import Prompts
from larder.models.decoder import Decoder
from larder.policy.budgets.base import Calibration
from larder.policy.budgets.unlimited import WITHOUT_LIMIT
from larder.prefill.base import Progress, silent
from larder.prefill.meter import Meter
from larder.prefill.reader import Lane, Reader
from larder.session.embedders.base import Embedder
from larder.session.memory import Figures, Memory
from larder.session.policy import Policy
from larder.session.prompts import common_prompts, episode_prompt, require
from larder.session.routing import Router
from larder.session.shelf import Shelf
from larder.session.sizes import resolve
from larder.session.transcript import Scribe


@dataclass(frozen=True)
class Desk:
    """What is needed to read: a model, its script, an embedder on demand, its measurements.

    Args:
        embedder: loads the embedder that a policy names.
        calibrate: measures what a budget needs, by name; kept per model.
    """

    decoder: Decoder
    scribe: Scribe
    embedder: Callable[[str], Embedder]
    calibrate: Callable[[frozenset[str]], Calibration]


@dataclass(frozen=True)
class Sizes:
    """What the command line says about sizes; None where it says nothing."""

    budget: str | None = None
    block: int | None = None


def read(
    desk: Desk,
    conversation: Conversation,
    policy: Policy,
    sizes: Sizes,
    prompts: Prompts,
    progress: Progress = silent,
) -> Memory:
    """Read a conversation into one cache or into one per episode.

    Args:
        prompts: further prompts by name, such as the question for an oracle policy.

    Raises:
        InputError: the conversation is empty.
        UsageError, BudgetError: sizes contradict each other or do not fit.
    """
    started = time.perf_counter()
    transcript = desk.scribe.write(conversation)
    context = len(transcript.ids)
    if not conversation.messages or not context:
        raise InputError(f"{conversation.name} holds no messages: there is nothing to read.")
    spec = desk.decoder.spec
    tokens = resolve(policy.budget, sizes.budget, context, spec)
    policy = policy.filled(tokens, sizes.block)
    router = policy.session.arrange(
        conversation, desk.embedder, lambda text: len(desk.scribe.encode(text))
    )
    meter = Meter()
    books = books_for(desk, router, prompts)
    caches = build(desk, policy, transcript.ids, books, meter, progress)
    figures = Figures(
        context_tokens=context,
        budget_tokens=min(tokens, context),
        full_kv_bytes=spec.full_bytes(context),
        kv_bytes=sum(cache.nbytes for cache in caches),
        active_kv_bytes=max(cache.nbytes for cache in caches),
        peak_kv_bytes=meter.peak_bytes,
        peak_entries=meter.peak_entries,
        prefill_seconds=time.perf_counter() - started,
    )
    return Memory(policy, conversation, transcript, Shelf(spec, caches), router, figures)


def books_for(desk: Desk, router: Router, prompts: Prompts) -> list[Prompts]:
    """One book of prompts per cache to build."""
    common = {**common_prompts(desk.scribe), **prompts}
    shown = router.prompts()
    if not shown:
        return [common]
    return [{**common, "episode": episode_prompt(desk.scribe, texts)} for texts in shown]


def build(
    desk: Desk,
    policy: Policy,
    ids: tuple[int, ...],
    books: Sequence[Prompts],
    meter: Meter,
    progress: Progress = silent,
) -> list[SequenceCache]:
    """Read tokens into one cache per book, each within the policy's budget."""
    planner, spec = policy.planner, desk.decoder.spec
    for book in books:
        require(book, planner.scorer.wanted())
    tokens = policy.budget.tokens
    assert tokens is not None  # filled in by `Policy.filled`
    facts = desk.calibrate(policy.budget.calibrations)
    quotas = planner.quotas(tokens, tuple(layer.index for layer in spec.managed), facts)
    form = Form.DENSE if tokens == WITHOUT_LIMIT else Form.RAGGED
    lanes = [Lane(SequenceCache(spec, form), book) for book in books]
    reader = Reader(desk.decoder, planner, tokens, quotas, meter)
    policy.schedule.read(reader, lanes, ids, progress)
    return [lane.cache for lane in lanes]
