"""State of the layers without attention (Mamba) of one sequence, as an immutable value.

State-space, linear-attention and convolution layers summarize all tokens read so far in tensors of
fixed size. Such a state belongs to one position: it can be held and put back, but not cut to an
earlier one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from larder.core.errors import CacheError
from larder.core.spec import ModelSpec

RECURRENT = "recurrent."  # prefix of names in a state


@dataclass(frozen=True)
class RecurrentState:
    """Tensors by layer number in the model and name; none before the first token.

    The tensors are never written, so that forks and checkpoints share them.
    """

    tensors: Mapping[tuple[int, str], Tensor] = field(default_factory=dict[tuple[int, str], Tensor])

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def state(self) -> dict[str, Tensor]:
        """All tensors by name."""
        return {f"{RECURRENT}{n}.{name}": tensor for (n, name), tensor in self.tensors.items()}

    def to(self, device: torch.device) -> RecurrentState:
        """State on a device."""
        return RecurrentState({key: tensor.to(device) for key, tensor in self.tensors.items()})

    @staticmethod
    def restore(state: Mapping[str, Tensor], spec: ModelSpec, length: int) -> RecurrentState:
        """State of a saved cache of `length` tokens, on the model's device.

        Raises:
            CacheError: a tensor is missing, or is not of the model's shape and dtype.
        """
        saved = {name: tensor for name, tensor in state.items() if name.startswith(RECURRENT)}
        known = (
            {f"{RECURRENT}{tensor.layer}.{tensor.name}": tensor for tensor in spec.recurrent}
            if length
            else {}
        )
        if saved.keys() != known.keys():
            raise CacheError(
                f"The saved cache of {length} tokens has {len(saved)} tensors of recurrent layers, "
                f"but the model has {len(known)}: read the text again into a new cache."
            )
        for name, own in known.items():
            found = saved[name]
            if (tuple(found.shape), found.dtype) != (own.shape, own.dtype):
                raise CacheError(
                    f"{name} of the saved cache is {tuple(found.shape)} in {found.dtype}, but the "
                    f"model's is {own.shape} in {own.dtype}: it belongs to another model."
                )
        tensors = {(own.layer, own.name): saved[name] for name, own in known.items()}
        return RecurrentState(tensors).to(spec.device)


NO_STATE = RecurrentState()


@dataclass(frozen=True)
class CacheCheckpoint:
    """Position that a cache can return to while no plan was applied since.

    Args:
        position: number of tokens read.
    """

    position: int
    recurrent: RecurrentState
