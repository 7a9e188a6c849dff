"""Read a conversation under a policy: from messages to a memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from larder.cache.sequence import SequenceCache
from larder.core.arguments import check_count
from larder.core.conversation import Conversation
from larder.core.errors import InputError, UsageError
from larder.core.memory_budget import MemoryBudget
from larder.core.observation import Calibration, Prompts
from larder.models.decoder import Decoder
from larder.models.introspection import output_projections
from larder.policy.budgets.unlimited import WITHOUT_LIMIT
from larder.policy.layer_calibration import select_layers
from larder.policy.planner import Planner
from larder.prefill.base import Progress, Steps, no_progress, run_steps
from larder.prefill.decode_eviction import DecodeEviction
from larder.prefill.memory import PeakMemoryMeter
from larder.prefill.reader import PrefillReader, PrefillSequence
from larder.prefill.turn_reader import TurnReader
from larder.session.caches import SessionCaches
from larder.session.capacity import (
    block_tokens,
    budget_tokens,
    budgeted_layers,
    check_recent_fits,
    empty_cache,
    entries_per_head,
    entry_bound,
    layer_figures,
    prefill_allowance,
    recall_budget_tokens,
    resolve_budget,
)
from larder.session.embedders.base import Embedder
from larder.session.episodes.routing import Router
from larder.session.memory import CacheFigures, ConversationMemory
from larder.session.policy import Policy
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter, Transcript


@dataclass(frozen=True)
class ModelRuntime:
    """What is needed to read: a model, its script, an embedder on demand, its measurements.

    Args:
        embedder: the embedder that a policy names, loaded once.
        calibrate: what a budget needs to know of the model, by name, measured once.
    """

    decoder: Decoder
    scribe: TokenizerAdapter
    embedder: Callable[[str], Embedder]
    calibrate: Callable[[frozenset[str]], Calibration]


@dataclass(frozen=True)
class SizeOptions:
    """Sizes for what a policy's spelling leaves open; None where nothing is said.

    Args:
        budget: of each cache, as `Amount.parse` takes it.
        block: tokens read between two plans.

    Raises:
        UsageError: the budget is no size.
        BadParameter: the block is no number of tokens.
    """

    budget: str | int | float | None = None
    block: int | None = None

    def __post_init__(self) -> None:
        if self.budget is not None:
            MemoryBudget.parse(self.budget)
        if self.block is not None:
            check_count("block", self.block)


@dataclass(frozen=True)
class PrefillInput:
    """What is read: a conversation, and what was said since.

    Args:
        said: question and answer of each later turn, a text each.
        turn_ids: the tokens of those turns, one after the other.
    """

    conversation: Conversation
    transcript: Transcript
    said: tuple[str, ...] = ()
    turn_ids: tuple[int, ...] = ()

    @property
    def ids(self) -> tuple[int, ...]:
        """All tokens, in the order they were said."""
        return self.transcript.ids + self.turn_ids


def prefill_conversation(
    desk: ModelRuntime,
    conversation: Conversation,
    policy: Policy,
    sizes: SizeOptions,
    prompts: Prompts,
    progress: Progress = no_progress,
) -> ConversationMemory:
    """Read a conversation into one cache or into one per episode.

    Args:
        prompts: further prompts by name, such as the question for an oracle policy.

    Raises:
        InputError: the conversation is empty.
        UsageError, BudgetError: sizes contradict each other or do not fit.
    """
    transcript = desk.scribe.write(conversation)
    context = len(transcript.ids)
    if not conversation.messages or not context:
        raise InputError(f"{conversation.name} holds no messages: there is nothing to read.")
    tokens = resolve_budget(policy, sizes.budget, context, desk.decoder.spec)
    source = PrefillInput(conversation, transcript)
    return prefill_memory(desk, source, policy.filled(tokens, sizes.block), prompts, progress)


def prefill_memory(
    desk: ModelRuntime,
    source: PrefillInput,
    policy: Policy,
    prompts: Prompts,
    progress: Progress = no_progress,
) -> ConversationMemory:
    """Form episodes of a source and read it into one cache each.

    Args:
        policy: with every size filled in.
    """
    return run_steps(
        prefill_memory_steps(desk, source, policy, prompts, PeakMemoryMeter()), progress
    )


def prefill_memory_steps(
    desk: ModelRuntime,
    source: PrefillInput,
    policy: Policy,
    prompts: Prompts,
    meter: PeakMemoryMeter,
) -> Steps[ConversationMemory]:
    """As `prefill_memory`, in steps."""
    setting_up = time.perf_counter()
    warm_up(desk, policy)
    started = time.perf_counter()
    router = policy.session.build_router(
        source.conversation, desk.embedder, desk.scribe.length, source.said
    )
    spec, context = desk.decoder.spec, len(source.ids)
    books = prompts_per_cache(desk, router, prompts)
    shelf = yield from build_caches_steps(desk, policy, source.ids, books, meter)
    answering = max(shelf.holdings(), key=lambda holding: holding.fast_tier_bytes)
    figures = CacheFigures(
        context_tokens=context,
        budget_tokens=min(budget_tokens(policy), context),
        full_kv_bytes=spec.full_bytes(context),
        kv_bytes=shelf.nbytes,
        active_kv_bytes=answering.fast_tier_bytes,
        peak_kv_bytes=meter.peak_bytes,
        peak_entries=meter.peak_entries,
        prefill_seconds=time.perf_counter() - started,
        setup_seconds=started - setting_up,
        layers=layer_figures(policy, spec, answering, context),
    )
    told = policy, source.conversation, source.transcript, shelf, router, figures
    return ConversationMemory(*told, dict(prompts))


def warm_up(desk: ModelRuntime, policy: Policy) -> None:
    """Fetch what stays from one reading to the next, so that no reading is charged for it."""
    for name in policy.session.embedders():
        desk.embedder(name)
    desk.calibrate(policy.calibrations)


def prompts_per_cache(desk: ModelRuntime, router: Router, prompts: Prompts) -> list[Prompts]:
    """One book of prompts per cache to build."""
    common = {**common_prompts(desk.scribe), **prompts}
    shown = router.prompts()
    if not shown:
        # A chat that starts from nothing has no episodes yet, and nothing to judge by them.
        return [{**common, **dict.fromkeys(router.prompt_names, ())}]
    return [{**common, "episode": episode_prompt(desk.scribe, texts)} for texts in shown]


def build_caches(
    desk: ModelRuntime,
    policy: Policy,
    ids: tuple[int, ...],
    books: Sequence[Prompts],
    meter: PeakMemoryMeter,
    progress: Progress = no_progress,
) -> SessionCaches:
    """Read tokens into one cache per book, each within the policy's budget and parked when done."""
    return run_steps(build_caches_steps(desk, policy, ids, books, meter), progress)


