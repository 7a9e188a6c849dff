"""Corpus of training texts: passages of equal length, split by document, one source held out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from random import Random

from larder.core.conversation import Conversation, PromptLayout
from larder.core.errors import BadParameter, InputError
from larder.models.measurements.base import SAMPLE_FILE
from larder.session.files import read_conversation
from larder.session.files.loader import read_document
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter

SUFFIXES = (".json", ".md", ".txt")
BUNDLED_SOURCE = "bundled"
BUNDLED_CHARS = 3200  # of a document that the bundled text is cut into
TEST_EVERY = 6  # one document of so many of each source is tested with
MOST_PASSAGES = 8  # of one document
SHORTEST = 0.75  # of a passage, as a share of its tokens


class CorpusSplit(Enum):
    """Use of a document: training, test, or test on a source that nothing was trained on."""

    TRAIN = "train"
    TEST = "test"
    HELD_OUT = "held_out"


@dataclass(frozen=True)
class Document:
    """Text of a corpus.

    Args:
        name: path below the corpus.
        source: file or folder of the corpus that it is in.
        digest: of its content.
    """

    name: str
    source: str
    digest: str
    conversation: Conversation


@dataclass(frozen=True)
class Passage:
    """Part of a document with a given number of tokens, as a model reads it.

    Args:
        ids: token ids, chat template included.
        predicting: indices of the tokens that predict an answer; empty where none is asked for.
    """

    document: str
    source: str
    split: CorpusSplit
    number: int
    ids: tuple[int, ...]
    predicting: tuple[int, ...] = ()


@dataclass(frozen=True)
class Corpus:
    """Documents, and the source that is held out.

    Args:
        held_out: source that nothing is trained on; empty for none.
    """

    documents: tuple[Document, ...]
    held_out: str = ""

    @property
    def sources(self) -> list[str]:
        """Names of all sources, sorted."""
        return sorted({document.source for document in self.documents})

    @property
    def digest(self) -> str:
        """Digest of all documents and of the source that is held out."""
        identity = [(document.name, document.digest) for document in self.documents]
        return hashlib.sha256(json.dumps([identity, self.held_out]).encode()).hexdigest()

    def splits(self) -> dict[str, CorpusSplit]:
        """Split of each document, by its name: every sixth of a source, by digest, is a test."""
        found = dict[str, CorpusSplit]()
        for source in self.sources:
            ordered = sorted(
                (d for d in self.documents if d.source == source), key=lambda d: d.digest
            )
            for index, document in enumerate(ordered):
                is_test = index % TEST_EVERY == 0 and len(ordered) > 1
                split = CorpusSplit.TEST if is_test else CorpusSplit.TRAIN
                found[document.name] = CorpusSplit.HELD_OUT if source == self.held_out else split
        return found

    def passages(self, adapter: TokenizerAdapter, tokens: int, seed: int = 0) -> Iterator[Passage]:
        """Passages of all documents: sources in turn, documents in turn within each.

        Args:
            tokens: of a passage, without the chat template.
            seed: of the order of documents.
        """
        splits, rounds = self.splits(), list[Iterator[Passage]]()
        for source in self.sources:
            documents = [document for document in self.documents if document.source == source]
            Random(seed).shuffle(documents)
            rounds.append(
                _in_turn([_passages(d, splits[d.name], adapter, tokens) for d in documents])
            )
        yield from _in_turn(rounds)


def read_corpus(folder: Path | None, held_out: str | None = None) -> Corpus:
    """Corpus of a folder, at any depth; the bundled text for None.

    A source is a direct child of the folder: a file, or a folder with all of its files.
    Of documents with equal content the first by name is read.

    Args:
        held_out: source that nothing is trained on; None for the last by name where there are
            several.

    Raises:
        InputError: there is no such folder, it has no file that Larder reads, or a file cannot be
            read.
        BadParameter: there is no such source.
    """
    documents = _bundled() if folder is None else _documents(folder)
    corpus = Corpus(_unlike(documents))
    known = corpus.sources
    if held_out is None:
        held_out = known[-1] if len(known) > 1 else ""
    if held_out and (held_out not in known or len(known) == 1):
        raise BadParameter(
            f"held_out {held_out!r} must be one of several sources of the corpus; it has "
            f"{', '.join(known)}."
        )
    return replace(corpus, held_out=held_out)


def _bundled() -> Iterator[Document]:
    text = (files("larder.models") / SAMPLE_FILE).read_text(encoding="utf-8")
    for number, start in enumerate(range(0, len(text), BUNDLED_CHARS)):
        part = text[start : start + BUNDLED_CHARS]
        if len(part) > BUNDLED_CHARS // 2:
            name = f"{BUNDLED_SOURCE}/{number:02}"
            digest = hashlib.sha256(part.encode()).hexdigest()
            yield Document(name, BUNDLED_SOURCE, digest, read_document(part, name))


def _documents(folder: Path) -> Iterator[Document]:
    if not folder.is_dir():
        fault = "is no folder" if folder.exists() else "does not exist"
        raise InputError(f"The corpus {folder} {fault}: name a folder of texts or transcripts.")
    found = sorted(
        path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file()
    )
    if not found:
        raise InputError(
            f"{folder} holds no {', '.join(SUFFIXES)} file: name a folder of texts or transcripts."
        )
    for path in found:
        name = path.relative_to(folder).as_posix()
        yield Document(name, name.split("/")[0], _file_digest(path), read_conversation(path))


def _file_digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error}): make it readable, or take it out of the corpus."
        ) from error


def _unlike(documents: Iterable[Document]) -> tuple[Document, ...]:
    """Documents without later ones of equal content, which could be in another split."""
    found = dict[str, Document]()
    for document in documents:
        found.setdefault(document.digest, document)
    return tuple(found.values())


def _passages(
    document: Document, split: CorpusSplit, adapter: TokenizerAdapter, tokens: int
) -> Iterator[Passage]:
    conversation = document.conversation
    is_chat = conversation.form is PromptLayout.CHAT
    cut = _message_groups if is_chat else _text_parts
    for number, part in enumerate(cut(conversation, adapter, tokens)):
        if number == MOST_PASSAGES:
            return
        ids = adapter.encode_conversation(part).ids
        yield Passage(document.name, document.source, split, number, ids)


def _text_parts(
    conversation: Conversation, adapter: TokenizerAdapter, tokens: int
) -> Iterator[Conversation]:
    """Equal parts of the text, each a document."""
    text = "".join((conversation.opening, *(m.content for m in conversation.messages)))
    starts = adapter.token_starts(text)
    edges = [*starts, len(text)]
    for first in range(0, len(starts), tokens):
        last = min(first + tokens, len(starts))
        if last - first >= SHORTEST * tokens:
            yield read_document(text[edges[first] : edges[last]], conversation.name)


def _message_groups(
    conversation: Conversation, adapter: TokenizerAdapter, tokens: int
) -> Iterator[Conversation]:
    """Successive messages, as many as make up a passage; they begin with the user's."""
    group, counted = list[int](), 0
    for index, message in enumerate(conversation.messages):
        if not group and message.role != "user":
            continue
        group.append(index)
        counted += adapter.count_tokens(message.content)
        if counted >= tokens:
            messages = tuple(conversation.messages[n] for n in group)
            yield replace(conversation, messages=messages, questions=())
            group, counted = [], 0


def _in_turn(streams: Sequence[Iterator[Passage]]) -> Iterator[Passage]:
    """One item of each stream in turn, until all have ended."""
    for row in zip_longest(*streams):
        yield from (item for item in row if item is not None)
