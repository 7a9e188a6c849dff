"""Files of a model, checked before transformers loads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from larder.core.errors import ModelError
from larder.models.model_packages import GGUF_SUFFIX

WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
INDEX_NAMES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def check_folder(source: str) -> None:
    """Checks of a local folder before transformers loads it."""
    folder = Path(source)
    if not folder.exists():
        if folder.is_absolute() or source.startswith((".", "~")) or source.endswith(GGUF_SUFFIX):
            raise ModelError(f"The model {source} does not exist: check its name.")
        return
    if not folder.is_dir():
        raise ModelError(
            f"{source} is a file: give the folder that holds config.json, or a .gguf file."
        )
    if not (folder / "config.json").is_file():
        raise ModelError(f"{source} has no config.json: give a folder saved by transformers.")
    if not any(any(folder.glob(pattern)) for pattern in WEIGHT_PATTERNS):
        raise ModelError(
            f"{source} has a config.json but no weights (*.safetensors): download them into it."
        )
    for index in (folder / name for name in INDEX_NAMES):
        if index.is_file():
            _check_weight_map(index)


def check_hub_indexes(name: str, revision: Mapping[str, str]) -> None:
    """Check the indexes of a model by name before its weights are fetched."""
    from transformers.utils.hub import cached_file

    for index in INDEX_NAMES:
        try:
            path = cached_file(name, index, **revision)
        except OSError:  # most models have no such file; missing weights are reported later
            continue
        _check_weight_map(Path(str(path)))


def _check_weight_map(index: Path) -> None:
    """Check that an index of weights names files inside the model's folder only.

    Raises:
        ModelError: it names a file elsewhere, or is damaged.
    """
    try:
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        outside = sorted(shard for shard in set(shards) if _escapes_folder(shard))
    except (AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        raise ModelError(
            f"{index} does not map weights to files ({type(error).__name__}): download it again."
        ) from error
    if outside:
        raise ModelError(
            f"{index} names the weight file {outside[0]!r}, which is outside the model's folder: "
            "a weight_map may only name files beside it. Do not trust this model."
        )


def _escapes_folder(shard: Any) -> bool:
    """True if a file name is absolute or leads out of its folder."""
    kinds = PurePosixPath(shard), PureWindowsPath(shard)
    return any(path.is_absolute() or path.drive or ".." in path.parts for path in kinds)
