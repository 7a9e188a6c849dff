"""Goldens of `--help`: its text, and the options of commands apart from their wording."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typer.core import TyperGroup

from golden.access import commands, run

# Wording may change on purpose; what a command takes may not.
UNWORDED = ("metavar", "required", "multiple", "nargs", "min", "max")


def texts() -> dict[str, list[str]]:
    """Output of `--help` of every command, 100 columns wide."""
    return {
        " ".join(("larder", *words)): [
            line.rstrip() for line in run(*words, "--help").stdout.splitlines()
        ]
        for words, _ in _walk(commands())
    }


def options() -> dict[str, list[dict[str, Any]]]:
    """Arguments and options of every command, without their wording."""
    return {
        " ".join(("larder", *words)): [_unworded(parameter) for parameter in command.params]
        for words, command in _walk(commands())
    }


def _walk(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield words, command
    if isinstance(command, TyperGroup):
        for name in command.list_commands(None):
            yield from _walk(command.get_command(None, name), (*words, name))


def _unworded(parameter: Any) -> dict[str, Any]:
    kind, default = parameter.param_type_name, parameter.default
    result = {"kind": kind, "type": parameter.bare_type()}
    result |= {"spelled": [*parameter.opts, *parameter.secondary_opts]} if kind == "option" else {}
    result |= {name: getattr(parameter, name) for name in UNWORDED}
    return result | {"default": None if default is None or callable(default) else str(default)}


GOLDENS = {"help_texts": texts, "help_options": options}
