"""Prefill of a conversation under a policy into one cache, or one per episode."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING

from larder.cache.sequence import SequenceCache
from larder.core.arguments import check_count, check_type
from larder.core.conversation import Conversation, PromptLayout
from larder.core.errors import UsageError
from larder.core.memory_budget import MemoryBudget
from larder.core.observation import Calibration, Prompts
from larder.core.plan import LayerQuotas
from larder.core.types import TokenIds
from larder.models.decoder import Decoder
from larder.models.introspection import weight_inputs
from larder.policy.budgets.base import WITHOUT_LIMIT
from larder.policy.layer_calibration import select_layers
from larder.policy.planner import Planner
from larder.policy.providers.base import GateProvider, LearnedProvider, select_providers
from larder.prefill.base import Progress, Steps, no_progress, run_steps
from larder.prefill.memory import PeakMemoryMeter
from larder.prefill.reader import PrefillReader, PrefillSequence
from larder.prefill.turn_reader import OpenBlock, TurnReader
from larder.session.caches import SessionCaches
from larder.session.capacity import (
    block_tokens,
    budgeted_layers,
    cache_figures,
    check_recent_fits,
    empty_cache,
    entries_per_head,
    entry_bound,
    prefill_allowance,
    recall_budget_tokens,
)
from larder.session.memory import ConversationMemory
from larder.session.policy import Policy
from larder.session.routing import Router
from larder.session.transcript.tokenizer_adapter import TokenizedTranscript, TokenizerAdapter

if TYPE_CHECKING:  # few policies evict while text is generated, episodes alone embed
    from larder.prefill.decode_eviction import DecodeEviction
    from larder.session.embedders.base import Embedder

REPEAT = "Repeat the previous context exactly."
TRAINED_GATES = "duo_attention"  # measurement of a model that `larder train` makes
SUMMARIZE = "Summarize the previous context, with its most important parts."
GUIDANCE = (
    "Somebody will ask about the previous context, but not yet known is what. Most questions ask "
    "who, what, when, where, how many, why or how; for names, places, dates, numbers, prices, "
    "things owned and bought, tastes, opinions, plans, promises, reasons and results; for the "
    "latest state of what has changed; for a summary, a comparison or a list. Recall all that "
    "would answer such questions."
)
# Scoring prompts that depend on the tokenizer alone, by the name that policies give them.
COMMON_PROMPTS: Mapping[str, str] = MappingProxyType(
    {"repeat": REPEAT, "summarize": SUMMARIZE, "guidance": GUIDANCE}
)
EPISODE = (
    "List the key facts of this part of the conversation: names, persons, dates, events, personal "
    "details, plans, opinions and feelings."
)


@dataclass(frozen=True)
class ModelRuntime:
    """Model with what prefill needs: tokenizer, embedders and calibration measurements.

    Args:
        embedder: loads an embedder by name, once.
        calibrate: measures calibration data of the model by name, once.
    """

    decoder: Decoder
    tokenizer: TokenizerAdapter
    embedder: Callable[[str], Embedder]
    calibrate: Callable[[frozenset[str]], Calibration]


@dataclass(frozen=True)
class SizeOptions:
    """Sizes that the spelling of a policy leaves open; None for the default.

    Args:
        budget: budget of each cache, as for `MemoryBudget.parse`.
        block: tokens read between two plans, at least 1.

    Raises:
        UsageError: the budget is not a size.
        BadParameter: the block is not a number of tokens.
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
    """Input of a prefill: a conversation, and later turns of a chat.

    Args:
        later_turns: texts of the later turns, question and answer in one.
        turn_ids: token ids of those turns, concatenated.
        turn_lens: number of tokens of each.
    """

    conversation: Conversation
    transcript: TokenizedTranscript
    later_turns: tuple[str, ...] = ()
    turn_ids: tuple[int, ...] = ()
    turn_lens: tuple[int, ...] = ()

    @property
    def ids(self) -> tuple[int, ...]:
        """All token ids, in order."""
        return self.transcript.ids + self.turn_ids

    @property
    def turn_ends(self) -> tuple[int, ...]:
        """True positions at which the system prompt and the turns end, that of all tokens last.

        A turn of a chat begins with a message of the user; in a dialogue of two people, every
        message is one.
        """
        begin = {"user"} if self.conversation.form is PromptLayout.CHAT else {"user", "assistant"}
        messages = zip(self.conversation.messages, self.transcript.spans, strict=True)
        starts = [span[0] for message, span in messages if message.role in begin]
        read = len(self.transcript.ids)
        later = accumulate(self.turn_lens, initial=read)
        return tuple(sorted({*starts, *later} - {0}))


