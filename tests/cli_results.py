"""A short conversation, and how to read what a command printed about it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import Result

TALK = [
    {"role": "system", "content": "Session 1, Monday May 1"},
    {"role": "user", "content": "My cat is called Mira. She sleeps on the sofa all day."},
    {"role": "assistant", "content": "That sounds cosy."},
    {"role": "user", "content": "The repair of the attic window is on July 5."},
    {"role": "assistant", "content": "I will remember that."},
    {"role": "user", "content": "My grandfather was a plumber. He liked long walks."},
    {"role": "assistant", "content": "Oh, interesting."},
]
QUESTIONS = [
    {"question": "What is my cat called?", "answer": "Mira", "kind": "pets"},
    {"question": "When is the repair of the attic window?", "answer": "July 5", "kind": "dates"},
]
CAT, WINDOW = (entry["question"] for entry in QUESTIONS)
SMALL = ("--policy", "snapkv_blockwise", "--budget", "48", "--max-new-tokens", "8")

Run = Callable[..., Result]


def write(path: Path, content: Any) -> Path:
    """A file of this text, or of this as JSON."""
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def talk(path: Path, questions: list[dict[str, str]] | None = None) -> Path:
    """The short conversation as a file."""
    return write(path, {"messages": TALK, "qa": QUESTIONS if questions is None else questions})


def document(result: Result) -> dict[str, Any]:
    """The one document on stdout."""
    return json.loads(result.stdout)


def complaint(result: Result, code: int) -> str:
    """The one line on stderr of a command that failed with `code`, with nothing on stdout."""
    assert result.exit_code == code, (result.exit_code, result.stdout, result.stderr)
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert line.startswith("larder: ")
    return line.removeprefix("larder: ")
