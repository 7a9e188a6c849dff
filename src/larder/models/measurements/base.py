"""Base of measurements: numbers that describe a model independently of the input text."""

from __future__ import annotations

import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import ClassVar

from safetensors.torch import save
from torch import Tensor

from larder.cache.table_file import DIGEST, check_measured, file_digest
from larder.core.errors import ModelError
from larder.core.progress import Progress, no_progress
from larder.core.spec import LayerSpec
from larder.models.decoder import Decoder

SAMPLE_FILE = "calibration.txt"
SHORTEST_WORD = 4  # letters


class Granularity(Enum):
    """Unit of a measurement: one number per layer, kv head, query head, channel of the keys of a kv
    head, or point of a curve of a kv head, of managed layers.
    """

    LAYER = "layer"
    KV_HEAD = "kv_head"
    QUERY_HEAD = "query_head"
    KEY_CHANNEL = "key_channel"
    KV_HEAD_CURVE = "kv_head_curve"

    def count(self, layer: LayerSpec) -> int:
        """Count of numbers for one layer."""
        if self is Granularity.LAYER:
            return 1
        if self is Granularity.KEY_CHANNEL:
            return layer.kv_heads * layer.head_dim
        if self is Granularity.KV_HEAD_CURVE:
            from larder.policy.budgets.lukv import CURVE_POINTS

            return layer.kv_heads * CURVE_POINTS
        return layer.kv_heads if self is Granularity.KV_HEAD else layer.query_heads


@dataclass(frozen=True)
class SampleText:
    """Bundled calibration text for one tokenizer.

    Args:
        encode: token ids of a text.
        progress: receives what a measurement has done and has to do, where it counts that.
    """

    encode: Callable[[str], Sequence[int]]
    progress: Progress = no_progress

    @cached_property
    def text(self) -> str:
        return (files("larder.models") / SAMPLE_FILE).read_text(encoding="utf-8")

    @cached_property
    def words(self) -> tuple[str, ...]:
        """Distinct lower-case words of the text, in alphabetical order."""
        plain = (word for word in self.text.split() if word.isalpha() and word.islower())
        return tuple(sorted({word for word in plain if len(word) >= SHORTEST_WORD}))

    def ids(self, tokens: int) -> tuple[int, ...]:
        """First `tokens` ids of the text, which repeats if it is shorter."""
        ids = tuple(self.encode(self.text))
        while len(ids) < tokens:  # a tokenizer with a large vocabulary needs fewer tokens
            ids += ids
        return ids[:tokens]

    def token_ids(self) -> tuple[int, ...]:
        """Distinct token ids of the text, ascending."""
        return tuple(sorted(set(self.encode(self.text))))


class Measurement(ABC):
    """Base class of measurements: frozen dataclasses whose fields are stored with the values."""

    granularity: ClassVar[Granularity]
    # Whether numbers are kept in a file of their own; others are read again each time.
    has_cache: ClassVar[bool] = True
    # Measurements that the command `model calibrate` makes beside it: policies do without them.
    companions: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def measure(self, decoder: Decoder, sample: SampleText) -> tuple[float, ...]:
        """Numbers in the order of managed layers, then heads.

        The attention matrix of all tokens is never in memory.
        """

    def measure_into(self, folder: Path, decoder: Decoder, sample: SampleText) -> tuple[float, ...]:
        """Numbers as of `measure`; what belongs to them is written into a folder."""
        return self.measure(decoder, sample)

    def has_files(self, folder: Path) -> bool:
        """True if a folder holds what belongs to the numbers."""
        return True

    def damaged_file(self, folder: Path) -> Path | None:
        """File of a folder that belongs to the numbers and is damaged; None if there is none."""
        return None

    def takes_packaged(self, folder: Path) -> bool:
        """True if numbers that come with the package may stand for those of a folder."""
        return True


class TableMeasurement(Measurement):
    """Base class of measurements of tensors, which are saved in a file beside their numbers."""

    file_name: ClassVar[str]

    @abstractmethod
    def measure_tables(self, decoder: Decoder, sample: SampleText) -> dict[str, Tensor]:
        """Tensors by name."""

    @abstractmethod
    def summary(self, tables: dict[str, Tensor]) -> tuple[float, ...]:
        """Numbers of the tensors, as of `measure`."""

    def measure(self, decoder: Decoder, sample: SampleText) -> tuple[float, ...]:
        return self.summary(self.measure_tables(decoder, sample))

    def measure_into(self, folder: Path, decoder: Decoder, sample: SampleText) -> tuple[float, ...]:
        """Numbers; the tensors are written into a folder.

        Raises:
            ModelError: the folder cannot be written to.
        """
        tables = self.measure_tables(decoder, sample)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle, draft = tempfile.mkstemp(dir=folder, suffix=".draft")
            with os.fdopen(handle, "wb") as file:
                file.write(save(tables, {DIGEST: file_digest(tables)}))
            os.replace(draft, folder / self.file_name)
        except OSError as error:
            raise ModelError(
                f"{folder / self.file_name} cannot be written ({error}), and caches read the "
                "measured tensors from it: set LARDER_HOME to a folder that can be written to."
            ) from None
        return self.summary(tables)

    def has_files(self, folder: Path) -> bool:
        """True if a folder holds the tensors, whole: a damaged file is measured again."""
        try:
            check_measured(folder / self.file_name)
            return True
        except (OSError, KeyError):
            return False

    def damaged_file(self, folder: Path) -> Path | None:
        path = folder / self.file_name
        return path if path.is_file() and not self.has_files(folder) else None

    def takes_packaged(self, folder: Path) -> bool:
        # Caches read the tensors of the folder, if there are any, damaged or not.
        return not (folder / self.file_name).is_file()
