"""LoRA adapters: folders saved by peft, merged into a model's weights or held beside them."""

from __future__ import annotations

import warnings
from copy import deepcopy
from enum import Enum
from itertools import chain
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from safetensors import SafetensorError
from torch import nn

from larder.core.errors import ModelError
from larder.core.progress import ProgressStage, silent_stage
from larder.models.transformers_logging import silence_transformers

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
LOAD_FAILURES = (
    KeyError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    SafetensorError,
    UnpicklingError,
)


class AdapterMode(Enum):
    """Way in which an adapter is applied.

    MERGED: added to the weights once; a step takes no longer than without it.
    LIVE: computed beside the weights, which stay as they are and can be quantized.
    """

    MERGED = "merged"
    LIVE = "live"


def apply_adapter(
    module: Any,
    folder: str,
    mode: AdapterMode = AdapterMode.MERGED,
    stage: ProgressStage = silent_stage,
) -> Any:
    """Model with an adapter, in eval mode; the module given is changed.

    Args:
        folder: as `save_pretrained` of peft writes it, with adapter_config.json.
        stage: opens the stage of merging, which counts adapted layers.

    Raises:
        ModelError: the folder holds no adapter, the adapter is of another model or damaged, or peft
            is missing.
    """
    adapted = _adapted(module, folder)
    if mode is AdapterMode.MERGED:
        return _merged(adapted, stage)
    return adapted.get_base_model().eval()


def adapted_copy(module: Any, folder: str) -> Any:
    """Copy of a model with an adapter merged into its weights, in eval mode.

    The module given stays as it is. Weights that the adapter leaves alone are shared with it.

    Args:
        folder: as for `apply_adapter`.

    Raises:
        ModelError: as `apply_adapter`.
    """
    shared: dict[int, Any] = {id(t): t for t in chain(module.parameters(), module.buffers())}
    adapted = _adapted(deepcopy(module, shared), folder)
    _unshare(adapted)
    return _merged(adapted, silent_stage)


def _merged(adapted: Any, stage: ProgressStage) -> Any:
    """Model of transformers with the adapter in its weights, in eval mode."""
    from peft.tuners.tuners_utils import onload_layer  # pyright: ignore

    layers = _adapted_layers(adapted)
    with stage("Merging the adapter", "layers") as report:
        for done, layer in enumerate(layers, start=1):
            with onload_layer(layer):
                layer.merge()
            report(done, len(layers))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="All adapters are already merged")
        return adapted.merge_and_unload().eval()


def _adapted_layers(adapted: Any) -> list[Any]:
    """Layers of a model of peft that hold an adapter beside their weights."""
    from peft.tuners.tuners_utils import BaseTunerLayer  # pyright: ignore

    return [each for each in adapted.modules() if isinstance(each, BaseTunerLayer)]


def _unshare(adapted: Any) -> None:
    """Replace weights that merging changes by copies, everywhere in the model."""
    layers = _adapted_layers(adapted)
    copies = {
        id(weight): nn.Parameter(weight.detach().clone(), requires_grad=False)
        for layer in layers
        for weight in layer.get_base_layer().parameters()
    }
    for module in adapted.modules():
        for name, weight in module.named_parameters(recurse=False):
            if id(weight) in copies:
                module.register_parameter(name, copies[id(weight)])


def adapter_files(folder: str) -> list[Path]:
    """Files that an adapter consists of."""
    return [Path(folder) / name for name in (CONFIG, *WEIGHTS) if (Path(folder) / name).is_file()]


def check_adapter_folder(folder: str) -> None:
    """Raise ModelError if a folder lacks the files of an adapter."""
    files = {one.name for one in adapter_files(folder)}
    if CONFIG not in files or not files.intersection(WEIGHTS):
        missing = WEIGHTS[0] if CONFIG in files else CONFIG
        raise ModelError(
            f"{folder} has no {missing}: give a folder that peft has saved an adapter in."
        )


def _adapted(module: Any, folder: str) -> Any:
    """Model of peft around a module, which is changed."""
    check_adapter_folder(folder)
    try:
        from peft import PeftConfig, PeftModel  # pyright: ignore
    except ImportError as error:
        raise ModelError(
            "An adapter needs the package peft: pip install 'larder[adapter]'."
        ) from error
    try:
        config = PeftConfig.from_pretrained(folder)
        if config.is_prompt_learning:
            raise ModelError(
                f"The adapter {folder} is {config.peft_type}, which adds keys and values "
                "that no token has: Larder takes adapters of weights, such as LoRA."
            )
        with silence_transformers():
            adapted = PeftModel.from_pretrained(module, folder, config=config)
        _check_names(adapted, folder)
    except LOAD_FAILURES as error:
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise ModelError(
            f"The adapter {folder} cannot be applied ({reason}): give one that was trained on this "
            "model."
        ) from error
    return adapted


def _check_names(adapted: Any, folder: str) -> None:
    """Raise ValueError if the adapter's tensors are not those that the model takes.

    peft ignores tensors of an adapter that fit no layer, and leaves those that are missing at zero.
    """
    from peft import get_peft_model_state_dict  # pyright: ignore
    from peft.utils import load_peft_weights  # pyright: ignore

    saved, taken = set(load_peft_weights(folder, "cpu")), set(get_peft_model_state_dict(adapted))
    if different := sorted(saved ^ taken):
        raise ValueError(f"{len(different)} tensors differ in name, such as {different[0]}")
