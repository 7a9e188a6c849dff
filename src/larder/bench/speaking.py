"""Answer a question for real, token by token, and note when each token came."""

from __future__ import annotations

import time
from dataclasses import dataclass

from larder.core.conversation import Question
from larder.engine.decoding import Limits, generate, untended
from larder.engine.engine import Engine
from larder.engine.reply import check_fits
from larder.engine.sampling import Sampling
from larder.session.memory import Memory
from larder.session.reading import tend
from larder.session.rooms import tokens_of

SPARE_TOKENS = 32  # that an answer may have beyond twice the expected one


@dataclass(frozen=True)
class Said:
    """An answer and its pace.

    Args:
        first_seconds: from the question's first token read to the first token chosen; None where
            the answer is empty.
        token_seconds: between two tokens.
        held_bytes: of all caches while it was given, as `Engine.ask` would hold them.
    """

    text: str
    first_seconds: float | None
    token_seconds: tuple[float, ...]
    held_bytes: int


def speak(engine: Engine, memory: Memory, question: Question) -> Said:
    """Answer greedily on a fork of the cache, which stays as it was.

    Raises:
        InputError: the question is longer than the budget.
    """
    cache, _ = memory.recall(question.question)
    wrapped = memory.conversation.question_prompt.format(question=question.question)
    prompt = engine.scribe.question(wrapped)
    check_fits(prompt, tokens_of(memory.policy))
    longest = max(engine.scribe.length(answer) for answer in (question.answer, *question.others))
    limits = Limits(SPARE_TOKENS + 2 * longest, engine.stops)
    fork, stamps = cache.fork(), list[float]()
    tending = tend(engine.desk, memory.policy, [fork])
    fork.reserve(len(prompt) + (limits.max_new_tokens if tending is None else 1))

    def note(row: int, token: int) -> bool:
        del row, token
        stamps.append(time.perf_counter())
        return True

    started = time.perf_counter()
    observe = untended if tending is None else tending.observer
    decoder = engine.loaded.decoder
    [ids] = generate(decoder, [fork], [prompt], Sampling(), limits, note, observe)
    text = engine.scribe.decode(ids).strip()
    between = tuple(later - sooner for sooner, later in zip(stamps, stamps[1:], strict=False))
    # Without a policy at work `Engine.ask` needs no copy: the fork stands for the cache itself.
    spared = cache.nbytes if tending is None else fork.shared_nbytes
    held = memory.shelf.nbytes + fork.nbytes - spared
    return Said(text, stamps[0] - started if stamps else None, between, held)
