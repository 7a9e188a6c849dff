"""The layers of a model, and the same model with something else in their places.

The copy shares all weights, and the model is not touched: only the modules on the way to the layers
are copied, each without its children.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from larder.core.errors import ModelError
from larder.models.rotation import KeyProbe

# What a copy does instead of a layer: given the layer and the words it was called with.
LayerVisit = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]


class LayerStack:
    """The layers of a model without its head, in order.

    Raises:
        ModelError: there is no one list of as many modules as the model has layers.
    """

    def __init__(self, base: Any, count: int) -> None:
        lists = [
            (path, list(module))
            for path, module in base.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) == count
        ]
        if len(lists) != 1:
            raise ModelError(
                f"{type(base).__name__} has {len(lists)} lists of {count} modules, so that its "
                "layers cannot be told: nothing can be recomputed with it."
            )
        self._base = base
        self._path, self.layers = lists[0]
        self._wraps = self._answers()

    def visiting(self, visits: Mapping[int, LayerVisit]) -> Any:
        """The model with some layers visited instead of passed: each hands on what it is given."""
        layers = [
            self._stand_in(index, visits[index]) if index in visits else layer
            for index, layer in enumerate(self.layers)
        ]
        return _replace_module(self._base, self._path, nn.ModuleList(layers))

    def _stand_in(self, index: int, visit: LayerVisit) -> nn.Module:
        """A copy of a layer, because models read attributes of theirs."""
        stand = copy.copy(self.layers[index])
        stand.__dict__["forward"] = partial(
            _run_visit, self.layers[index], visit, self._wraps[index]
        )
        return stand

    @torch.no_grad()
    def _answers(self) -> list[bool]:
        """Whether each layer answers with a tuple, as those of older transformers do."""
        found: list[bool] = []

        def note(module: nn.Module, args: Any, answer: Any) -> None:
            del module, args
            found.append(isinstance(answer, tuple))

        handles = [layer.register_forward_hook(note) for layer in self.layers]
        try:
            place = torch.zeros(1, 1, dtype=torch.int64, device=self._base.device)
            self._base(input_ids=place, position_ids=place, use_cache=False, larder=KeyProbe())
        finally:
            for handle in handles:
                handle.remove()
        return found


def _run_visit(
    layer: nn.Module,
    visit: LayerVisit,
    wraps: bool,
    hidden_states: Tensor,
    *rest: Any,
    **options: Any,
) -> Any:
    visit(layer, rest, options)
    return (hidden_states,) if wraps else hidden_states


def _replace_module(module: nn.Module, path: str, stand: nn.Module) -> Any:
    """A copy of a module with another one at a path below it."""
    twin = copy.copy(module)
    twin.__dict__.pop("forward", None)  # a wrapper would call the module it wraps
    twin._modules = dict(module._modules)
    first, _, rest = path.partition(".")
    twin._modules[first] = (
        _replace_module(module.get_submodule(first), rest, stand) if rest else stand
    )
    return twin
