"""Schedule that begins with a cartridge: trained keys and values in place of a text.

Eyuboglu et al., "Cartridges: Lightweight and general-purpose long context representations via
self-study" (2025), arXiv:2506.06266. `larder train cartridge FILE` trains the slots of one text
once; here a cache begins with them, and counts the text as read: what follows stands behind the
text's own positions, where the paper lets it stand behind the slots. Nothing of the text is read.
Only the text that was trained on can begin so, with anything behind it; other texts are refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.core.arguments import require
from larder.core.errors import UsageError
from larder.core.spelling import spell
from larder.core.types import TokenIds
from larder.models.cartridges import find_cartridge
from larder.prefill.base import Schedule, Steps
from larder.prefill.contexts import check_chunkable
from larder.prefill.reader import PrefillGroup, PrefillReader
from larder.prefill.schedules.whole import Whole


@dataclass(frozen=True)
class Cartridge(Schedule):
    """Trained slots of the text; what stands behind the text is read as usual.

    Args:
        slots: entries of each head that replace the text.
    """

    slots: int = 256

    def __post_init__(self) -> None:
        require(self.slots >= 1, "cartridge.slots", "at least 1", self.slots)

    def steps(self, reader: PrefillReader, sequences: PrefillGroup, ids: TokenIds) -> Steps[None]:
        if reader.quotas:
            raise UsageError(
                f"{spell(self)} holds as many entries as it was trained with, so a budget has no "
                "say: take unlimited() with it, and no budget."
            )
        if sequences[0].cache.next_position:
            yield from Whole().steps(reader, sequences, ids)
            return
        spec = reader.decoder.spec
        check_chunkable(spec, spell(self))
        cartridge = find_cartridge(spec, ids, self.slots)
        for sequence in sequences:
            cartridge.start(sequence.cache)
            reader.meter.observe([sequence.cache], 0)
        rest = ids[cartridge.num_tokens :]
        if rest:
            yield from Whole().steps(reader, sequences, rest)
            return
        for sequence in sequences:
            reader.finish(sequence)
        yield len(ids), len(ids)


Part = Cartridge
