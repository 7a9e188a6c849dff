"""Products of one bfloat16 row: the switch of oneDNN is set while a call runs, and put back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch

from larder.ops.cpu import one_row_products
from larder.ops.cpu.one_row_products import products_of, without_onednn


@pytest.fixture(autouse=True)
def faster(monkeypatch):
    """A processor on which torch's own kernel wins."""
    monkeypatch.setattr(one_row_products, "is_faster_without_onednn", lambda: True)


def test_one_bfloat16_row_is_multiplied_without_onednn_and_the_switch_is_restored():
    before = torch.backends.mkldnn.enabled
    with products_of(1, torch.ones(1, dtype=torch.bfloat16)):
        assert not torch.backends.mkldnn.enabled
    assert torch.backends.mkldnn.enabled == before


@pytest.mark.parametrize(("rows", "dtype"), [(2, torch.bfloat16), (1, torch.float32)])
def test_other_products_are_left_alone(rows, dtype):
    assert isinstance(products_of(rows, torch.ones(1, dtype=dtype)), nullcontext)


def test_the_switch_stays_until_the_last_of_several_threads_has_left():
    before = torch.backends.mkldnn.enabled

    def enter_and_leave(_: int) -> bool:
        with without_onednn():
            return torch.backends.mkldnn.enabled

    with without_onednn(), ThreadPoolExecutor(4) as pool:
        assert not any(pool.map(enter_and_leave, range(50)))
        assert not torch.backends.mkldnn.enabled
    assert torch.backends.mkldnn.enabled == before


def test_a_failed_call_puts_the_switch_back():
    before = torch.backends.mkldnn.enabled
    with pytest.raises(ZeroDivisionError), without_onednn():
        raise ZeroDivisionError
    assert torch.backends.mkldnn.enabled == before
