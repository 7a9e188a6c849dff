"""One object to read conversations with and to ask: the way in for programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, overload

import torch

from larder.core.arguments import check_count, check_type
from larder.core.observation import Calibration, Prompts
from larder.engine.answer import Answer, AnswerGenerator, check_prompt_fits
from larder.engine.sampler import SamplingParams
from larder.models.calibration import calibrate
from larder.models.loader import SEED, LoadedModel, load
from larder.prefill.base import Progress, no_progress, run_steps
from larder.session.capacity import beyond_budget, budget_tokens
from larder.session.embedders.base import Embedder, load_embedder
from larder.session.files import ConversationLike, conversation_of
from larder.session.memory import ConversationMemory
from larder.session.policy import Policy
from larder.session.prefill import (
    ModelRuntime,
    SizeOptions,
    prefill_conversation,
    prompts_per_cache,
    turn_reader,
)
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter


def discard_text(text: str) -> None:
    """For who does not listen to the stream."""
    del text


class Engine:
    """A loaded model under a policy.

    One thread at a time; memories that it read may be asked in any order.

    Args:
        loaded: a model with its tokenizer, from `larder.models.loader.load`.
        policy: a preset's name, a sentence of parts, or a `Policy`.
        budget: of each cache, and episodes have one each: 512 (tokens per kv head, averaged over
            layers), `"20%"`, `"1/5"` or 0.2 of the context, `"64MiB"`; None takes what the policy
            says, else 20%.
        block: tokens read between two plans; None takes what the policy says, else the smaller of
            512 and the budget.

    Raises:
        LarderError: the policy does not parse, or an argument is of a wrong type or no size.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        policy: str | Policy = "epicache",
        budget: str | int | float | None = None,
        block: int | None = None,
    ) -> None:
        check_type("loaded", loaded, LoadedModel, "a model from larder.models.loader.load")
        self.loaded = loaded
        self.policy = _parse_policy(policy)
        self.sizes = SizeOptions(budget, block)
        self.scribe = TokenizerAdapter(loaded.tokenizer)
        self._embedder = lru_cache(maxsize=None)(self._load_embedder)
        self._measured = lru_cache(maxsize=None)(self._calibrate)

    @classmethod
    def load(
        cls,
        model: str = SEED,
        *,
        policy: str | Policy = "epicache",
        budget: str | int | float | None = None,
        block: int | None = None,
        device: str = "cpu",
        dtype: str | torch.dtype | None = None,
    ) -> Engine:
        """Load a model and put it under a policy; the bundled model is the default.

        Args:
            dtype: `"float32"` or `torch.float32` and the like; `"auto"` for that of the weights.

        Raises:
            LarderError: the model cannot be loaded or honored, the policy does not parse, or an
                argument is of a wrong type or no size.
        """
        chosen = _parse_policy(policy)
        SizeOptions(budget, block)  # refused before a model is loaded
        return cls(load(model, device, dtype), chosen, budget, block)

    def under(
        self,
        policy: str | Policy,
        budget: str | int | float | None = None,
        block: int | None = None,
    ) -> Engine:
        """The same model, and the embedders already loaded, under another policy."""
        engine = Engine(self.loaded, policy, budget, block)
        engine._embedder = self._embedder
        return engine

    def read(
        self,
        conversation: ConversationLike,
        prompts: Mapping[str, str] | None = None,
        progress: Progress = no_progress,
    ) -> ConversationMemory:
        """Read a conversation or a document within the budget.

        Args:
            conversation: from `read_conversation`; or a text, read as a document; or messages as
                chat APIs have them, `[{"role": "user", "content": "..."}, ...]`.
            prompts: texts by name, for a policy that looks them up: `question`, or any name that a
                `patched(prompt="...")` gives.
            progress: told of tokens read and tokens to read.

        Raises:
            InputError: there is nothing to read, or a message is none.
            LarderError: sizes contradict each other, or an argument is of a wrong type.
        """
        source = conversation_of(conversation)
        book: Prompts = {name: self.scribe.question(text) for name, text in (prompts or {}).items()}
        return prefill_conversation(self.desk, source, self.policy, self.sizes, book, progress)

    @overload
    def ask(
        self,
        memory: ConversationMemory,
        question: str,
        sampling: SamplingParams | None = None,
        max_new_tokens: int = 256,
        stop: Sequence[str] = (),
        on_text: Callable[[str], None] = discard_text,
    ) -> Answer: ...

    @overload
    def ask(
        self,
        memory: ConversationMemory,
        question: Sequence[str],
        sampling: SamplingParams | None = None,
        max_new_tokens: int = 256,
        stop: Sequence[str] = (),
        on_text: Callable[[str], None] = discard_text,
    ) -> list[Answer]: ...

    def ask(
        self,
        memory: ConversationMemory,
        question: str | Sequence[str],
        sampling: SamplingParams | None = None,
        max_new_tokens: int = 256,
        stop: Sequence[str] = (),
        on_text: Callable[[str], None] = discard_text,
    ) -> Answer | list[Answer]:
        """Answer a question, or several, about what was read; the memory stays as it was.

        The room that an answer takes is given back too, so memories do not grow by being asked.
        The cache that answers holds no more than budget + block meanwhile; a question and an answer
        longer than a block leave it as it was by way of a copy.

        Args:
            question: one, or a list of questions, each answered as if it was the only one.
            stop: strings that end an answer.
            on_text: told of an answer's text as it comes.

        Returns:
            An answer to one question; a list of answers, in order, to a list.

        Raises:
            LarderError: an argument is of a wrong type or out of range.
        """
        check_type("memory", memory, ConversationMemory, "what Engine.read returned")
        check_count("max_new_tokens", max_new_tokens)
        wanted = "a question as a string, or a list of questions"
        check_type("question", question, (str, list, tuple), wanted)
        chosen = sampling or SamplingParams()
        check_type("sampling", chosen, SamplingParams, "a Sampling")
        if isinstance(question, str):
            return self._answer(memory, question, chosen, max_new_tokens, stop, on_text)
        for one in question:
            check_type("question", one, str, wanted)
        return [
            self._answer(memory, one, chosen, max_new_tokens, stop, on_text) for one in question
        ]

    @property
    def beyond_budget(self) -> tuple[str, ...]:
        """What the policy holds beyond its budget, a clause each; nothing where that bounds all."""
        return beyond_budget(self.policy, self.loaded.decoder.spec)

    @cached_property
    def desk(self) -> ModelRuntime:
        """What reading needs; embedder and measurements are fetched when first asked for."""
        return ModelRuntime(self.loaded.decoder, self.scribe, self._embedder, self._measured)

    @cached_property
    def speaker(self) -> AnswerGenerator:
        """What answers over a cache."""
        return AnswerGenerator(self.loaded.decoder, self.scribe, self.stops)

    @cached_property
    def stops(self) -> frozenset[int]:
        """Token ids that end a turn."""
        return stop_ids(self.loaded)

    def _answer(
        self,
        memory: ConversationMemory,
        question: str,
        sampling: SamplingParams,
        max_new_tokens: int,
        stop: Sequence[str],
        on_text: Callable[[str], None],
    ) -> Answer:
        cache, match = memory.recall(question)
        prompt = self.scribe.question(memory.conversation.question_prompt.format(question=question))
        check_prompt_fits(prompt, budget_tokens(memory.policy))
        is_copy = memory.policy.timing.excess() is not None
        saved, mark = (cache, cache.next_position) if is_copy else (None, cache.next_position)
        if is_copy:
            cache = cache.fork()  # what goes while the answer is generated cannot come back
        book = prompts_per_cache(self.desk, memory.router, memory.prompts)[
            match.episode if match else 0
        ]
        turn = turn_reader(self.desk, memory.policy, cache, book, saved)
        turn.reserve(len(prompt) + max_new_tokens)
        try:
            rest = run_steps(turn.message_steps(prompt))
            told = cache, rest, sampling, max_new_tokens, stop, on_text, turn.observer
            reply = self.speaker.generate(*told)
            held_bytes = memory.caches.nbytes
            if is_copy:
                held_bytes += cache.nbytes - cache.shared_nbytes
            elif turn.snapshot is not None:
                held_bytes += turn.snapshot.nbytes
        finally:
            if turn.snapshot is None:
                cache.truncate(mark)
                cache.compact()
            elif not is_copy:
                turn.snapshot.compact()
                memory.caches.replace_active(turn.snapshot)
        return reply.answer(question, match, len(prompt), held_bytes)

    def _load_embedder(self, name: str) -> Embedder:
        table = self.loaded.decoder.embedding_table()
        return load_embedder(name, "cpu", table, self.scribe.encode)

    def _calibrate(self, names: frozenset[str]) -> Calibration:
        return calibrate(self.loaded.decoder, self.scribe.encode, names)


def _parse_policy(policy: str | Policy) -> Policy:
    check_type("policy", policy, (str, Policy), "a preset's name, a sentence of parts or a Policy")
    return policy if isinstance(policy, Policy) else Policy.parse(policy)


def stop_ids(loaded: LoadedModel) -> frozenset[int]:
    """End-of-turn tokens that model and tokenizer name, and what the chat template closes with."""
    named: list[Any] = [
        loaded.decoder.module.generation_config.eos_token_id,
        loaded.tokenizer.eos_token_id,
        *TokenizerAdapter(loaded.tokenizer).closing()[:1],
    ]
    flat = [i for entry in named for i in (entry if isinstance(entry, list) else [entry])]
    special = set(loaded.tokenizer.all_special_ids) | set(flat[:-1])
    return frozenset(i for i in flat if i is not None and i in special)
