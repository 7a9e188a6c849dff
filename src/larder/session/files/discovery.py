"""Turn the paths a person names, files or folders, into the files to read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from larder.core.errors import InputError

CONVERSATION_SUFFIXES = (".json",)
DOCUMENT_SUFFIXES = (".txt", ".md")


def find_files(paths: Iterable[Path | str]) -> list[Path]:
    """The files meant by `paths`: a file stands for itself, a folder for what lies directly in it.

    A folder yields its `.json` files in order of name. Only if it has none does it yield its
    documents, so that a README beside a data set is not taken for part of it. Hidden files are
    passed over, and a file named twice is read once.

    Raises:
        InputError: a path does not exist, or a folder holds nothing that can be read.
    """
    found: dict[Path, None] = {}
    for path in map(Path, paths):
        found.update(dict.fromkeys(_files_of(path)))
    return list(found)


def _files_of(path: Path) -> list[Path]:
    if not path.exists():
        raise InputError(f"{path} does not exist: check the spelling, or name another file.")
    if not path.is_dir():
        return [path]
    for endings in (CONVERSATION_SUFFIXES, DOCUMENT_SUFFIXES):
        if files := _visible_files(path, endings):
            return files
    known = ", ".join(CONVERSATION_SUFFIXES + DOCUMENT_SUFFIXES)
    raise InputError(
        f"the folder {path} holds no readable file: it must directly contain {known} files."
    )


def _visible_files(folder: Path, endings: tuple[str, ...]) -> list[Path]:
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        reason = error.strerror or "unknown reason"
        raise InputError(
            f"the folder {folder} cannot be listed ({reason}): check its permissions."
        ) from error
    return [
        entry
        for entry in entries
        if entry.suffix.lower() in endings and entry.is_file() and not entry.name.startswith(".")
    ]
