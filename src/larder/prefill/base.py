"""Base class of prefill schedules, and stepwise tasks with progress."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, TypeVar

from larder.cache.sequence import SequenceCache
from larder.core.errors import UsageError
from larder.core.images import NO_IMAGES, ImageSpans
from larder.core.progress import Progress, no_progress
from larder.core.spelling import spell
from larder.core.types import TokenIds
from larder.ops.apportionment import even_ranges
from larder.policy.scorers.base import ReducedScorer
from larder.prefill.memory import EntryCapacity
from larder.prefill.reader import PrefillGroup, PrefillReader, PrefillSequence

if TYPE_CHECKING:  # read where a prompt has contexts
    from larder.prefill.contexts import ChunkSource

Result = TypeVar("Result")
# Task that yields after every forward pass, so that others may use the model; it yields the
# arguments of `Progress`, or None where they have not changed.
Steps = Generator[tuple[int, int] | None, None, Result]


def run_steps(steps: Steps[Result], progress: Progress = no_progress) -> Result:
    """Run a stepwise task to its end and return its result."""
    while True:
        try:
            counts = next(steps)
        except StopIteration as end:
            return end.value
        if counts is not None:
            done, total = counts
            progress(done, total)


@dataclass(frozen=True)
class ContextText:
    """Token ids of several contexts in one prompt.

    Args:
        prefix: tokens before the first context.
        contexts: tokens of each context.
        suffix: tokens behind the last context.
    """

    prefix: tuple[int, ...]
    contexts: tuple[tuple[int, ...], ...]
    suffix: tuple[int, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        """All tokens, in order."""
        return self.prefix + sum(self.contexts, ()) + self.suffix


@dataclass(frozen=True)
class ContextReuse:
    """Reuse of the contexts of a prefill.

    Args:
        tokens: number of tokens of each context.
        cached: contexts whose entries were found and not read.
        recomputed_tokens: tokens of contexts that were computed in all layers, although their
            entries were known.
    """

    tokens: tuple[int, ...] = ()
    cached: tuple[bool, ...] = ()
    recomputed_tokens: int = 0

    @property
    def cached_tokens(self) -> int:
        """Tokens of contexts whose entries were found."""
        return sum(count for count, known in zip(self.tokens, self.cached, strict=True) if known)


class TurnRule:
    """Rule of what the end of a turn of a conversation changes; this one judges all entries again,
    so that nothing does. `freeze()` has another.
    """

    # Whether a turn ends with a plan even where the cache is within its budget.
    plans_turns: bool = False

    def protecting(self, first: int) -> TurnRule:
        """Rule under which the first tokens of the text never leave."""
        return self

    def reader(self, reader: PrefillReader, cache: SequenceCache, length: int) -> PrefillReader:
        """Reader whose plans judge what they may.

        Args:
            length: true tokens once the text is read.
        """
        return reader

    def is_due(self, reader: PrefillReader, cache: SequenceCache, length: int) -> bool:
        """True if a turn that ends at `length` tokens has to be judged."""
        return False

    def freeze(self, cache: SequenceCache) -> None:
        """Count everything that was read as judged."""
        del cache

    def trim(self, cache: SequenceCache, bound: EntryCapacity | None) -> None:
        """Bring a cache that was judged within its bound."""
        del cache, bound


class Schedule(ABC):
    """Order in which a context is read and plans are made. A frozen dataclass without state."""

    # Whether plans are made between blocks; such a schedule has a field `tokens`, M_block.
    has_blocks: ClassVar[bool] = False
    # Whether tokens are left out of some layers, so that layers hold different ones.
    narrows: ClassVar[bool] = False

    # Cache form of a schedule that reads contexts apart; empty for that of the policy.
    cache_form: ClassVar[str] = ""
    # Whether chunks may approximate the model's own reading, since what is made of them is private.
    takes_reused_chunks: ClassVar[bool] = False
    # Whether tokens are chosen in the pass that reads them, before a prompt is read behind it.
    chooses_in_pass: ClassVar[bool] = False

    @property
    def scoring(self) -> ReducedScorer | None:
        """Scorer of the tokens that go deeper; None for the scorer of the policy."""
        return None

    @property
    def block_tokens(self) -> int | None:
        """M_block, the most tokens read between two plans; None without blocks, or where open."""
        return None

    def with_budget(self, tokens: int, context: int | None) -> Schedule:
        """Copy with open parameters but M_block filled in.

        Args:
            tokens: M, entries per kv head.
            context: tokens of the text that is to be read; None where that is not known.
        """
        return self

    @property
    def turn_rule(self) -> TurnRule:
        """Changes at the end of a turn of a conversation."""
        return TurnRule()

    @abstractmethod
    def steps(self, reader: PrefillReader, sequences: PrefillGroup, ids: TokenIds) -> Steps[None]:
        """Read `ids` into the cache of every sequence and leave each within its budget."""

    @property
    def context_copies(self) -> int:
        """Bound of the copies of a text's entries beside its cache while contexts are read."""
        return 2

    @property
    def chunk_eviction(self) -> str:
        """Eviction policy of the contexts that a server keeps in host memory."""
        return "lru"

    def check_chunks(self, source: ChunkSource) -> None:
        """Check that contexts may come from a source.

        Raises:
            UsageError: they are of another model, and the schedule reads contexts as one text, or
                keeps what it makes of them as the model's own reading.
        """
        if source.is_exact or self.takes_reused_chunks:
            return
        how = (
            "keeps what it makes of them as exact" if self.cache_form else "reads them as one text"
        )
        raise UsageError(
            f"{spell(self)} {how}, so that it cannot take contexts of another model: take "
            "cacheblend or ape, or read them without the other model."
        )

    def context_steps(
        self,
        reader: PrefillReader,
        sequence: PrefillSequence,
        text: ContextText,
        source: ChunkSource,
    ) -> Steps[ContextReuse]:
        """Read several contexts into one cache; by default as one text, which reuses nothing.

        Args:
            source: entries of contexts that were read before.
        """
        yield from self.steps(reader, (sequence,), text.ids)
        lengths = tuple(map(len, text.contexts))
        return ContextReuse(lengths, (False,) * len(lengths))

    def read(
        self,
        reader: PrefillReader,
        sequences: PrefillGroup,
        ids: TokenIds,
        progress: Progress,
    ) -> None:
        """Run all steps."""
        run_steps(self.steps(reader, sequences, ids), progress)


