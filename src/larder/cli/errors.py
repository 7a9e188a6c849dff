"""Failure of a command: one line on stderr, a document on stdout for `--json`, an exit code."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

from larder.core.errors import LarderError
from larder.core.home import HOME, home

SCHEMA = 1
INTERRUPTED_EXIT_CODE = 130  # what shells report for a program that Ctrl-C ended


class Interrupted(LarderError):
    """Ctrl-C before the first result."""

    exit_code = INTERRUPTED_EXIT_CODE


def print_error(error: LarderError, is_json: bool) -> None:
    """Print an error as one line on stderr, and with `is_json` as a document on stdout."""
    print(f"larder: {' '.join(str(error).split())}", file=sys.stderr)
    if is_json:
        print_document({"schema": SCHEMA, "error": error_record(error)})


class Unwritable(LarderError):
    """Stdout is closed or full."""


class FileAccessError(LarderError):
    """A file or folder that cannot be read or written."""

    @staticmethod
    def of(error: OSError) -> FileAccessError:
        """Error for a failure of the system that names a file.

        The way out of a file at or above the home folder, or in it, is `LARDER_HOME`.
        """
        path = Path(str(error.filename)).absolute()
        way_out = "name another place"
        if path.is_relative_to(home()) or home().is_relative_to(path):
            way_out = f"set {HOME} to another folder"
        return FileAccessError(
            f"{error.filename} cannot be used ({error.strerror}): {way_out}, or make this one "
            "readable and writable."
        )


def handle_stdout_error(error: OSError) -> int:
    """Report a failed write to stdout, redirect stdout to null, and return the exit code.

    A closed pipe, as `head` leaves it, is not reported.

    Raises:
        OSError: `error` itself, if it names a file and so does not concern stdout.
    """
    if error.filename is not None:
        raise error
    if error.errno != errno.EPIPE:
        message = (
            f"The output cannot be written ({error.strerror}): make room, or send it elsewhere."
        )
        print_error(Unwritable(message), is_json=False)
    _redirect_stdout_to_null()
    return Unwritable.exit_code


def _redirect_stdout_to_null() -> None:
    """Discard buffered output, which Python would otherwise fail to flush at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, sys.stdout.fileno())
    except (OSError, ValueError):
        pass  # no file descriptor, as in tests
    finally:
        os.close(null)


def error_record(error: LarderError) -> dict[str, str]:
    """Error as a JSON record: type and one-line message."""
    return {"type": type(error).__name__, "message": " ".join(str(error).split())}


def print_document(document: dict[str, Any]) -> None:
    """Print the single JSON document of a command with `--json`."""
    print(json.dumps(document, ensure_ascii=False, indent=2, allow_nan=False))
