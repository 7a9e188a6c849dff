"""Learned tokens of a scratch pass: vectors in place of embeddings, and low-rank updates of layers.

Both are hooks for the time of one pass, whose tokens are all learned. No weight of the model
changes, and every other pass is the plain model's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from larder.core.errors import ModelError
from larder.core.spec import ModelSpec
from larder.models.activation_hooks import forward_hooks
from larder.models.learned_weights import LayerTensors, load_learned
from larder.policy.providers._soft_tokens import DOWN, EMBEDDINGS, UP
from larder.policy.providers.base import SoftTokenProvider


@dataclass(frozen=True)
class SoftPromptModules:
    """Modules of a model that learned tokens change.

    Args:
        embedding: of input tokens.
        linears: linear layers of each managed layer, by their names in it.
    """

    embedding: nn.Module
    linears: tuple[Mapping[str, nn.Linear], ...]

    @staticmethod
    def of(
        body: nn.Module, embedding: nn.Module, attentions: Iterable[nn.Module]
    ) -> SoftPromptModules:
        """Modules of the layers that own some attention modules."""
        owners = {part: owner for owner in body.modules() for part in owner.children()}
        return SoftPromptModules(
            embedding,
            tuple(
                {
                    name: part
                    for name, part in owners[attention].named_modules()
                    if isinstance(part, nn.Linear)
                }
                for attention in attentions
            ),
        )

    def installed(
        self, layers: Sequence[LayerTensors], provider: SoftTokenProvider
    ) -> AbstractContextManager[None]:
        """Context of passes whose tokens are the learned ones, once for each sequence.

        Args:
            layers: tensors of each managed layer; gradients pass through.
        """
        return forward_hooks(self._handles(layers, provider))

    def _handles(
        self, layers: Sequence[LayerTensors], provider: SoftTokenProvider
    ) -> Iterator[Any]:
        yield self.embedding.register_forward_hook(_replacing(layers[0][EMBEDDINGS]))
        for layer, linears in zip(layers, self.linears, strict=True):
            for name, linear in linears.items():
                down, up = layer[f"{name}{DOWN}"], layer[f"{name}{UP}"]
                yield linear.register_forward_hook(_adding(down, up, provider.scale(len(down))))

    def check(self, layers: Sequence[LayerTensors], name: str) -> None:
        """Check that tensors are those of these modules.

        Raises:
            ModelError: they are not.
        """
        if EMBEDDINGS not in layers[0]:
            raise ModelError(
                f"The weights of {name} have no {EMBEDDINGS!r} in the first layer: train {name} "
                "for this model."
            )
        pairs = zip(layers, self.linears, strict=True)
        if not all(_fits(layer, linears) for layer, linears in pairs):
            raise ModelError(
                f"The weights of {name} do not fit the linear layers of this model: train {name} "
                "for this model."
            )


def _fits(tensors: LayerTensors, linears: Mapping[str, nn.Linear]) -> bool:
    wanted = {f"{name}{end}" for name in linears for end in (DOWN, UP)}
    return wanted == tensors.keys() - {EMBEDDINGS} and all(
        tensors[f"{name}{DOWN}"].shape[1] == linear.in_features
        and tensors[f"{name}{UP}"].shape[0] == linear.out_features
        for name, linear in linears.items()
    )


def _replacing(embeddings: Float[Tensor, "N hidden"]) -> Callable[..., Tensor]:
    def replace(module: nn.Module, args: Any, output: Float[Tensor, "1 M hidden"]) -> Tensor:
        times = output.shape[1] // len(embeddings)
        return embeddings.repeat(times, 1)[None].to(output)

    return replace


def _adding(
    down: Float[Tensor, "rank in"], up: Float[Tensor, "out rank"], scale: float
) -> Callable[..., Tensor]:
    def add(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        inner = F.linear(args[0], down.to(args[0]))
        return output + scale * F.linear(inner, up.to(inner))

    return add


class LearnedSoftPrompts:
    """Learned tokens of one model by provider, loaded when first asked for.

    Args:
        module: the model.
        body: its layers, without the head.
        attentions: attention module of each layer, by its index.
    """

    def __init__(
        self, module: Any, body: nn.Module, spec: ModelSpec, attentions: Mapping[int, nn.Module]
    ) -> None:
        managed = [attentions[layer.index] for layer in spec.managed]
        self.modules = SoftPromptModules.of(body, module.get_input_embeddings(), managed)
        self._spec = spec
        self._layers = dict[str, Sequence[LayerTensors]]()

    def soft_pass(self, name: str, provider: SoftTokenProvider) -> AbstractContextManager[None]:
        """Context of scratch passes of the provider's tokens.

        Raises:
            ModelError: there are no weights for this model, or they do not fit it.
        """
        if name not in self._layers:
            self.put(name, load_learned(self._spec, name, provider).layers)
        return self.modules.installed(self._layers[name], provider)

    def put(self, name: str, layers: Sequence[LayerTensors]) -> None:
        """Use given tensors of each managed layer from now on.

        Raises:
            ModelError: they are not those of the linear layers of this model.
        """
        self.modules.check(layers, name)
        device = self._spec.device
        self._layers[name] = [
            {key: tensor.to(device) for key, tensor in each.items()} for each in layers
        ]
