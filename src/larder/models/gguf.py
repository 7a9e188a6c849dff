"""GGUF files: converted once to a folder of safetensors in bfloat16, kept by digest.

transformers can load a GGUF file itself, but parses its header, token by token, up to four times
and builds the map of tensor names once per submodule. Here the header is read once and the map is
built once; configuration, tensor names, weight layouts and the tokenizer are transformers' own, and
so the weights are equal to the bit. The folder is an ordinary model folder, so that every later
load takes a memory map.
"""

from __future__ import annotations

import json
import mmap
import shutil
import struct
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from larder.core.errors import ModelError
from larder.core.home import home
from larder.core.progress import Progress, ProgressStage, silent_stage

FOLDER = "models"  # below `$LARDER_HOME`
DIGEST_LENGTH = 16  # hexadecimal digits of the file's digest in the name of its folder
WEIGHTS = "model.safetensors"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
TOKEN_OPTIONS = ("single_word", "lstrip", "rstrip", "normalized", "special")  # of an added token
# Bytes of the fixed-size metadata types of the format, by their numbers.
WIDTHS = {0: 1, 1: 1, 7: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9
HEADER_START = 24  # bytes of the magic, the version and the counts of tensors and of keys
ALIGNMENT_KEY, DEFAULT_ALIGNMENT = b"general.alignment", 32
# What damaged or hostile files make this module, gguf and transformers raise.
READ_FAILURES = (
    ArithmeticError,
    LookupError,
    NotImplementedError,
    TypeError,
    ValueError,
    struct.error,
)
REQUIREMENTS = "pip install 'larder[gguf]'"


@dataclass(frozen=True)
class _ShortHeader:
    """Copy of a GGUF header without the vocabulary; the tensors' bytes behind it are a hole.

    transformers and the package gguf parse the arrays of the tokenizer element by element, which
    takes seconds each time, and need nothing of them for a configuration or a tensor.

    Args:
        path: the copy.
        shift: bytes to add to an offset in the copy for the same byte of the file.
    """

    path: Path
    shift: int


@dataclass(frozen=True)
class _State:
    """State dict names of a model, in the form that transformers' tensor name map expects."""

    config: Any
    names: tuple[str, ...]

    def state_dict(self) -> dict[str, None]:
        return dict.fromkeys(self.names)

    def named_children(self) -> tuple[()]:
        return ()


def convert_gguf(
    path: Path, stage: ProgressStage = silent_stage, digest: str | None = None
) -> Path:
    """Folder with the converted model of a GGUF file, made at first use.

    Args:
        stage: opens the stage of the conversion, which counts tensors.
        digest: of the file, where it is known; None to read the file for it.

    Raises:
        ModelError: the file is damaged, in several parts or of an architecture that transformers
            does not read; a needed package is missing; the folder cannot be written.
    """
    folder = home() / FOLDER / f"{path.stem}-{(digest or _digest(path))[:DIGEST_LENGTH]}"
    if (folder / WEIGHTS).is_file():
        return folder
    _check_requirements()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            made = Path(scratch) / "model"
            made.mkdir()
            with stage("Converting", "tensors") as report:
                _convert(path, made, Path(scratch) / "header.gguf", report)
            _move(made, folder)
    except OSError as error:
        raise ModelError(
            f"{path} cannot be converted to {folder} ({error}): make room, or set LARDER_HOME to "
            "another folder."
        ) from error
    return folder


def join_parts(parts: Iterable[Path], name: str, digest: str) -> Path:
    """GGUF file made of parts, once, below `$LARDER_HOME`.

    Args:
        digest: SHA-256 that the whole file must have.

    Raises:
        ModelError: the digest is another, or the file cannot be written.
    """
    import hashlib

    target = home() / FOLDER / name
    if target.is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as file:
            for part in parts:
                with part.open("rb") as source:
                    shutil.copyfileobj(source, file, 1 << 20)
        whole = Path(file.name)
        with whole.open("rb") as source:
            found = hashlib.file_digest(source, "sha256").hexdigest()
        if found != digest:
            whole.unlink()
            raise ModelError(f"The parts of {name} are damaged: install their packages again.")
        whole.replace(target)
    except OSError as error:
        raise ModelError(
            f"{target} cannot be written ({error}): make room, or set LARDER_HOME to another "
            "folder."
        ) from error
    return target


def _check_requirements() -> None:
    """Raise ModelError if a package that reads GGUF is missing."""
    try:
        import gguf  # noqa: F401  # pyright: ignore
        from transformers.integrations.gguf import gguf_tokenizer_mapping  # noqa: F401
    except ImportError as error:
        raise ModelError(f"A GGUF file needs more packages ({error}): {REQUIREMENTS}.") from error


def _digest(path: Path) -> str:
    try:
        hasher = blake3(max_threads=blake3.AUTO)
        hasher.update_mmap(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}): check its name.") from error
    return hasher.hexdigest()


