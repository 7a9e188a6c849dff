"""Attention over pages: every backend against the readable loop."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from fake_device import FakeDevice, HostSynchronization
from larder.core import LarderError
from larder.ops import (
    PAGE_TOKENS,
    AttentionBackend,
    choose_backend,
    gathered_attention,
    reference_paged_attention,
)
from larder.ops import paged_attention as paged_attention_module
from larder.ops.attention import attention
from larder.ops.gpu import varlen
from larder.ops.paged_attention import paged_attention
from paged_segments import PagedSegments, some_segments

LENGTHS = (9, 0, 4, 1, 12)
LONG = (300, 1, 512, 77)


def stored(own: PagedSegments) -> tuple:
    return own.queries, own.keys, own.values, own.tables, own.scaling


def assert_close(got: tuple, expected: tuple, tolerance: float = 1e-5) -> None:
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one.float(), other, atol=tolerance, rtol=tolerance)


def test_reference_attends_to_the_entries_of_each_segment() -> None:
    own = some_segments((5, 0, 3), page_tokens=2, queries=(2, 2))
    out, lse = reference_paged_attention(*stored(own))
    pages = own.tables.table[0].tolist()
    keys, values = (
        torch.stack([side[pages[index // 2], index % 2] for index in range(5)])
        for side in (own.keys, own.values)
    )
    expected = attention(own.queries[0], keys, values, own.scaling)
    assert_close((out[0], lse[0]), expected)
    assert not out[1].any()
    assert lse[1].isneginf().all()


@pytest.mark.parametrize("queries", [(2, 1), (3, 4), (1, 1)])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("is_biased", [False, True])
@pytest.mark.parametrize("backend", [AttentionBackend.CPU, AttentionBackend.GATHERED])
def test_backends_equal_the_reference(queries, softcap, is_biased, backend) -> None:
    own = some_segments(LENGTHS, page_tokens=4, queries=queries)
    bias = own.bias if is_biased else None
    own.values[0] = torch.nan  # the null page may hold anything
    got = paged_attention(*stored(own), backend, bias, softcap)
    assert_close(got, reference_paged_attention(*stored(own), bias, softcap))


@torch.no_grad()
@pytest.mark.parametrize("queries", [(2, 1), (3, 4)])
def test_varlen_is_called_as_it_requires(queries) -> None:
    own = some_segments(LONG, PAGE_TOKENS, queries, dtype=torch.bfloat16)
    with FakeDevice() as device:
        got = paged_attention(*stored(own), AttentionBackend.VARLEN)
    assert device.launches[-1] == "torch_attn::_varlen_attn"
    assert_close(got, reference_paged_attention(*stored(own)), 0.02)


@torch.no_grad()
def test_varlen_refuses_unsupported_page_sizes() -> None:
    own = some_segments(LENGTHS, page_tokens=4, dtype=torch.bfloat16)
    with FakeDevice(), pytest.raises(AssertionError, match="multiple of 256"):
        paged_attention(*stored(own), AttentionBackend.VARLEN)


def test_biases_and_softcaps_use_a_supporting_backend() -> None:
    assert AttentionBackend.VARLEN.with_bias() is AttentionBackend.GATHERED
    assert AttentionBackend.CPU.with_bias() is AttentionBackend.CPU


def test_backend_is_selected_by_device_and_page_format(monkeypatch) -> None:
    form = torch.bfloat16, 64, PAGE_TOKENS
    assert choose_backend(torch.device("cpu"), *form) is AttentionBackend.CPU
    assert choose_backend(torch.device("mps"), *form) is AttentionBackend.GATHERED
    gpu = torch.device("cuda")
    monkeypatch.setattr(paged_attention_module, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "larder.ops.gpu.attention_kernel", kernels_for(16))
    assert choose_backend(gpu, *form) is AttentionBackend.TRITON
    assert choose_backend(gpu, torch.bfloat16, 64, 8) is AttentionBackend.GATHERED
    monkeypatch.setattr(paged_attention_module, "find_spec", lambda name: None)
    assert choose_backend(gpu, torch.float32, 64, PAGE_TOKENS) is AttentionBackend.GATHERED
    assert choose_backend(gpu, torch.bfloat16, 64, 128) is AttentionBackend.GATHERED
    assert choose_backend(gpu, torch.bfloat16, 12, PAGE_TOKENS) is AttentionBackend.GATHERED
    for is_there, expected in ((True, AttentionBackend.VARLEN), (False, AttentionBackend.GATHERED)):
        monkeypatch.setattr(varlen, "_is_available", lambda found=is_there: found)
        assert choose_backend(gpu, *form) is expected


def kernels_for(smallest_page: int) -> ModuleType:
    """Stand-in of the module of Triton kernels, which is importable where Triton is."""
    module = ModuleType("attention_kernel")
    vars(module)["supports"] = lambda page_tokens: page_tokens >= smallest_page
    return module


@torch.no_grad()
def test_gather_does_not_synchronize() -> None:
    own = some_segments(LENGTHS, page_tokens=4)
    with FakeDevice():
        gathered_attention(*stored(own), own.bias, 1.5)
    with FakeDevice(), pytest.raises(HostSynchronization, match="tolist"):
        reference_paged_attention(*stored(own))


READS = {
    "item": lambda numbers: numbers.sum().item(),
    "tolist": lambda numbers: numbers.tolist(),
    "numpy": lambda numbers: numbers.numpy(),
    "cpu": lambda numbers: numbers.cpu(),
    "int": lambda numbers: int(numbers[0]),
    "float": lambda numbers: float(numbers[0]),
    "bool": lambda numbers: 1 if numbers.any() else 0,
    "index": lambda numbers: [0, 1, 2][numbers[1]],
    "nonzero": lambda numbers: numbers.nonzero(),
    "mask": lambda numbers: numbers[numbers > 1],
    "masked write": lambda numbers: numbers.index_put_((numbers > 1,), numbers[0]),
    "masked_select": lambda numbers: numbers.masked_select(numbers > 1),
    "equal": lambda numbers: torch.equal(numbers, numbers),
    "unique": lambda numbers: numbers.unique(),
    "repeat_interleave": lambda numbers: torch.repeat_interleave(numbers, numbers),
}


@pytest.mark.parametrize("read", READS)
def test_host_synchronization_is_detected(read) -> None:
    with FakeDevice(), pytest.raises(HostSynchronization, match="wait for the device") as error:
        READS[read](torch.tensor([0, 1, 2]))
    assert isinstance(error.value, LarderError)


def test_launches_are_counted_and_views_are_not() -> None:
    numbers = torch.zeros(4, 4)
    with FakeDevice() as device:
        numbers.view(2, 8).T.unsqueeze(0).add_(1)
        torch.empty(3)
        numbers @ numbers
    assert device.launches == ["aten::add_.Tensor", "aten::mm"]
    assert device.launch_count == 2
