"""Evaluation of the questions of many files, under one policy or two that are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from larder.cli.options import ModelOptions
from larder.cli.question_run import (
    QuestionOutcome,
    QuestionRun,
    choose_policy,
    open_engine,
    parse_policy_option,
    prefill_run,
    prompts_for,
    sampling_params,
)
from larder.core.conversation import Conversation
from larder.core.errors import InputError, LarderError
from larder.engine.engine import Engine
from larder.engine.progress_bar import progress_bar
from larder.session.files import Adversarial, find_files, read_conversation

Files = Mapping[Path, Conversation]


@dataclass
class FileEvaluation:
    """One file under one policy: its run, or the error that prevented it."""

    path: Path
    run: QuestionRun | None = None
    error: LarderError | None = None

    @property
    def outcomes(self) -> list[QuestionOutcome]:
        """Outcomes so far; empty if the prefill failed."""
        return [] if self.run is None else self.run.outcomes


@dataclass
class Evaluation:
    """Finished files under one policy, and under a second one for comparison.

    Args:
        comparison: engine of the second policy; None without a comparison.
        wanted: number of files given.
        is_whole: False after Ctrl-C.
    """

    engine: Engine
    comparison: Engine | None
    wanted: int
    files: list[FileEvaluation] = field(default_factory=list)
    others: list[FileEvaluation] = field(default_factory=list)
    is_whole: bool = False

    @property
    def scored(self) -> int:
        """Number of files with at least one expected answer."""
        return sum(any(a.question.answer for a in one.outcomes) for one in self.files)

    def pairs(self) -> list[tuple[Sequence[QuestionOutcome], Sequence[QuestionOutcome]]]:
        """Outcomes under both policies, of the questions that both finished."""
        both = zip(self.files, self.others, strict=False)
        counts = [(one, other, min(len(one.outcomes), len(other.outcomes))) for one, other in both]
        return [(one.outcomes[:n], other.outcomes[:n]) for one, other, n in counts]


def load_question_files(paths: Sequence[Path], adversarial: Adversarial) -> Files:
    """Conversations by path, all read before a model loads.

    Raises:
        InputError: a file cannot be read or has no questions.
    """
    found = {path: read_conversation(path, adversarial) for path in find_files(paths)}
    for path, conversation in found.items():
        if not conversation.questions:
            raise InputError(f"{path} has no questions: add some under 'qa', or use larder ask.")
    return found


def evaluate_files(options: ModelOptions, against: str | None, files: Files) -> Evaluation:
    """Answer the questions of all files; Ctrl-C returns what is finished.

    Raises:
        LarderError: the first error, if no question was answered.
        KeyboardInterrupt: before the first file was read.
    """
    options = choose_policy(options, files.values())
    engine = open_engine(options)
    rival = None if against is None else comparison_engine(engine, against)
    evaluation = Evaluation(engine, rival, len(files))
    try:
        for path, conversation in files.items():
            _evaluate_file(options, engine, path, conversation, evaluation.files)
            if rival is not None:
                _evaluate_file(options, rival, path, conversation, evaluation.others)
        evaluation.is_whole = True
    except KeyboardInterrupt:
        if not any(one.run for one in evaluation.files):
            raise
    errors = [e for one in evaluation.files for e in (one.error, *(a.error for a in one.outcomes))]
    answered = any(a.answer for one in evaluation.files for a in one.outcomes)
    if evaluation.is_whole and not answered:
        raise next(error for error in errors if error is not None)
    return evaluation


def comparison_engine(engine: Engine, spelling: str) -> Engine:
    """Engine over the same model with another policy; open sizes are taken from `engine`."""
    policy, sizes = parse_policy_option("--against", spelling), engine.sizes
    is_sized = policy.budget.tokens is not None or policy.budget.kept is not None
    has_block = policy.schedule.has_blocks and policy.schedule.block_tokens is None
    return engine.under(
        policy, None if is_sized else sizes.budget, sizes.block if has_block else None
    )


def _evaluate_file(
    options: ModelOptions,
    engine: Engine,
    path: Path,
    conversation: Conversation,
    evaluations: list[FileEvaluation],
) -> None:
    file_evaluation = FileEvaluation(path)
    evaluations.append(file_evaluation)
    questions = list(conversation.questions)
    try:
        run = prefill_run(engine, conversation, prompts_for(engine, questions))
    except LarderError as error:
        file_evaluation.error = error
        return
    file_evaluation.run = run
    sampling = sampling_params(options)
    with progress_bar(f"Asking about {conversation.name}", "questions") as watch:
        for number, question in enumerate(questions, start=1):
            run.ask(question, sampling, options.max_new_tokens)
            watch(number, len(questions))