def prefill_memory(
    runtime: ModelRuntime,
    source: PrefillInput,
    policy: Policy,
    prompts: Prompts,
    progress: Progress = no_progress,
) -> ConversationMemory:
    """Form episodes of a prefill input and prefill it into one cache each.

    Args:
        policy: policy with every size filled in.
    """
    return run_steps(
        prefill_memory_steps(runtime, source, policy, prompts, PeakMemoryMeter()), progress
    )


def prefill_memory_steps(
    runtime: ModelRuntime,
    source: PrefillInput,
    policy: Policy,
    prompts: Prompts,
    meter: PeakMemoryMeter,
) -> Steps[ConversationMemory]:
    """Steps of `prefill_memory`."""
    setup_started = time.perf_counter()
    warm_up(runtime, policy)
    started = time.perf_counter()
    router = policy.session.build_router(
        source.conversation, runtime.embedder, runtime.tokenizer.count_tokens, source.later_turns
    )
    prompt_sets = prompts_per_cache(runtime, router, prompts)
    caches = yield from build_caches_steps(
        runtime, policy, source.ids, prompt_sets, meter, source.turn_ends
    )
    figures = cache_figures(
        policy,
        runtime.decoder.spec,
        caches,
        context_tokens=len(source.ids),
        peak_kv_bytes=meter.peak_bytes,
        peak_entries=meter.peak_entries,
        prefill_seconds=time.perf_counter() - started,
        setup_seconds=started - setup_started,
    )
    return ConversationMemory(
        policy, source.conversation, source.transcript, caches, router, figures, dict(prompts)
    )


def warm_up(runtime: ModelRuntime, policy: Policy) -> None:
    """Load embedders and calibration data, which later prefills reuse, before time is measured."""
    for name in policy.session.embedders():
        runtime.embedder(name)
    runtime.calibrate(policy.calibrations)


def prompts_per_cache(runtime: ModelRuntime, router: Router, prompts: Prompts) -> list[Prompts]:
    """Scoring prompts of each cache to build, by name."""
    common = {**common_prompts(runtime.tokenizer), **prompts}
    shown = router.prompts()
    if not shown:
        # A chat without a history has no episodes yet: their prompts show no segments.
        return [{**common, **dict.fromkeys(router.prompt_names, episode_prompt(runtime.tokenizer))}]
    return [{**common, "episode": episode_prompt(runtime.tokenizer, texts)} for texts in shown]


def build_caches(
    runtime: ModelRuntime,
    policy: Policy,
    ids: TokenIds,
    prompt_sets: Sequence[Prompts],
    meter: PeakMemoryMeter,
) -> SessionCaches:
    """Prefill tokens into one cache per prompt set, within the budget, and offload each."""
    return run_steps(build_caches_steps(runtime, policy, ids, prompt_sets, meter))


