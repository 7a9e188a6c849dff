"""What enters the attention of each layer, for a scorer that asks to see it."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from torch import nn

from larder.core.needs import Need
from larder.models.forward_batch import ForwardBatch
from larder.models.prefetch import CONTEXT_KEYWORD


class HiddenStateHooks:
    """Tells one pass the hidden states that each layer starts from, while the `with` block lasts.

    The hooks are removed with it; where nobody asks there are none.

    Args:
        modules: attention modules by layer.
        journey: the pass, as it comes down the model's call.
    """

    def __init__(
        self, modules: Mapping[int, nn.Module], journey: ForwardBatch, needs: frozenset[Need]
    ) -> None:
        self._modules = modules.values() if Need.STATES in needs else ()
        self._journey = journey
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        for module in self._modules:
            self._hooks.append(module.register_forward_pre_hook(self._tell, with_kwargs=True))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    def _tell(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        del module
        if named.get(CONTEXT_KEYWORD) is self._journey:
            self._journey.states = (args[0] if args else named["hidden_states"])[0]
