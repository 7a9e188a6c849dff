"""Put the questions of many files, under one policy or under two that are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from larder.cli.console import progress_bar
from larder.cli.options import ModelOptions
from larder.cli.question_run import (
    QuestionOutcome,
    QuestionRun,
    open_engine,
    parse_policy_option,
    prefill_run,
    prompts_for,
    sampling_params,
)
from larder.core.conversation import Conversation
from larder.core.errors import InputError, LarderError
from larder.engine.engine import Engine
from larder.session.files import Adversarial, find_files, read_conversation

Files = Mapping[Path, Conversation]


@dataclass
class FileEvaluation:
    """One file under one policy: the sitting, or why there is none."""

    path: Path
    sitting: QuestionRun | None = None
    error: LarderError | None = None

    @property
    def asked(self) -> list[QuestionOutcome]:
        """What came of the questions so far; empty where the file could not be read."""
        return [] if self.sitting is None else self.sitting.asked


@dataclass
class Evaluation:
    """All files so far, and the same files under the policy they are compared with.

    Args:
        wanted: how many files there are.
        comparison: the engine of the other policy; None where nothing is compared.
        is_whole: whether every question had its turn.
    """

    engine: Engine
    comparison: Engine | None
    wanted: int
    files: list[FileEvaluation] = field(default_factory=list)
    others: list[FileEvaluation] = field(default_factory=list)
    is_whole: bool = False

    @property
    def scored(self) -> int:
        """How many files had a question whose answer is known."""
        return sum(any(a.question.answer for a in one.asked) for one in self.files)

    def pairs(self) -> list[tuple[Sequence[QuestionOutcome], Sequence[QuestionOutcome]]]:
        """Outcomes under both policies, of the questions that both got to."""
        both = zip(self.files, self.others, strict=False)
        counts = [(one, other, min(len(one.asked), len(other.asked))) for one, other in both]
        return [(one.asked[:n], other.asked[:n]) for one, other, n in counts]


def load_question_files(paths: Sequence[Path], adversarial: Adversarial) -> Files:
    """All files, read before any work starts, so that a bad one is known at once.

    Raises:
        InputError: a file cannot be read or asks nothing.
    """
    found = {path: read_conversation(path, adversarial) for path in find_files(paths)}
    for path, conversation in found.items():
        if not conversation.questions:
            raise InputError(
                f"{path} holds no questions: give it some under 'qa', or use larder ask."
            )
    return found


def evaluate_files(options: ModelOptions, against: str | None, files: Files) -> Evaluation:
    """Put every file's questions; Ctrl-C ends it early with what is finished.

    Raises:
        LarderError: the first error, if nothing at all could be answered.
        KeyboardInterrupt: it came before a file was read.
    """
    engine = open_engine(options)
    rival = None if against is None else comparison_engine(engine, against)
    examination = Evaluation(engine, rival, len(files))
    try:
        for path, conversation in files.items():
            _evaluate_file(options, engine, path, conversation, examination.files)
            if rival is not None:
                _evaluate_file(options, rival, path, conversation, examination.others)
        examination.is_whole = True
    except KeyboardInterrupt:
        if not any(one.sitting for one in examination.files):
            raise
    errors = [e for one in examination.files for e in (one.error, *(a.error for a in one.asked))]
    answered = any(a.answer for one in examination.files for a in one.asked)
    if examination.is_whole and not answered:
        raise next(error for error in errors if error is not None)
    return examination


def comparison_engine(engine: Engine, spelling: str) -> Engine:
    """The same model under another policy, at the same sizes where that policy leaves them open."""
    policy, sizes = parse_policy_option("--against", spelling), engine.sizes
    is_sized = policy.budget.tokens is not None or policy.budget.kept is not None
    blocks = [f.name for f in fields(policy.schedule)]  # pyright: ignore[reportArgumentType]
    has_block = "tokens" in blocks and policy.schedule.tokens is None
    return engine.under(
        policy, None if is_sized else sizes.budget, sizes.block if has_block else None
    )


def _evaluate_file(
    options: ModelOptions,
    engine: Engine,
    path: Path,
    conversation: Conversation,
    into: list[FileEvaluation],
) -> None:
    examined = FileEvaluation(path)
    into.append(examined)
    questions = list(conversation.questions)
    try:
        sitting = prefill_run(engine, conversation, prompts_for(engine, questions))
    except LarderError as error:
        examined.error = error
        return
    examined.sitting = sitting
    drawn = sampling_params(options)
    with progress_bar(f"Asking about {conversation.name}", "questions") as watch:
        for number, question in enumerate(questions, start=1):
            sitting.ask(question, drawn, options.max_new_tokens)
            watch(number, len(questions))
