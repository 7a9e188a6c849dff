"""Copies of a model that a cache was attached to."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import larder
from model_runs import some_ids
from tiny_models import tiny

IDS = torch.tensor([some_ids(20, seed=1)])
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 4}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copied_model_is_attached_separately(copied: Callable[[Any], Any]) -> None:
    model = tiny("llama")
    expected = model.generate(IDS, **GREEDY)
    with larder.applied(model, "full") as run:
        other = copied(model)
        assert torch.equal(other.generate(IDS, **GREEDY), expected)
        assert run.cache is None
        with larder.applied(other, "full") as own:
            assert torch.equal(other.generate(IDS, **GREEDY), expected)
    assert own.cache is not None
    assert own.cache.attachment.module is other
