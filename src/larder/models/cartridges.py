"""Cartridges of a model: trained keys and values in place of one text, found by its tokens.

Files of learned weights with a card, under `$LARDER_HOME/<fingerprint>/cartridges/`, that
`larder train cartridge` writes. A file's name holds the number of tokens of the text, the number of
slots, and the digest of the token ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from larder.cache.chunk_entries import ChunkEntries
from larder.cache.sequence import SequenceCache
from larder.cache.table_file import check_fingerprint
from larder.core.errors import MissingWeights, ModelError
from larder.core.home import home
from larder.core.spec import ModelSpec
from larder.models.learned_weights import SUFFIX, LearnedWeights, read_learned

FOLDER = "cartridges"
METHOD = "cartridge"


@dataclass(frozen=True)
class TrainedCartridge:
    """Slots of all layers that replace the first tokens of a text.

    Args:
        slots: keys and values, keys rotated to 0, 1, ...
        num_tokens: of the text.
    """

    slots: ChunkEntries
    num_tokens: int

    def start(self, cache: SequenceCache) -> None:
        """Fill an empty cache, which counts the text as read."""
        positions = torch.arange(self.slots.num_tokens, device=self.slots.keys[0].device)
        for store, keys, values in zip(
            cache.layers, self.slots.keys, self.slots.values, strict=True
        ):
            store.append(keys, values, positions)
        cache.advance(self.num_tokens)


def cartridge_path(fingerprint: str, ids: Sequence[int], slots: int) -> Path:
    """File of the cartridge of a text."""
    digest = hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:32]
    return home() / fingerprint / FOLDER / f"{len(ids)}-{slots}-{digest}{SUFFIX}"


def find_cartridge(spec: ModelSpec, ids: Sequence[int], slots: int) -> TrainedCartridge:
    """Cartridge of the longest beginning of a text that has one.

    Raises:
        MissingWeights: there is none.
        ModelError: its file is damaged or of another model.
    """
    folder = home() / spec.fingerprint / FOLDER
    names = [path.name.partition("-")[0] for path in folder.glob(f"*-{slots}-*{SUFFIX}")]
    for count in sorted({int(name) for name in names if name.isdecimal()}, reverse=True):
        path = cartridge_path(spec.fingerprint, ids[:count], slots)
        if count <= len(ids) and path.is_file():
            return TrainedCartridge(_slots_of(read_learned(path), path, spec, slots), count)
    raise MissingWeights(
        f"No cartridge of {slots} slots was trained for this text of {len(ids)} tokens: train it "
        f"with `larder train cartridge FILE --slots {slots}`, or take another policy."
    )


def _slots_of(learned: LearnedWeights, path: Path, spec: ModelSpec, slots: int) -> ChunkEntries:
    """Keys and values of a file.

    Raises:
        ModelError: they are of other shapes, or of another model.
    """
    check_fingerprint(str(path), learned.card.fingerprints, spec.fingerprint)
    shapes = [(layer.kv_heads, slots, layer.head_dim) for layer in spec.layers]
    found = [(tensors.get("keys"), tensors.get("values")) for tensors in learned.layers]
    fits = len(found) == len(shapes) and all(
        side is not None and tuple(side.shape) == shape
        for pair, shape in zip(found, shapes, strict=True)
        for side in pair
    )
    if not fits:
        raise ModelError(f"{path} holds no slots of this model: remove it, and train again.")
    sides = [
        tuple(tensors[name].to(spec.device, spec.dtype) for tensors in learned.layers)
        for name in ("keys", "values")
    ]
    return ChunkEntries(sides[0], sides[1])