def prefill_blocks(
    reader: PrefillReader, groups: Sequence[PrefillGroup], ids: TokenIds, tokens: int
) -> Steps[None]:
    """Blockwise prefill with a plan per block: groups in turn, the sequences of a group together.

    Args:
        tokens: most tokens of a block.
    """
    done, total = 0, len(ids) * sum(len(group) for group in groups)
    for group in groups:
        start = group[0].cache.next_position
        images = group[0].images.within(start, start + len(ids))
        for block in split_blocks(ids, tokens, images):
            yield from reader.read_and_evict_steps(
                group, block, block, group[0].cache.next_position
            )
            done += len(block) * len(group)
            yield done, total
        for number, sequence in enumerate(group, start=1):
            reader.finish(sequence, group[number:])


def split_blocks(ids: TokenIds, size: int, images: ImageSpans = NO_IMAGES) -> list[tuple[int, ...]]:
    """Consecutive blocks of nearly equal length, at most `size` tokens each.

    A cut inside an image moves to its border; a block is longer than `size` only for an image that
    is.

    Args:
        images: images among `ids`.
    """
    cuts, total = [0], len(ids)
    while cuts[-1] < total:
        ahead = even_ranges(total - cuts[-1], size)
        cuts += [cuts[-1] + stop for _, stop in (ahead[:1] if images.spans else ahead)]
        cuts[-1] = images.border(cuts[-1], cuts[-2])
    return [ids[start:stop] for start, stop in pairwise(cuts)]
