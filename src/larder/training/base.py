"""Base of trained methods: weights of a gate, fitted layer by layer to a label file."""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor

from larder.cache.table_file import CARD
from larder.core.errors import ModelError
from larder.core.registry import Family, public_name
from larder.core.spec import LayerSpec, ModelSpec
from larder.core.types import NamedTensors
from larder.models.learned_weights import (
    SUFFIX,
    Card,
    LayerTensors,
    LearnedWeights,
    WeightForm,
    check_learned,
    split_layers,
)
from larder.policy.providers.base import PROVIDERS, GateProvider
from larder.prefill.base import Progress
from larder.training.corpus import CorpusSplit
from larder.training.labels import STATES, LabelFile, Shard
from larder.training.passage_method import PASSAGE_METHODS

METHODS = Family("method", "larder.training.methods")
# First parts of the names of tensors in released files; NVIDIA's KVzap uses both.
PREFIXES = ("layers", "module_list")
# What names of tensors and cards of another form raise.
UNREADABLE = (AttributeError, KeyError, TypeError, ValueError)


@dataclass(frozen=True)
class LayerData:
    """Hidden states and labels of one layer.

    Args:
        lengths: tokens of each passage, in order.
    """

    states: Float[Tensor, "N hidden"]
    targets: Float[Tensor, "N K"]
    lengths: tuple[int, ...]


class Method(ABC):
    """Base class of trained methods: frozen dataclasses whose fields are settings of the training.

    The name of the file is that of the provider whose weights are trained.
    """

    label: ClassVar[str]  # name of the label in the label file

    @abstractmethod
    def target(self, labels: Float[Tensor, "N K"]) -> Float[Tensor, "N K"]:
        """Targets that the gate is fitted to."""

    @abstractmethod
    def fit(self, data: LayerData, layer: LayerSpec, seed: int) -> dict[str, Tensor]:
        """Tensors of the gate of one layer."""

    def gate(self) -> GateProvider:
        """Gate that takes the weights."""
        return PROVIDERS.load(public_name(type(self)))()


def train(
    method: Method, labels: LabelFile, spec: ModelSpec, seed: int, progress: Progress
) -> LearnedWeights:
    """Weights of every managed layer, measured on documents that were not trained on.

    Args:
        progress: called with layers done and in total.

    Raises:
        ModelError: there is nothing to train on, or training diverged.
    """
    used = labels.of_split(CorpusSplit.TRAIN)
    if not used:
        raise ModelError(
            "The labels hold no training document: give a corpus of more texts, or more tokens."
        )
    started, gate = time.perf_counter(), method.gate()
    tested = {split: labels.of_split(split) for split in (CorpusSplit.TEST, CorpusSplit.HELD_OUT)}
    layers, found = list[LayerTensors](), {split: list[Mapping[str, float]]() for split in tested}
    for done, layer in enumerate(spec.managed, start=1):
        fitted = method.fit(read_layer(method, used, layer.index), layer, seed)
        _check_finite(fitted, method, layer)
        layers.append(fitted)
        for split, shards in tested.items():
            if shards:
                data = read_layer(method, shards, layer.index)
                found[split].append(agreement(gate.gate(data.states, fitted), data.targets))
        progress(done, len(spec.managed))
    card = Card(
        public_name(type(method)),
        (spec.fingerprint,),
        labels.digest,
        labels.tokens(CorpusSplit.TRAIN),
        seed,
        round(time.perf_counter() - started, 1),
        _mean_metrics(found, tested),
        _settings(method),
    )
    return LearnedWeights(card, tuple(layers))


def read_layer(method: Method, shards: Sequence[Shard], index: int) -> LayerData:
    """States and targets of one layer, in float32."""
    states = torch.cat([shard.layer(index, STATES).float() for shard in shards])
    labels = torch.cat([shard.layer(index, method.label).T.float() for shard in shards])
    return LayerData(states, method.target(labels), tuple(shard.tokens for shard in shards))


