"""Sessions that are held as chats: policies by the way that they take, and things to say."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from larder import Policy
from larder.server import ChatMessage
from larder.session import PRESETS
from topic_embedder import TopicEmbedder

# What cannot be served, and a word of why.
REFUSED = {
    **dict.fromkeys(("exact_question", "finch", "laq", "dapq", "ilre", "reform"), "question"),
    "task_aware": "task",
}
TOKENS = 96
# Their windows, their lag and a page do not fit that.
WIDE = (
    *("arkvale", "longcache", "pqcache", "retrieval_attention", "retroinfer"),
    "squeezed_attention",
)
EPICACHE = (
    "episodes(count=2, segment=1, representatives=2) > blockwise() > protect(sinks=4, recent=8)"
    ' > patched(prompt="episode") > pooled()'
)
PARKING = (
    "blockwise() > protect(sinks=4, recent=8) > sinks_and_window() > uniform() > "
    "park() > dci(page=4, dense=1) > lagged(tokens=4)"
)
# By what they are made of: each of these takes another way through the server.
KINDS = {
    "epicache": EPICACHE,
    "icecache": PARKING,
    "d2o": "d2o_blockwise",
    "snapkv": "snapkv",
    "flowkv": "freeze(kept=0.5) > protect(sinks=2, recent=4) > keydiff() > uniform()",
    "int4": "whole() > snapkv() > uniform() > quantized(bits=4)",
    "rebuilt": "kv_direct",
}
SAID = ["My dog is 7.", "The car is red.", "My dog eats.", "What car?"]
HISTORY = [
    ChatMessage(role, f"{text} {n}")
    for n in range(2)
    for role, text in (
        ("user", "The dog eats apples."),
        ("assistant", "Good dog."),
        ("user", "The car is red."),
        ("assistant", "Red car."),
    )
]


def asked(policy: str, tokens: int = TOKENS) -> dict[str, object]:
    """Options of `Served` for chats: blocks as long as questions, as a chat reads them."""
    spelling = KINDS.get(policy, policy)
    return {"policy": spelling, "tokens": tokens, "block": None, "embedder": TopicEmbedder()}


def makeup(name: str) -> tuple[str, ...]:
    """Parts that determine the code path of a preset: of equal presets, one runs by default."""
    policy = Policy.parse(name)
    parts = policy.session, policy.schedule, policy.timing, policy.recall
    return tuple(type(part).__name__ for part in parts)


def ways(names: Iterable[str] = PRESETS) -> list[object]:
    """Presets; those that take a way which another one takes too are slow tests."""
    known, found = set[tuple[str, ...]](), list[object]()
    for name in names:
        own = makeup(name)
        is_known = own in known and name not in REFUSED
        found.append(pytest.param(name, marks=[pytest.mark.slow] if is_known else []))
        known.add(own)
    return found
