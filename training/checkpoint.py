"""Checkpoints of training: master weights and optimizer states, next to the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

STATE = "training.safetensors"
MASTER = "master"  # key prefix of float32 weights, next to those of optimizer states


def save_checkpoint(
    masters: Mapping[str, Parameter], optimizers: Sequence[Optimizer], out: Path
) -> None:
    """Write the checkpoint atomically: an interruption leaves the former file or this one."""
    state = {f"{MASTER} {name}": weight.detach().cpu() for name, weight in masters.items()}
    for name, weight, optimizer in _optimized_weights(masters, optimizers):
        for key, value in optimizer.state[weight].items():
            state[f"{key} {name}"] = torch.as_tensor(value).detach().cpu().contiguous()
    part = out / f"{STATE}.part"
    save_file(state, part)
    part.replace(out / STATE)


def load_checkpoint(
    masters: Mapping[str, Parameter], optimizers: Sequence[Optimizer], start: Path
) -> bool:
    """Load what `save_checkpoint` wrote; return False, and change nothing, if a folder has no
    checkpoint.
    """
    if not (start / STATE).is_file():
        return False
    state = load_file(start / STATE)
    with torch.no_grad():
        for name, weight, optimizer in _optimized_weights(masters, optimizers):
            weight.copy_(state[f"{MASTER} {name}"])
            optimizer.state[weight] = _optimizer_state(name, state, weight)
    return True


def _optimizer_state(
    name: str, state: Mapping[str, Tensor], weight: Parameter
) -> dict[str, Tensor]:
    """Optimizer state of one weight; counts stay on the host."""
    found: dict[str, Tensor] = {}
    for key, value in state.items():
        kind, _, owner = key.partition(" ")
        if owner == name and kind != MASTER:
            found[kind] = value.to(weight.device) if value.dim() else value
    return found


def _optimized_weights(
    masters: Mapping[str, Parameter], optimizers: Sequence[Optimizer]
) -> Iterator[tuple[str, Parameter, Optimizer]]:
    """Each weight with its name and the optimizer that updates it."""
    names = {id(weight): name for name, weight in masters.items()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for weight in group["params"]:
                yield names[id(weight)], weight, optimizer
