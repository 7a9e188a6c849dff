"""Reading token ids through a decoder, and what the model says on its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from larder.cache import SequenceCache
from larder.core import Mode
from larder.models import BatchSegment, Decoder
from larder.prefill import PrefillReader, PrefillSequence
from larder.session import ModelRuntime, TokenizerAdapter
from tiny_models import tiny


def some_ids(count: int, vocabulary: int = 128, seed: int = 0) -> tuple[int, ...]:
    """Random token ids without the special ones."""
    source = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, vocabulary, (count,), generator=source).tolist())


@torch.no_grad()
def native_logits(module: Any, ids: Sequence[int]) -> Tensor:
    """Logits [Q, V] of a transformers model on its own attention."""
    return module(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].float()


def cuts(total: int, block: int) -> list[tuple[int, int]]:
    """Blocks [start, stop) of `block` tokens, the last one short."""
    return [(start, min(start + block, total)) for start in range(0, total, block)]


def read_on(decoder: Decoder, cache: SequenceCache, ids: Sequence[int], block: int) -> Tensor:
    """Logits [Q, V] of ids read block by block behind a cache."""
    parts = [
        decoder.forward_logits([BatchSegment(cache, tuple(ids[a:b]))], Mode.APPEND, range(b - a))
        for a, b in cuts(len(ids), block)
    ]
    return torch.cat(parts)


def read_and_evict(
    reader: PrefillReader,
    sequences: Sequence[PrefillSequence],
    ids: tuple[int, ...],
    block: tuple[int, ...],
    start: int,
) -> None:
    """All steps of a block."""
    for _ in reader.read_and_evict_steps(sequences, ids, block, start):
        pass


class IdTokenizer(TokenizerAdapter):
    """Tokenizer of token ids alone.

    Args:
        sets: sets of tokens by name; the first two tokens are in every other set.
    """

    def __init__(self, **sets: frozenset[int]) -> None:
        self._sets = sets

    def lexicon(self, names: Iterable[str]) -> dict[str, frozenset[int]]:
        return {name: self._sets.get(name, frozenset({0, 1})) for name in names}


def no_embedder(name: str) -> NoReturn:
    raise AssertionError(f"no test of token ids forms episodes, but {name} was asked for")


def id_runtime(
    decoder: Decoder, calibration: dict[str, Any] | None = None, **sets: frozenset[int]
) -> ModelRuntime:
    """Runtime for policies over token ids, with calibration and sets of tokens."""
    return ModelRuntime(decoder, IdTokenizer(**sets), no_embedder, lambda names: calibration or {})


def similar_decoders() -> tuple[Decoder, Decoder]:
    """A model and one whose weights are a little different."""
    one, other = tiny("qwen3", layers=4), tiny("qwen3", layers=4)
    source = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in other.parameters():
            weight += 0.1 * weight.std() * torch.randn(weight.shape, generator=source)
    return Decoder(one), Decoder(other)
