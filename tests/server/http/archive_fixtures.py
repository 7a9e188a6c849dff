"""Archives with and without a key, filled for two tenants."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from larder.server import (
    CONVERSATION,
    IDEMPOTENT_ANSWER,
    RESPONSE,
    Archive,
    ChatMessage,
    ConversationItem,
)
from larder.store import encryption_for

KEY, OTHER = b"k" * 32, b"o" * 32
ANNE, BOB = "anne-the-tenant", "bob-the-tenant"
ONE, TWO = "conv_0123456789abcdef", "conv_fedcba9876543210"


def opened(folder: Path, key: bytes | None = KEY) -> closing[Archive]:
    return closing(Archive(folder / "archive.sqlite", sealing=encryption_for(key, "archive")))


def item(name: str, text: str, role: str = "user") -> ConversationItem:
    return ConversationItem(name, ChatMessage(role, text))


def fill(archive: Archive) -> None:
    for tenant in (ANNE, BOB):
        for name in (ONE, TWO):
            archive.put(tenant, CONVERSATION, name, {"id": name, "session": name})
            own = [item(f"msg_{name}_{n}", f"{tenant} says {n} in {name}") for n in range(3)]
            archive.append(tenant, name, own)
        archive.put(tenant, RESPONSE, "resp_1", {"told": f"a secret of {tenant}"})
        archive.put(tenant, IDEMPOTENT_ANSWER, "idem-key", {"id": "resp_1"})


def archive_contents(archive: Archive) -> dict[Any, Any]:
    """All documents of an archive, by tenant and name."""
    found: dict[Any, Any] = {}
    for tenant in (ANNE, BOB):
        for name in (ONE, TWO):
            found[tenant, name] = archive.get(tenant, CONVERSATION, name)
            found[tenant, name, "items"] = archive.items(tenant, name)
        found[tenant, "resp_1"] = archive.get(tenant, RESPONSE, "resp_1")
        found[tenant, "idem-key"] = archive.get(tenant, IDEMPOTENT_ANSWER, "idem-key")
    return found
