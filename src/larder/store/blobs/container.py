"""Container of tensors and metadata: a safetensors file, format KVM 1.

`__metadata__` holds `kvm`, canonical JSON of the metadata, and `kvm_digest`, blake3 over it and
over every tensor's name, type, shape and bytes in the order of names: safetensors itself has no
checksum. Any safetensors reader reads these files. The writer of safetensors orders `__metadata__`
differently in every process, so the layout is written here: deduplication needs equal bytes for
equal content.

Reading validates the header before it allocates anything, and runs no code from the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from larder.core.errors import Damaged
from larder.store.digests import canonical_json, digest_of, digests_equal, key_of, parse_json
from larder.store.versions import StoredForm

CONTAINER_FORMAT, CONTAINER_VERSION = "kvm", 1
# Blobs never change: those of earlier versions are carried over as they are read, as a pair of
# tensors and metadata.
CONTAINER_FORM = StoredForm("The saved cache", "version", CONTAINER_VERSION)
METADATA_KEY = "__metadata__"
MAX_HEADER_BYTES = 16 * 2**20
MAX_TENSORS = 2**14
MAX_NAME = 255
MAX_DIMS = 8
ALIGNMENT_BYTES = 8  # bytes: where tensors begin

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)
DTYPE_NAMES = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})
ZSTD_LEVEL = (
    1  # nearly all redundancy is found by entropy coding alone; higher levels only cost time
)


@dataclass(frozen=True)
class _TensorHeader:
    """Header entry of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def pack_container(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> bytes:
    """Write tensors and metadata as container bytes; equal content gives equal bytes.

    Args:
        metadata: JSON-compatible; format and version are added.
    """
    spelled = canonical_json({**metadata, "format": CONTAINER_FORMAT, "version": CONTAINER_VERSION})
    # The widest numbers come first, so that each tensor begins where its numbers may.
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    parts = {name: raw_bytes(tensors[name]) for name in order}
    fields: dict[str, _TensorHeader] = {}
    stop = 0
    for name, data in parts.items():
        start, stop = stop, stop + len(data)
        fields[name] = _TensorHeader(
            DTYPE_NAMES[tensors[name].dtype], tuple(tensors[name].shape), start, stop
        )
    digest = _digest(spelled, fields, parts)
    header: dict[str, Any] = {METADATA_KEY: {"kvm": spelled, "kvm_digest": digest}}
    for name, field in fields.items():
        offsets = [field.start, field.stop]
        header[name] = {"dtype": field.dtype, "shape": field.shape, "data_offsets": offsets}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % ALIGNMENT_BYTES)
    return b"".join([len(head).to_bytes(8, "little"), head, *parts.values()])


def unpack_container(data: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a container: tensors (read-only views of `data`) and metadata.

    Raises:
        Damaged: the bytes are no intact container.
        Refused: it is of another version.
    """
    fields, head, body = _parse_header(data)
    spelled = _text(head.get("kvm"), "kvm")
    metadata = _parse_metadata(spelled)
    parts = {name: body[field.start : field.stop] for name, field in fields.items()}
    if not digests_equal(
        _digest(spelled, fields, parts), _text(head.get("kvm_digest"), "kvm_digest")
    ):
        raise Damaged("The bytes of a saved cache do not match their digest.")
    tensors = {name: _tensor(fields[name], part) for name, part in parts.items()}
    if metadata["version"] != CONTAINER_VERSION:
        tensors, metadata = CONTAINER_FORM.upgraded((tensors, metadata), metadata["version"])
    return tensors, metadata


def peek_metadata(data: bytes) -> dict[str, Any]:
    """Read the metadata of a container without verifying its tensors."""
    return _parse_metadata(_text(_parse_header(data)[1].get("kvm"), "kvm"))


def raw_bytes(tensor: Tensor) -> memoryview:
    """Bytes of a tensor in row-major order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data)


def _digest(
    spelled: str, fields: Mapping[str, _TensorHeader], parts: Mapping[str, memoryview]
) -> str:
    heads = [f"{name}:{fields[name].dtype}:{fields[name].shape}" for name in sorted(fields)]
    return digest_of(key_of(spelled, *heads).encode(), *(parts[name] for name in sorted(parts)))