def build_caches_steps(
    desk: ModelRuntime,
    policy: Policy,
    ids: tuple[int, ...],
    books: Sequence[Prompts],
    meter: PeakMemoryMeter,
) -> Steps[SessionCaches]:
    """As `build_caches`, in steps."""
    spec = desk.decoder.spec
    for book in books:
        require_prompts(book, policy.scorer.wanted())
    check_recent_fits(policy, entries_per_head(policy, spec))
    shelf, reader = SessionCaches(spec, ()), prefill_reader(desk, policy, len(ids), meter)
    lanes = [PrefillSequence(empty_cache(policy, spec), book, shelf.add) for book in books]
    if not ids:
        for lane in lanes:
            reader.finish(lane)
        return shelf
    yield from policy.schedule.steps(reader, lanes, ids)
    return shelf


def prefill_reader(
    desk: ModelRuntime, policy: Policy, context: int, meter: PeakMemoryMeter
) -> PrefillReader:
    """What reads a text of so many tokens under a policy."""
    tokens = policy.timing.prefill_tokens(entries_per_head(policy, desk.decoder.spec))
    planner, quotas = planner_with_quotas(desk, policy, tokens, context)
    return PrefillReader(desk.decoder, planner, tokens, quotas, meter, prefill_allowance(policy))


