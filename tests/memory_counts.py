"""Counted bytes and entries of caches, compared with a walk over every tensor they hold."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import current_thread, main_thread
from typing import Any

import pytest

from larder.cache import FORMS, CacheLayer, SequenceCache, TieredLayer, storage_bytes

LAYERS = [FORMS.load(name) for name in FORMS.names()]
CHANGES = (
    *("append", "attend", "attend_replayed", "record_logits", "take_logits", "apply", "evict"),
    *("write_columns", "allocate", "reserve", "compact", "truncate", "drop_range", "entries"),
    *("fork", "state", "adopt", "append_source", "record_ids", "fetch", "expect", "link"),
    "give_up",
)
SEQUENCE_CHANGES = (
    *("attend", "advance", "apply", "evict", "write_columns", "record_queries", "drop_range"),
    *("allocate", "reserve", "compact", "truncate", "fork", "entries", "release_state"),
    *("restore", "adopt"),
)


def bytes_of(layer: CacheLayer) -> int:
    """Bytes of the tensors of a layer, and of its pages of an arena."""
    lease = layer.page_lease
    return storage_bytes(layer.tensors()) + (lease.num_pages * lease.page_bytes if lease else 0)


def assert_counted(layer: CacheLayer) -> None:
    """Check the counts of a layer against its tensors and lengths, behind a prefetch under way."""
    if isinstance(layer, TieredLayer) and layer.fetcher._arrived is not None:
        layer.fetcher._arrived()
    assert layer.nbytes == bytes_of(layer)
    assert layer.usage.entries == sum(layer.lengths)
    if layer.page_lease is not None:
        assert layer.device_nbytes == layer.nbytes
        return
    near = layer.tensors()
    if isinstance(layer, TieredLayer):
        pool = layer.fetcher._pool
        near = layer._ragged.tensors() + (() if pool is None else pool.own_tensors())
        assert layer.host_nbytes == storage_bytes(
            (*layer._slow.tensors(), *layer.fetcher.shared_index.index.tensors())
        )
    assert layer.device_nbytes == storage_bytes(near)


def assert_sequence_counted(cache: SequenceCache) -> None:
    """Check the counts of a sequence against those of a walk over its layers."""
    for layer in cache.layers:
        assert_counted(layer)
    latest = cache.latest._queries.values()
    beside = cache.latest.tail.nbytes + sum(held.nbytes for held in latest)
    beside += cache.model_positions.nbytes
    assert cache.nbytes == sum(map(bytes_of, cache.layers)) + beside
    assert cache.device_nbytes == sum(s.device_nbytes for s in cache.layers) + beside
    budgeted = [s for s in cache.layers if cache.is_budgeted(s.layer)]
    assert cache.managed_entries == sum(sum(s.lengths) for s in budgeted)


@contextmanager
def checked_counts() -> Iterator[None]:
    """Check the counts of every layer and sequence after each call that may change them."""
    running: list[None] = []

    def checked(method: Callable[..., Any], check: Callable[[Any], None]) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **options: Any) -> Any:
            if current_thread() is not main_thread():  # a prefetch, which layers change beside
                return method(*args, **options)
            running.append(None)
            try:
                result = method(*args, **options)
            finally:
                running.pop()
            if not running:  # inside a change, counts may lag behind
                for subject in (args[0], result):
                    if isinstance(subject, CacheLayer | SequenceCache):
                        check(subject)
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        subjects: list[tuple[type, tuple[str, ...], Callable[[Any], None]]]
        subjects = [(kind, CHANGES, assert_counted) for kind in LAYERS]
        subjects.append((SequenceCache, SEQUENCE_CHANGES, assert_sequence_counted))
        for kind, names, check in subjects:
            for name in names:
                for owner in kind.__mro__:
                    held = vars(owner).get(name)
                    if held is None:
                        continue
                    if isinstance(held, classmethod):
                        patch.setattr(owner, name, classmethod(checked(held.__func__, check)))
                    elif isinstance(held, types.FunctionType):
                        patch.setattr(owner, name, checked(held, check))
                    break
        yield