def build_caches_steps(
    runtime: ModelRuntime,
    policy: Policy,
    ids: TokenIds,
    prompt_sets: Sequence[Prompts],
    meter: PeakMemoryMeter,
    turn_ends: tuple[int, ...] = (),
) -> Steps[SessionCaches]:
    """Steps of `build_caches`.

    Args:
        turn_ends: positions at which turns of a conversation end.
    """
    spec = runtime.decoder.spec
    for prompts in prompt_sets:
        require_prompts(prompts, policy.scorer.required_prompts())
    check_recent_fits(policy, entries_per_head(policy, spec))
    caches, reader = SessionCaches(spec, ()), prefill_reader(runtime, policy, len(ids), meter)
    sequences = [
        PrefillSequence(empty_cache(policy, spec), prompts, caches.add, turn_ends=turn_ends)
        for prompts in prompt_sets
    ]
    if not ids:
        for sequence in sequences:
            reader.finish(sequence)
        return caches
    yield from policy.schedule.steps(reader, sequences, ids)
    return caches


def prefill_reader(
    runtime: ModelRuntime, policy: Policy, context: int, meter: PeakMemoryMeter
) -> PrefillReader:
    """Reader that prefills a text of `context` tokens under a policy."""
    tokens = policy.timing.prefill_tokens(entries_per_head(policy, runtime.decoder.spec))
    planner, quotas = planner_with_quotas(runtime, policy, tokens, context)
    bound = entry_bound(policy, runtime.decoder.spec)
    recall_entries = prefill_allowance(policy)
    return PrefillReader(runtime.decoder, planner, tokens, quotas, meter, recall_entries, bound)


def turn_reader(
    runtime: ModelRuntime,
    policy: Policy,
    cache: SequenceCache,
    prompts: Prompts,
    saved: SequenceCache | None = None,
    open_block: OpenBlock | None = None,
) -> TurnReader:
    """Reader that adds a turn to a cache, within budget and block.

    Args:
        prompts: prompts that the entries of the cache are scored with.
        saved: copy of the cache before the turn, if there is one.
        open_block: as for `TurnReader`; empty by default.
    """
    spec = runtime.decoder.spec
    entries, bound = entries_per_head(policy, spec), entry_bound(policy, spec)

    def reader(length: int, meter: PeakMemoryMeter) -> PrefillReader:
        return prefill_reader(runtime, policy, max(length, entries), meter)

    return TurnReader(
        runtime.decoder,
        cache,
        prompts,
        reader,
        bound,
        block_tokens(policy),
        open_block or OpenBlock((), cache.checkpoint()),
        decode_planner(runtime, policy, [cache]),
        saved,
        policy.turn_rule,
    )


def decode_planner(
    runtime: ModelRuntime, policy: Policy, caches: Sequence[SequenceCache]
) -> DecodeEviction | None:
    """Decode eviction that keeps caches within the budget while text is generated.

    None for policies that keep generated text whole.

    Args:
        caches: at least one.
    """
    if policy.timing.excess() is None:
        return None
    from larder.prefill.decode_eviction import DecodeEviction

    tokens = entries_per_head(policy, runtime.decoder.spec)
    reading = policy.timing.prefill_tokens(tokens)
    # Generated text continues to fill layers, so the present context does not limit them.
    lengths = [max(cache.next_position, tokens) for cache in caches]
    ready = [planner_with_quotas(runtime, policy, reading, length) for length in lengths]
    quotas = tuple(quota for _, quota in ready)
    return DecodeEviction(
        ready[0][0],
        tokens,
        quotas,
        tuple(_generation_start(*own) for own in zip(caches, quotas, strict=True)),
        runtime.decoder.predict_token_numbers,
        recall_budget_tokens(policy),
        block_tokens(policy) - 1,
    )


def _generation_start(cache: SequenceCache, quotas: LayerQuotas) -> int:
    """True position of the first token that counts as generated.

    The next one; the first of all where earlier turns filled more than the share of reading. Then
    nothing that they left is protected as read, or a turn would find no room for itself.
    """
    lengths = cache.lengths()
    held = sum(sum(lengths[layer]) for layer in quotas)
    room = sum(quota * len(lengths[layer]) for layer, quota in quotas.items())
    return cache.next_position if held <= room else 0


