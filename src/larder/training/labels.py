"""Label file of a model: hidden states and KVzip scores of a corpus, one shard per passage.

A folder `$LARDER_HOME/<fingerprint>/labels/<digest>/` with `labels.json` and a safetensors file per
passage. The digest covers the corpus and how it is cut, not how much of it is labelled: a later
call that asks for more continues where the last one ended, also if that was interrupted. Shards are
written whole or not at all, and depend on nothing but their passage.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from larder.core.errors import BadParameter, ModelError
from larder.core.home import home
from larder.models.decoder import Decoder
from larder.prefill.base import Progress
from larder.session.prefill import common_prompts
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter
from larder.training.corpus import Corpus, CorpusSplit, Passage
from larder.training.label_pass import STATES, CopyPass, label_layers

SCHEMA = 1
INDEX = "labels.json"
IDS = "ids"  # tensor of a shard: token ids of its passage
PASSAGE_TOKENS = 768  # KVzap's texts have 750 to 1,250: softmax shares depend on the length


@dataclass(frozen=True)
class LabelSettings:
    """Size of the labelled part of a corpus, and of its passages.

    Args:
        tokens: labelled tokens, at least; all passages where the corpus has fewer.
        passage_tokens: of a passage, without the chat template.
        seed: of the order of documents.
    """

    tokens: int = 40_000
    passage_tokens: int = PASSAGE_TOKENS
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.passage_tokens < 2:
            raise BadParameter(
                "labels need tokens >= 1 and passage_tokens >= 2, got "
                f"{self.tokens} and {self.passage_tokens}."
            )


@dataclass(frozen=True)
class Shard:
    """Labels of one passage.

    Args:
        path: of a safetensors file with tensors `<label>.<layer>`.
    """

    path: Path
    document: str
    source: str
    split: CorpusSplit
    tokens: int

    def layer(self, index: int, name: str) -> Tensor:
        """One label of one layer.

        Raises:
            ModelError: the file is damaged.
        """
        try:
            with safe_open(self.path, "pt") as tensors:
                return tensors.get_tensor(f"{name}.{index}")
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"The labels {self.path} cannot be read ({error}): remove the file, and it is "
                "made again."
            ) from error


@dataclass(frozen=True)
class LabelFile:
    """Shards of a model.

    Args:
        digest: of the corpus and of how it is cut.
    """

    digest: str
    shards: tuple[Shard, ...]

    def of_split(self, *splits: CorpusSplit) -> list[Shard]:
        """Shards of some splits, in order."""
        return [shard for shard in self.shards if shard.split in splits]

    def tokens(self, *splits: CorpusSplit) -> int:
        """Labelled tokens of some splits."""
        return sum(shard.tokens for shard in self.of_split(*splits))


def make_labels(
    decoder: Decoder,
    adapter: TokenizerAdapter,
    corpus: Corpus,
    settings: LabelSettings,
    progress: Progress,
) -> LabelFile:
    """Label a corpus, passage by passage; passages that have a whole shard are not read again.

    Args:
        progress: called with tokens done and in total.

    Raises:
        ModelError: the corpus has no passage of that length.
    """
    digest = _digest(corpus, settings)
    folder = home() / decoder.spec.fingerprint / "labels" / digest
    folder.mkdir(parents=True, exist_ok=True)
    request = common_prompts(adapter)["repeat"]
    shards, done = list[Shard](), 0
    wanted = list(_first_passages(corpus, adapter, settings))
    if not wanted:
        raise ModelError(
            f"The corpus has no text of {settings.passage_tokens} tokens: give longer texts, or "
            "fewer passage_tokens."
        )
    total = sum(len(passage.ids) for passage in wanted)
    for number, passage in enumerate(wanted):
        path = folder / f"{number:05}.safetensors"
        if not _is_of(path, passage):
            _write_shard(path, decoder, passage, request)
        shards.append(
            Shard(path, passage.document, passage.source, passage.split, len(passage.ids))
        )
        done += len(passage.ids)
        progress(done, total)
    _write_index(folder / INDEX, corpus, settings, shards)
    return LabelFile(digest, tuple(shards))


def _digest(corpus: Corpus, settings: LabelSettings) -> str:
    identity = [SCHEMA, corpus.digest, settings.passage_tokens, settings.seed]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]


def _first_passages(
    corpus: Corpus, adapter: TokenizerAdapter, settings: LabelSettings
) -> Iterator[Passage]:
    tokens = 0
    for passage in corpus.passages(adapter, settings.passage_tokens, settings.seed):
        if tokens >= settings.tokens:
            return
        tokens += len(passage.ids)
        yield passage


def _is_of(path: Path, passage: Passage) -> bool:
    """True where a shard is there, whole, and of this passage."""
    if not path.is_file():
        return False
    try:
        with safe_open(path, "pt") as tensors:
            return IDS in tensors.keys() and (  # noqa: SIM118
                tuple(tensors.get_tensor(IDS).tolist()) == tuple(passage.ids)
            )
    except (SafetensorError, OSError):
        return False


def _write_shard(path: Path, decoder: Decoder, passage: Passage, request: tuple[int, ...]) -> None:
    found = label_layers(decoder, CopyPass.of(passage.ids, request))
    tensors = {
        f"{name}.{layer}": tensor.contiguous()
        for layer, labels in found.items()
        for name, tensor in labels.items()
    }
    draft = path.with_suffix(f".{os.getpid()}.draft")
    save_file({IDS: torch.tensor(passage.ids), **tensors}, draft)
    os.replace(draft, path)


def _write_index(path: Path, corpus: Corpus, settings: LabelSettings, shards: list[Shard]) -> None:
    """Description of the shards, for readers; nothing is read from it."""
    document = {
        "schema": SCHEMA,
        "labels": [STATES, *sorted({"kvzip", "kvzip_plus", "logit"})],
        "held_out": corpus.held_out,
        "settings": asdict(settings),
        "shards": [
            {**asdict(shard), "path": shard.path.name, "split": shard.split.value}
            for shard in shards
        ],
    }
    draft = path.with_suffix(f".{os.getpid()}.draft")
    draft.write_text(json.dumps(document, indent=1), encoding="utf-8")
    os.replace(draft, path)
