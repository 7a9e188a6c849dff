"""Container of tensors: round trips, detected changes, and refused headers."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cache_stores import same_bits
from larder import LarderError
from larder.core import Damaged, Refused
from larder.store import DTYPES, MAX_HEADER_BYTES, pack_container, peek_metadata, unpack_container

TOLD = {"kind": "session_snapshot", "layers": {"n": 2}}


def some_tensors() -> dict[str, Tensor]:
    made = {f"of_{name}": torch.arange(6).reshape(2, 3).to(dtype) for name, dtype in DTYPES.items()}
    return made | {
        "empty": torch.empty(0, 8),
        "nan": torch.tensor([float("nan"), -0.0]),
        "turned": torch.arange(6.0).reshape(2, 3).T,
    }


def in_rows(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def test_scalar_round_trips() -> None:
    tensors, _ = unpack_container(pack_container({"scalar": torch.tensor(3.5)}, TOLD))
    assert tensors["scalar"].shape == () and tensors["scalar"] == 3.5


def rewritten(header: dict[str, Any], body: bytes = b"") -> bytes:
    head = json.dumps(header).encode()
    return len(head).to_bytes(8, "little") + head + body


def test_container_round_trips_bit_exactly() -> None:
    tensors, result = unpack_container(pack_container(some_tensors(), TOLD))
    assert same_bits(tensors, in_rows(some_tensors()))
    assert result == TOLD | {"format": "kvm", "version": 1}
    assert peek_metadata(pack_container(some_tensors(), TOLD)) == result


def test_safetensors_reads_the_container() -> None:
    assert same_bits(
        safetensors.torch.load(pack_container(some_tensors(), TOLD)), in_rows(some_tensors())
    )


def test_packing_is_deterministic() -> None:
    backwards = dict(reversed(some_tensors().items()))
    assert pack_container(some_tensors(), {"x": 2, "y": 1}) == pack_container(
        backwards, {"y": 1, "x": 2}
    )


@pytest.mark.parametrize("part", ["length", "header", "tensor"])
def test_every_flipped_bit_is_detected(part: str) -> None:
    data = pack_container({"a": torch.arange(4.0), "b": torch.arange(3, dtype=torch.uint8)}, TOLD)
    head = 8 + int.from_bytes(data[:8], "little")
    spans = {"length": (0, 8), "header": (8, head), "tensor": (head, len(data))}
    padding = len(data[8:head]) - len(data[8:head].rstrip())
    for index in range(*spans[part]):
        for bit in range(8):
            if head - padding <= index < head and bit != 7:
                continue  # blanks behind JSON; some are blanks of another kind when flipped
            flipped = bytearray(data)
            flipped[index] ^= 1 << bit
            with pytest.raises((Damaged, Refused)):
                unpack_container(bytes(flipped))


def test_truncated_or_extended_container_is_detected() -> None:
    data = pack_container(some_tensors(), TOLD)
    for other in (data[:-1], data[: len(data) // 2], b"", data[:7], data + b"\0", b"\0" * 1000):
        with pytest.raises(Damaged):
            unpack_container(other)


@pytest.mark.failure(number=30)
@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [2**61], "data_offsets": [0, 2**63]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 3]}},
        {"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}},
        {"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}},
        {"a": {"dtype": "F32", "shape": [1] * 99, "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
        {"a" * 300: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
        {
            "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
        },
        {"a": 3},
    ],
)
def test_malicious_header_is_refused(header: dict[str, Any]) -> None:
    metadata = json.loads(_head(pack_container({}, TOLD)))["__metadata__"]
    with pytest.raises(Damaged):
        unpack_container(rewritten({"__metadata__": metadata} | header, b"\0" * 8))


def _head(data: bytes) -> bytes:
    return data[8 : 8 + int.from_bytes(data[:8], "little")]


@pytest.mark.failure(number=30)
def test_oversized_nested_or_foreign_headers_are_refused() -> None:
    huge = (2**63).to_bytes(8, "little") + b"{}"
    claimed = (MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b" " * (MAX_HEADER_BYTES + 1)
    deep = b"[" * 100_000
    nested = len(deep).to_bytes(8, "little") + deep
    field = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    many = rewritten({f"{n:x}": field for n in range(17_000)})
    for data in (huge, claimed, nested, many, rewritten({}), pickle.dumps({"a": 1})):
        with pytest.raises(Damaged):
            unpack_container(data)


@pytest.mark.failure(number=30)
@given(st.binary(max_size=400))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(LarderError):
        unpack_container(data)


@pytest.mark.failure(number=30)
@given(st.data())
def test_container_with_one_changed_byte_is_refused(data: st.DataObject) -> None:
    packed = bytearray(pack_container({"a": torch.arange(4.0)}, TOLD))
    head = 8 + int.from_bytes(packed[:8], "little")
    solid = len(packed[:head].rstrip())
    index = data.draw(st.integers(0, len(packed) - 1))
    if solid <= index < head:
        return
    value = data.draw(st.integers(0, 255).filter(lambda value: value != packed[index]))
    packed[index] = value
    with pytest.raises(LarderError):
        unpack_container(bytes(packed))


@pytest.mark.failure(number=10)
@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_version_is_refused_with_its_reason(version: object) -> None:
    metadata = json.loads(_head(pack_container({}, TOLD)))["__metadata__"]
    result = json.loads(metadata["kvm"]) | {"version": version}
    with pytest.raises(Refused, match="left as it is") as refused:
        unpack_container(rewritten({"__metadata__": metadata | {"kvm": json.dumps(result)}}))
    assert refused.value.reason == "format"


@pytest.mark.failure(number=10)
def test_unknown_metadata_keys_are_tolerated() -> None:
    assert unpack_container(pack_container({}, TOLD | {"of_later": [1]}))[1]["of_later"] == [1]
