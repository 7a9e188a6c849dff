"""Decode steps over pages on a GPU: its kernels, its graphs, and no synchronization."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from builders import a_plan
from larder.cache import PageArena, SequenceCache
from larder.core import Mode
from larder.models import (
    BatchSegment,
    CudaGraphCapture,
    DecodeGraphs,
    Decoder,
    LayerRunner,
    StackRunner,
)
from larder.ops import (
    PAGE_TOKENS,
    AttentionBackend,
    SegmentTables,
    choose_backend,
    reference_paged_attention,
)
from larder.ops.gpu import varlen
from larder.ops.paged_attention import paged_attention
from model_runs import read_on, some_ids
from paged_segments import PagedSegments, some_segments
from tiny_models import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]
TESTS = Path(__file__).parent.parent
LENGTHS = (700, 1, 256, 90, 513)


def on_gpu(own: PagedSegments) -> PagedSegments:
    sides = (side.cuda() for side in (own.keys, own.values, own.queries, own.bias))
    tables = SegmentTables(*(table.cuda() for table in own.tables))
    return PagedSegments(*sides, tables, own.scaling)


@torch.no_grad()
@pytest.mark.parametrize("queries", [(2, 1), (8, 1), (3, 5), (2, 90)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("backend", [AttentionBackend.VARLEN, AttentionBackend.TRITON])
def test_kernels_equal_the_reference(backend, dtype, queries) -> None:
    if backend is AttentionBackend.VARLEN and not varlen.supports(dtype, 64, PAGE_TOKENS):
        pytest.skip("varlen_attn of this torch does not take these pages")
    own = on_gpu(some_segments(LENGTHS, PAGE_TOKENS, queries, 64, dtype))
    stored = own.queries, own.keys, own.values, own.tables, own.scaling
    got = paged_attention(*stored, backend)
    expected = reference_paged_attention(*stored)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one.float(), other, atol=0.02, rtol=0.02)


@torch.no_grad()
def test_biases_and_softcaps_equal_the_reference() -> None:
    own = on_gpu(some_segments(LENGTHS, PAGE_TOKENS, (2, 1), 64, torch.bfloat16))
    stored = own.queries, own.keys, own.values, own.tables, own.scaling
    got = paged_attention(*stored, AttentionBackend.TRITON, own.bias, 1.5)
    expected = reference_paged_attention(*stored, own.bias, 1.5)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one.float(), other, atol=0.02, rtol=0.02)


@torch.no_grad()
def test_segment_is_bitwise_independent_of_the_batch() -> None:
    own = on_gpu(some_segments(LENGTHS, PAGE_TOKENS, (2, 1), 64, torch.bfloat16))
    stored, backend = (own.keys, own.values), AttentionBackend.TRITON
    together, _ = paged_attention(own.queries, *stored, own.tables, own.scaling, backend)
    for number in range(len(LENGTHS)):
        one = slice(number, number + 1)
        table, lengths, *offsets = own.tables
        tables = SegmentTables(
            table[one].contiguous(), lengths[one], *(ahead[:2] for ahead in offsets)
        )
        alone, _ = paged_attention(own.queries[one], *stored, tables, own.scaling, backend)
        assert torch.equal(alone[0], together[number])


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_triton_kernels_equal_torch() -> None:
    done = subprocess.run(
        [sys.executable, str(TESTS / "interpreted_page_kernels.py"), "cuda"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def decoder() -> Iterator[Decoder]:
    module = tiny("llama", dtype=torch.bfloat16).cuda()
    with Decoder(module) as own:
        own.use_pages(PageArena(own.spec, 60))
        yield own


def some_caches(decoder: Decoder) -> list[SequenceCache]:
    """Caches of different lengths with heads of different lengths."""
    caches = [SequenceCache(decoder.spec, "ragged") for _ in range(2)]
    for number, cache in enumerate(caches):
        read_on(decoder, cache, some_ids(300 + 9 * number, seed=number), 128)
        for layer in range(2):
            held = cache.lengths()[layer]
            cache.apply(layer, a_plan([range(h, held[h], 2 + h) for h in range(len(held))], held))
    return caches


def step(decoder: Decoder, caches: list[SequenceCache], token: int) -> Tensor:
    segments = [BatchSegment(cache, (token,)) for cache in caches]
    return decoder.forward_logits(segments, Mode.APPEND, range(len(caches)))


def test_gpu_has_a_fast_backend(decoder) -> None:
    spec = decoder.spec
    form = spec.device, spec.dtype, spec.layers[0].head_dim, PAGE_TOKENS
    assert choose_backend(*form) is AttentionBackend.TRITON


def test_step_does_not_synchronize(decoder) -> None:
    caches = some_caches(decoder)
    step(decoder, caches, 5)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = step(decoder, caches, 6)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert out.isfinite().all()


def test_captured_steps_equal_forward_batches(decoder) -> None:
    ours, theirs = some_caches(decoder), some_caches(decoder)
    graphs = DecodeGraphs(decoder, CudaGraphCapture(), width=4, batch_sizes=(2, 4))
    for token in range(5, 45):
        expected = step(decoder, theirs, token)
        got = graphs.step(ours, (token, token))
        torch.testing.assert_close(got, expected, atol=0.05, rtol=0.05)


def test_decoder_stack_runs_the_layers(decoder) -> None:
    got = step(decoder, some_caches(decoder), 5)
    assert isinstance(decoder.layer_runner, StackRunner)
    assert decoder.layer_runner._stack is not None
    decoder.layer_runner = LayerRunner()
    expected = step(decoder, some_caches(decoder), 5)
    assert (got - expected).square().mean().sqrt() < 0.05 * expected.std()


def test_pages_change_few_bits_of_the_logits(decoder) -> None:
    with Decoder(tiny("llama", dtype=torch.bfloat16)) as plain:
        expected = torch.cat([step(plain, some_caches(plain), token) for token in (5, 6)])
    got = torch.cat([step(decoder, some_caches(decoder), token) for token in (5, 6)])
    torch.testing.assert_close(got.cpu(), expected, atol=0.1, rtol=0.1)
