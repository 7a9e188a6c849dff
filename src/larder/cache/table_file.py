"""Tables that are trained or measured once per model, and their safetensors files.

They lie under the model's fingerprint; those of models that `larder model list` names come with the
package, for measurements that take long (`models/calibrated/`), found by fingerprint, too.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from larder.core.errors import MissingWeights, ModelError
from larder.core.home import home

Tables = TypeVar("Tables", bound="TrainedTables")
PACKAGED = "models/calibrated"  # folder of this package
SUFFIX = ".safetensors"
CARD = "card"  # key of the card in the metadata of a safetensors file
DIGEST = "digest"  # key of the digest of a file of measured tensors there


def check_fingerprint(name: str, fingerprints: Sequence[str], expected: str) -> None:
    """Check that a model is among those of a card.

    Args:
        name: of the trained tensors, or of their file.
        fingerprints: fingerprints of the card.

    Raises:
        ModelError: it is not.
    """
    if expected not in fingerprints:
        raise ModelError(
            f"{name} was trained for the model {', '.join(each[:12] for each in fingerprints)}, "
            f"not for this one ({expected[:12]}): train it for this model."
        )


class TrainedTables(ABC):
    """Tables of a codec, one file per model."""

    method: ClassVar[str]  # of `larder train`
    content: ClassVar[str]  # what the tables hold, for messages

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Tensors of the file, by name; contiguous, in an order of their own."""

    @classmethod
    @abstractmethod
    def of(cls: type[Tables], tensors: Mapping[str, Tensor]) -> Tables:
        """Tables of a file's tensors.

        Raises:
            KeyError: one is missing.
        """

    @classmethod
    def load(cls: type[Tables], fingerprint: str) -> Tables:
        """Tables of a model, shared by all caches of it.

        Raises:
            MissingWeights: there are none, or they cannot be read.
            ModelError: they are of another model.
        """
        path = tables_path(fingerprint, cls.method)
        try:
            return _read(cls, path, path.stat().st_mtime_ns, fingerprint)
        except (OSError, KeyError):
            raise MissingWeights(
                f"{path} has no {cls.content} for this model: make them with "
                f"`larder train {cls.method}`, or choose another codec."
            ) from None

    @classmethod
    def find(cls: type[Tables], fingerprint: str) -> Tables | None:
        """Tables of a model as of `load`; None if it has none, or those of another one."""
        try:
            return cls.load(fingerprint)
        except ModelError:
            return None

    @cached_property
    def digest(self) -> str:
        """Short digest of the numbers, which identifies a training."""
        return tensors_digest(self.tensors().values())

    def save(self, path: Path, card: Mapping[str, str]) -> None:
        """Write the file, whole or not at all.

        Args:
            card: metadata of the file.
        """
        write_tensors(path, self.tensors(), card)


def tables_path(fingerprint: str, name: str) -> Path:
    """File of the tables of a model, by the method or measurement that makes them."""
    return home() / fingerprint / f"{name}{SUFFIX}"


def measured_path(fingerprint: str, name: str) -> Path:
    """File of the tensors that a measurement of a model made: its own, if there is one, else that
    of the package; the path of its own, if there is neither.
    """
    own = tables_path(fingerprint, name)
    return own if own.is_file() else packaged_path(fingerprint, name) or own


@cache
def packaged_path(fingerprint: str, name: str) -> Path | None:
    """File of a measurement that comes with the package; None if there is none of this model.

    Raises:
        ModelError: a file of the package is damaged.
    """
    folder = Path(str(files("larder") / PACKAGED))
    for path in sorted(folder.glob(f"{name}.*{SUFFIX}")):
        if fingerprint in _packaged_fingerprints(path):
            return path
    return None


def _packaged_fingerprints(path: Path) -> Sequence[str]:
    """Fingerprints of the models that a file of the package is of."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return json.loads((file.metadata() or {})[CARD])["fingerprints"]
    except (SafetensorError, KeyError, ValueError) as error:
        raise ModelError(f"{path} is damaged ({error}): install Larder again.") from None


def tensors_digest(tensors: Iterable[Tensor]) -> str:
    """Short digest of the bytes of tensors, in order."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def file_digest(tensors: Mapping[str, Tensor]) -> str:
    """Digest of the tensors of a file with their names, types and shapes."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].cpu().contiguous()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def check_measured(path: Path) -> None:
    """Check that a file of measured tensors is whole: its digest, if it has one, is that of its
    tensors. Older files have none.

    Raises:
        KeyError: the file is damaged.
        OSError: there is no file.
    """
    _check_digest(path, path.stat().st_mtime_ns)


@cache
def _check_digest(path: Path, modified: int) -> None:
    """`check_measured` of a file as it was at a time."""
    from safetensors import SafetensorError, safe_open

    tensors = read_tensors(path)
    try:
        with safe_open(path, framework="pt") as file:
            expected = (file.metadata() or {}).get(DIGEST)
    except SafetensorError as error:
        raise KeyError(str(error)) from None
    if expected is not None and expected != file_digest(tensors):
        raise KeyError(f"{path} has other numbers than were written")


def read_tensors(path: Path, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Tensors of a file by name: the named ones, or all.

    Raises:
        KeyError: one is missing, or the file is damaged.
        OSError: there is no file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            wanted = file.keys() if names is None else names
            return {name: file.get_tensor(name) for name in wanted}
    except SafetensorError as error:
        raise KeyError(str(error)) from None


def read_trained(
    path: Path, fingerprint: str, names: Iterable[str] | None = None
) -> dict[str, Tensor]:
    """Tensors of a file that `larder train` made for a model, as of `read_tensors`.

    Raises:
        KeyError: one is missing, or the file is damaged, or has no card.
        OSError: there is no file.
        ModelError: the card names another model.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            found = json.loads((file.metadata() or {})[CARD])["fingerprints"]
    except (SafetensorError, ValueError, TypeError) as error:
        raise KeyError(str(error)) from None
    check_fingerprint(str(path), found, fingerprint)
    return read_tensors(path, names)


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a file, whole or not at all."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.draft")
    save_file(tensors, draft, dict(metadata))
    os.replace(draft, path)


@cache
def _read(kind: type[Tables], path: Path, modified: int, fingerprint: str) -> Tables:
    """Tables of a file as it was at a time.

    Raises:
        KeyError: the file is damaged.
        ModelError: it is of another model.
    """
    return kind.of(read_trained(path, fingerprint))