def turn_reader(
    desk: ModelRuntime,
    policy: Policy,
    cache: SequenceCache,
    book: Prompts,
    saved: SequenceCache | None = None,
    open_ids: Sequence[int] = (),
) -> TurnReader:
    """What reads a turn into a cache, within the policy's budget and a block.

    Args:
        book: the prompts that judge it.
        saved, open_ids: as in `TurnReader`.
    """
    spec = desk.decoder.spec
    entries, bound = entries_per_head(policy, spec), entry_bound(policy, spec)

    def reader(length: int, meter: PeakMemoryMeter) -> PrefillReader:
        return prefill_reader(desk, policy, max(length, entries), meter)

    told = desk.decoder, cache, book, reader, bound, block_tokens(policy)
    return TurnReader(*told, decode_planner(desk, policy, [cache]), saved, open_ids)


def decode_planner(
    desk: ModelRuntime, policy: Policy, caches: Sequence[SequenceCache]
) -> DecodeEviction | None:
    """What keeps caches within the policy's budget while text is generated over them.

    None where the policy lets what is generated stay whole.

    Args:
        caches: at least one.
    """
    if policy.timing.excess() is None:
        return None
    starts = tuple(cache.next_position for cache in caches)
    tokens = entries_per_head(policy, desk.decoder.spec)
    reading = policy.timing.prefill_tokens(tokens)
    # Generated text goes on filling layers, so the context so far does not limit them.
    ready = [planner_with_quotas(desk, policy, reading, max(start, tokens)) for start in starts]
    quotas = tuple(own for _, own in ready)
    told = tokens, quotas, starts, desk.decoder.predict_surprise, recall_budget_tokens(policy)
    return DecodeEviction(ready[0][0], *told, block_tokens(policy) - 1)


def planner_with_quotas(
    desk: ModelRuntime, policy: Policy, tokens: int, context: int
) -> tuple[Planner, dict[int, int]]:
    """The planner with its measurements, and how many entries each layer may hold."""
    managed = tuple(layer.index for layer in desk.decoder.spec.managed)
    layers = tuple(layer.index for layer in budgeted_layers(policy, desk.decoder.spec))
    facts = select_layers(desk.calibrate(policy.calibrations), managed, layers)
    planner = policy.planner.under(facts, layers, desk.scribe.lexicon(policy.lexicon))
    if policy.values.projects:
        planner = replace(
            planner, projections=output_projections(desk.decoder.body, desk.decoder.spec.layers)
        )
    if tokens == WITHOUT_LIMIT:
        return planner, {}
    return planner, planner.quotas(tokens, context, layers, facts)


REPEAT = "Repeat the previous context exactly."
SUMMARIZE = "Summarize the previous context, with its most important parts."
GUIDANCE = (
    "Somebody will ask about the previous context, but not yet known is what. Most questions ask "
    "who, what, when, where, how many, why or how; for names, places, dates, numbers, prices, "
    "things owned and bought, tastes, opinions, plans, promises, reasons and results; for the "
    "latest state of what has changed; for a summary, a comparison or a list. Recall all that "
    "would answer such questions."
)
EPISODE = (
    "List the key facts of this part of the conversation: names, persons, dates, events, personal "
    "details, plans, opinions and feelings."
)


def common_prompts(scribe: TokenizerAdapter) -> dict[str, tuple[int, ...]]:
    """The prompts that depend on nothing but the model."""
    texts = {"repeat": REPEAT, "summarize": SUMMARIZE, "guidance": GUIDANCE}
    return {name: scribe.question(text) for name, text in texts.items()}


def episode_prompt(scribe: TokenizerAdapter, texts: Sequence[str]) -> tuple[int, ...]:
    """A request for key facts, answered with the episode's representative segments."""
    return scribe.question(EPISODE) + scribe.encode("\n\n".join(texts))


def require_prompts(book: Prompts, names: frozenset[str]) -> None:
    """Raises: UsageError: a prompt is needed that nothing provides."""
    for name in sorted(names - book.keys()):
        way = {
            "question": "it needs the question before reading: use it where questions are known",
            "episode": "it needs episodes: put episodes() in front",
        }.get(name, f"only {', '.join(sorted(book))} are known: give its text with prompts={{...}}")
        raise UsageError(f"The policy looks for the prompt {name!r}, but {way}.")
