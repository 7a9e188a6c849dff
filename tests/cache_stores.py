"""Entries that a cache's store holds, and the calls that tests of stores make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from builders import Tokens
from larder.cache import AttentionState, CacheLayer, NewTokens
from larder.core import Mode
from larder.ops import merge_attention
from references.cache.ragged import RaggedLoop


def held(store: CacheLayer) -> list[tuple[list[int], Tensor, Tensor]]:
    """Positions, keys and values of each head."""
    entries = store.entries()
    return [
        (
            entries.head_positions(h).tolist(),
            entries.head_keys(h).clone(),
            entries.head_values(h).clone(),
        )
        for h in range(len(entries.lengths))
    ]


def same(left: CacheLayer, right: CacheLayer) -> bool:
    pairs = zip(held(left), held(right), strict=True)
    return all(
        a[0] == b[0] and torch.equal(a[1], b[1]) and torch.equal(a[2], b[2]) for a, b in pairs
    )


def same_bits(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    """True if two states are equal to the bit; NaN equals NaN."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype
        and left[name].shape == right[name].shape
        and torch.equal(_bytes(left[name]), _bytes(right[name]))
        for name in left
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def exact(store: CacheLayer) -> Tensor:
    """Which packed entries are held at full precision."""
    entries = store.entries()
    if not len(entries.grades):
        return torch.ones(sum(entries.lengths), dtype=torch.bool)
    return entries.pack(entries.grades) == 0


def addresses(store: CacheLayer) -> list[int]:
    """Where keys, values and positions lie in memory."""
    return [tensor.data_ptr() for tensor in store.tensors()[:3]]


def new_tokens(new: Tokens, mode: Mode = Mode.SCRATCH, **options: Any) -> NewTokens:
    """Drawn tokens as a layer takes them."""
    return NewTokens(new.queries, new.keys, new.values, new.positions, mode, **options)


def attend_held(store: CacheLayer, new: Tokens) -> Tensor:
    """Attention of tokens to all entries, their own included."""
    count, states = new.queries.shape[1], list[AttentionState]()
    for call in store.attention_calls(new_tokens(new, Mode.APPEND, shift=-count)):
        states.append(call())
    return merge_attention([out for out, _ in states], [lse for _, lse in states])[0]


def attend(store: CacheLayer | RaggedLoop, new: Tokens, sections: tuple[int, ...] = ()) -> Tensor:
    return store.attend(new_tokens(new, sections=sections))


def append(store: CacheLayer | RaggedLoop, new: Tokens) -> None:
    store.append(new.keys, new.values, new.positions)


def extend(store: CacheLayer, new: Tokens) -> Tensor:
    return store.attend(new_tokens(new, Mode.APPEND))


def assert_close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got.double(), expected.double(), atol=2e-5, rtol=1e-4)


def assert_holds(store: CacheLayer, loop: RaggedLoop) -> None:
    for (positions, keys, values), entries in zip(held(store), loop.shown(), strict=True):
        count = len(positions)  # a window has forgotten the first of what the loop remembers
        expected = entries[len(entries) - count :]
        assert positions == [entry.position for entry in expected]
        for row, entry in enumerate(expected):
            assert_key(keys[row], entry.key, loop.exact)
            assert torch.equal(values[row], entry.value)


def assert_key(got: Tensor, expected: Tensor, exact: bool) -> None:
    if exact:
        assert torch.equal(got, expected)
    else:  # turned to and fro, and rounded to the type of the storage between
        rounding = torch.finfo(got.dtype).eps
        largest = float(expected.abs().max())
        torch.testing.assert_close(
            got.double(), expected.double(), atol=16 * rounding * largest, rtol=0.0
        )
