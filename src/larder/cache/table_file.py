"""Tables of a codec that are trained once per model and kept in a safetensors file."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor


class TrainedTables(ABC):
    """Tables with a file."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Tensors of the file, by name; contiguous, in an order of their own."""

    @cached_property
    def digest(self) -> str:
        """Short digest of the numbers, which tells one training from another."""
        found = hashlib.sha256()
        for tensor in self.tensors().values():
            found.update(tensor.view(torch.uint8).numpy().tobytes())
        return found.hexdigest()[:16]

    def save(self, path: Path, card: Mapping[str, str]) -> None:
        """Write the file, whole or not at all.

        Args:
            card: metadata of the file.
        """
        from safetensors.torch import save_file

        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}.draft")
        save_file(self.tensors(), draft, dict(card))
        os.replace(draft, path)