def _move(converted: Path, folder: Path) -> None:
    """Rename to the final folder, unless another process was faster."""
    try:
        converted.rename(folder)
    except OSError:
        if not (folder / WEIGHTS).is_file():
            raise


def _convert(path: Path, folder: Path, short: Path, report: Progress) -> None:
    """Write config, tokenizer and weights of a GGUF file into a folder.

    Args:
        short: where a short copy of the header is written.

    Raises:
        ModelError: the file is damaged or not supported.
    """
    try:
        header = _write_short_header(path, short)
        tokens = _save_tokenizer(path, folder)
        config = _read_config(header, tokens)
        tensors = dict(_weights(path, header, config, report))
    except READ_FAILURES as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise ModelError(
            f"{path} cannot be read as GGUF ({reason}): download it again, or take a folder in "
            "safetensors of the same model."
        ) from error
    _save_model(folder, config, tensors)


def _write_short_header(path: Path, target: Path) -> _ShortHeader:
    """Copy a header without the arrays of the tokenizer.

    Raises:
        ArithmeticError, LookupError, ValueError, struct.error: the file is no GGUF file.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != b"GGUF":
            raise ValueError("it does not start with GGUF")
        version, tensors, keys = struct.unpack_from("<IQQ", data, 4)
        kept, end, alignment = list[bytes](), HEADER_START, DEFAULT_ALIGNMENT
        for _ in range(keys):
            start, name_end = end, _string_end(data, end)
            name = data[start + 8 : name_end]
            (kind,) = struct.unpack_from("<I", data, name_end)
            end = _value_end(data, name_end + 4, kind)
            if name == ALIGNMENT_KEY:
                (alignment,) = struct.unpack_from("<I", data, name_end + 4)
            if kind != ARRAY or not name.startswith(b"tokenizer."):
                kept.append(data[start:end])
        table_end = _tensor_table_end(data, end, tensors)
        table = data[end:table_end]
    data_start = -(-table_end // alignment) * alignment
    counts = struct.pack("<IQQ", version, tensors, len(kept))
    header = b"".join([b"GGUF", counts, *kept, table])
    short_start = -(-len(header) // alignment) * alignment
    with target.open("wb") as file:
        file.write(header)
        file.truncate(short_start + path.stat().st_size - data_start)
    return _ShortHeader(target, data_start - short_start)


def _string_end(data: mmap.mmap, start: int) -> int:
    """End of a string: its length, then its bytes."""
    (length,) = struct.unpack_from("<Q", data, start)
    return start + 8 + length


def _value_end(data: mmap.mmap, start: int, kind: int) -> int:
    """End of a metadata value of a type."""
    if kind == STRING:
        return _string_end(data, start)
    if kind != ARRAY:
        return start + WIDTHS[kind]
    element, count = struct.unpack_from("<IQ", data, start)
    start += 12
    if element in WIDTHS:
        return start + count * WIDTHS[element]
    for _ in range(count):
        start = _string_end(data, start)
    return start


def _tensor_table_end(data: mmap.mmap, start: int, tensors: int) -> int:
    """End of the table of tensors: name, count of dimensions, dimensions, type, offset."""
    for _ in range(tensors):
        start = _string_end(data, start)
        (dimensions,) = struct.unpack_from("<I", data, start)
        start += 4 + 8 * dimensions + 12
    return start


def _save_tokenizer(path: Path, folder: Path) -> int:
    """Write the tokenizer's files; number of its tokens."""
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        convert_gguf_tokenizer,
        get_gguf_tokenizer,
    )

    architecture, vocabulary, options = get_gguf_tokenizer(str(path))
    backend, more = convert_gguf_tokenizer(architecture, vocabulary)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **options, **more)
    tokenizer.save_pretrained(folder)
    _shorten_load(tokenizer, folder)
    return len(vocabulary["tokens"])


