"""Command `larder`: its sub-commands, `--version`, and the entry point."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

import larder
from larder.cli import ask, cache, chat, eval, policy, serve
from larder.cli.demo import command as demo
from larder.cli.errors import Unwritable, print_error
from larder.cli.options import ErrorLineGroup

app = typer.Typer(
    name="larder",
    cls=ErrorLineGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo.demo)
app.command("ask")(ask.ask)
app.command("eval")(eval.evaluate)
app.command("chat")(chat.chat)
app.command("serve")(serve.serve)
app.add_typer(policy.app, name="policy")
app.add_typer(cache.app, name="cache")


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
    app(prog_name="larder")
