"""Learned weights of a model: safetensors with a card, found by the model's fingerprint.

`$LARDER_HOME/<fingerprint>/<name>.safetensors` comes first, then the files that come with the
package. Tensors are named `layers.<n>.<tensor>`, where n counts the managed layers. The card is
JSON in the file's metadata: method, fingerprints of the model in the dtypes that it fits, data
digest, tokens, seed, time and metrics.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from larder.cache.table_file import CARD, check_fingerprint, write_tensors
from larder.core.errors import MissingWeights, ModelError
from larder.core.home import home
from larder.core.spec import LayerSpec, ModelSpec
from larder.core.types import HiddenStates, NamedTensors, TensorShapes
from larder.policy.providers.base import (
    ActivationProvider,
    GateProvider,
    LearnedProvider,
    select_providers,
)

SUFFIX = ".safetensors"
PACKAGED = "learned"  # folder of this package
LAYERS = "layers"

LayerTensors = NamedTensors


@runtime_checkable
class WeightForm(Protocol):
    """Shapes of the tensors of a method, such as those of a gate."""

    def shapes(self, layer: LayerSpec, width: int, tensors: NamedTensors) -> TensorShapes:
        """Shape that each tensor of a layer must have, by name; see `GateProvider.shapes`."""
        ...


@dataclass(frozen=True)
class Card:
    """Description of learned weights.

    Args:
        method: name of the method.
        fingerprints: of the model, one per dtype that it was seen in.
        data: digest of the labels.
        tokens: labelled tokens that they were trained on.
        seconds: training time, labels not included.
        metrics: measured on documents that were not trained on.
        settings: parameters of the training.
    """

    method: str
    fingerprints: tuple[str, ...]
    data: str = ""
    tokens: int = 0
    seed: int = 0
    seconds: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def dumps(self) -> str:
        """JSON of the card."""
        return json.dumps(dict(vars(self)), sort_keys=True)

    @staticmethod
    def loads(text: str) -> Card:
        """Card from JSON.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: it is none.
        """
        try:
            fields = json.loads(text)
        except RecursionError as error:
            raise ValueError("the card is nested too deeply") from error
        metrics = {name: float(number) for name, number in fields["metrics"].items()}
        prints = fields["fingerprints"]
        if not isinstance(prints, list) or not all(isinstance(each, str) for each in prints):
            raise ValueError(f"fingerprints must be a list of strings, got {prints!r}")
        return Card(**{**fields, "fingerprints": tuple(prints), "metrics": metrics})


@dataclass(frozen=True)
class LearnedWeights:
    """Card, and tensors of each managed layer in order."""

    card: Card
    layers: tuple[LayerTensors, ...]

    def save(self, path: Path, dtype: torch.dtype = torch.float32) -> None:
        """Write the file, whole or not at all."""
        tensors = {
            f"{LAYERS}.{index}.{name}": tensor.to(dtype).contiguous()
            for index, layer in enumerate(self.layers)
            for name, tensor in layer.items()
        }
        write_tensors(path, tensors, {CARD: self.card.dumps()})


def learned_file(fingerprint: str, name: str) -> Path:
    """Path that weights are written to."""
    return home() / fingerprint / f"{name}{SUFFIX}"


def load_learned(spec: ModelSpec, name: str, form: WeightForm) -> LearnedWeights:
    """Weights of a method for a model, in float32.

    Raises:
        MissingWeights: there are none.
        ModelError: they are of another model, or have other shapes.
    """
    path = learned_file(spec.fingerprint, name)
    found = read_learned(path) if path.is_file() else _packaged(spec.fingerprint, name)
    if found is None:
        raise MissingWeights(
            f"{name} has no weights for this model (fingerprint {spec.fingerprint[:12]}, "
            f"{str(spec.dtype).removeprefix('torch.')}): make them with `larder train {name}`, or "
            "choose a policy without it."
        )
    check_learned(found, spec, name, form)
    return found


def read_learned(path: Path) -> LearnedWeights:
    """Weights of a file of any model.

    Raises:
        ModelError: the file is damaged, or has no card.
    """
    try:
        with safe_open(path, "pt") as tensors:
            card = Card.loads((tensors.metadata() or {})[CARD])
            given = {key: tensors.get_tensor(key).float() for key in tensors.keys()}  # noqa: SIM118
        return LearnedWeights(card, split_layers(given))
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{path} holds no learned weights with a card ({error}): remove it, and train again."
        ) from error


def split_layers(tensors: NamedTensors, prefix: str = LAYERS) -> tuple[LayerTensors, ...]:
    """Tensors by layer, from names `<prefix>.<n>.<tensor>`.

    Raises:
        ValueError: a name has another form, or a layer is missing.
    """
    layers = dict[int, dict[str, Tensor]]()
    for key, tensor in tensors.items():
        head, number, name = key.split(".", 2)
        if head != prefix:
            raise ValueError(f"{key!r} does not begin with {prefix!r}")
        layers.setdefault(int(number), {})[name] = tensor
    if sorted(layers) != [*range(len(layers))]:
        raise ValueError(f"layers {sorted(layers)} are not numbered from 0 without gaps")
    return tuple(layers[index] for index in range(len(layers)))


def check_learned(weights: LearnedWeights, spec: ModelSpec, name: str, form: WeightForm) -> None:
    """Check that weights are of a model and fit it.

    Raises:
        ModelError: they do not.
    """
    check_fingerprint(name, weights.card.fingerprints, spec.fingerprint)
    if len(weights.layers) != len(spec.managed):
        raise ModelError(
            f"The weights of {name} are of {len(weights.layers)} layers, but this model has "
            f"{len(spec.managed)} managed ones: train {name} for this model."
        )
    for layer, tensors in zip(spec.managed, weights.layers, strict=True):
        shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        wanted = _wanted_shapes(form, layer, spec.width, tensors)
        if shapes != wanted:
            raise ModelError(
                f"The weights of {name} for layer {layer.index} have shapes {shapes}, but this "
                f"model needs {wanted}: train {name} for this model."
            )


def _wanted_shapes(
    form: WeightForm, layer: LayerSpec, width: int, tensors: LayerTensors
) -> TensorShapes | str:
    """Shapes of a form, or what it misses where its sizes cannot be read from the tensors."""
    try:
        return dict(form.shapes(layer, width, tensors))
    except (KeyError, ValueError, IndexError, TypeError) as error:
        return f"others ({error})"


def _check_shared(weights: LearnedWeights, name: str, gate: GateProvider) -> None:
    for index, layer in enumerate(weights.layers):
        differing = [k for k in sorted(gate.shared) if not layer[k].equal(weights.layers[0][k])]
        if differing:
            raise ModelError(
                f"The weights of {name} have another {differing[0]} in layer {index} than in layer "
                f"0, but all layers share it: train {name} again."
            )


def _packaged(fingerprint: str, name: str) -> LearnedWeights | None:
    """Weights that come with the package; None if none are of this model."""
    folder = files("larder.models") / PACKAGED
    if not folder.is_dir():
        return None
    for entry in sorted(folder.iterdir(), key=lambda each: each.name):
        if entry.name.startswith(f"{name}.") and entry.name.endswith(SUFFIX):
            with as_file(entry) as path:
                found = read_learned(path)
            if fingerprint in found.card.fingerprints:
                return found
    return None


@dataclass(frozen=True)
class BoundGate(ActivationProvider):
    """Gate with the weights of every layer, by its attention module."""

    gate: GateProvider
    weights: Mapping[nn.Module, LayerTensors]

    @property
    def reads_pass(self) -> bool:
        return self.gate.reads_pass

    def capture(self, attention: nn.Module, states: HiddenStates) -> Float[Tensor, "Q *rest"]:
        if attention not in self.weights:  # a layer that no budget governs
            return states.new_zeros(len(states), dtype=torch.float32)
        return self.gate.gate(states, self.weights[attention])


class LearnedGates:
    """Gates of one model, loaded when first asked for.

    Args:
        modules: attention module of each layer, by its index.
    """

    def __init__(self, spec: ModelSpec, modules: Mapping[int, nn.Module]) -> None:
        self._spec, self._modules = spec, modules
        self._bound = dict[str, BoundGate]()
        self._tensors = dict[str, LearnedWeights]()

    def inputs(self, names: Iterable[str]) -> dict[int, dict[str, Tensor]]:
        """Tensors of learned providers among the named ones, by layer index, then by name.

        Raises:
            ModelError: a provider has no weights for this model.
        """
        found = {layer.index: dict[str, Tensor]() for layer in self._spec.managed}
        for name, provider in select_providers(names, LearnedProvider).items():
            if name not in self._tensors:
                self.put_tensors(name, provider, load_learned(self._spec, name, provider))
            pairs = zip(self._spec.managed, self._tensors[name].layers, strict=True)
            for layer, tensors in pairs:
                found[layer.index] |= {f"{name}.{key}": each for key, each in tensors.items()}
        return found

    def put_tensors(self, name: str, provider: LearnedProvider, learned: LearnedWeights) -> None:
        """Use given tensors of a learned provider from now on.

        Raises:
            ModelError: they do not fit the model.
        """
        check_learned(learned, self._spec, name, provider)
        layers = zip(self._spec.managed, learned.layers, strict=True)
        placed = tuple(
            {key: each.to(self._spec.device_of(layer.index)) for key, each in own.items()}
            for layer, own in layers
        )
        self._tensors[name] = replace(learned, layers=placed)

    def bound(self, gates: Mapping[str, GateProvider]) -> dict[str, ActivationProvider]:
        """Gates with this model's weights, by name.

        Raises:
            ModelError: a gate has no weights for this model.
        """
        for name in gates.keys() - self._bound.keys():
            self.put(name, gates[name], load_learned(self._spec, name, gates[name]))
        return {name: self._bound[name] for name in gates}

    def put(self, name: str, gate: GateProvider, learned: LearnedWeights) -> None:
        """Use given weights for a gate from now on.

        Raises:
            ModelError: they do not fit the model.
        """
        check_learned(learned, self._spec, name, gate)
        _check_shared(learned, name, gate)
        device, layers = self._spec.device, self._spec.managed
        self._bound[name] = BoundGate(
            gate,
            {
                self._modules[layer.index]: {key: each.to(device) for key, each in tensors.items()}
                for layer, tensors in zip(layers, learned.layers, strict=True)
            },
        )
