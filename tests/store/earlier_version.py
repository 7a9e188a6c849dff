"""Stores as an earlier version wrote them, made up: schema 0 has other names of fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from larder.session import CHAT_LOG_FORM
from larder.store import (
    CHUNK_FORM,
    RECORD_FORM,
    Store,
    canonical_json,
    open_sealed_json,
    sealed_json,
)

CHATS = "chats"
NAMES = {
    "sessions": {"tokens": "log", "spans": "blobs"},
    "chunks": {"prefix": "text", "ref": "blob"},
    CHATS: {"policy": "rule"},
}
FIELDS = {"sessions": "record", "chunks": "chunk"}
FORMS = {"sessions": RECORD_FORM, "chunks": CHUNK_FORM, CHATS: CHAT_LOG_FORM}


def renamed(fields: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Fields of the present version as schema 0 has them."""
    return {NAMES[kind].get(name, name): value for name, value in fields.items()} | {"schema": 0}


def know_schema_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Larder know the way from schema 0."""
    for kind, form in FORMS.items():
        back = {new: old for old, new in NAMES[kind].items()}

        def step(fields: Mapping[str, Any], back: Mapping[str, str] = back) -> dict[str, Any]:
            return {back.get(name, name): value for name, value in fields.items()}

        monkeypatch.setitem(vars(form), "steps", {0: step})


def take_back(store: Store) -> int:
    """Write all records of a store again as schema 0 had them; their number."""
    count, parts = 0, store.parts
    for kind, field in FIELDS.items():
        paths = [entry.path for entry in parts.file_system.list_files(kind)]
        for path in (path for path in paths if path.endswith(".json")):
            fields = json.loads(open_sealed_json(parts.secret, field, parts.records.read(path)))
            text = canonical_json(renamed(fields, kind))
            parts.records.replace(path, sealed_json(parts.secret, field, text))
            count += 1
    return count


def take_chats_back(home: Path) -> int:
    """Rewrite chats without a key in the earlier version; their number."""
    files = sorted((home / "sessions").glob("*.json"))
    for file in files:
        file.write_text(json.dumps(renamed(json.loads(file.read_text()), CHATS)))
    return len(files)
