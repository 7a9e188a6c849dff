"""Hooks on modules: for the time of a block, and those that capture activations during a batch.

`attention_modules` says which modules of a model they go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from larder.core.types import HiddenStates
from larder.models.attention_backend import CONTEXT_KEYWORD
from larder.models.batch_segment import BatchSegment
from larder.models.forward_batch import ForwardBatch
from larder.policy.providers.base import ActivationProvider, GateProvider, column_providers

if TYPE_CHECKING:
    from larder.models.learned_weights import LearnedGates


@contextmanager
def forward_hooks(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Context that removes hooks at its end.

    Args:
        handles: of the hooks. If an iterator fails to install one, those before it are removed.
    """
    with ExitStack() as installed:
        for handle in handles:
            installed.enter_context(handle)
        yield


class CaptureHook:
    """Forward pre-hook of attention modules that captures activations of one batch.

    Args:
        batch: the batch in the model's call, which gets what was captured.
        providers: of the activations, by name.
    """

    def __init__(self, batch: ForwardBatch, providers: Mapping[str, ActivationProvider]) -> None:
        self._batch, self._providers = batch, providers

    @property
    def is_on_device(self) -> bool:
        """True if the batch is computed on an accelerator."""
        return self._batch.segments[0].cache.spec.device.type != "cpu"

    def __call__(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        states = args[0] if args else named["hidden_states"]
        self.capture(module, states[0], named.get(CONTEXT_KEYWORD))

    def capture(self, attention: nn.Module, states: HiddenStates, batch: object) -> None:
        """Capture from the input of a layer's attention, if it is a call of the batch."""
        if batch is self._batch:
            self._batch.captured = {
                name: _captured(provider, attention, states, self._batch.widths)
                for name, provider in self._providers.items()
            }


def capture_activations(
    modules: Mapping[int, nn.Module],
    batch: ForwardBatch,
    providers: Mapping[str, ActivationProvider],
) -> AbstractContextManager[None]:
    """Context whose hooks capture activations at each layer's attention input.

    Without a provider no hook is installed.

    Args:
        modules: attention modules by layer.
        batch: the batch in the model's call, which gets what was captured.
    """
    hook = CaptureHook(batch, providers)
    # Before hooks that put another attention into the call.
    return forward_hooks(
        module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
        for module in (modules.values() if providers else ())
    )


def _captured(
    provider: ActivationProvider, module: nn.Module, states: HiddenStates, widths: Sequence[int]
) -> Float[Tensor, "Q *rest"]:
    """Rows of all tokens, made of each sequence alone where the provider reads the pass."""
    if not provider.reads_pass:
        return provider.capture(module, states)
    return torch.cat([provider.capture(module, part) for part in states.split(list(widths))])


def column_inputs(
    segments: Sequence[BatchSegment], gates: Callable[[], LearnedGates]
) -> dict[str, ActivationProvider]:
    """Providers of captured numbers that the caches keep in columns.

    Args:
        gates: the model's learned gates, asked for where a cache has a column of one.

    Raises:
        ModelError: a gate has no weights for this model.
    """
    columns = {name for each in segments for name in each.cache.cache_spec.ledger.columns}
    found = column_providers(columns, ActivationProvider)
    learned = column_providers(columns, GateProvider)
    return {**found, **gates().bound(learned)} if learned else found


def is_numbered(module: Any) -> bool:
    """True for modules with a `layer_idx`: attention, and others of a layer."""
    return isinstance(getattr(module, "layer_idx", None), int)


def attention_modules(model: Any, others: Sequence[nn.Module] = ()) -> dict[int, nn.Module]:
    """Attention module by number of the layer: the innermost modules with a `layer_idx`.

    Args:
        others: modules that are not attention.
    """
    numbered = [each for each in model.modules() if is_numbered(each)]
    inner = [m for m in numbered if not any(n is not m and n in numbered for n in m.modules())]
    return {module.layer_idx: module for module in inner if module not in others}
