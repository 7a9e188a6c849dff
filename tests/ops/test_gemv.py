"""Products of one bfloat16 row: the switch of oneDNN is set while a call runs, and put back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from larder.cache import SequenceCache
from larder.core import Mode
from larder.models import BatchSegment, wrap_model
from larder.ops import without_onednn
from larder.ops.cpu import gemv
from model_runs import some_ids
from tiny_models import tiny


@pytest.mark.parametrize("is_faster", [True, False])
def test_single_row_skips_onednn_when_faster(monkeypatch, is_faster):
    monkeypatch.setattr(gemv, "is_faster_without_onednn", lambda: is_faster)
    before = torch.backends.mkldnn.enabled
    with gemv.fastest_gemv():
        assert torch.backends.mkldnn.enabled == (before and not is_faster)
    assert torch.backends.mkldnn.enabled == before


@pytest.mark.parametrize(
    ("dtype", "tokens", "expected"),
    [(torch.bfloat16, 1, [False]), (torch.bfloat16, 2, [True]), (torch.float32, 1, [True])],
)
def test_decoder_skips_onednn_for_single_bfloat16_tokens(monkeypatch, dtype, tokens, expected):
    monkeypatch.setattr(gemv, "is_faster_without_onednn", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", True)
    decoder = wrap_model(tiny("llama").to(dtype))
    cache, seen = SequenceCache(decoder.spec, "dense"), list[bool]()
    decoder.module.lm_head.register_forward_hook(
        lambda *_: seen.append(torch.backends.mkldnn.enabled)
    )
    decoder.forward_logits([BatchSegment(cache, some_ids(tokens))], Mode.APPEND, [0])
    assert seen == expected


def test_onednn_switch_is_held_until_the_last_thread_leaves():
    before = torch.backends.mkldnn.enabled

    def enter_and_leave(_: int) -> bool:
        with without_onednn():
            return torch.backends.mkldnn.enabled

    with without_onednn(), ThreadPoolExecutor(4) as pool:
        assert not any(pool.map(enter_and_leave, range(50)))
        assert not torch.backends.mkldnn.enabled
    assert torch.backends.mkldnn.enabled == before


def test_failed_call_restores_onednn():
    before = torch.backends.mkldnn.enabled
    with pytest.raises(ZeroDivisionError), without_onednn():
        raise ZeroDivisionError
    assert torch.backends.mkldnn.enabled == before
