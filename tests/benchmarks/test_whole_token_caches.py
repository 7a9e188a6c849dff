"""Caches that the benchmark of codings of whole tokens attends to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import Tensor

from larder import Engine
from larder.session import Policy
from larder.store import CodedStack, LayerStack, RowLayout, StorageCodec, TensorRole
from larder_bench.random_models import open_model
from larder_bench.scoring.recorded_scores import RecordedText, forced_logits

ROOT = Path(__file__).parents[2]
FOLLOWING, LENGTH = 8, 200


@pytest.fixture(autouse=True)
def among_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def text() -> RecordedText:
    torch.manual_seed(0)
    engine = Engine(open_model("random:qwen3-tiny"), policy="full")
    source = torch.Generator().manual_seed(1)
    size = engine.loaded.decoder.vocab_size
    ids = torch.randint(5, size, (LENGTH + FOLLOWING,), generator=source)
    return RecordedText.of(engine, tuple(ids.tolist()), FOLLOWING)


class ScaledCodec(StorageCodec):
    """Codec that multiplies all numbers."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def encode(self, numbers: Tensor, rows: RowLayout) -> dict[str, Tensor]:
        raise NotImplementedError

    def decode(self, coded: Mapping[str, Tensor], rows: RowLayout) -> Tensor:
        raise NotImplementedError

    def encode_stack(self, stack: LayerStack) -> CodedStack:
        layers = [
            {role: {"numbers": self.factor * side} for role, side in sides.items()}
            for sides in stack.sides
        ]
        return CodedStack(tuple(layers))

    def decode_stack(
        self, coded: CodedStack, positions: Tensor, heads: Sequence[int]
    ) -> Iterator[dict[TensorRole, Tensor]]:
        for sides in coded.sides:
            yield {role: parts["numbers"] for role, parts in sides.items()}


@pytest.mark.parametrize(("factor", "is_equal"), [(1.0, True), (0.5, False)])
def test_decoded_cache_is_attended_to(text: RecordedText, factor: float, is_equal: bool) -> None:
    benchmark = import_module("whole_token_caches")
    stack = benchmark.layer_stack(text)
    cache, row = benchmark.decoded(text, stack, ScaledCodec(factor))
    for name, probe in text.probes.items():
        near = forced_logits(text.engine, cache, probe)
        assert torch.allclose(near, text.logits[name], atol=1e-4) == is_equal
    numbers = sum(side.numel() for sides in stack.sides for side in sides.values())
    assert 4 * (numbers + LENGTH) < row["bytes"] < 4 * (numbers + LENGTH) + 4000


def test_all_heads_keep_the_tokens_of_the_highest_mean(text: RecordedText) -> None:
    benchmark = import_module("whole_token_caches")
    whole = benchmark.TokenScoredText.of_text(text)
    policy = Policy.parse("whole() > protect(sinks=0, recent=0) > reconstruct() > uniform()")
    scores = text.scores(policy)
    heads = [head for each in scores.values() for head in each.scores.split(each.lengths)]
    best = sorted(range(LENGTH), key=lambda at: -float(sum(head[at] for head in heads)))[:50]
    held = whole.held(policy, 50)
    for layer in range(len(held.layers)):
        own = held.entries(layer)
        for head in range(len(own.lengths)):
            assert own.head_positions(head).tolist() == sorted(best)
    alone = text.held(policy, 50).entries(0)
    assert alone.head_positions(0).tolist() != sorted(best)
