"""`larder chat`: interactive chat; a named session can be resumed by a later process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from larder.cli.console import format_bytes, make_table, progress_console, results_console
from larder.cli.errors import INTERRUPTED_EXIT_CODE, SCHEMA, error_record, print_document
from larder.cli.options import ModelOptions, command
from larder.cli.store_options import (
    DEFAULT_CODEC,
    QUIET_REASONS,
    CodecName,
    KeyFile,
    ResumeDeadline,
    StoreUrl,
    check_codec,
    open_persistence,
    print_resume_result,
)
from larder.core.errors import LarderError, StoreError
from larder.core.home import home
from larder.engine.progress_bar import progress_bar

if TYPE_CHECKING:
    from larder.core.conversation import Conversation
    from larder.engine.answer import Answer
    from larder.engine.chat import Chat

COMMANDS = {
    "/help": "the commands",
    "/figures": "turns, tokens and bytes of the caches",
    "/episodes": "the episodes, one cache each",
    "/quit": "leave; a named session can be resumed",
}


@command
def chat(
    options: ModelOptions,
    session: Annotated[
        str | None, typer.Argument(metavar="SESSION", help="Name to resume it by.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Start a new session with the messages of FILE."),
    ] = None,
    store: StoreUrl = None,
    codec: CodecName = DEFAULT_CODEC,
    resume_deadline: ResumeDeadline = None,
    key_file: KeyFile = None,
) -> None:
    """Chat under a memory budget; one line is one turn.

    The transcript of a named session is saved under LARDER_HOME/sessions, its caches in a store.
    A resumed session restores them, or is prefilled again where that is faster or safer.
    """
    from larder.cli.question_run import open_engine
    from larder.engine.chat import Chat

    check_codec(codec, resume_deadline)
    history = _history(file)
    if session is not None:
        _print_unwritable_home(session)
    engine = open_engine(options)
    persistence = (
        nullcontext()
        if session is None
        else open_persistence(engine, store, codec, key_file, resume_deadline)
    )
    with persistence as keeper:
        with progress_bar("Reading", "tokens") as watch:
            talk = Chat(engine, session, history, watch, keeper)
        _chat_loop(talk, session, options)


def _print_unwritable_home(session: str) -> None:
    """Report on stderr if the transcript could not be saved now."""
    from larder.store.fs import check_writable

    try:
        check_writable(str(home()))
    except StoreError as error:
        print(
            f"larder: the turns of {session!r} are not saved: {home()} cannot be written "
            f"({error.__cause__ or error}): let this user write there, or set LARDER_HOME to "
            "another folder.",
            file=sys.stderr,
        )


def _history(file: Path | None) -> Conversation | None:
    from larder.session.files import read_conversation

    return None if file is None else read_conversation(file)


def _chat_loop(talk: Chat, session: str | None, options: ModelOptions) -> None:
    """Run the lines of stdin as turns, to the end or until interrupted."""
    from larder.session.capacity import beyond_budget_line

    _print_policy_change(talk, session)
    if talk.beyond_budget:
        print(f"larder: {beyond_budget_line(talk.beyond_budget)}", file=sys.stderr)
    progress_console().print(f"{talk.policy}\n{len(talk.turns)} turns so far; /help for help")
    answers: list[dict[str, Any]] = []
    try:
        for line in _lines():
            if line.split()[0] == "/quit":
                break
            _turn(talk, line, options, answers)
    except KeyboardInterrupt:
        _finish(talk, session, options, answers)
        raise typer.Exit(INTERRUPTED_EXIT_CODE) from None
    _finish(talk, session, options, answers)


def _print_policy_change(talk: Chat, session: str | None) -> None:
    """Report on stderr that a session resumes under another policy, or how it was restored."""
    former, now = talk.former_policy, str(talk.policy)
    if former is None:
        return
    if former == now:
        print_resume_result(f"the session {session!r}", talk.resumed)
        return
    print(
        f"larder: the session {session!r} used {former} and is prefilled again under {now}",
        file=sys.stderr,
    )


def _lines() -> Iterator[str]:
    """Non-blank lines of stdin, prompted for on a terminal."""
    is_terminal = sys.stdin.isatty() and sys.stderr.isatty()
    if is_terminal:
        # Importing readline gives input() arrow keys and a history; Windows has none.
        try:
            import readline  # noqa: F401
        except ImportError:
            pass
    while True:
        try:
            line = input("> ") if is_terminal else next(sys.stdin)
        except (EOFError, StopIteration):
            return
        if line.strip():
            yield line.strip()


def _turn(talk: Chat, line: str, options: ModelOptions, answers: list[dict[str, Any]]) -> None:
    """Run a command, or answer the line; an error is printed and the chat continues."""
    if line in COMMANDS:
        _run_command(talk, line)
        return
    if line.startswith("/"):
        print(f"larder: no command {line.split()[0]}: type /help.", file=sys.stderr)
        return
    try:
        answer = _answer_line(talk, line, options)
    except LarderError as error:
        print(f"larder: {error}", file=sys.stderr)
        answers.append({"question": line, "error": error_record(error)})
        return
    answers.append(_record(answer))


def _answer_line(talk: Chat, line: str, options: ModelOptions) -> Answer:
    from larder.cli.question_run import sampling_params

    def print_text(text: str) -> None:
        if not options.json:
            sys.stdout.write(text)
            sys.stdout.flush()

    answer = talk.say(line, print_text, sampling_params(options), options.max_new_tokens)
    if not options.json:
        print()
    if answer.episode is not None and talk.outcome is not None:
        opened = ", which opened a new one" if talk.outcome.is_new_episode else ""
        progress_console().print(
            f"episode {answer.episode + 1}{opened}; {answer.new_tokens} tokens"
        )
    return answer


def _record(answer: Answer) -> dict[str, Any]:
    record: dict[str, Any] = {"question": answer.question, "answer": answer.text}
    if answer.episode is not None:
        record["episode"] = answer.episode
    return record | {"decode_seconds": answer.decode_seconds, "new_tokens": answer.new_tokens}


def _finish(
    talk: Chat, session: str | None, options: ModelOptions, answers: list[dict[str, Any]]
) -> None:
    reason = talk.keep()
    if reason not in QUIET_REASONS:
        print(f"larder: the caches of {session!r} were not saved ({reason}).", file=sys.stderr)
    if options.json:
        figures = talk.figures
        head = {"schema": SCHEMA, "session": session, "policy": str(talk.policy)}
        sizes = {**asdict(figures), "kv_bytes": figures.kv_bytes}
        sizes["restored_tokens"] = talk.resumed.tokens
        print_document({**head, "model": options.model, **sizes, "answers": answers})


def _run_command(talk: Chat, line: str) -> None:
    if line == "/help":
        _show_help()
    elif line == "/figures":
        _show_figures(talk)
    else:
        _show_episodes(talk)


def _show_help() -> None:
    table = make_table("command", "shows", texts=2)
    for name, meaning in COMMANDS.items():
        table.add_row(name, meaning)
    results_console().print(table)


def _show_figures(talk: Chat) -> None:
    figures = talk.figures
    results_console().print(
        f"{figures.turns} turns, {figures.log_tokens:,} tokens; "
        f"budget {figures.budget_tokens:,} per kv head, "
        f"refreshed above {figures.budget_tokens + figures.block_tokens:,}\n"
        f"KV cache {format_bytes(figures.active_kv_bytes)} active, "
        f"{format_bytes(figures.kv_bytes)} in all, "
        f"{format_bytes(figures.peak_kv_bytes)} at the peak, "
        f"{format_bytes(figures.full_kv_bytes)} without a budget\n"
        f"{figures.refreshes} refreshes, {figures.opened} episodes opened, "
        f"{figures.write_backs} write-backs"
    )


def _show_episodes(talk: Chat) -> None:
    table = make_table("episode", "about", "segments", "per head", "KV", "", texts=2)
    for view in talk.episodes:
        about = " ".join(view.prompt_texts[0].split())[:60] if view.prompt_texts else "everything"
        table.add_row(
            str(view.number + 1),
            about,
            str(view.segments),
            f"{view.entries_per_head:,.0f}",
            format_bytes(view.kv_bytes),
            "active" if view.is_active else "",
        )
    results_console().print(table)