def fit_by_gradient(
    tensors: dict[str, Tensor],
    loss: Callable[[NamedTensors, Tensor], Tensor],
    batches: Callable[[torch.Generator], Sequence[Tensor]],
    *,
    epochs: int,
    rate: float,
    seed: int,
) -> dict[str, Tensor]:
    """Tensors after AdamW with a cosine schedule and gradients clipped to length 1.

    Args:
        loss: of the tensors, over the rows of a batch.
        batches: rows of each batch of an epoch.
    """
    source = torch.Generator().manual_seed(seed)
    fitted = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    optimizer = torch.optim.AdamW(fitted.values(), lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    with torch.enable_grad():
        for _ in range(epochs):
            for rows in batches(source):
                optimizer.zero_grad()
                loss(fitted, rows).backward()
                torch.nn.utils.clip_grad_norm_(fitted.values(), 1.0)
                optimizer.step()
            schedule.step()
    return {name: tensor.detach() for name, tensor in fitted.items()}


def _check_finite(fitted: NamedTensors, method: Method, layer: LayerSpec) -> None:
    if not all(bool(tensor.isfinite().all()) for tensor in fitted.values()):
        raise ModelError(
            f"Training {public_name(type(method))} diverged in layer {layer.index}: take another "
            "seed, or more tokens."
        )


def _mean_metrics(
    metrics: Mapping[CorpusSplit, Sequence[Mapping[str, float]]],
    tested: Mapping[CorpusSplit, Sequence[Shard]],
) -> dict[str, float]:
    """Means over layers, and the number of documents, by split and metric."""
    out = dict[str, float]()
    for split, layers in metrics.items():
        for name in layers[0] if layers else ():
            out[f"{split.value}_{name}"] = round(
                sum(layer[name] for layer in layers) / len(layers), 4
            )
        if layers:
            out[f"{split.value}_documents"] = float(
                len({passage.document for passage in tested[split]})
            )
            out[f"{split.value}_tokens"] = float(sum(passage.tokens for passage in tested[split]))
    return out


def _settings(method: Method) -> dict[str, Any]:
    return asdict(method)  # pyright: ignore


QUARTER, TENTH = 4, 10


def agreement(predicted: Float[Tensor, "N K"], targets: Float[Tensor, "N K"]) -> dict[str, float]:
    """Means over heads: R2, rank correlation, and overlap of the best quarter and tenth."""
    return {
        "r2": float(explained(predicted, targets).mean()),
        "spearman": float(rank_correlation(predicted, targets).mean()),
        "top_quarter": float(top_overlap(predicted, targets, QUARTER).mean()),
        "top_tenth": float(top_overlap(predicted, targets, TENTH).mean()),
    }


def explained(
    predicted: Float[Tensor, "N K"], targets: Float[Tensor, "N K"]
) -> Float[Tensor, " K"]:
    """R2: share of the variance of the targets that the predictions explain."""
    errors = (targets - predicted).double().square().sum(0)
    spread = (targets - targets.mean(0)).double().square().sum(0)
    return (1 - errors / spread.clamp(min=1e-30)).float()


def rank_correlation(
    predicted: Float[Tensor, "N K"], targets: Float[Tensor, "N K"]
) -> Float[Tensor, " K"]:
    """Spearman's rho; ties are ranked by position."""
    ranks = [values.argsort(0).argsort(0).double() for values in (predicted, targets)]
    centered = [rank - rank.mean(0) for rank in ranks]
    lengths = [rank.square().sum(0).sqrt().clamp(min=1e-30) for rank in centered]
    return ((centered[0] * centered[1]).sum(0) / (lengths[0] * lengths[1])).float()


def top_overlap(
    predicted: Float[Tensor, "N K"], targets: Float[Tensor, "N K"], part: int
) -> Float[Tensor, " K"]:
    """Share of the best 1 / `part` by targets that are among the best by predictions."""
    count = max(len(targets) // part, 1)
    marks = [
        torch.zeros_like(values, dtype=torch.bool).scatter_(0, values.topk(count, 0).indices, True)
        for values in (predicted, targets)
    ]
    return (marks[0] & marks[1]).sum(0) / count


def adopt_published(path: Path, method: str, spec: ModelSpec) -> LearnedWeights:
    """Weights of a published file, with its card, or one that names the file where it has none.

    Tensors are named `layers.<n>.<tensor>` or `module_list.<n>.<tensor>`. Whether they were made
    for this model cannot be seen from the file; their shapes must fit.

    Raises:
        ModelError: the file cannot be read, or has other tensors.
    """
    if path.suffix != SUFFIX:
        raise ModelError(
            f"{path} does not end in {SUFFIX}: other formats can run code, convert it where you "
            "trust it."
        )
    if not path.is_file():
        raise ModelError(f"{path} does not exist: name a file of weights by layer, or train.")
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        with safe_open(path, "pt") as tensors:
            written = (tensors.metadata() or {}).get(CARD)
            given = {key: tensors.get_tensor(key).float() for key in tensors.keys()}  # noqa: SIM118
        prefix = next(each for each in PREFIXES if all(k.startswith(f"{each}.") for k in given))
        layers = split_layers(given, prefix)
        card = Card(method, (spec.fingerprint,), f"sha256:{digest}")
        card = card if written is None else Card.loads(written)
    except (*UNREADABLE, SafetensorError, OSError, StopIteration) as error:
        raise ModelError(
            f"{path} holds no weights by layer ({error}): tensors must be named "
            "layers.<n>.<tensor>."
        ) from error
    learned = LearnedWeights(card, layers)
    check_learned(learned, spec, method, _form(method))
    return learned


def _form(method: str) -> WeightForm:
    if method in PASSAGE_METHODS:
        return PASSAGE_METHODS.load(method)()
    return METHODS.load(method)().gate()
