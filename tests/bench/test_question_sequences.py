"""Questions are asked on forks, after the turns before them, and with a new prefill where
needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from larder import Conversation, Engine, Message, Question
from larder.core import MemoryBudget
from larder.session import ConversationMemory
from larder_bench.datasets.sources import TaskSources
from larder_bench.random_models import open_model
from larder_bench.results.budget_labels import MatchedQuantity
from larder_bench.results.rows import Row
from larder_bench.scoring.item_scores import NumberedQuestion, generated_items, likelihood_items
from larder_bench.scoring.teacher_forcing import score_answers, score_answers_stepwise
from larder_bench.studies.methods import ComparedMethod, parse_control, parse_method
from larder_bench.studies.model_context import ModelContext
from larder_bench.studies.question_sequences import ConversationReader, ask_all, fork_memory
from larder_bench.tasks.base import parse_task

SAID = ["My cat is Mira.", "Nice.", "The vet is Vera.", "Good.", "I like long walks by the lake."]
TALK = Conversation(
    "talk",
    tuple(Message(("user", "assistant")[n % 2], text) for n, text in enumerate(SAID * 3)),
    tuple(Question(f"Who is {name}?", f"Some {name}.") for name in ("Mira", "Vera", "Olga")),
)
TASKS = {
    "alone": parse_task("lifelog"),
    "turns": parse_task("turns"),
    "requests": parse_task("requests(turns=2)"),
}


@pytest.fixture(scope="module")
def bench() -> ModelContext:
    engine = Engine(open_model("random:qwen3-tiny"), policy="full")
    return ModelContext(engine, TaskSources(engine.tokenizer.count_tokens))


@dataclass
class LengthRecorder:
    """Scorer that records the length of text before each question."""

    asked: list[tuple[int, int]] = field(default_factory=list)

    def ask(
        self, engine: Engine, memory: ConversationMemory, posed: Sequence[NumberedQuestion]
    ) -> list[Row]:
        length = memory.activate_for(posed[0].question.question)[0].next_position
        self.asked += [(one.number, length) for one in posed]
        forced = score_answers(engine, memory, [one.question for one in posed])
        pairs = zip(posed, forced, strict=True)
        return [
            item for one, each in pairs for item in likelihood_items(one, each, engine.tokenizer)
        ]


def ask_questions(
    bench: ModelContext, one: ComparedMethod, kind: str
) -> tuple[LengthRecorder, ConversationReader, list[Row]]:
    recorder = LengthRecorder()
    readings = ConversationReader(
        bench, one, TALK, MemoryBudget.parse("1/2"), MatchedQuantity.TOKENS
    )
    return recorder, readings, ask_all(readings, TASKS[kind], recorder)


@pytest.mark.parametrize(
    ("name", "kind", "reads"),
    [
        ("keydiff", "alone", 1),
        ("keydiff", "turns", 1),
        ("exact_question", "alone", 3),
        ("exact_question", "turns", 1),
        ("exact_question", "requests", 1),
        ("oracle", "turns", 3),
        ("oracle", "requests", 3),
        ('rag_2k(embedder="tokens")', "turns", 3),
    ],
)
def test_sequences_have_the_expected_prefills_and_turns(
    bench: ModelContext, name: str, kind: str, reads: int
) -> None:
    recorder, readings, items = ask_questions(bench, parse_control(name), kind)
    assert readings.figures()["reads"] == reads
    turns = {"alone": [0, 0, 0], "turns": [0, 1, 2], "requests": [0, 1, 0]}[kind]
    by_question = sorted(items, key=lambda item: item["question"])
    assert [item["turn"] for item in by_question] == turns
    lengths = [length for _, length in sorted(recorder.asked)]
    if name.startswith("rag"):
        assert lengths == sorted(set(lengths))
        return
    start = len(bench.engine.tokenizer.encode_conversation(TALK).ids)
    assert [length > start for length in lengths] == [turn > 0 for turn in turns]
    assert kind != "turns" or lengths == sorted(set(lengths))


def test_later_turn_equals_one_text(bench: ModelContext) -> None:
    first, second, _ = TALK.questions
    turns = (Message("user", first.question), Message("assistant", first.answer))
    longer = replace(TALK, messages=(*TALK.messages[:-1], *turns))
    # The talk must end with an answer, so that both texts have the same turns.
    shorter = replace(TALK, messages=TALK.messages[:-1])
    readings = ConversationReader(
        bench, parse_method("full"), shorter, None, MatchedQuantity.TOKENS
    )
    items = ask_all(readings, TASKS["turns"], LengthRecorder())
    [wanted] = score_answers(bench.engine, bench.engine.read(longer), [second])
    assert items[1]["log_likelihood"] == pytest.approx(wanted.log_likelihood, abs=2e-3)


def test_forks_do_not_change_the_memory(bench: ModelContext) -> None:
    memory = bench.engine.under("h2o", "40").read(TALK)
    before = memory.activate_for("?")[0].state()
    again = fork_memory(bench.engine, memory)
    assert again.activate_for("?")[0] is not memory.activate_for("?")[0]
    score_answers_stepwise(bench.engine, memory, TALK.questions)
    after = memory.activate_for("?")[0].state()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_sequential_scoring_equals_packed_without_offload(bench: ModelContext) -> None:
    memory = bench.engine.read(TALK)
    pairs = zip(
        score_answers(bench.engine, memory, TALK.questions),
        score_answers_stepwise(bench.engine, memory, TALK.questions),
        strict=True,
    )
    for packed, slow in pairs:
        assert packed.likelihoods == pytest.approx(slow.likelihoods, abs=1e-4)
        assert packed.episode == slow.episode


def test_generated_answers_are_scored_item_by_item() -> None:
    plain = NumberedQuestion(Question("Who?", "Mira Silva", others=("Mrs Silva",)), 3, 1)
    [item] = generated_items(plain, "mrs. silva")
    assert (item["exact"], item["f1"], item["question"], item["turn"]) == (True, 1.0, 3, 1)
    answer = "1: a cat. 2: a dog. 3: a cow."
    spans = ((0, 9), (9, 19), (19, 29))
    listed = NumberedQuestion(Question("All?", answer, items=spans), 0, 0)
    right = [item["exact"] for item in generated_items(listed, "1: a cat. 2: a cow. 3: a cow.")]
    assert right == [True, False, True]
    row = NumberedQuestion(Question("All?", "red, blue", items=((0, 4), (4, 9))), 0, 0)
    assert [item["exact"] for item in generated_items(row, "Blue, green")] == [False, True]
    assert [item["item"] for item in generated_items(row, "")] == [0, 1]
    numbers = NumberedQuestion(
        Question("Which?", "12, 345", "values", items=((0, 2), (3, 7))), 0, 0
    )
    assert [item["exact"] for item in generated_items(numbers, "345, 67")] == [False, True]
