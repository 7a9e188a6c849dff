"""Options that commands share, the decorator `command`, and the command groups.

A command takes one parameter of an options class; `command` turns its fields into options.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import wraps
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup

from larder.cli.errors import INTERRUPTED_EXIT_CODE, Interrupted, handle_stdout_error, print_error
from larder.core.errors import LarderError, UsageError


@dataclass(frozen=True)
class OutputOptions:
    """Output of results and errors."""

    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False
    debug: Annotated[bool, typer.Option("--debug", help="Print an error's traceback.")] = False


@dataclass(frozen=True)
class ModelOptions(OutputOptions):
    """Options of every command that runs a model."""

    model: Annotated[
        str, typer.Option(metavar="NAME_OR_PATH", help="Hugging Face name or local folder.")
    ] = "seed"
    policy: Annotated[
        str, typer.Option(metavar="SPELLING", help="A name or sentence; see 'larder policy list'.")
    ] = "epicache"
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Size of each cache: 512 (tokens per kv head), 20% or 1/5 of the context, or "
            "64MiB; each episode has its own cache.  "
            "Default: the policy's, else 20%, at least 128.",
        ),
    ] = None
    block: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            help="Tokens read between two plans.  Default: the smaller of 512 and the budget.",
        ),
    ] = None
    device: Annotated[str, typer.Option(help="Device of the model: cpu, cuda, cuda:1, mps.")] = (
        "cpu"
    )
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16, float16 or auto.  Default: float32 on a CPU."),
    ] = None
    seed: Annotated[int, typer.Option(help="Random seed of sampling.")] = 0
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 256
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.")] = 0.0
    top_k: Annotated[
        int, typer.Option(help="Sample among the K most likely tokens; 0 for all.")
    ] = 0
    top_p: Annotated[float, typer.Option(help="Sample within this share of probability.")] = 1.0


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Decorator for commands: flattens the options class, and turns errors into exit codes."""
    own = inspect.signature(function, eval_str=True)
    [slot] = [p for p in own.parameters.values() if _is_options(p.annotation)]
    shared = _parameters(slot.annotation)

    @wraps(function)
    def run(**arguments: Any) -> None:
        options = slot.annotation(**{p.name: arguments.pop(p.name) for p in shared})
        try:
            function(**arguments, **{slot.name: options})
        except LarderError as error:
            _exit_with_error(error, options)
        except KeyboardInterrupt:
            _exit_with_error(Interrupted("interrupted before the first result."), options)

    others = [p for p in own.parameters.values() if p is not slot]
    run.__signature__ = inspect.Signature(  # pyright: ignore[reportAttributeAccessIssue]
        [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*others, *shared)]
    )
    run.__annotations__ = {p.name: p.annotation for p in (*others, *shared)}
    return run


def _exit_with_error(error: LarderError, options: OutputOptions) -> None:
    print_error(error, options.json)
    if options.debug:
        raise error
    raise typer.Exit(error.exit_code)


def _is_options(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, OutputOptions)


def _parameters(kind: type[OutputOptions]) -> list[inspect.Parameter]:
    """Parameters from the fields of an options class; those of `OutputOptions` come last."""
    hints = get_type_hints(kind, include_extras=True)
    base = {f.name for f in fields(OutputOptions)}
    ordered = sorted(fields(kind), key=lambda f: f.name in base)
    return [
        inspect.Parameter(
            f.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if f.default is MISSING else f.default,
            annotation=hints[f.name],
        )
        for f in ordered
    ]


# Base class of all errors of the parser; typer exports only subclasses.
ParserError: Any = typer.BadParameter.__base__


class HelpGroup(TyperGroup):
    """Group of commands that prints its help if no command is given."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, `--help` if there are none."""
        return super().parse_args(ctx, args or ["--help"])


COMMANDS = "larder.command"  # entry point group of commands in other packages


class ErrorLineGroup(HelpGroup):
    """Top-level group of commands; a usage error is one line on stderr and exit code 2.

    Packages add commands through the entry point group `larder.command`. A command is loaded when
    it runs or its help is listed, and cannot replace a built-in command.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of built-in commands, of other packages' commands, then of built-in groups."""
        own = super().list_commands(ctx)
        groups = [name for name in own if isinstance(self.commands[name], TyperGroup)]
        others = sorted(point.name for point in entry_points(group=COMMANDS))
        return [n for n in own if n not in groups] + [n for n in others if n not in own] + groups

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Command of this name, or None."""
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
    program = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    program.command(point.name)(point.load())
    return typer.main.get_command(program)


def _usage_error(error: Any) -> UsageError:
    message = " ".join(error.format_message().split())
    where = "larder" if error.ctx is None else error.ctx.command_path
    return UsageError(f"{message.rstrip('.')}. See '{where} --help'.")
