"""A cache of its own for every question, judged by a prompt of its own."""

from __future__ import annotations

from collections.abc import Sequence

from larder import Conversation, Engine, Question
from larder.bench.forced import Forced, force
from larder.prefill.meter import Meter
from larder.session.memory import Figures, Memory
from larder.session.policy import Policy
from larder.session.prompts import common_prompts
from larder.session.reading import build
from larder.session.routing import OneCache
from larder.session.shelf import Shelf

LANES = 8  # caches that stand at the same time
_NO_FIGURES = Figures(0, 0, 0, 0, 0, 0, 0, 0.0)


def answer_each(
    engine: Engine,
    conversation: Conversation,
    questions: Sequence[Question],
    prompts: Sequence[tuple[int, ...]],
    policy: Policy,
) -> list[Forced]:
    """Score each expected answer from a cache that was built for its question.

    Args:
        prompts: one per question, token ids; the policy knows it as the prompt `question`.
        policy: with a budget; its schedule says how many caches are built in one pass.
    """
    transcript = engine.scribe.write(conversation)
    common, spec = common_prompts(engine.scribe), engine.loaded.decoder.spec
    results: list[Forced] = []
    for start in range(0, len(questions), LANES):
        books = [{**common, "question": prompt} for prompt in prompts[start : start + LANES]]
        built = build(engine.desk, policy, transcript.ids, books, Meter())
        for number in range(len(books)):
            question, shelf = questions[start + number], Shelf(spec, [built.activate(number)])
            memory = Memory(policy, conversation, transcript, shelf, OneCache(), _NO_FIGURES)
            results += force(engine, memory, [question])
    return results
