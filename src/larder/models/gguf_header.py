"""Headers of GGUF files: the tensors' table, the tokenizer's arrays, and a copy without these.

transformers and the package gguf parse the arrays of a tokenizer element by element, which takes
seconds each time, and need nothing of them for a configuration.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Formats of the fixed-size metadata types, by their numbers.
FORMATS = {
    **{0: "B", 1: "b", 7: "?", 2: "H", 3: "h", 4: "I"},
    **{5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"},
}
STRING, ARRAY = 8, 9
MAGIC = b"GGUF"
HEADER_START = 24  # bytes of the magic, the version and the counts of tensors and of keys
ALIGNMENT_KEY, DEFAULT_ALIGNMENT = "general.alignment", 32
TOKENIZER_KEYS, TOKEN_ID = "tokenizer.", "_token_id"
TOKENS, TYPES, SCORES, MERGES = (
    f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "scores", "merges")
)
TOKEN_ARRAYS = frozenset({TYPES, SCORES})


@dataclass(frozen=True)
class StoredTensor:
    """Place and form of a tensor.

    Args:
        shape: in the order of torch.
        kind: number of its type.
        start: offset in the file.
        stop: end of its bytes.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int
    stop: int


@dataclass(frozen=True)
class GGUFHeader:
    """Header of a GGUF file: metadata and the table of tensors.

    Args:
        values: metadata by their keys.
        stored: their bytes, key, type and value, in the order of the file.
        tensors: in the order of the file.
        version: of the format.
        table: of the tensors, as stored.
        data_bytes: size of what follows, from the first tensor on.
    """

    values: Mapping[str, Any]
    stored: Mapping[str, bytes]
    tensors: tuple[StoredTensor, ...]
    version: int
    table: bytes
    data_bytes: int

    @property
    def architecture(self) -> str:
        """Name of the architecture in the format."""
        return self.values["general.architecture"]

    @property
    def alignment(self) -> int:
        """Bytes that the first tensor's offset is a multiple of."""
        return int(self.values.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT))

    def write_short(self, target: Path) -> None:
        """Write a copy of the file without the arrays of the tokenizer; its tensors are a hole."""
        metadata = [
            stored
            for key, stored in self.stored.items()
            if not (key.startswith(TOKENIZER_KEYS) and isinstance(self.values[key], list))
        ]
        header = self._joined(len(self.tensors), metadata) + self.table
        start = -(-len(header) // self.alignment) * self.alignment
        with target.open("wb") as file:
            file.write(header)
            file.truncate(start + self.data_bytes)

    def write_tokens(self, target: Path, indices: Sequence[int]) -> None:
        """Write a file without tensors whose vocabulary is some of the tokens, without merges.

        Args:
            indices: of the tokens; ids in the metadata become their positions here.
        """
        count, positions = len(self.values[TOKENS]), {one: n for n, one in enumerate(indices)}
        metadata = list[bytes]()
        for key, stored in self.stored.items():
            value = self.values[key]
            if key == MERGES:
                stored = _stored_strings(key, [])
            elif key == TOKENS:
                stored = _stored_strings(key, [value[index] for index in indices])
            elif key in TOKEN_ARRAYS and len(value) == count:
                stored = _stored_numbers(key, stored, [value[index] for index in indices])
            elif key.startswith(TOKENIZER_KEYS) and key.endswith(TOKEN_ID):
                stored = _stored_number(key, stored, positions[value])
            metadata.append(stored)
        target.write_bytes(self._joined(0, metadata))

    def _joined(self, tensors: int, metadata: Sequence[bytes]) -> bytes:
        """Bytes of a header up to the table of the tensors."""
        counts = struct.pack("<IQQ", self.version, tensors, len(metadata))
        return b"".join([MAGIC, counts, *metadata])


def _stored_strings(key: str, strings: Sequence[str]) -> bytes:
    texts = [text.encode() for text in (key, *strings)]
    name, *others = (struct.pack("<Q", len(text)) + text for text in texts)
    return b"".join([name, struct.pack("<IIQ", ARRAY, STRING, len(others)), *others])


def _stored_numbers(key: str, stored: bytes, numbers: Sequence[int | float]) -> bytes:
    """An array of other numbers of the same type."""
    start = 8 + len(key.encode())
    (element,) = struct.unpack_from("<I", stored, start + 4)
    layout = f"<IIQ{len(numbers)}{FORMATS[element]}"
    return stored[:start] + struct.pack(layout, ARRAY, element, len(numbers), *numbers)


def _stored_number(key: str, stored: bytes, number: int) -> bytes:
    """Another number of the same type."""
    start = 8 + len(key.encode())
    (kind,) = struct.unpack_from("<I", stored, start)
    return stored[: start + 4] + struct.pack("<" + FORMATS[kind], number)


def read_header(path: Path) -> GGUFHeader:
    """Header of a file.

    Raises:
        ArithmeticError, LookupError, ValueError, struct.error: it is no GGUF file.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != MAGIC:
            raise ValueError("it does not start with GGUF")
        version, tensors, count = struct.unpack_from("<IQQ", data, 4)
        values, stored, end = dict[str, Any](), dict[str, bytes](), HEADER_START
        for _ in range(count):
            start, (key, end) = end, _string(data, end)
            (kind,) = struct.unpack_from("<I", data, end)
            values[key], end = _value(data, end + 4, kind)
            stored[key] = data[start:end]
        table, table_end = _tensor_table(data, end, tensors)
        alignment = int(values.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT))
        data_start = -(-table_end // alignment) * alignment
        placed = tuple(_placed(*entry, data_start, len(data)) for entry in table)
        rest = len(data) - data_start
        return GGUFHeader(values, stored, placed, version, data[end:table_end], rest)


def _placed(
    name: str, shape: tuple[int, ...], kind: int, offset: int, data_start: int, size: int
) -> StoredTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # pyright: ignore

    values, width = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    start = data_start + offset
    stop = start + math.prod(shape) // values * width
    if math.prod(shape[-1:]) % values or stop > size:
        raise ValueError(f"the tensor {name} of shape {shape} is cut")
    return StoredTensor(name, shape, kind, start, stop)


def _string(data: mmap.mmap, start: int) -> tuple[str, int]:
    """A string and its end: its length, then its bytes."""
    (length,) = struct.unpack_from("<Q", data, start)
    stop = start + 8 + length
    return data[start + 8 : stop].decode("utf-8"), stop


def _value(data: mmap.mmap, start: int, kind: int) -> tuple[Any, int]:
    """A metadata value of a type and its end."""
    if kind == STRING:
        return _string(data, start)
    if kind != ARRAY:
        layout = struct.Struct("<" + FORMATS[kind])
        return layout.unpack_from(data, start)[0], start + layout.size
    element, count = struct.unpack_from("<IQ", data, start)
    if element == STRING:
        return _strings(data, start + 12, count)
    if element == ARRAY:
        raise ValueError("its metadata holds arrays of arrays")
    width = struct.calcsize("<" + FORMATS[element])
    stop = start + 12 + count * width
    if stop > len(data):
        raise ValueError("its metadata is cut")
    return list(struct.unpack_from(f"<{count}{FORMATS[element]}", data, start + 12)), stop


def _strings(data: mmap.mmap, start: int, count: int) -> tuple[list[str], int]:
    """The strings of an array and their end."""
    length_at, strings = struct.Struct("<Q").unpack_from, list[str]()
    for _ in range(count):
        (length,) = length_at(data, start)
        start += 8
        strings.append(data[start : start + length].decode("utf-8"))
        start += length
    return strings, start


def _tensor_table(
    data: mmap.mmap, start: int, tensors: int
) -> tuple[list[tuple[str, tuple[int, ...], int, int]], int]:
    """Name, shape, type and offset of each tensor, and the end of the table."""
    table = list[tuple[str, tuple[int, ...], int, int]]()
    for _ in range(tensors):
        name, start = _string(data, start)
        (dimensions,) = struct.unpack_from("<I", data, start)
        shape = struct.unpack_from(f"<{dimensions}Q", data, start + 4)
        start += 4 + 8 * dimensions
        kind, offset = struct.unpack_from("<IQ", data, start)
        table.append((name, tuple(reversed(shape)), kind, offset))
        start += 12
    return table, start
