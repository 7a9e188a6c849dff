"""Choice of what multiplies the tokens of a call with the weights of a model on a CPU.

Calls of few bfloat16 tokens take as long as reading the weights: they run the decoder stack and its
product for the head where these serve the model, and torch's faster kernel for one row elsewhere.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from larder.core.spec import ModelSpec

if TYPE_CHECKING:
    from larder.models.decoder_stack import DecoderStack


class TorchProducts:
    """Contexts of calls that run the model as it is, whatever their number of tokens."""

    def matrices(self, num_tokens: int) -> AbstractContextManager[None]:
        """Context of torch's matrix products."""
        del num_tokens
        return nullcontext()

    layers = head = matrices


class FewRows:
    """Contexts of calls of a model by their number of tokens. Not thread-safe.

    Args:
        module: bfloat16 model with a head, on a CPU.
        body: its layers with embedding and norm.
        spec: of its caches.
    """

    def __init__(self, module: Any, body: Any, spec: ModelSpec) -> None:
        self._module, self._body, self._spec = module, body, spec
        self._stack: DecoderStack | None = None

    def matrices(self, num_tokens: int) -> AbstractContextManager[None]:
        """Context of torch's matrix products of a call with so many tokens."""
        if num_tokens > 1:
            return nullcontext()
        from larder.ops.cpu.one_row_products import (
            one_row_products,  # measures: not before it is needed
        )

        return one_row_products()

    def layers(self, num_tokens: int) -> AbstractContextManager[None]:
        """Context of the layers that a call runs, to be entered once all hooks are set."""
        if not self._are_few(num_tokens):
            return nullcontext()
        if self._stack is None or not self._stack.is_current:
            from larder.models.decoder_stack import DecoderStack

            if (stack := DecoderStack.of(self._body, self._spec)) is None:
                return nullcontext()
            self._stack = stack
        return self._stack.in_place_of_layers()

    def head(self, num_tokens: int) -> AbstractContextManager[None]:
        """Context in which the model's head multiplies the states of a call once."""
        if not self._are_few(num_tokens):
            return nullcontext()
        from larder.models.decoder_stack import FewRowsHead

        return FewRowsHead(self._module)

    def _are_few(self, num_tokens: int) -> bool:
        """True for so few tokens that the kernel is faster than torch's products."""
        from larder.ops.cpu.decoder_layer import (
            MAX_ROWS,
            max_rows,  # measures: not before it is needed
        )

        return num_tokens <= MAX_ROWS and num_tokens <= max_rows()
