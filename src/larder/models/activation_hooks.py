"""Hooks that capture activations at the input of attention during a forward batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from torch import nn

from larder.models.attention_backend import CONTEXT_KEYWORD
from larder.models.forward_batch import BatchSegment, ForwardBatch
from larder.policy.providers.base import ActivationProvider, column_providers


class ActivationHooks:
    """Context manager whose hooks capture activations at each layer's attention input.

    Without a provider no hook is installed.

    Args:
        modules: attention modules by layer.
        batch: the batch in the model's call, which gets what was captured.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        batch: ForwardBatch,
        providers: Mapping[str, ActivationProvider],
    ) -> None:
        self._modules = modules.values() if providers else ()
        self._batch, self._providers = batch, providers
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        for module in self._modules:
            # Before hooks that put another attention into the call.
            hook = module.register_forward_pre_hook(self._record, prepend=True, with_kwargs=True)
            self._hooks.append(hook)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    def _record(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if named.get(CONTEXT_KEYWORD) is self._batch:
            states = (args[0] if args else named["hidden_states"])[0]
            self._batch.captured = {
                name: each.capture(module, states) for name, each in self._providers.items()
            }


def column_inputs(segments: Sequence[BatchSegment]) -> dict[str, ActivationProvider]:
    """Providers of captured numbers that the caches keep in columns."""
    columns = {name for each in segments for name in each.cache.cache_spec.ledger.columns}
    return column_providers(columns, ActivationProvider)
