"""Contexts behind each other, each reused behind the same contexts in the same order.

Jin et al., "RAGCache: Efficient Knowledge Caching for Retrieval-Augmented Generation" (2024),
arXiv:2404.12457, section 5: the entries of retrieved documents form a tree, in which a document is
a child of the one that it was read behind, so that reuse is exact. What leaves a full tree is up to
its source; the server's takes the priority of section 5.1 (`larder.server.context_prompts`).
Requests in which more is known are read first, as in section 5.2, by the server's scheduler, which
prefers short prompts within an age limit. Documents are not read before they are asked for:
speculation needs a retriever that reports what it is about to return.

Without contexts the schedule is `whole()`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from larder.core.errors import UsageError
from larder.core.spelling import spell
from larder.core.types import TokenIds
from larder.prefill.base import ContextReuse, ContextText, Steps
from larder.prefill.contexts import BLOCK_TOKENS, ChunkSource
from larder.prefill.reader import PrefillReader, PrefillSequence
from larder.prefill.schedules._chunk_schedule import ChunkedSchedule


@dataclass(frozen=True)
class DocumentTree(ChunkedSchedule):
    """Exact reuse of contexts behind the same beginning (RAGCache).

    Args:
        eviction: policy by which contexts leave the host memory of a server.
    """

    eviction: str = "gdsf"
    cache_form: ClassVar[str] = "dense"

    @property
    def chunk_eviction(self) -> str:
        return self.eviction

    def context_steps(
        self,
        reader: PrefillReader,
        sequence: PrefillSequence,
        text: ContextText,
        source: ChunkSource,
    ) -> Steps[ContextReuse]:
        self.check(reader)
        if reader.quotas:
            raise UsageError(
                f"{spell(self)} keeps every entry: write unlimited() behind it and nothing else, "
                "or take blended()."
            )
        total, before, is_known = len(text.ids), tuple[int, ...](), list[bool]()
        sequence.cache.allocate(total)
        for chunk in (text.prefix, *text.contexts):
            is_known.append(_extend(reader, sequence, before, chunk, source))
            before += chunk
            yield len(before), total
        _read(reader, sequence, text.suffix)
        reader.finish(sequence)
        yield total, total
        return ContextReuse(tuple(map(len, text.contexts)), tuple(is_known[1:]))


def _extend(
    reader: PrefillReader,
    sequence: PrefillSequence,
    before: tuple[int, ...],
    ids: TokenIds,
    source: ChunkSource,
) -> bool:
    """Extend a cache by a text behind `before`; True if its entries were known."""
    found = source.find(reader.decoder.spec, before, ids) if ids else None
    if found is not None:
        found.append_to(sequence.cache)
        return True
    _read(reader, sequence, ids)
    if ids:
        source.add(before, ids, sequence.cache)
    return False


def _read(reader: PrefillReader, sequence: PrefillSequence, ids: TokenIds) -> None:
    for start in range(0, len(ids), BLOCK_TOKENS):
        reader.append((sequence,), ids[start : start + BLOCK_TOKENS])


Part = DocumentTree
