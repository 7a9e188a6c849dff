"""All goldens by name."""

from __future__ import annotations

from golden import documents, help_texts, homes, logits, policies, results, surface
from golden.comparison import Golden

GOLDENS: dict[str, Golden] = {
    **help_texts.GOLDENS,
    **policies.GOLDENS,
    **surface.GOLDENS,
    **homes.GOLDENS,
    **documents.GOLDENS,
    **results.GOLDENS,
    **logits.GOLDENS,
}
# Those that take 0.4 s and more.
EXTENDED = frozenset(
    {
        "ask",
        "bench",
        "eval",
        "homes/chats",
        "homes/chats_sealed",
        "homes/lost_index",
        "homes/server_chat",
        "homes/server_sealed",
        "http",
        "logits",
        "study_fields",
    }
)
SLOW: dict[str, Golden] = {**policies.SLOW, **homes.SLOW, **documents.SLOW, **results.SLOW}
TOLERANCES = {"logits": logits.TOLERANCE}
# Listings of parts: a new one may join, and those of the golden stay as they are.
LISTINGS = frozenset({"families", "policy_list", "policy_cite"})
