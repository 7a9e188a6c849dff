"""What entered the layers of a model while one sequence was read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn


class ResidualStream:
    """The residual stream before some layers, token by token; it owns what it holds.

    Args:
        layers: before which.
    """

    def __init__(self, layers: Iterable[int]) -> None:
        self._blocks: dict[int, list[Tensor]] = {layer: [] for layer in layers}

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self._blocks)

    def before(self, layer: int) -> Float[Tensor, "S hidden"]:
        """All tokens before one layer, in order; nothing where none was read."""
        blocks = self._blocks[layer]
        if len(blocks) > 1:
            blocks[:] = [torch.cat(blocks)]
        return blocks[0] if blocks else torch.empty(0, 0)

    @contextmanager
    def taking(self, layers: list[nn.Module]) -> Iterator[None]:
        """Take what enters while the block runs; a block that fails leaves nothing.

        Args:
            layers: all of the model's.
        """
        counts = {layer: len(blocks) for layer, blocks in self._blocks.items()}
        handles = [
            layers[index].register_forward_pre_hook(self._taker(index), with_kwargs=True)
            for index in self._blocks
        ]
        try:
            yield
        except BaseException:
            for layer, blocks in self._blocks.items():
                del blocks[counts[layer] :]
            raise
        finally:
            for handle in handles:
                handle.remove()

    @property
    def nbytes(self) -> int:
        """Bytes of everything held."""
        return sum(block.nbytes for blocks in self._blocks.values() for block in blocks)

    def _taker(self, index: int) -> Callable[[nn.Module, Any, Any], None]:
        def take(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            del module
            entering = args[0] if args else options["hidden_states"]
            self._blocks[index].append(entering[0].detach().clone())

        return take
