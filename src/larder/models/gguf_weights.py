"""Weights of GGUF files as safetensors in bfloat16, equal to the bit to those of transformers.

Names and layouts are transformers' own. Where its processor of an architecture changes no
quantized value, blocks are dequantized by the C library into a small buffer and written from there;
else every tensor is made as transformers makes it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from larder.core.progress import Progress
from larder.models.gguf_header import GGUFHeader, StoredTensor
from larder.ops.cpu.gguf_blocks import BLOCKS, dequantize_blocks, supports

# Processors that keep names and shapes. They leave a quantized tensor as it is, but for the one
# that changes the order of rows.
KEEPING_PROCESSORS = ("TensorProcessor", "LlamaTensorProcessor", "Gemma2TensorProcessor")
ORDERING_PROCESSOR = "LlamaTensorProcessor"
# Types of numbers in the format, by their numbers there.
FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
BUFFER_VALUES = 1 << 18  # of 2 bytes: a buffer that a core's cache holds
HEADER_ALIGNMENT = 8  # of safetensors


@dataclass(frozen=True)
class _State:
    """State dict names of a model, in the form that transformers' tensor name map expects."""

    config: Any
    names: tuple[str, ...]

    def state_dict(self) -> dict[str, None]:
        return dict.fromkeys(self.names)

    def named_children(self) -> tuple[()]:
        return ()


@dataclass(frozen=True)
class _Source:
    """Source of the tensors: file, processor and names.

    Args:
        data: bytes of the GGUF file.
        processor: of transformers, for the architecture.
        names: of the model's tensors, by those in the file.
    """

    data: np.ndarray
    processor: Any
    names: Mapping[str, str]

    def processed(self, weights: Any, tensor: StoredTensor, merged: dict[str, Any]) -> Any:
        """Result of transformers' processor: new weights, and their name in the file."""
        return self.processor.process(
            weights=weights,
            name=tensor.name,
            tensor_key_mapping=self.names,
            parsed_parameters={"tensors": merged},
        )


def write_weights(
    path: Path, header: GGUFHeader, config: Any, target: Path, report: Progress
) -> None:
    """Write the tensors of a GGUF file.

    Args:
        config: of the model, of transformers.
        report: called with the number of tensors that are done.
    """
    source = _source(path, header, config)
    if type(source.processor).__name__ in KEEPING_PROCESSORS:
        _stream(source, header, target, report)
        return
    from safetensors.torch import save_file

    tensors = dict(_converted(source, header, report))
    save_file(tensors, target, metadata={"format": "pt"})


def _source(path: Path, header: GGUFHeader, config: Any) -> _Source:
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=config.to_dict())
    with torch.device("meta"):
        names = tuple(AutoModelForCausalLM.from_config(config).state_dict())
    name_map = get_gguf_hf_weights_map(_State(config, names), processor)
    return _Source(np.memmap(path, mode="c"), processor, name_map)


def _stream(source: _Source, header: GGUFHeader, target: Path, report: Progress) -> None:
    """Write tensors one by one, in the order of their names, as safetensors does."""
    tensors = {source.names[one.name]: one for one in header.tensors if one.name in source.names}
    entries, end = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in sorted(tensors.items()):
        start, end = end, end + 2 * int(np.prod(tensor.shape))
        entry = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": (start, end)}
        entries[name] = entry
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    with target.open("wb") as file:  # buffered: a write to the file itself may be cut short
        file.write(struct.pack("<Q", len(text)) + text)
        for count, (_, tensor) in enumerate(sorted(tensors.items()), start=1):
            _write_tensor(source, tensor, file)
            report(count, len(tensors))


def _write_tensor(source: _Source, tensor: StoredTensor, file: BinaryIO) -> None:
    stored = torch.from_numpy(source.data[tensor.start : tensor.stop])
    if supports(tensor.kind) or tensor.kind in FLOATS:
        stand_in = np.broadcast_to(np.uint16(0), tensor.shape)
        if source.processed(stand_in, tensor, {}).weights is stand_in:
            for values in _values_in_parts(stored, tensor.kind):
                _write_values(values, file)
            return
    if supports(tensor.kind) and type(source.processor).__name__ == ORDERING_PROCESSOR:
        values = torch.empty(tensor.shape, dtype=torch.bfloat16)
        dequantize_blocks(stored, tensor.kind, values)
        bits = source.processed(values.view(torch.uint16).numpy(), tensor, {}).weights
        file.write(np.ascontiguousarray(bits).data)
        return
    values = _bfloat16(source.processed(_dequantize(source, tensor), tensor, {}).weights)
    if values.shape != tensor.shape:
        raise ValueError(f"the tensor {tensor.name} has another shape than {tensor.shape}")
    _write_values(values, file)


def _write_values(values: torch.Tensor, file: BinaryIO) -> None:
    file.write(values.contiguous().view(torch.uint16).numpy().data)


def _values_in_parts(stored: torch.Tensor, kind: int) -> Iterator[torch.Tensor]:
    """Values of a tensor in bfloat16, part by part; the next part may overwrite the last."""
    if kind in FLOATS:
        values = stored.view(FLOATS[kind])
        yield from (part.to(torch.bfloat16) for part in values.split(BUFFER_VALUES))
        return
    size, width = BLOCKS[kind]
    buffer = torch.empty(BUFFER_VALUES, dtype=torch.bfloat16)
    for part in stored.split(BUFFER_VALUES // size * width):
        values = buffer[: part.numel() // width * size]
        dequantize_blocks(part, kind, values)
        yield values


def _converted(
    source: _Source, header: GGUFHeader, report: Progress
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of the model in bfloat16 as transformers makes them, by their names there."""
    merged: dict[str, torch.Tensor] = {}  # where processors put tensors that they join
    for count, tensor in enumerate(header.tensors, start=1):
        done = source.processed(_dequantize(source, tensor), tensor, merged)
        if done.name in source.names:
            yield source.names[done.name], _bfloat16(done.weights)
        report(count, len(header.tensors))
    yield from ((name, weights.to(torch.bfloat16)) for name, weights in merged.items())


def _bfloat16(weights: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(weights, order="C")).to(torch.bfloat16)


def _dequantize(source: _Source, tensor: StoredTensor) -> np.ndarray:
    """Values of a tensor in float32: by torch, or for types that it leaves out by numpy."""
    from gguf import GGMLQuantizationType, dequantize  # pyright: ignore
    from transformers.integrations.gguf.dequant import GGML_BLOCK
    from transformers.integrations.gguf.dequant import dequantize as dequantize_blocks

    stored = source.data[tensor.start : tensor.stop]
    if tensor.kind in GGML_BLOCK:
        values = dequantize_blocks(torch.from_numpy(np.array(stored)), tensor.kind)
        return values.reshape(tensor.shape).numpy()
    rows = stored.reshape(*tensor.shape[:-1], -1)
    values = dequantize(rows, GGMLQuantizationType(tensor.kind))
    return values.reshape(tensor.shape)
