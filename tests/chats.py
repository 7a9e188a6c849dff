"""Helpers for tests of chats: policies, a history of two topics, and views of the caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from larder import Chat, Conversation, Engine, Message, Policy
from larder.cache import SequenceCache
from larder.core import Mode
from larder.models import BatchSegment, LoadedModel
from larder.prefill import no_progress
from larder.session import ConversationMemory, ModelRuntime, PrefillInput, SessionCaches
from topic_embedder import TopicEmbedder

BUDGET, BLOCK = 96, 32
EPISODES = (
    "episodes(count=2, segment=1, representatives=2) > blockwise() > protect(sinks=4, recent=8)"
    ' > patched(prompt="episode") > pooled()'
)
SINGLE = "single() > blockwise() > protect(sinks=4, recent=8) > keydiff() > pooled()"
H2O = "blockwise() > protect(sinks=2, recent=0.5) > column_mass() > uniform()"
STEPWISE = {
    "h2o": f"{H2O} > every_step()",
    "d2o": f"{H2O} > fold_ema() > every_step()",
    "lagged": f"{H2O} > lagged(tokens=8)",
    "episodes": f"episodes(count=2, segment=1, representatives=2) > {H2O} > every_step()",
}
POLICIES = {"episodes": EPISODES, "single": SINGLE, "full": "full"}
HISTORY = Conversation(
    "two topics",
    tuple(
        Message(role, text)
        for n in range(5)
        for role, text in (
            ("user", f"My dog number {n} is called Rex{n}."),
            ("assistant", f"A fine dog, number {n}."),
            ("user", f"The car in lot {n} is red."),
            ("assistant", f"I noted the car {n}."),
        )
    ),
)


class Library:
    """Reads a conversation once under each policy, and hands out copies of what was left."""

    def __init__(self, gather: Callable[..., ConversationMemory]) -> None:
        self._gather, self._read = gather, dict[Any, tuple[ConversationMemory, list[Any], Any]]()

    def gather(
        self,
        runtime: ModelRuntime,
        source: PrefillInput,
        policy: Policy,
        prompts: Any,
        progress: Any = no_progress,
    ) -> ConversationMemory:
        """Like `larder.session.prefill.prefill_memory`; reads again with an observer or prompts."""
        if prompts or progress is not no_progress:
            return self._gather(runtime, source, policy, prompts, progress)
        key = id(runtime.decoder), str(policy), source.ids, source.later_turns
        if key not in self._read:
            memory = self._gather(runtime, source, policy, prompts, progress)
            kept = [memory.caches.activate(n).fork() for n in range(len(memory.caches))]
            self._read[key] = memory, kept, runtime.decoder  # whose id is the key stays
        memory, kept, _ = self._read[key]
        caches = SessionCaches(runtime.decoder.spec, [cache.fork() for cache in kept])
        return replace(memory, conversation=source.conversation, caches=caches)


def under(loaded: LoadedModel, policy: str) -> Engine:
    budget, block = (None, None) if policy == "full" else (str(BUDGET), BLOCK)
    engine = Engine(loaded, policy=policy, budget=budget, block=block)
    engine.runtime = replace(engine.runtime, embedder=lambda name: TopicEmbedder())
    return engine


def state(cache: SequenceCache) -> dict[str, Any]:
    cache.compact()
    return {**cache.state(), **cache.meta()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[k], other[k]) if isinstance(one[k], torch.Tensor) else one[k] == other[k]
        for k in one
    )


def states(chat: Chat) -> list[dict[str, Any]]:
    """Every cache of a chat, on a copy of its caches, so that nothing moves."""
    caches = chat.memory.caches
    active, found = caches.active_number, []
    for number in range(len(caches)):
        found.append(state(caches.activate(number).fork()))
    if active is None:
        caches.offload_active()
    else:
        caches.activate(active)
    return found


def logits(engine: Engine, cache: SequenceCache, text: str) -> torch.Tensor:
    ids = engine.tokenizer.encode_question(text)
    return engine.loaded.decoder.forward_logits(
        [BatchSegment(cache, ids)], Mode.SCRATCH, [len(ids) - 1]
    )


def raising(error: type[BaseException]) -> Callable[[str], None]:
    def on_text(text: str) -> None:
        raise error(text)

    return on_text


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def within(chat: Chat) -> bool:
    """True if no idle cache is above the budget."""
    most = chat.figures.budget_tokens
    return all(view.entries_per_head <= most for view in chat.episodes)


def active(chat: Chat) -> int:
    [view] = [view for view in chat.episodes if view.is_active]
    return view.number
