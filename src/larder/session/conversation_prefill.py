"""Prefill of a conversation, or of several contexts with chunks that were read before."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from larder.core.conversation import Conversation, PromptLayout
from larder.core.errors import InputError
from larder.core.observation import Prompts
from larder.prefill.base import ContextText, Progress, no_progress, run_steps
from larder.prefill.memory import PeakMemoryMeter
from larder.prefill.reader import PrefillSequence
from larder.session.arrangements.single import Single
from larder.session.caches import SessionCaches
from larder.session.capacity import (
    cache_figures,
    check_recent_fits,
    empty_cache,
    entries_per_head,
    resolve_budget,
)
from larder.session.memory import ConversationMemory
from larder.session.policy import Policy
from larder.session.prefill import (
    ModelRuntime,
    PrefillInput,
    SizeOptions,
    prefill_memory,
    prefill_reader,
    prompts_per_cache,
    require_prompts,
    warm_up,
)
from larder.session.transcript.tokenizer_adapter import TokenizedTranscript

if TYPE_CHECKING:  # imported where contexts are read
    from larder.prefill.contexts import ChunkSource


def prefill_conversation(
    runtime: ModelRuntime,
    conversation: Conversation,
    policy: Policy,
    sizes: SizeOptions,
    prompts: Prompts,
    progress: Progress = no_progress,
    chunks: ChunkSource | None = None,
) -> ConversationMemory:
    """Prefill a conversation into one cache, or one per episode.

    Args:
        prompts: token ids of further prompts by name, such as the question for an oracle policy.
        chunks: contexts that were read before, for a document in `PromptLayout.CONTEXTS`.

    Raises:
        InputError: the conversation is empty.
        UsageError, BudgetError: sizes contradict each other or do not fit.
    """
    if conversation.form is PromptLayout.CONTEXTS and isinstance(policy.session, Single):
        return _prefill_contexts(runtime, conversation, policy, sizes, prompts, chunks, progress)
    transcript = runtime.tokenizer.encode_conversation(conversation)
    context = len(transcript.ids)
    if not conversation.messages or not context:
        raise InputError(f"{conversation.name} holds no messages: give it at least one.")
    tokens = resolve_budget(policy, sizes.budget, context, runtime.decoder.spec)
    source = PrefillInput(conversation, transcript)
    return prefill_memory(
        runtime, source, policy.with_sizes(tokens, sizes.block, context), prompts, progress
    )


def _prefill_contexts(
    runtime: ModelRuntime,
    document: Conversation,
    policy: Policy,
    sizes: SizeOptions,
    prompts: Prompts,
    source: ChunkSource | None,
    progress: Progress,
) -> ConversationMemory:
    """Prefill a document in `PromptLayout.CONTEXTS` into one cache.

    Args:
        policy: policy without episodes.
        prompts: token ids of further prompts by name.
        source: entries of contexts that were read before; None for none.

    Raises:
        LarderError: sizes contradict each other, or as the schedule of the policy raises.
    """
    from larder.prefill.contexts import NoChunks

    source = source or NoChunks()
    policy.schedule.check_chunks(source)
    spec, tokenizer = runtime.decoder.spec, runtime.tokenizer
    transcript = tokenizer.encode_conversation(document)
    text = _context_text(transcript, tokenizer.num_prefix_tokens(document))
    tokens = resolve_budget(policy, sizes.budget, len(text.ids), spec)
    policy, meter = policy.with_sizes(tokens, sizes.block), PeakMemoryMeter()
    setup_started = time.perf_counter()
    warm_up(runtime, policy)
    started = time.perf_counter()
    router = policy.session.build_router(document, runtime.embedder, tokenizer.count_tokens)
    [known] = prompts_per_cache(runtime, router, prompts)
    require_prompts(known, policy.scorer.required_prompts())
    check_recent_fits(policy, entries_per_head(policy, spec))
    caches, reader = SessionCaches(spec, ()), prefill_reader(runtime, policy, len(text.ids), meter)
    sequence = PrefillSequence(empty_cache(policy, spec), known, caches.add)
    reuse = run_steps(policy.schedule.context_steps(reader, sequence, text, source), progress)
    figures = cache_figures(
        policy,
        spec,
        caches,
        context_tokens=len(text.ids),
        peak_kv_bytes=meter.peak_bytes,
        peak_entries=meter.peak_entries,
        prefill_seconds=time.perf_counter() - started,
        setup_seconds=started - setup_started,
    )
    return ConversationMemory(
        policy, document, transcript, caches, router, figures, dict(prompts), reuse
    )


def _context_text(transcript: TokenizedTranscript, first: int) -> ContextText:
    """Contexts of a transcript, whose first span begins with `first` tokens of the template."""
    ids, spans = transcript.ids, transcript.spans
    ranges = [(max(start, first), stop) for start, stop in spans]
    contexts = tuple(ids[start:stop] for start, stop in ranges)
    return ContextText(ids[:first], contexts, ids[spans[-1][1] :])
