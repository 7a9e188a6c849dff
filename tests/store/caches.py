"""Caches whose numbers follow from their tokens, and stores that keep them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from builders import a_layer, a_spec
from cache_stores import same_bits
from larder.cache import NewTokens, SequenceCache
from larder.core import Mode, ModelSpec, Plan, Refused
from larder.store import (
    CacheRequirements,
    CacheSnapshot,
    CallLimits,
    FileSystem,
    LoadedSession,
    ModelIdentity,
    Store,
)
from larder.store.model_identity import model_identity

SPEC = a_spec(a_layer(), a_layer(index=1))
POLICY = "full"
WHO = "somebody"
TALK = "talk"
IDS = tuple(range(10, 31))  # with chunks of 4: five of them, and one token more
LONGER = (*IDS, 5, 6, 7, 8, 9)  # the same, continued
SECRET = b"s" * 32


def identity(spec: ModelSpec = SPEC, **changes: Any) -> ModelIdentity:
    result = {"config": {}, "weights": "w", "tokenizer": "t"} | changes
    return model_identity(spec, **result)


def read(ids: Sequence[int], form: str = "dense", spec: ModelSpec = SPEC) -> SequenceCache:
    """A cache of a text: each number depends on every token up to its own."""
    cache = SequenceCache(spec, form)
    go_on(cache, ids)
    return cache


def go_on(cache: SequenceCache, ids: Sequence[int], before: Sequence[int] = ()) -> None:
    text = torch.tensor([*before, *ids], dtype=torch.float64)
    sums = (text * torch.arange(1, len(text) + 1)).cumsum(0)[len(before) :]
    start = cache.next_position
    for layer in cache.spec.layers:
        size = (layer.kv_heads, len(ids), layer.head_dim)
        waves = torch.arange(1.0, 1 + layer.kv_heads * layer.head_dim).reshape(size[0], 1, size[2])
        keys = torch.sin(sums[None, :, None] * waves / 7 + layer.index).float()
        queries = torch.zeros(layer.query_heads, len(ids), layer.head_dim)
        positions = torch.arange(start, start + len(ids))
        cache.attend(layer.index, NewTokens(queries, keys, keys.cos(), positions, Mode.APPEND))
    cache.advance(len(ids))


def compressed(ids: Sequence[int]) -> SequenceCache:
    """A cache of which a policy has dropped every third entry."""
    cache = read(ids, "ragged")
    for layer in SPEC.layers:
        held = cache.lengths()[layer.index]
        stays = torch.arange(sum(held)) % 3 != 1
        cache.apply(layer.index, Plan.from_mask(stays, held))
    return cache


def snapshot(cache: SequenceCache, codec: str = "raw", policy: str = POLICY) -> CacheSnapshot:
    return CacheSnapshot(cache, identity(), policy, codec)


def asking(policy: str = POLICY, **changes: Any) -> CacheRequirements:
    return CacheRequirements(identity(**changes), policy, SPEC)


def store_at(
    folder: Path, index: FileSystem | None = None, home: str = "home", **options: Any
) -> Store:
    result = {"secret": SECRET, "call_limits": CallLimits(seconds=5.0)} | options
    return Store(str(folder / "store") if index is None else index, folder / home, **result)


def save(store: Store, ids: Sequence[int] = IDS, codec: str = "raw", name: str = TALK) -> None:
    store.sessions.save(WHO, name, ids, snapshot(read(ids), codec))


def load(store: Store, name: str = TALK, **changes: Any) -> LoadedSession:
    found = store.sessions.load(WHO, name, asking(**changes))
    assert found is not None
    return found


def is_exact(loaded: LoadedSession, ids: Sequence[int] = IDS) -> bool:
    """True if a session was restored unchanged, or can be read again from all of its tokens."""
    if loaded.ids != tuple(ids):
        return False
    if loaded.cache is None:
        return bool(loaded.reason)
    return not loaded.reason and same_bits(loaded.cache.state(), read(ids).state())


def files(folder: Path, below: str = "store") -> list[Path]:
    return sorted(path for path in (folder / below).rglob("*") if path.is_file())


def blob_files(folder: Path) -> list[Path]:
    return [path for path in files(folder, "store/blobs")]


def cache_files(folder: Path) -> list[Path]:
    """Files of blobs that hold tensors: all but logs of tokens."""
    return [path for path in blob_files(folder) if b"kvm_digest" in path.read_bytes()]


def outcome(folder: Path) -> tuple[str, str]:
    """Outcome of opening the session in a new process: unchanged, or a reason."""
    store = store_at(folder)
    try:
        loaded = load(store)
    except Refused as error:
        assert store.parts.refusals.counts()[error.reason] == 1
        return "lost", error.reason
    assert is_exact(loaded)
    if loaded.reason:
        assert store.parts.refusals.counts()[loaded.reason] == 1
    return ("exact" if loaded.cache is not None else "tokens"), loaded.reason