def _parse_metadata(spelled: str) -> dict[str, Any]:
    metadata = parse_json(spelled)
    if not isinstance(metadata, dict) or metadata.get("format") != CONTAINER_FORMAT:
        raise Damaged("This safetensors file holds no saved cache.")
    version = metadata.get("version")
    if version != CONTAINER_VERSION and not CONTAINER_FORM.can_upgrade(version):
        raise CONTAINER_FORM.refusal(version)
    return metadata


def _parse_header(data: bytes) -> tuple[dict[str, _TensorHeader], dict[str, Any], memoryview]:
    """Tensor headers sorted by name, metadata, and the bytes after the header."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(MAX_HEADER_BYTES, len(data) - 8):
        raise Damaged(
            f"A saved cache of {len(data)} bytes claims a header of {length}; the limit is "
            f"{MAX_HEADER_BYTES} bytes."
        )
    header = parse_json(data[8 : 8 + length])
    if not isinstance(header, dict) or len(header) > MAX_TENSORS:
        raise Damaged(f"The header of a saved cache is not a list of up to {MAX_TENSORS} tensors.")
    metadata = header.pop(METADATA_KEY, None)
    if not isinstance(metadata, dict):
        raise Damaged("This safetensors file holds no saved cache.")
    body = memoryview(data)[8 + length :]
    fields = {name: _tensor_header(name, header[name]) for name in sorted(header)}
    _check_cover(fields.values(), len(body))
    return fields, metadata, body


def _tensor_header(name: str, entry: Any) -> _TensorHeader:
    """Header of a tensor. Raise Damaged if the entry describes none."""
    if len(name) > MAX_NAME or not isinstance(entry, dict):
        raise Damaged(f"The header of a saved cache has no tensor at {name[:40]!r}.")
    dtype, shape, offsets = (
        entry.get("dtype"),
        _counts(entry, "shape"),
        _counts(entry, "data_offsets"),
    )
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise Damaged(f"Tensor {name!r} is of the unknown type {str(dtype)[:20]!r}.")
    if len(shape) > MAX_DIMS or len(offsets) != 2:
        raise Damaged(f"Tensor {name!r} has {len(shape)} dimensions and {len(offsets)} offsets.")
    field = _TensorHeader(dtype, shape, *offsets)
    if field.stop - field.start != math.prod(shape) * DTYPES[dtype].itemsize:
        raise Damaged(f"The bytes of tensor {name!r} do not match its shape {field.shape}.")
    return field


def _counts(entry: dict[str, Any], key: str) -> tuple[int, ...]:
    value = entry.get(key)
    if not isinstance(value, list) or not all(type(n) is int and 0 <= n < 2**62 for n in value):
        raise Damaged(f"A tensor of a saved cache has no valid {key}.")
    return tuple(value)


def _check_cover(fields: Iterable[_TensorHeader], length: int) -> None:
    """Raise Damaged if tensors overlap, leave gaps, or end before or behind the bytes."""
    stop = 0
    for field in sorted(fields, key=lambda field: (field.start, field.stop)):
        if field.start != stop:
            raise Damaged("The tensors of a saved cache overlap or leave gaps.")
        stop = field.stop
    if stop != length:
        raise Damaged(f"The tensors of a saved cache take {stop} bytes, but it has {length}.")


def _tensor(field: _TensorHeader, part: memoryview) -> Tensor:
    dtype = DTYPES[field.dtype]
    if not len(part):
        return torch.empty(field.shape, dtype=dtype)
    # Copied once, because rows must begin where numbers of their type may.
    return torch.frombuffer(bytearray(part), dtype=dtype).reshape(field.shape)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise Damaged(f"A saved cache lacks its {name}.")
    return value


def compress(data: bytes | memoryview) -> bytes:
    """Compress bytes as one zstd frame."""
    import zstandard

    return zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_content_size=True).compress(data)


def decompress(data: bytes | memoryview, size: int) -> bytes:
    """Decompress one zstd frame.

    Args:
        size: number of decompressed bytes; a frame that declares another size is not opened.

    Raises:
        Damaged: this is no zstd frame of `size` bytes.
    """
    import zstandard

    try:
        claimed = zstandard.frame_content_size(data)
        if claimed != size:
            raise Damaged(f"A compressed part claims {claimed} bytes instead of {size}.")
        found = zstandard.ZstdDecompressor().decompress(data, max_output_size=max(size, 1))
    except zstandard.ZstdError as error:
        raise Damaged(f"A compressed part cannot be opened ({error}).") from error
    if len(found) != size:
        raise Damaged(f"A compressed part has {len(found)} bytes instead of {size}.")
    return found
