"""Wording of tasks: what a model reads, what it is asked, and how its answers are scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from bench.corpus_files import sources, words
from larder import Conversation, Engine, Message, Question
from larder.core import MemoryBudget, PromptLayout, UnknownName, UsageError
from larder.session import ConversationMemory, TemplateMessage, TokenizerAdapter
from larder_bench.datasets.prompt_templates import (
    PROMPTS,
    worded_chat,
    worded_document,
    worded_text,
)
from larder_bench.datasets.sources import TaskSources
from larder_bench.datasets.task_prompts import QuestionPlacement, Wording
from larder_bench.execution.runner import validate_study
from larder_bench.measures.forced import ForcedAnswers
from larder_bench.random_models import open_model
from larder_bench.results.budget_labels import MatchedQuantity
from larder_bench.results.rows import Row
from larder_bench.scoring.item_scores import NumberedQuestion, generated_items, likelihood_items
from larder_bench.scoring.teacher_forcing import AnswerLikelihood, score_answers
from larder_bench.studies.cells import Cell, cells_of
from larder_bench.studies.methods import parse_control
from larder_bench.studies.model_context import ModelContext
from larder_bench.studies.question_sequences import ConversationReader, ask_all
from larder_bench.studies.study import Study, StudyTask
from larder_bench.tasks.base import parse_task

RULER = {
    'needles(kind="magic")': "niah_magic",
    "passkey": "niah_passkey",
    "multi_key(questions=2)": "multi_key",
    "multi_value": "multi_value",
    "multi_query": "multi_query",
    "variables": "niah_vars",
    "lookup(questions=4)": "lookup",
    "common_words": "common_words",
    "frequent_words": "frequent_words",
    "passage": "passage",
    "code": "code",
    "qa": "qa",
    "few_shot": "few_shot",
}
SCORERS = {"passage": "prefix_share", "code": "edit_similarity", "few_shot": "classes"}
OTHERS = [Wording.INSTRUCT, Wording.PLAIN]


@pytest.fixture(scope="module")
def bench() -> ModelContext:
    engine = Engine(open_model("random:qwen3-tiny"), policy="full")
    return ModelContext(engine, TaskSources(engine.tokenizer.count_tokens))


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> TaskSources:
    return sources(tmp_path_factory.mktemp("material"))


def a_text(wording: Wording, *questions: Question) -> Conversation:
    return worded_text("text", "Mira is a cat. Vera is a vet.", questions, wording, "Read. ")


def test_default_wording_depends_on_the_model() -> None:
    assert Wording.of_model("seed", True) is Wording.of_model("random:tiny", True) is Wording.SEED
    assert Wording.of_model("smollm2-dialogue", True) is Wording.SEED
    assert Wording.of_model("smollm2-dialogue-4k", True) is Wording.SEED
    assert Wording.of_model("smollm2", True) is Wording.INSTRUCT
    assert Wording.of_model("gemma3-270m", False) is Wording.PLAIN


@pytest.mark.parametrize("task", RULER)
@pytest.mark.parametrize("wording", OTHERS)
def test_published_prompts_ask_for_what_the_text_holds(
    task: str, wording: Wording, material: TaskSources
) -> None:
    made = parse_task(task).make(1, 500, replace(material, wording=wording))
    assert made.form is wording.layout and made.opening
    [message] = made.messages
    assert words(made.opening) + words(message.content) <= 500
    for question in made.questions:
        assert question.kind == RULER[task]
        assert question.scorer == SCORERS.get(task, "string_match")
        assert "{" not in question.question + question.answer_prefix
        if task == "code":
            continue
        assert question.answer_prefix
        parts = [question.answer[a:b].strip() for a, b in question.items] or [question.answer]
        assert all(part in message.content for part in parts)


@pytest.mark.parametrize("kind", PROMPTS)
def test_seed_prompts_have_no_answer_prefix(kind: str) -> None:
    assert not PROMPTS[kind].of(Wording.SEED).answer_prefix
    assert PROMPTS[kind].of(Wording.PLAIN).answer_prefix or kind == "code"


def test_variables_are_asked_for_by_value_in_the_published_wording() -> None:
    seed, other = (
        parse_task("variables(chains=1)").make(0, 300, TaskSources(words, wording=wording))
        for wording in (Wording.SEED, Wording.INSTRUCT)
    )
    assert seed.questions[0].answer in other.questions[0].question
    assert len(other.questions[0].items) == 3


@pytest.mark.parametrize("placement", QuestionPlacement)
@pytest.mark.parametrize("form", PromptLayout)
def test_context_and_question_are_one_prompt_wherever_the_question_stands(
    bench: ModelContext, form: PromptLayout, placement: QuestionPlacement
) -> None:
    tokenizer: TokenizerAdapter = bench.engine.tokenizer
    question = Question("Who is Mira?", "A cat.", answer_prefix="Mira is")
    talk = Conversation("talk", (Message("user", "Mira is a cat."),), (question,), form)
    talk = replace(talk, opening="" if form is PromptLayout.CHAT else "Read. ")
    talk = replace(talk, question_prompt="\n{question}\n")
    expected = tokenizer.encode_conversation(talk).ids + tokenizer.encode_question_about(
        talk, question
    )
    if placement is QuestionPlacement.INSIDE:
        talk = replace(talk, inside=question)
    context = tokenizer.encode_conversation(talk).ids
    rest = tokenizer.encode_question_about(talk, question)
    assert tokenizer.decode(context + rest) == tokenizer.decode(expected)
    asked = tokenizer.decode(context)
    assert ("Who is Mira?" in asked) == (placement is QuestionPlacement.INSIDE)
    assert tokenizer.decode(rest).endswith("Mira is")


def test_text_and_question_share_one_turn(bench: ModelContext) -> None:
    tokenizer, made = bench.engine.tokenizer, a_text(Wording.INSTRUCT, Question("Who?", "Mira"))
    ids = tokenizer.encode_conversation(made).ids
    ids += tokenizer.encode_question_about(made, made.questions[0])
    text = made.opening + made.messages[0].content + "\nWho?"
    assert ids == tokenizer.encode_first_question(text)


DOCUMENTS = ["longbench", "longbench_v2", "infinitebench", "text"]


@pytest.mark.parametrize("task", DOCUMENTS)
def test_documents_of_data_sets_have_the_layout_of_the_wording(
    task: str, material: TaskSources
) -> None:
    seed, *others = (
        parse_task(task).make(0, 300, replace(material, wording=wording)) for wording in Wording
    )
    assert seed.form is PromptLayout.DOCUMENT and not seed.questions[0].answer_prefix
    for wording, made in zip(OTHERS, others, strict=True):
        assert made.form is wording.layout and made.messages == seed.messages
        [question] = made.questions
        assert question.question == seed.questions[0].question
        assert question.scorer or task == "text"
        begins = wording is Wording.PLAIN and task != "text"
        assert question.answer_prefix == ("Answer:" if begins else "")


@pytest.mark.parametrize("wording", OTHERS)
def test_plain_answer_starts_with_the_last_line_of_a_published_prompt(wording: Wording) -> None:
    question = Question("Who {is} it?", "Mira")
    made = Conversation("document", (Message("user", "A text."),), (question,))
    for prompt, plain, prefix in (
        ("Now: {question} {{x}}\nReply {{x}}:", "\n\nNow: Who {is} it? {x}\n", "Reply {x}:"),
        ("Now: {question}", "\n\nNow: Who {is} it?\n", "Answer:"),
        ("It is {question}:", "\n\nIt is Who {is} it?:\n", "Answer:"),
    ):
        worded = worded_document(replace(made, question_prompt=prompt), wording)
        asked = worded.question_prompt.format(question=question.question)
        is_plain = wording is Wording.PLAIN
        whole = plain if prefix == "Answer:" else f"{plain}{prefix}"
        assert asked == (plain if is_plain else whole.rstrip("\n"))
        assert worded.questions[0].answer_prefix == (prefix if is_plain else "")
        assert worded.questions[0].scorer == "string_match"


def test_plain_text_continues_at_the_cut(bench: ModelContext) -> None:
    made = parse_task("text").make(0, 300, replace(bench.sources, wording=Wording.PLAIN))
    tokenizer = bench.engine.tokenizer
    ids = tokenizer.encode_conversation(made).ids
    ids += tokenizer.encode_question_about(made, made.questions[0])
    assert tokenizer.decode(ids).strip() == "".join(one.content for one in made.messages).strip()


def test_messages_become_lines_where_there_is_no_chat_format() -> None:
    talk = Conversation("talk", (Message("user", "Hi."), Message("assistant", "Hello.")))
    talk = replace(talk, questions=(Question("Who?", "You."),))
    assert worded_chat(talk, Wording.SEED) is talk
    plain = worded_chat(talk, Wording.PLAIN)
    assert "".join(m.content for m in plain.messages) == "User: Hi.\nAssistant: Hello.\n"
    assert plain.questions[0].answer_prefix == "Answer:" and plain.form is PromptLayout.PLAIN
    asked = worded_chat(talk, Wording.INSTRUCT)
    assert asked.messages == talk.messages and asked.question_prompt == "{question}"
    assert asked.questions[0].answer_prefix.endswith("the answer is")
    listed = replace(talk, questions=(Question("Which?", "1, 2", items=((0, 1), (2, 4))),))
    assert not worded_chat(listed, Wording.INSTRUCT).questions[0].answer_prefix
    assert worded_chat(plain, Wording.INSTRUCT) is plain


def test_transcripts_are_plain_texts_where_there_is_no_chat_format(material: TaskSources) -> None:
    made = parse_task("locomo").make(0, 300, material)
    assert worded_chat(made, Wording.INSTRUCT) is made
    plain = worded_chat(made, Wording.PLAIN)
    assert plain.form is PromptLayout.PLAIN and plain.messages == made.messages
    assert all(one.answer_prefix.endswith(":") for one in plain.questions)


def test_string_match_scores_each_part_in_the_whole_answer() -> None:
    made = a_text(
        Wording.INSTRUCT,
        Question("Who?", "Mira, Vera", items=((0, 4), (5, 10))),
        Question("Who?", "Olga", others=("Vera",)),
    )
    both, other = made.questions
    items = generated_items(NumberedQuestion(both, 0, 0), "It is VERA, I think.")
    assert [item["own"] for item in items] == [0.0, 1.0]
    [item] = generated_items(NumberedQuestion(other, 1, 0), "It is VERA, I think.")
    assert item["own"] == 1.0 and item["scored_by"] == "string_match" and not item["exact"]


def test_recited_passage_counts_until_its_first_wrong_word(bench: ModelContext) -> None:
    question = Question("Go on.", "the cat sat on the mat", scorer="prefix_share")
    numbered = NumberedQuestion(question, 0, 0)
    for text, share in {
        "the cat sat on the mat. Then it left.": 5 / 6,
        "the cat sat on the mat Then it left.": 1.0,
        "the dog sat on the mat": 1 / 6,
        "cat": 0.0,
        "the cat": 2 / 6,
    }.items():
        [item] = generated_items(numbered, text)
        assert item["own"] == pytest.approx(share, abs=1e-4)
    for hits, share in {(True, True, False, True): 0.5, (False, True): 0.0, (True,): 1.0}.items():
        forced = AnswerLikelihood(question, hits, (0.0,) * len(hits), None)
        [item] = likelihood_items(numbered, forced, bench.engine.tokenizer)
        assert item["own"] == share and item["scored_by"] == "prefix_share"
    plain = AnswerLikelihood(replace(question, scorer=""), (True,), (0.0,), None)
    assert "own" not in likelihood_items(numbered, plain, bench.engine.tokenizer)[0]


def test_answer_prefix_is_scored_without_the_end_of_turn(bench: ModelContext) -> None:
    question = Question("Who is Mira?", "a cat")
    prefixed = replace(question, answer_prefix="Mira is")
    made = a_text(Wording.INSTRUCT, question, prefixed)
    memory = bench.engine.read(made)
    ended, open_ended = score_answers(bench.engine, memory, made.questions)
    tokenizer = bench.engine.tokenizer
    assert ended.tokens == len(tokenizer.encode("a cat")) + 1
    assert open_ended.tokens == len(tokenizer.encode(" a cat"))


@pytest.mark.parametrize("task", ["lifelog(questions=2)", "turns(of='lifelog(questions=2)')"])
@pytest.mark.parametrize("wording", Wording)
def test_full_cache_answers_equally_with_the_question_inside_or_after(
    bench: ModelContext, task: str, wording: Wording
) -> None:
    spelled = parse_task(task)
    sources = replace(bench.sources, wording=wording)
    conversation = worded_chat(spelled.make(0, 300, sources), wording)
    found = [
        ask_all(reader, spelled, ForcedAnswers())
        for placement in QuestionPlacement
        for reader in [_reader(bench, conversation, placement, "full")]
    ]
    after, inside = found
    assert len(after) == len(inside) == 2
    for one, other in zip(after, inside, strict=True):
        assert one["log_likelihood"] == pytest.approx(other["log_likelihood"], abs=2e-3)


@dataclass
class PromptTextRecorder:
    """Scorer that records the whole text before each answer."""

    texts: list[str] = field(default_factory=list)

    def ask(
        self, engine: Engine, memory: ConversationMemory, numbered: Sequence[NumberedQuestion]
    ) -> list[Row]:
        for one in numbered:
            result = engine.tokenizer.encode_question_about(memory.conversation, one.question)
            self.texts.append(engine.tokenizer.decode(result))
        return [one.item() for one in numbered]


@pytest.mark.parametrize("policy", ["full", "oracle"])
@pytest.mark.parametrize("task", ["turns", "requests"])
def test_inside_a_sequence_only_its_first_question_is_in_the_context(
    bench: ModelContext, task: str, policy: str
) -> None:
    spelled = parse_task(
        f"{task}(of='lifelog(questions=3)'" + (", turns=2)" if task == "requests" else ")")
    )
    conversation = spelled.make(0, 400, bench.sources)
    noted = PromptTextRecorder()
    reader = _reader(bench, conversation, QuestionPlacement.INSIDE, policy)
    reads: list[str] = []
    read = reader.subject.read

    class RecordingMethod:
        """Method that records what it reads."""

        scope, matched = reader.subject.scope, reader.subject.matched

        def read(
            self, bench: ModelContext, history: Conversation, *rest: Any
        ) -> ConversationMemory:
            assert history.inside is not None
            reads.append(history.inside.question)
            return read(bench, history, *rest)

    items = ask_all(replace(reader, subject=RecordingMethod()), spelled, noted)
    questions = [one.question for one in conversation.questions]
    firsts = questions[:1] if task == "turns" else [questions[0], questions[2]]
    assert list(dict.fromkeys(reads)) == firsts
    assert [item["question"] for item in items] == [0, 1, 2]
    for question, text in zip(questions, noted.texts, strict=True):
        assert (question in text) == (question not in firsts)


def test_measures_without_questions_refuse_them_inside() -> None:
    tasks = (StudyTask("lifelog", (300,)),)
    study = Study("s", tasks, question=("inside",), measure=("fidelity",), policies=("snapkv",))
    with pytest.raises(UsageError, match="fidelity asks no question inside"):
        validate_study(study)
    assert validate_study(replace(study, measure=("forced",)))


def test_policy_sees_the_question_only_when_it_is_inside(bench: ModelContext) -> None:
    conversation = parse_task("lifelog(questions=1)").make(0, 400, bench.sources)
    kept: dict[QuestionPlacement, int] = {}
    for placement in QuestionPlacement:
        reader = _reader(bench, conversation, placement, "streaming_llm")
        memory = reader.read(conversation.questions[0])
        kept[placement] = memory.activate_for("?")[0].next_position
    tokenizer = bench.engine.tokenizer
    asked = tokenizer.encode(conversation.questions[0].question)
    assert kept[QuestionPlacement.INSIDE] - kept[QuestionPlacement.AFTER] >= len(asked)


@dataclass
class PromptTokenRecorder:
    """Scorer that records what the model reads before each answer."""

    prompts: list[tuple[int, ...]] = field(default_factory=list)

    def ask(
        self, engine: Engine, memory: ConversationMemory, numbered: Sequence[NumberedQuestion]
    ) -> list[Row]:
        """No items."""
        for one in numbered:
            encode = engine.tokenizer.encode_question_about
            self.prompts.append(encode(memory.conversation, one.question))
        return []


@pytest.mark.parametrize("placement", QuestionPlacement)
@pytest.mark.parametrize("task", ["turns(of='{}')", "requests(of='{}', turns=2)"])
@pytest.mark.parametrize("inner", ["lookup(questions=4)", "passage(questions=4)"])
def test_later_questions_of_a_sequence_are_ordinary_turns(
    bench: ModelContext, task: str, inner: str, placement: QuestionPlacement
) -> None:
    spelled, tokenizer = parse_task(task.format(inner)), bench.engine.tokenizer
    sources = replace(bench.sources, wording=Wording.INSTRUCT)
    made = spelled.make(0, 300, sources)
    scorer = PromptTokenRecorder()
    ask_all(_reader(bench, made, placement, "full"), spelled, scorer)
    inside = made.questions[0] if placement is QuestionPlacement.INSIDE else None
    text = tokenizer.encode_conversation(replace(made, inside=inside)).ids
    turns = [TemplateMessage("user", made.opening + made.messages[0].content + "\n")]
    first, second = made.questions[:2]
    turns[0] = replace(turns[0], content=turns[0].content + first.question)
    answered = TemplateMessage("assistant", first.answer_prefix + first.prefixed_answer)
    asked = TemplateMessage("user", second.question)
    expected = [
        tokenizer.encode(tokenizer.render_messages(turns)) + tokenizer.encode(first.answer_prefix),
        tokenizer.encode(tokenizer.render_messages([*turns, answered, asked]))
        + tokenizer.encode(second.answer_prefix),
    ]
    read = [text + scorer.prompts[0]]
    read.append(read[0] + tokenizer.encode_answer_about(made, first) + scorer.prompts[1])
    decode = tokenizer.tokenizer.decode
    assert [decode(ids) for ids in read] == [decode(ids) for ids in expected]
    assert len(scorer.prompts) == 4


def test_question_placements_are_separate_cells() -> None:
    tasks = (StudyTask("lifelog", (300,)),)
    study = Study("both", tasks, question=("after", "inside"), policies=("snapkv",), controls=())
    cells: list[Cell] = cells_of(study, "seed")
    assert {cell.question for cell in cells} == set(QuestionPlacement)
    assert len({(*cell.setting, cell.seed) for cell in cells}) == len(cells)
    assert {cell.head({})["question"] for cell in cells} == {"after", "inside"}
    with pytest.raises(UnknownName, match="place of the question named 'before'"):
        replace(study, question=("before",))
    with pytest.raises(UnknownName, match="wording named 'formal'"):
        replace(study, wording="formal")


def _reader(
    bench: ModelContext, conversation: Conversation, placement: QuestionPlacement, policy: str
) -> ConversationReader:
    method = parse_control(policy)
    amount = None if policy == "full" else MemoryBudget.parse("64")
    return ConversationReader(
        bench, method, conversation, amount, MatchedQuantity.TOKENS, placement=placement
    )
