"""How a command fails: one line on stderr, a document on stdout for `--json`, an exit code."""

from __future__ import annotations

import json
import sys
from typing import Any

from larder.core.errors import LarderError

SCHEMA = 1
INTERRUPTED = 130  # what shells report for a program that Ctrl-C ended


class Interrupted(LarderError):
    """Ctrl-C came before there was anything to show."""

    exit_code = INTERRUPTED


def tell(error: LarderError, is_json: bool) -> None:
    """Print an error where it is looked for."""
    print(f"larder: {' '.join(str(error).split())}", file=sys.stderr)
    if is_json:
        print_document({"schema": SCHEMA, "error": as_record(error)})


def as_record(error: LarderError) -> dict[str, str]:
    """An error as documents carry it."""
    return {"type": type(error).__name__, "message": " ".join(str(error).split())}


def print_document(document: dict[str, Any]) -> None:
    """The one document of a command run with `--json`."""
    print(json.dumps(document, ensure_ascii=False, indent=2, allow_nan=False))