def planner_with_quotas(
    runtime: ModelRuntime, policy: Policy, tokens: int, context: int
) -> tuple[Planner, dict[int, int]]:
    """Planner with its calibration data, and the quota of entries of each layer."""
    managed = tuple(layer.index for layer in runtime.decoder.spec.managed)
    layers = tuple(layer.index for layer in budgeted_layers(policy, runtime.decoder.spec))
    calibration = select_layers(runtime.calibrate(policy.calibrations), managed, layers)
    lexicon = runtime.tokenizer.lexicon(policy.lexicon)
    planner = policy.planner.with_calibration(calibration, layers, lexicon)
    inputs = weight_inputs(
        runtime.decoder.attentions, runtime.decoder.spec.layers, planner.providers
    )
    if learned := select_providers(planner.providers, LearnedProvider):
        for index, tensors in runtime.decoder.gates.inputs(learned).items():
            inputs[index] = {**inputs.get(index, {}), **tensors}
    planner = replace(planner, weight_inputs=inputs)
    if tokens == WITHOUT_LIMIT:
        return planner, {}
    return planner, planner.quotas(tokens, context, layers, calibration)


def load_weights(runtime: ModelRuntime, policy: Policy) -> None:
    """Load the trained weights of a policy's parts before the first text is read.

    Raises:
        MissingWeights: there are none for the model.
        ModelError: they are of another model, or damaged.
    """
    from larder.cache.forms.low_rank import LowRankMaps
    from larder.cache.residual_tier import AquaPredictions
    from larder.models.learned_weights import load_learned

    decoder, planner = runtime.decoder, policy.planner
    spec = decoder.spec
    decoder.gates.bound(select_providers(planner.providers, GateProvider))
    decoder.gates.inputs(planner.providers)
    soft = {**planner.soft_prompt_providers, **planner.soft_entry_providers}
    for name, provider in soft.items():
        load_learned(spec, name, provider)
    if TRAINED_GATES in policy.calibrations:
        runtime.calibrate(frozenset({TRAINED_GATES}))
    for first in spec.managed[:1]:  # none where all layers have windows
        if policy.resident_storage.residual is not None:
            AquaPredictions.load(first, 0, spec.fingerprint, spec.device)
        if policy.compensation.cache_form == "low_rank":
            LowRankMaps.load(first, 0, spec.fingerprint)


def encoded_prompts(
    tokenizer: TokenizerAdapter, prompts: Mapping[str, str] | None
) -> dict[str, tuple[int, ...]]:
    """Token ids of scoring prompts.

    Raises:
        BadParameter: they are no texts by name.
    """
    expected = 'texts by name, such as {"question": "..."}'
    check_type("prompts", prompts, (Mapping, type(None)), expected)
    return {name: tokenizer.encode_question(text) for name, text in (prompts or {}).items()}


def common_prompts(tokenizer: TokenizerAdapter) -> dict[str, tuple[int, ...]]:
    """Scoring prompts that depend on the tokenizer alone."""
    return encoded_prompts(tokenizer, COMMON_PROMPTS)


def episode_prompt(tokenizer: TokenizerAdapter, texts: Sequence[str] = ()) -> tuple[int, ...]:
    """Scoring prompt of an episode: a request for key facts, and its representative segments."""
    return tokenizer.encode_question(EPISODE) + tokenizer.encode("\n\n".join(texts))


def require_prompts(prompts: Prompts, names: frozenset[str]) -> None:
    """Validate that all required prompts are there.

    Raises:
        UsageError: a required prompt is missing.
    """
    for name in sorted(names - prompts.keys()):
        way = {
            "question": (
                "it needs the question before prefill: give engine.read(text, "
                'prompts={"question": "..."}), and then engine.ask; or take a policy without it, '
                "such as kvzip"
            ),
            "episode": "it needs episodes: put episodes() in front",
        }.get(
            name,
            f"only {', '.join(sorted(prompts))} are known: give its text with prompts={{...}} or "
            f"`larder ask --prompt {name}=TEXT`",
        )
        raise UsageError(f"The policy scores with the prompt {name!r}, but {way}.")
