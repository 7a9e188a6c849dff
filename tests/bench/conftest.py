"""A tiny model with random weights, which studies run on."""

from __future__ import annotations

import pytest
import torch

from larder import Engine
from larder_bench.datasets.sources import TaskSources
from larder_bench.random_models import open_model
from larder_bench.studies.model_context import ModelContext


@pytest.fixture(scope="session")
def bench() -> ModelContext:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        engine = Engine(open_model("random:qwen3-tiny"), policy="full")
    return ModelContext(engine, TaskSources(engine.tokenizer.count_tokens))
