"""One object to read conversations with and to ask: the way in for programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from larder.core.conversation import Conversation
from larder.core.observation import Calibration, Prompts
from larder.engine.answer import Answer
from larder.engine.decoding import untended
from larder.engine.reply import Speaker, check_fits
from larder.engine.sampling import Sampling
from larder.models.calibration import calibrate
from larder.models.loading import SEED, Loaded, load
from larder.prefill.base import Progress, silent
from larder.session.embedders.base import Embedder
from larder.session.embedding import load_embedder
from larder.session.memory import Memory
from larder.session.policy import Policy
from larder.session.reading import Desk, Sizes, read, tend
from larder.session.rooms import tokens_of
from larder.session.transcript import Scribe


def unheard(text: str) -> None:
    """For who does not listen to the stream."""
    del text


class Engine:
    """A loaded model under a policy.

    One thread at a time; memories that it read may be asked in any order.

    Args:
        loaded: a model with its tokenizer, from `larder.models.loading.load`.
        policy: a preset's name, a sentence of parts, or a `Policy`.
        budget: of each cache, and episodes have one each: `512` (tokens per kv head, averaged over
            layers), `20%` of the context, `64MiB`; None takes what the policy says, else 20%.
        block: tokens read between two plans; None takes what the policy says, else the smaller of
            512 and the budget.
    """

    def __init__(
        self,
        loaded: Loaded,
        policy: str | Policy = "epicache",
        budget: str | None = None,
        block: int | None = None,
    ) -> None:
        self.loaded = loaded
        self.policy = policy if isinstance(policy, Policy) else Policy.parse(policy)
        self.sizes = Sizes(budget, block)
        self.scribe = Scribe(loaded.tokenizer)
        self._embedder = lru_cache(maxsize=None)(self._load_embedder)
        self._measured = lru_cache(maxsize=None)(self._calibrate)

    @classmethod
    def load(
        cls,
        model: str = SEED,
        *,
        policy: str | Policy = "epicache",
        budget: str | None = None,
        block: int | None = None,
        device: str = "cpu",
        dtype: str | None = None,
    ) -> Engine:
        """Load a model and put it under a policy; the bundled model is the default.

        Raises:
            LarderError: the model cannot be loaded or honored, the policy does not parse.
        """
        chosen = policy if isinstance(policy, Policy) else Policy.parse(policy)
        return cls(load(model, device, dtype), chosen, budget, block)

    def under(
        self, policy: str | Policy, budget: str | None = None, block: int | None = None
    ) -> Engine:
        """The same model, and the embedders already loaded, under another policy."""
        engine = Engine(self.loaded, policy, budget, block)
        engine._embedder = self._embedder
        return engine

    def read(
        self,
        conversation: Conversation,
        prompts: Mapping[str, str] | None = None,
        progress: Progress = silent,
    ) -> Memory:
        """Read a conversation within the budget.

        Args:
            prompts: texts by name, for a policy that looks them up: `question`, or any name that a
                `patched(prompt="...")` gives.
            progress: told of tokens read and tokens to read.
        """
        book: Prompts = {name: self.scribe.question(text) for name, text in (prompts or {}).items()}
        return read(self.desk, conversation, self.policy, self.sizes, book, progress)

    def ask(
        self,
        memory: Memory,
        question: str,
        sampling: Sampling | None = None,
        max_new_tokens: int = 256,
        stop: Sequence[str] = (),
        on_text: Callable[[str], None] = unheard,
    ) -> Answer:
        """Answer a question about what was read; the memory is afterwards as it was before.

        The room that an answer takes is given back too, so memories do not grow by being asked.

        Args:
            stop: strings that end the answer.
            on_text: told of the answer's text as it comes.
        """
        cache, match = memory.recall(question)
        prompt = self.scribe.question(memory.conversation.question_prompt.format(question=question))
        check_fits(prompt, tokens_of(memory.policy))
        tending = tend(self.desk, memory.policy, [cache])
        if tending is not None:
            cache = cache.fork()  # what goes while the answer is generated cannot come back
        mark = cache.next_position
        cache.reserve(len(prompt) + (max_new_tokens if tending is None else 1))
        try:
            reply = self.speaker.reply(
                cache,
                prompt,
                sampling or Sampling(),
                max_new_tokens,
                stop,
                on_text,
                untended if tending is None else tending.observer,
            )
            held_bytes = memory.shelf.nbytes
            if tending is not None:
                held_bytes += cache.nbytes - cache.shared_nbytes
        finally:
            if tending is None:
                cache.truncate(mark)
                cache.compact()
        return reply.answer(question, match, len(prompt), held_bytes)

    @cached_property
    def desk(self) -> Desk:
        """What reading needs; embedder and measurements are fetched when first asked for."""
        return Desk(self.loaded.decoder, self.scribe, self._embedder, self._measured)

    @cached_property
    def speaker(self) -> Speaker:
        """What answers over a cache."""
        return Speaker(self.loaded.decoder, self.scribe, self.stops)

    @cached_property
    def stops(self) -> frozenset[int]:
        """Token ids that end a turn."""
        return stop_ids(self.loaded)

    def _load_embedder(self, name: str) -> Embedder:
        table = self.loaded.decoder.token_table()
        return load_embedder(name, "cpu", table, self.scribe.encode)

    def _calibrate(self, names: frozenset[str]) -> Calibration:
        return calibrate(self.loaded.decoder, self.scribe.encode, names)


def stop_ids(loaded: Loaded) -> frozenset[int]:
    """End-of-turn tokens that model and tokenizer name, and what the chat template closes with."""
    named: list[Any] = [
        loaded.decoder.module.generation_config.eos_token_id,
        loaded.tokenizer.eos_token_id,
        *Scribe(loaded.tokenizer).closing()[:1],
    ]
    flat = [i for entry in named for i in (entry if isinstance(entry, list) else [entry])]
    special = set(loaded.tokenizer.all_special_ids) | set(flat[:-1])
    return frozenset(i for i in flat if i is not None and i in special)
