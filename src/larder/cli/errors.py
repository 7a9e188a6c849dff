"""How a command fails: one line on stderr, a document on stdout for `--json`, an exit code."""

from __future__ import annotations

import errno
import json
import os
import sys
from typing import Any

from larder.core.errors import LarderError

SCHEMA = 1
INTERRUPTED_EXIT_CODE = 130  # what shells report for a program that Ctrl-C ended


class Interrupted(LarderError):
    """Ctrl-C came before there was anything to show."""

    exit_code = INTERRUPTED_EXIT_CODE


def print_error(error: LarderError, is_json: bool) -> None:
    """Print an error where it is looked for."""
    print(f"larder: {' '.join(str(error).split())}", file=sys.stderr)
    if is_json:
        print_document({"schema": SCHEMA, "error": error_record(error)})


class Unwritable(LarderError):
    """Stdout takes no more."""


def handle_stdout_error(error: OSError) -> int:
    """Say that stdout takes no more, and have nothing else tried; the exit code.

    A reader that has gone, as `head` does, knows that itself.

    Raises:
        OSError: the same, if it is about a file and not about stdout.
    """
    if error.filename is not None:
        raise error
    if error.errno != errno.EPIPE:
        said = f"The output cannot be written ({error.strerror}): make room, or send it elsewhere."
        print_error(Unwritable(said), is_json=False)
    _redirect_stdout_to_null()
    return Unwritable.exit_code


def _redirect_stdout_to_null() -> None:
    """Let what stdout still holds go nowhere, or Python would complain when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, sys.stdout.fileno())
    except (OSError, ValueError):
        pass  # no file behind it, as in a test
    finally:
        os.close(nowhere)


def error_record(error: LarderError) -> dict[str, str]:
    """An error as documents carry it."""
    return {"type": type(error).__name__, "message": " ".join(str(error).split())}


def print_document(document: dict[str, Any]) -> None:
    """The one document of a command run with `--json`."""
    print(json.dumps(document, ensure_ascii=False, indent=2, allow_nan=False))
