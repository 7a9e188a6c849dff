"""How commands are grouped: help where none is named, usage errors told in one line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.core import TyperGroup

from larder.cli.errors import INTERRUPTED_EXIT_CODE, handle_stdout_error, print_error
from larder.core.errors import UsageError

# The class behind every complaint of the parser; typer shows only its children.
ParserError: Any = typer.BadParameter.__base__


class HelpGroup(TyperGroup):
    """Commands; without the name of one, their help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words behind the group's name."""
        return super().parse_args(ctx, args or ["--help"])


COMMANDS = "larder.command"  # entry points: functions that are commands


class ErrorLineGroup(HelpGroup):
    """All commands; a usage error is one line on stderr and exit code 2.

    Packages add commands through the entry point group `larder.command`. They are loaded when they
    are called or listed, and cannot take the name of a built-in command.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Built-in commands, those of other packages, then built-in groups of commands."""
        own = super().list_commands(ctx)
        groups = [name for name in own if isinstance(self.commands[name], TyperGroup)]
        others = sorted(point.name for point in entry_points(group=COMMANDS))
        return [n for n in own if n not in groups] + [n for n in others if n not in own] + groups

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of this name, or None."""
        built_in = super().get_command(ctx, cmd_name)
        if built_in is not None:
            return built_in
        for point in entry_points(group=COMMANDS, name=cmd_name):
            return _command_of(point)
        return None

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command line and leave with its exit code."""
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
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command(point.name)(point.load())
    return typer.main.get_command(alone)


def _usage_error(error: Any) -> UsageError:
    said = " ".join(error.format_message().split())
    where = "larder" if error.ctx is None else error.ctx.command_path
    return UsageError(f"{said.rstrip('.')}. See '{where} --help'.")
