"""Real keys and queries: a conversation is read, then asked, and every layer recorded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from larder import read_conversation
from larder.cache.sequence import SequenceCache
from larder.core.conversation import Conversation
from larder.core.observation import Entries
from larder.core.spec import LayerSpec
from larder.core.types import Mode
from larder.models.forward_batch import BatchSegment, LayerActivations
from larder.models.loader import load
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter

BLOCK = 512
PROTECTED_TOKENS = 32  # sinks, and as many of the latest, that are never parked


@dataclass(frozen=True)
class RecordedLayer:
    """What one layer made of a text and of the questions asked behind it.

    Args:
        keys: of the text, post-RoPE.
        queries: of the last token of each question and of the tokens of its answer.
        latest: queries of the last tokens of the text.
    """

    layer: LayerSpec
    keys: Float[Tensor, "K S D"]
    queries: Float[Tensor, "H Q D"]
    latest: Float[Tensor, "H Q D"]


def load_or_record(path: Path, tokens: int, asked: int, folder: Path) -> list[RecordedLayer]:
    """As `record_layers`, from a file in a folder if it is there, and left there."""
    file = folder / f"{path.stem}-{tokens}-{asked}.pt"
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        torch.save([vars(each) for each in record_layers(path, tokens, asked)], file)
    return [RecordedLayer(**each) for each in torch.load(file, weights_only=False)]


def record_layers(path: Path, tokens: int, asked: int) -> list[RecordedLayer]:
    """All layers, for the last `tokens` tokens of a conversation and `asked` of its questions.

    A conversation that is shorter is read over and over.
    """
    loaded = load("seed")
    scribe = TokenizerAdapter(loaded.tokenizer)
    conversation = read_conversation(path)
    ids = scribe.encode_conversation(conversation).ids
    ids = (ids * (1 + tokens // len(ids)))[-tokens:]
    cache = SequenceCache(loaded.decoder.spec, "dense")
    cache.reserve(tokens)
    keys: dict[int, list[Tensor]] = {}
    queries: dict[int, list[Tensor]] = {}

    latest: dict[int, Tensor] = {}

    def hear(_: int, layer: int, made: LayerActivations) -> None:
        keys.setdefault(layer, []).append(made.keys.float())
        latest[layer] = made.queries.float()

    for start in range(0, tokens, BLOCK):
        loaded.decoder.read([BatchSegment(cache, ids[start : start + BLOCK])], Mode.APPEND, hear)
    for question, answer in _question_answer_ids(scribe, conversation, asked):

        def listen(
            _: int, layer: int, made: LayerActivations, first: int = len(question) - 1
        ) -> None:
            queries.setdefault(layer, []).append(made.queries[:, first:].float())

        loaded.decoder.read([BatchSegment(cache, question + answer)], Mode.SCRATCH, listen)
    return [
        RecordedLayer(
            layer,
            torch.cat(keys[layer.index], 1),
            torch.cat(queries[layer.index], 1),
            latest[layer.index],
        )
        for layer in loaded.decoder.spec.layers
    ]


def _question_answer_ids(
    scribe: TokenizerAdapter, conversation: Conversation, asked: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Questions, evenly taken, and their answers as the model would write them."""
    step = max(len(conversation.questions) // asked, 1)
    return [
        (scribe.encode_question(question.question), scribe.encode_answer(question.answer))
        for question in conversation.questions[::step][:asked]
    ]


def parked_entries(keys: Float[Tensor, "K S D"]) -> Entries:
    """All entries but the ends, as a slow tier holds them; values do not matter."""
    flat = keys[:, PROTECTED_TOKENS : keys.shape[1] - PROTECTED_TOKENS].contiguous()
    heads, length, head_dim = flat.shape
    rows = flat.view(-1, head_dim)
    starts = tuple(head * length for head in range(heads))
    nowhere = torch.zeros(len(rows), dtype=torch.int32)
    return Entries(rows, rows, nowhere, starts, (length,) * heads)
