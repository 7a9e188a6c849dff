"""`larder ask`: answer questions over a conversation or a document, under a budget."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from larder.cli.console import format_bytes, format_seconds, progress_console
from larder.cli.errors import INTERRUPTED_EXIT_CODE, print_document
from larder.cli.options import ModelOptions, command
from larder.cli.store_options import (
    DEFAULT_CODEC,
    CodecName,
    KeyFile,
    RecomputeLayers,
    ResumeDeadline,
    ReuseFrom,
    ShareLayers,
    StoreUrl,
    check_codec,
    layer_transfer,
    open_persistence,
)
from larder.core.conversation import Conversation, Question
from larder.core.errors import InputError, UsageError

if TYPE_CHECKING:
    from larder.cli.question_run import QuestionRun
    from larder.engine.engine import Engine
    from larder.engine.persistence import ChatPersistence

STDIN = Path("-")
InputFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="FILE",
        help="Conversation (.json) or document (.txt, .md, logs, programs), or - for stdin; may "
        "be left out with --context.",
    ),
]
ContextFiles = Annotated[
    list[Path],
    typer.Option(
        metavar="FILE",
        help="Document to read beside others; may be repeated, and FILE is the first.",
    ),
]
ScoringPrompts = Annotated[
    list[str],
    typer.Option(
        metavar="NAME=TEXT",
        help="Text that a policy scores entries by, such as task=TEXT for task_aware; "
        "may be repeated.",
    ),
]
ExplainPage = Annotated[
    Path | None,
    typer.Option(metavar="PAGE.html", help="Write a page that shows the entries of each cache."),
]
SchemaFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="JSON schema that each answer matches.")
]


@command
def ask(
    *,
    file: InputFile = None,
    question: Annotated[
        list[str], typer.Option("--question", "-q", help="Question; may be repeated.")
    ],
    options: ModelOptions,
    context: ContextFiles = [],  # noqa: B006, never changed
    prompt: ScoringPrompts = [],  # noqa: B006, never changed
    explain: ExplainPage = None,
    keep: Annotated[
        bool,
        typer.Option("--keep", help="Save the caches after prefill; restore them the next time."),
    ] = False,
    schema: SchemaFile = None,
    store: StoreUrl = None,
    codec: CodecName = DEFAULT_CODEC,
    resume_deadline: ResumeDeadline = None,
    key_file: KeyFile = None,
    share_layer: ShareLayers = [],  # noqa: B006, never changed
    reuse_from: ReuseFrom = None,
    recompute_layers: RecomputeLayers = None,
) -> None:
    """Answer questions about FILE from a cache within the budget.

    Questions are independent. A question whose answer is in FILE is scored.
    """
    from larder.cli.question_run import open_engine

    _check_page(explain)
    check_codec(codec, resume_deadline)
    answer_schema = None if schema is None else _read_schema(schema)
    layers = layer_transfer(share_layer, reuse_from, recompute_layers)
    if not keep:
        _check_no_store(store, codec, key_file, resume_deadline)
        if layers is not None:
            raise UsageError(
                "--share-layer and --reuse-from need --keep, since models share through a store: "
                "add --keep, or leave them out."
            )
    conversation = _read_files(file, context)
    questions = [_question_of(conversation, text) for text in question]
    prompts = _prompts(prompt)
    engine = open_engine(options, [conversation])
    saved = nullcontext()
    if keep:
        saved = open_persistence(engine, store, codec, key_file, resume_deadline, layers)
    with saved as keeper:
        run, is_whole = _run_questions(
            engine, keeper, options, conversation, questions, prompts, answer_schema
        )
    if explain is not None and is_whole:
        _write_page(explain, run)
    _print_run(run, options)
    if not is_whole:
        raise typer.Exit(INTERRUPTED_EXIT_CODE)


def _print_run(run: QuestionRun, options: ModelOptions) -> None:
    from larder.cli.question_run import SEED, seed_model_line

    if options.json:
        from larder.cli.json_documents import run_document

        print_document(run_document(run))
    else:
        _print_errors(run)
    if options.model == SEED:
        progress_console().print(seed_model_line())
    _print_figures(run)


def _check_no_store(
    store: str | None, codec: str, key_file: Path | None, resume_deadline: float | None
) -> None:
    is_given = any(each is not None for each in (store, key_file, resume_deadline))
    if is_given or codec != DEFAULT_CODEC:
        raise UsageError(
            "--store, --codec, --resume-deadline and --key-file need --keep: add --keep, or leave "
            "them out."
        )


def _run_questions(
    engine: Engine,
    keeper: ChatPersistence | None,
    options: ModelOptions,
    conversation: Conversation,
    questions: list[Question],
    prompts: Mapping[str, str],
    schema: Mapping[str, Any] | None,
) -> tuple[QuestionRun, bool]:
    """Prefill and questions; False if Ctrl-C came before the last question.

    Args:
        prompts: texts of scoring prompts by name, beside those that depend on the question.

    Raises:
        LarderError: error of the first question, if every question failed.
    """
    from larder.cli.question_run import prefill_run, prompts_for, sampling_params

    prompts = {**prompts, **prompts_for(engine, questions)}
    run = prefill_run(engine, conversation, prompts, keeper=keeper)
    sampling, run.schema = sampling_params(options), schema
    try:
        for one in questions:
            if not options.json and len(questions) > 1:
                print(f"{'' if one is questions[0] else chr(10)}> {one.question}")
            on_text = _discard_text if options.json else _write_text
            outcome = run.ask(one, sampling, options.max_new_tokens, on_text)
            if not options.json and outcome.error is None:
                print()
    except KeyboardInterrupt:
        if not options.json:
            print()
        return run, False
    if all(outcome.error is not None for outcome in run.outcomes):
        raise next(outcome.error for outcome in run.outcomes if outcome.error is not None)
    return run, True


def _prompts(questions: list[str]) -> dict[str, str]:
    """Texts of scoring prompts by name.

    Raises:
        UsageError: one has no name or no text.
    """
    prompts: dict[str, str] = {}
    for each in questions:
        name, _, text = each.partition("=")
        if not name or not text:
            raise UsageError(f"--prompt takes NAME=TEXT, such as task=TEXT, got {each!r}.")
        prompts[name] = text
    return prompts


def _read_files(file: Path | None, context: list[Path]) -> Conversation:
    """Conversation in a file or on stdin, or a document of several contexts.

    Raises:
        UsageError: neither is given, or stdin beside contexts, or stdin is closed.
        InputError: a file cannot be read, or is no document beside others.
    """
    from larder.session.files import read_conversation
    from larder.session.files.loader import read_context_files

    if STDIN in (file, *context):
        return _read_stdin(is_alone=not context)
    if not context:
        if file is None:
            raise UsageError(
                "Nothing to read was given: name a FILE, or --context FILE. "
                "See 'larder ask --help'."
            )
        return read_conversation(file)
    return read_context_files([*([] if file is None else [file]), *context])


def _read_stdin(is_alone: bool) -> Conversation:
    from larder.session.files.loader import read_stream

    if not is_alone:
        raise UsageError(
            "- is stdin, which is read alone: save its text to a file, and give that as --context."
        )
    if sys.stdin is None:
        raise UsageError("- is stdin, which is closed: pipe a text into it, or name a FILE.")
    return read_stream(sys.stdin.buffer.read(), "stdin")


def _read_schema(path: Path) -> Mapping[str, Any]:
    """JSON schema in a file, checked before anything is read.

    Raises:
        InputError: the file is no JSON object.
        BadParameter: the schema cannot be enforced.
        DependencyError: llguidance is not installed.
    """
    from larder.engine.constraint import json_constraint

    try:
        schema = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as JSON ({error}): give a JSON schema.") from error
    if not isinstance(schema, dict):
        raise InputError(f"{path} holds no JSON object: give a JSON schema.")
    json_constraint(schema)
    return schema


def _question_of(conversation: Conversation, text: str) -> Question:
    """Question of the file with this text and its answer; otherwise a question without one."""
    if not text.strip():
        raise UsageError('A question is empty: write -q "What ...?".')
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


def _print_errors(run: QuestionRun) -> None:
    for outcome in run.outcomes:
        if outcome.error is not None:
            print(f"larder: {outcome.question.question[:40]!r}: {outcome.error}", file=sys.stderr)


def _print_figures(run: QuestionRun) -> None:
    from larder.cli.question_run import dense_line

    figures = run.memory.figures
    lines = progress_console()
    lines.print(
        f"read {figures.context_tokens:,} tokens in {format_seconds(figures.prefill_seconds)}; "
        f"KV cache {format_bytes(figures.active_kv_bytes)} in use, "
        f"{format_bytes(figures.kv_bytes)} in all, "
        f"{format_bytes(figures.full_kv_bytes)} without a budget{dense_line(figures)}"
    )
    for one in run.outcomes:
        if one.answer is not None:
            origin = "" if one.answer.episode is None else f" from episode {one.answer.episode + 1}"
            lines.print(
                f"{one.answer.new_tokens} tokens in "
                f"{format_seconds(one.answer.decode_seconds)}{origin}"
            )


def _check_page(page: Path | None) -> None:
    """Raise UsageError if the page's path is a folder, or in none that exists."""
    if page is not None and (page.is_dir() or not page.absolute().parent.is_dir()):
        raise UsageError(
            f"--explain {page} is not a writable file path: name a file in an existing folder."
        )


def _write_page(page: Path, run: QuestionRun) -> None:
    from larder.cli.explain_page import explanation
    from larder.explain import render

    try:
        page.write_text(render(explanation(run)), encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"--explain {page} cannot be written ({error.strerror}): name another file."
        ) from error
