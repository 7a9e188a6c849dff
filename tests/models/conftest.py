"""Tiny models, built once, on Larder's attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch

from larder.models import Decoder, wrap_model
from tiny_models import ARCHITECTURES, tiny

KV_HEADS = {"multi_query": 1, "grouped": 2, "multi_head": 4}


@pytest.fixture(scope="session")
def adopted() -> Callable[..., Decoder]:
    """A decoder around `tiny(architecture, kv_heads=kv_heads, dtype=dtype)`."""

    @cache
    def make(architecture: str, kv_heads: int = 2, dtype: torch.dtype = torch.float32) -> Decoder:
        return wrap_model(tiny(architecture, kv_heads=kv_heads, dtype=dtype))

    return make


@pytest.fixture(scope="session")
def own() -> Callable[..., Any]:
    """Reference model on its own attention; tests must not change it."""
    return cache(tiny)


@pytest.fixture(params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=KV_HEADS)
def kv_heads(request: pytest.FixtureRequest) -> int:
    return KV_HEADS[request.param]


@pytest.fixture(scope="module")
def three_layers() -> Iterator[Decoder]:
    with wrap_model(tiny("llama", layers=3)) as held:
        yield held
