"""Command `larder`: its sub-commands, `--version`, and the entry point."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any

import typer

import larder
from larder.cli.errors import INTERRUPTED_EXIT_CODE, Unwritable, handle_stdout_error, print_error
from larder.cli.options import HelpGroup
from larder.cli.startup import pause_collection
from larder.core.errors import UsageError

GROUP = "larder.command"  # entry point group of commands in other packages
# Built-in commands, and groups of commands.
COMMANDS = {
    "demo": "larder.cli.demo.command:demo",
    "ask": "larder.cli.ask:ask",
    "eval": "larder.cli.eval:evaluate",
    "chat": "larder.cli.chat:chat",
    "batch": "larder.cli.batch:batch",
    "serve": "larder.cli.serve:serve",
    "train": "larder.cli.train:train",
}
# Commands that load much, and either end soon or call `resume_collection`.
LOADING_COMMANDS = (*COMMANDS, "policy")
COMMAND_GROUPS = {
    "model": "larder.cli.model:app",
    "policy": "larder.cli.policy:app",
    "cache": "larder.cli.cache:app",
}
# Base class of all errors of the parser; typer exports only subclasses.
ParserError: Any = typer.BadParameter.__base__
RATIO_OPTION = "--compression-ratio"  # of kvpress


class CommandTable(Mapping[str, Any]):
    """Commands by name, in the order of `--help`; a module is imported by the first look-up.

    Packages add commands through the entry point group `larder.command`; they cannot replace a
    built-in command.
    """

    def __getitem__(self, name: str) -> Any:
        target = (COMMANDS | COMMAND_GROUPS).get(name)
        if target is not None:
            return _command_of(EntryPoint(name, target, GROUP))
        for point in entry_points(group=GROUP, name=name):
            return _command_of(point)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        others = {point.name for point in entry_points(group=GROUP)}
        yield from (*COMMANDS, *sorted(others - {*COMMANDS, *COMMAND_GROUPS}), *COMMAND_GROUPS)

    def __len__(self) -> int:
        return len(list(iter(self)))


class ErrorLineGroup(HelpGroup):
    """Top-level group of commands; a usage error is one line on stderr and exit code 2."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = CommandTable()

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command line and exit with its code; without `standalone_mode`, return the code."""
        words = list(sys.argv[1:] if args is None else args)
        try:
            code = self._code(words, prog_name, complete_var, **extra)
            sys.stdout.flush()
        except OSError as error:
            code = handle_stdout_error(error)
        if standalone_mode:
            sys.exit(code or 0)
        return code

    def _code(self, words: list[str], *rest: Any, **extra: Any) -> Any:
        try:
            return super().main(words, *rest, standalone_mode=False, **extra)
        except typer.Abort:
            return INTERRUPTED_EXIT_CODE
        except ParserError as error:
            print_error(_usage_error(error), "--json" in words)
            return UsageError.exit_code


def _command_of(point: EntryPoint) -> Any:
    program = point.load()
    if not isinstance(program, typer.Typer):
        function, program = program, typer.Typer(add_completion=False)
        program.command(point.name)(function)
    loaded = typer.main.get_command(program)
    loaded.name = point.name
    return loaded


UNKNOWN_OPTION, EXTRA_ARGUMENT = "No such option: ", "Got unexpected extra argument"


def _usage_error(error: Any) -> UsageError:
    message = " ".join(error.format_message().split())
    where = "larder" if error.ctx is None else error.ctx.command_path
    ended = message if message.endswith("?") else f"{message.rstrip('.')}."
    if RATIO_OPTION in message:
        ended += " The share that stays is --budget: 25% for a compression ratio of 0.75."
    if where.endswith(" ask") and message.startswith(EXTRA_ARGUMENT):
        ended += " One FILE is read: give each further one as --context FILE."
    if where.endswith(" serve"):
        ended = _vllm_answer(ended)
    return UsageError(f"{ended} See '{where} --help'.")


def _vllm_answer(message: str) -> str:
    """Message for a command line of `vllm serve`; any other one as it is."""
    from larder.cli.vllm_flags import answer

    if message.startswith(EXTRA_ARGUMENT):
        return f"{message} The model is named by --model."
    if message.startswith(UNKNOWN_OPTION):
        option = message.removeprefix(UNKNOWN_OPTION).split()[0].rstrip(".")
        return answer(option) or message
    return message


app = typer.Typer(
    name="larder",
    cls=ErrorLineGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(show: bool) -> bool:
    if show:
        typer.echo(f"larder {larder.__version__}")
        raise typer.Exit
    return show


@app.callback()
def describe(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Run a model with its KV cache within a fixed memory budget, and measure what that costs."""
    del version


def main() -> None:
    """Entry point of the `larder` console script."""
    if sys.stderr is None:  # closed by the parent process
        sys.stderr = open(os.devnull, "w")
    if sys.stdout is None:
        print_error(
            Unwritable("stdout is closed: send it to a file, or to /dev/null."), is_json=False
        )
        sys.exit(Unwritable.exit_code)
    if sys.argv[1:2] and sys.argv[1] in LOADING_COMMANDS:
        pause_collection()
    app(prog_name="larder")
