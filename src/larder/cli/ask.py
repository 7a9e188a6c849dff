"""`larder ask`: answer questions over a conversation or a document, under a budget."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from larder.cli.console import format_bytes, format_seconds, progress_console
from larder.cli.errors import INTERRUPTED_EXIT_CODE, print_document
from larder.cli.options import ModelOptions, command
from larder.cli.store_options import CodecName, KeyFile, StoreUrl, check_codec, open_persistence
from larder.core.conversation import Conversation, Question
from larder.core.errors import LarderError, UsageError

if TYPE_CHECKING:
    from larder.cli.question_run import QuestionRun
    from larder.engine.engine import Engine
    from larder.engine.persistence import ChatPersistence


@command
def ask(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Conversation (.json) or document (.txt, .md).")
    ],
    question: Annotated[
        list[str], typer.Option("--question", "-q", help="What to ask; may be given many times.")
    ],
    options: ModelOptions,
    explain: Annotated[
        Path | None,
        typer.Option(metavar="PAGE.html", help="Write a page that shows what each cache keeps."),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the reading, and restore it the next time.")
    ] = False,
    store: StoreUrl = None,
    codec: CodecName = "raw",
    key_file: KeyFile = None,
) -> None:
    """Answer questions about FILE from a cache within the budget.

    Questions are independent of each other. A question that FILE knows the answer to is scored.
    """
    from larder.cli.question_run import open_engine
    from larder.session.files import read_conversation

    _check_page(explain)
    check_codec(codec)
    if not keep and (store is not None or codec != "raw" or key_file is not None):
        raise UsageError(
            "--store, --codec and --key-file say how a reading is kept: give --keep as well."
        )
    conversation = read_conversation(file)
    questions = [_question_of(conversation, text) for text in question]
    engine = open_engine(options)
    with open_persistence(engine, store, codec, key_file) if keep else nullcontext() as keeper:
        sitting, is_whole = _run_questions(engine, keeper, options, conversation, questions)
    if explain is not None and is_whole:
        _write_page(explain, sitting)
    if options.json:
        from larder.cli.json_documents import run_document

        print_document(run_document(sitting))
    else:
        _print_errors(sitting)
    _print_figures(sitting)
    if not is_whole:
        raise typer.Exit(INTERRUPTED_EXIT_CODE)


def _run_questions(
    engine: Engine,
    keeper: ChatPersistence | None,
    options: ModelOptions,
    conversation: Conversation,
    questions: list[Question],
) -> tuple[QuestionRun, bool]:
    """Read and ask; whether every question had its turn before Ctrl-C.

    Raises:
        LarderError: the first question's, if none could be answered.
    """
    from larder.cli.question_run import prefill_run, prompts_for, sampling_params

    sitting = prefill_run(engine, conversation, prompts_for(engine, questions), keeper=keeper)
    drawn = sampling_params(options)
    try:
        for one in questions:
            if not options.json and len(questions) > 1:
                print(f"{'' if one is questions[0] else chr(10)}> {one.question}")
            on_text = _discard_text if options.json else _write_text
            asked = sitting.ask(one, drawn, options.max_new_tokens, on_text)
            if not options.json and asked.error is None:
                print()
    except KeyboardInterrupt:
        if not options.json:
            print()
        return sitting, False
    if all(asked.error is not None for asked in sitting.asked):
        raise _first_error(sitting)
    return sitting, True


def _first_error(sitting: QuestionRun) -> LarderError:
    return next(asked.error for asked in sitting.asked if asked.error is not None)


def _question_of(conversation: Conversation, text: str) -> Question:
    """The question as the file has it, with its answer; else as it was typed."""
    if not text.strip():
        raise UsageError('A question is blank: write -q "What ...?".')
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError(f"The question {text!r} is not valid UTF-8: type it as text.") from None
    known = {question.question.strip(): question for question in conversation.questions}
    return known.get(text.strip(), Question(text))


def _write_text(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _discard_text(text: str) -> None:
    del text


def _print_errors(sitting: QuestionRun) -> None:
    for asked in sitting.asked:
        if asked.error is not None:
            print(f"larder: {asked.question.question[:40]!r}: {asked.error}", file=sys.stderr)


def _print_figures(sitting: QuestionRun) -> None:
    from larder.cli.eval_tables import dense_line

    figures, asked = sitting.memory.figures, sitting.asked
    lines = progress_console()
    lines.print(
        f"read {figures.context_tokens:,} tokens in {format_seconds(figures.prefill_seconds)}; "
        f"KV cache {format_bytes(figures.active_kv_bytes)} in use, "
        f"{format_bytes(figures.kv_bytes)} in all, "
        f"{format_bytes(figures.full_kv_bytes)} without a budget{dense_line(figures)}"
    )
    for one in asked:
        if one.answer is not None:
            place = "" if one.answer.episode is None else f" from episode {one.answer.episode + 1}"
            lines.print(
                f"{one.answer.new_tokens} tokens in "
                f"{format_seconds(one.answer.decode_seconds)}{place}"
            )


def _check_page(page: Path | None) -> None:
    """Raises: UsageError: the page could not be written at the end."""
    if page is not None and (page.is_dir() or not page.absolute().parent.is_dir()):
        raise UsageError(
            f"--explain {page} is no place for a page: name a file in a folder that exists."
        )


def _write_page(page: Path, sitting: QuestionRun) -> None:
    from larder.cli.explain_page import explanation
    from larder.explain import render

    try:
        page.write_text(render(explanation(sitting)), encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"--explain {page} cannot be written ({error.strerror}): name another file."
        ) from error