def _shorten_load(tokenizer: Any, folder: Path) -> None:
    """Rewrite a saved tokenizer, of the same content, so that it loads fast.

    transformers parses the whole of tokenizer.json in Python for the added tokens (2 s of a
    vocabulary of 262,144) where tokenizer_config.json does not list them.
    """
    tokenizer.backend_tokenizer.save(str(folder / TOKENIZER), pretty=False)
    path = folder / TOKENIZER_CONFIG
    config = json.loads(path.read_text(encoding="utf-8"))
    config["added_tokens_decoder"] = {
        index: {"content": token.content} | {name: getattr(token, name) for name in TOKEN_OPTIONS}
        for index, token in tokenizer.added_tokens_decoder.items()
    }
    path.write_text(json.dumps(config, ensure_ascii=False, indent=2), encoding="utf-8")


def _read_config(header: _ShortHeader, tokens: int) -> Any:
    """Configuration as transformers reads it; the size of the vocabulary is that of the tokenizer
    where the file does not name it."""
    from gguf import GGUFReader  # pyright: ignore
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(header.path.parent), gguf_file=header.path.name)
    fields = GGUFReader(header.path).fields
    if (split := fields.get("split.count")) is not None and (count := int(split.parts[-1][0])) > 1:
        raise ValueError(f"it is one of {count} parts: join them with llama-gguf-split --merge")
    if not any(key.endswith(".vocab_size") for key in fields):
        config.vocab_size = tokens
    return config


def _weights(
    path: Path, header: _ShortHeader, config: Any, report: Progress
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of the model in bfloat16, by their names in transformers."""
    from gguf import GGUFReader  # pyright: ignore
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
        read_field,
    )

    reader = GGUFReader(header.path)
    architecture = str(read_field(reader, "general.architecture")[0])
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    with torch.device("meta"):
        names = tuple(AutoModelForCausalLM.from_config(config).state_dict())
    name_map = get_gguf_hf_weights_map(_State(config, names), processor)
    merged: dict[str, torch.Tensor] = {}  # where processors put tensors that they join
    data = np.memmap(path, mode="r")
    for count, tensor in enumerate(reader.tensors, start=1):
        start = tensor.data_offset + header.shift
        done = processor.process(
            weights=_dequantize(data[start : start + tensor.n_bytes], tensor),
            name=tensor.name,
            tensor_key_mapping=name_map,
            parsed_parameters={"tensors": merged},
        )
        if done.name in name_map:
            weights = torch.from_numpy(np.array(done.weights, order="C"))
            yield name_map[done.name], weights.to(torch.bfloat16)
        report(count, len(reader.tensors))
    yield from ((name, weights.to(torch.bfloat16)) for name, weights in merged.items())


def _dequantize(stored: np.ndarray, tensor: Any) -> np.ndarray:
    """Values of a tensor in float32: by torch, or for types that transformers leaves out by numpy.

    Args:
        stored: bytes of the tensor.
        tensor: its entry in the header.
    """
    from gguf import dequantize  # pyright: ignore
    from transformers.integrations.gguf.dequant import GGML_BLOCK
    from transformers.integrations.gguf.dequant import dequantize as dequantize_blocks

    if (kind := int(tensor.tensor_type)) not in GGML_BLOCK:
        rows = stored.view(tensor.data.dtype).reshape(tensor.data.shape)
        return dequantize(rows, tensor.tensor_type)
    values = dequantize_blocks(torch.from_numpy(np.array(stored)), kind)
    return values.reshape(*map(int, reversed(tensor.shape))).numpy()


def _save_model(folder: Path, config: Any, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
