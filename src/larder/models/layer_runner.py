"""Choice of what runs the layers of a model for the tokens of a call.

On a CPU calls of at most a block of tokens run the decoder stack and its product for the head where
these serve the model and are measured to be faster than torch, and for bfloat16 elsewhere torch's
faster kernel for one row.
On a GPU the stack saves most launches of a layer, for any number of tokens.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from larder.core.spec import ModelSpec

if TYPE_CHECKING:
    from larder.models.decoder_stack import DecoderStack


class LayerRunner:
    """Contexts of calls that run the model as it is, whatever their number of tokens."""

    def matrices(self, num_tokens: int) -> AbstractContextManager[None]:
        """Context of torch's matrix products."""
        return nullcontext()

    layers = head = matrices


class StackRunner(LayerRunner):
    """Contexts of calls of a model on a GPU, which run the decoder stack. Not thread-safe.

    Args:
        body: layers of a model with embedding and norm.
        spec: of its caches.
    """

    def __init__(self, body: Any, spec: ModelSpec) -> None:
        self._body, self._spec = body, spec
        self._stack: DecoderStack | None = None

    def layers(self, num_tokens: int) -> AbstractContextManager[None]:
        """Context of the layers that a call runs, to be entered once all hooks are set."""
        if self._stack is not None and self._stack.is_running:
            return nullcontext()  # a call between two layers of another one, whose stack it runs
        if self._stack is None or not self._stack.is_current:
            from larder.models.decoder_stack import DecoderStack

            if (stack := DecoderStack.of(self._body, self._spec)) is None:
                return nullcontext()
            self._stack = stack
        return self._stack.in_place_of_layers()


class SmallBatchRunner(StackRunner):
    """Contexts of calls of a model on a CPU by their number of tokens. Not thread-safe.

    Args:
        module: bfloat16 or float32 model with a head.
        body: its layers with embedding and norm.
        spec: of its caches.
    """

    def __init__(self, module: Any, body: Any, spec: ModelSpec) -> None:
        super().__init__(body, spec)
        self._module = module

    def matrices(self, num_tokens: int) -> AbstractContextManager[None]:
        """Context of torch's matrix products of a call with so many tokens."""
        if num_tokens > 1 or self._spec.dtype is not torch.bfloat16:
            return nullcontext()
        from larder.ops.cpu.gemv import fastest_gemv  # measures: not before it is needed

        return fastest_gemv()

    def layers(self, num_tokens: int) -> AbstractContextManager[None]:
        """Context of the layers that a call runs, to be entered once all hooks are set."""
        if self._are_few(num_tokens):
            return super().layers(num_tokens)
        if self._stack is not None and self._stack.is_running:
            return self._stack.out_of_place()  # a long call between two layers of a shorter one
        return nullcontext()

    def head(self, num_tokens: int) -> AbstractContextManager[None]:
        """Context in which the model's head multiplies the states of a call once."""
        if not self._are_few(num_tokens):
            return nullcontext()
        from larder.models.decoder_stack import SmallBatchHead

        return SmallBatchHead(self._module)

    def _are_few(self, num_tokens: int) -> bool:
        """True for so few tokens that the kernel is faster than torch's products."""
        from larder.ops.cpu.decoder_layer import (
            MAX_ROWS,
            max_rows,  # measures: not before it is needed
        )

        return num_tokens <= MAX_ROWS and num_tokens <= max_rows(self._spec.dtype)


def layer_runner_of(module: Any, body: Any, spec: ModelSpec) -> LayerRunner:
    """Runner of the layers of a model with that specification of its caches.

    Args:
        module: model with a head.
        body: its layers with embedding and norm.
    """
    if spec.dtype in (torch.bfloat16, torch.float32) and spec.device.type == "cpu":
        return SmallBatchRunner(module, body, spec)
    if spec.dtype == torch.bfloat16 and spec.device.type == "cuda" and find_spec("triton"):
        return StackRunner(body, spec)
    return LayerRunner()
