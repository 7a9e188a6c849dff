"""Recorded keys and queries of every layer, from a conversation and its questions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder import read_conversation
from larder.cache import SequenceCache
from larder.core import Conversation, Entries, LayerSpec, Mode
from larder.models import BatchSegment, LayerActivations, load
from larder.session import TokenizerAdapter

BLOCK = 512
PROTECTED_TOKENS = 32  # sinks, and as many of the latest tokens, that are never offloaded


@dataclass(frozen=True)
class RecordedLayer:
    """Keys and queries of one layer, of a text and of the questions asked behind it.

    Args:
        keys: of the text, post-RoPE.
        queries: of the last token of each question and of the tokens of its answer.
        latest: queries of the last tokens of the text.
        distance: positions of the queries behind the text.
        openings: queries of each question's tokens before its last.
    """

    layer: LayerSpec
    keys: Float[Tensor, "K S D"]
    queries: Float[Tensor, "H Q D"]
    latest: Float[Tensor, "H Q D"]
    distance: Int64[Tensor, " Q"]
    openings: tuple[Float[Tensor, "H N D"], ...] = ()


def load_or_record(
    path: Path, tokens: int, asked: int, folder: Path, model: str = "seed"
) -> list[RecordedLayer]:
    """Recorded layers from a cached file, or from `record_layers` if there is none."""
    file = folder / f"{path.stem}-{model}-{tokens}-{asked}.pt"
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        torch.save([vars(each) for each in record_layers(path, tokens, asked, model)], file)
    return [RecordedLayer(**each) for each in torch.load(file, weights_only=False)]


def text_ids(path: Path, tokens: int, model: str) -> tuple[list[int], Any]:
    """Last `tokens` tokens of a conversation, repeated if it is shorter, and the tokenizer."""
    tokenizer = load(model).tokenizer
    ids = TokenizerAdapter(tokenizer).encode_conversation(read_conversation(path)).ids
    return list((ids * (1 + tokens // len(ids)))[-tokens:]), tokenizer


def record_layers(path: Path, tokens: int, asked: int, model: str = "seed") -> list[RecordedLayer]:
    """Recorded layers of the last `tokens` tokens of a conversation and `asked` of its questions.

    A shorter conversation is repeated.
    """
    loaded = load(model)
    tokenizer = TokenizerAdapter(loaded.tokenizer)
    conversation = read_conversation(path)
    ids = tokenizer.encode_conversation(conversation).ids
    ids = (ids * (1 + tokens // len(ids)))[-tokens:]
    cache = SequenceCache(loaded.decoder.spec, "dense")
    cache.reserve(tokens)
    keys: dict[int, list[Tensor]] = {}
    queries: dict[int, list[Tensor]] = {}
    openings: dict[int, list[Tensor]] = {}
    distance: list[Tensor] = []
    latest: dict[int, Tensor] = {}

    def record(_: int, layer: int, activations: LayerActivations) -> None:
        keys.setdefault(layer, []).append(activations.keys.float())
        kept = [latest[layer]] if layer in latest else []
        latest[layer] = torch.cat([*kept, activations.queries.float()], 1)[:, -BLOCK:]

    for start in range(0, tokens, BLOCK):
        loaded.decoder.read([BatchSegment(cache, ids[start : start + BLOCK])], Mode.APPEND, record)
    for question, answer in _question_answer_ids(tokenizer, conversation, asked):

        def record_queries(
            _: int, layer: int, activations: LayerActivations, first: int = len(question) - 1
        ) -> None:
            queries.setdefault(layer, []).append(activations.queries[:, first:].float())
            openings.setdefault(layer, []).append(activations.queries[:, :first].float())

        loaded.decoder.read([BatchSegment(cache, question + answer)], Mode.SCRATCH, record_queries)
        distance.append(torch.arange(len(question) - 1, len(question + answer)))
    return [
        RecordedLayer(
            layer,
            torch.cat(keys[layer.index], 1),
            torch.cat(queries[layer.index], 1),
            latest[layer.index],
            torch.cat(distance),
            tuple(openings[layer.index]),
        )
        for layer in loaded.decoder.spec.layers
    ]


def _question_answer_ids(
    tokenizer: TokenizerAdapter, conversation: Conversation, asked: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Token ids of evenly spaced questions and of their answers."""
    step = max(len(conversation.questions) // asked, 1)
    return [
        (tokenizer.encode_question(question.question), tokenizer.encode_answer(question.answer))
        for question in conversation.questions[::step][:asked]
    ]


def parked_entries(keys: Float[Tensor, "K S D"]) -> Entries:
    """All entries but the protected ones, as in a slow tier; values do not matter."""
    flat = keys[:, PROTECTED_TOKENS : keys.shape[1] - PROTECTED_TOKENS].contiguous()
    heads, length, head_dim = flat.shape
    rows = flat.view(-1, head_dim)
    starts = tuple(head * length for head in range(heads))
    positions = torch.zeros(len(rows), dtype=torch.int32)
    return Entries(rows, rows, positions, starts, (length,) * heads)
