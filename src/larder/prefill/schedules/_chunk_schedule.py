"""Base of schedules that put the cache of a text together from chunks of contexts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from larder.cache.chunk_entries import ChunkEntries
from larder.core.errors import UsageError
from larder.core.spelling import spell
from larder.core.types import TokenIds
from larder.prefill.base import ContextReuse, ContextText, Schedule, Steps
from larder.prefill.contexts import check_chunkable
from larder.prefill.reader import PrefillGroup, PrefillReader, PrefillSequence
from larder.prefill.schedules.whole import Whole


@dataclass(frozen=True)
class ChunkedSchedule(Schedule):
    """Contexts from chunks; the tokens behind them are read as usual."""

    cache_form: ClassVar[str] = "blended"

    def steps(self, reader: PrefillReader, sequences: PrefillGroup, ids: TokenIds) -> Steps[None]:
        return Whole().steps(reader, sequences, ids)

    def check(self, reader: PrefillReader) -> None:
        """Check that the policy can plan without having observed every token.

        Raises:
            ModelError: the model's layers do not hold entries of their own.
            UsageError: it cannot.
        """
        check_chunkable(reader.decoder.spec, spell(self))
        planner = reader.planner
        if reader.quotas and (planner.has_state or planner.observes_whole_text):
            raise UsageError(
                f"{spell(planner.scorer)} observes every token of a text, but {spell(self)} does "
                "not compute those of known contexts: take a scorer that looks at keys, at the "
                "last queries or at a prompt behind the text (snapkv(), keydiff(), "
                "reconstruct()), or unlimited()."
            )

    def reused_tokens(self, reader: PrefillReader, text: ContextText) -> int:
        """First tokens of a text that may come from chunks; the others are read as usual."""
        behind = max(1, len(text.suffix), reader.planner.scorer.protected_tokens().last)
        return max(0, len(text.ids) - behind)

    def finish(
        self,
        reader: PrefillReader,
        sequence: PrefillSequence,
        text: ContextText,
        entries: ChunkEntries,
        is_known: Sequence[bool],
        recomputed: int,
    ) -> Steps[ContextReuse]:
        """Read what stands behind the entries, and bring the cache within its budget.

        Args:
            is_known: contexts whose entries were found.
            recomputed: tokens of these that were computed again.
        """
        total = len(text.ids)
        sequence.cache.allocate(total)
        if entries.num_tokens:
            entries.append_to(sequence.cache)
        reader.meter.observe([sequence.cache], entries.nbytes)
        rest = text.ids[sequence.cache.next_position :]
        yield from reader.read_and_evict_steps((sequence,), rest, text.ids, 0)
        reader.finish(sequence)
        yield total, total
        lengths = tuple(map(len, text.contexts))
        behind = max(0, len(rest) - len(text.suffix))  # the last context, read as usual
        return ContextReuse(lengths, tuple(is_known), min(sum(lengths), recomputed + behind))
